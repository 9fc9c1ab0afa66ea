"""How loaded an engine is: requests over what it can run at once.

Requests are ours that are open now, plus those of others (another driver, a router, a person) as the engine last reported them. What it
can run at once is its number of request slots or, where that is less, its KV memory over what a running request was seen to hold. A
report is believed whole for `trust_s` and not at all after twice that; between, it fades, and what is left are our own counts. No clock,
no I/O. The pool compares the scores of all engines for each request it gives out, so most of a score is worked out beforehand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from rollout.answer import malformed


class _Rank(msgspec.Struct):
    """What we read of one data-parallel rank in /v1/loads."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float


class _Reply(msgspec.Struct):
    loads: list[_Rank]


@dataclass(frozen=True, slots=True)
class Load:
    """One report of an engine, summed over its ranks. `kv_use` is the share of its KV memory in use; `at_s` is the asker's clock."""

    running: int
    waiting: int
    used_tokens: int
    max_total_tokens: int
    max_running: int
    kv_use: float
    foreign: int
    at_s: float
    trust_s: float

    def differs_from(self, other: Load) -> bool:
        """The engine's loop has turned in between: it writes these numbers, and a loop that hangs leaves them as they are."""
        return (self.running, self.waiting, self.used_tokens) != (other.running, other.waiting, other.used_tokens)


def load_of(reply: Any, *, own: int, at_s: float, trust_s: float) -> Load:
    """Of a body of /v1/loads. `own` is the most of our requests that may be among those it counts; EngineError when it makes no sense."""
    try:
        ranks = msgspec.convert(reply, _Reply).loads
    except msgspec.ValidationError as error:
        raise malformed(f"/v1/loads: {error}") from error
    running, waiting = sum(rank.num_running_reqs for rank in ranks), sum(rank.num_waiting_reqs for rank in ranks)
    max_running = sum(rank.max_running_requests for rank in ranks)
    if max_running < 1:
        raise malformed("/v1/loads: it says that it can run no request")
    return Load(
        running=running,
        waiting=waiting,
        used_tokens=sum(rank.num_used_tokens for rank in ranks),
        max_total_tokens=sum(rank.max_total_num_tokens for rank in ranks),
        max_running=max_running,
        kv_use=max(rank.token_usage for rank in ranks),
        foreign=max(0, running + waiting - own),
        at_s=at_s,
        trust_s=trust_s,
    )


@dataclass(frozen=True, slots=True)
class Scale:
    """What turns a number of our own open requests into a score, good until `until_s`; 1 is full."""

    others: float
    per_request: float
    until_s: float

    def score(self, own: int) -> float:
        return (own + self.others) * self.per_request


def scale(capacity: int, load: Load | None, now_s: float) -> Scale:
    """Requests over what runs at once; of an engine that has not reported, over `capacity`, all that we would send."""
    if load is None:
        return Scale(0.0, 1.0 / capacity, math.inf)
    age_s = now_s - load.at_s
    believed = 1.0 if age_s <= load.trust_s else max(0.0, 2.0 - age_s / load.trust_s)
    held = load.kv_use / load.running if load.running else 0.0  # share of the KV memory that one running request holds
    until_s = load.at_s + load.trust_s if believed == 1.0 else now_s if believed else math.inf
    return Scale(believed * load.foreign, max(1.0 / load.max_running, believed * held), until_s)
