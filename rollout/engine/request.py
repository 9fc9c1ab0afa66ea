"""One request's life, shared by the two threads: the loop thread appends, the HTTP side reads.

The loop writes tokens and their facts first, `visible` after them, and `finish` last; the HTTP side reads `finish` first, then `visible`,
and never looks past it. So it needs no lock, and what it sees is whole (ids, log-probs and spans of the same tokens) and meant to be seen.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LogProb = list[Any]  # [log-prob or None, token id, None], as SGLang writes it
GREEDY_TOP_K = 1
ALL_TOP_K = 1 << 30  # SGLang's number for "the whole vocabulary"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters after checks and defaults. Temperature 0 has become top_k 1 at temperature 1, as in SGLang."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL_TOP_K
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    stream_interval: int = 1
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @property
    def greedy(self) -> bool:
        return self.top_k == GREEDY_TOP_K

    @property
    def filtered(self) -> bool:
        """True when some tokens of the vocabulary may not be drawn."""
        return not self.greedy and (self.top_p < 1.0 or self.top_k < ALL_TOP_K or self.min_p > 0.0)


@dataclass(slots=True, eq=False)
class Request:
    """`output_*` grow by one a token. `spans` holds [version, start] for each change of weight version over the output."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    stream: bool
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_prompt_token_ids: bool = False
    routes_from: int | None = None  # the first position whose experts are wanted
    created_s: float = field(default_factory=time.perf_counter)

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[LogProb] = field(default_factory=list)
    output_tops: list[list[LogProb]] = field(default_factory=list)
    input_logprobs: list[LogProb] | None = None
    input_tops: list[list[LogProb] | None] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    num_retractions: int = 0
    phase: int | None = None  # of the steps in which it has a chunk; of the paced mode
    visible: int = 0  # how many tokens the client may have by now
    finish: dict[str, Any] | None = None
    routes: np.ndarray | None = None  # [length − 1 − routes_from, layers, k], once it has finished

    aborting: bool = False  # the loop's
    # The HTTP side's.
    abort_sent: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def known_ids(self) -> list[int]:
        return self.input_ids + self.output_ids

    @property
    def length(self) -> int:
        return len(self.input_ids) + len(self.output_ids)

    @property
    def wants_input_logprobs(self) -> bool:
        return self.return_logprob and self.input_logprobs is None and 0 <= self.logprob_start_len < len(self.input_ids)

    def append(self, token: int, logprob: float, tops: list[LogProb] | None, version: str) -> None:
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output_ids)))
        self.output_ids.append(token)
        if self.return_logprob:
            self.output_logprobs.append([logprob, token, None])
            if tops is not None:
                self.output_tops.append(tops)

    def show(self) -> None:
        self.visible = len(self.output_ids)

    def end(self, finish: dict[str, Any]) -> None:
        self.show()
        self.finish = finish

    def end_unseen(self, finish: dict[str, Any]) -> None:
        """As what the client may see already: nothing newer is shown."""
        self.finish = finish


def finish_stop(matched: int | str) -> dict[str, Any]:
    return {"type": "stop", "matched": matched}


def finish_length(length: int) -> dict[str, Any]:
    return {"type": "length", "length": length}


def finish_aborted_running() -> dict[str, Any]:
    return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def finish_aborted_waiting() -> dict[str, Any]:
    return {"type": "abort", "message": "Abort in waiting queue"}


def finish_failed(message: str, status_code: int) -> dict[str, Any]:
    """Ends a request with an HTTP error instead of a body (a chunk with this reason, when streamed)."""
    return {"type": "abort", "message": message, "status_code": status_code, "err_type": None}
