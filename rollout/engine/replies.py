"""The bodies that /generate answers with: SGLang's field for field, from what a request shows at one instant."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rollout.engine.request import Request
from rollout.engine.text import HALF_A_CHARACTER, Text


@dataclass(slots=True)
class Sent:
    """How much of a streamed request its client has, for streams that send only what is new."""

    tokens: int = 0
    characters: int = 0


def build_reply(request: Request, weight_version: str, text: Text | None, sent: Sent | None = None) -> dict[str, Any]:
    """Everything so far; with `sent`, only what is new since, which it then counts as sent.

    `weight_version` is the engine's now: chunks before the last carry it, the last one that of its last token.
    """
    finish = request.finish  # before `visible`: see rollout.engine.request
    visible = request.visible
    start = 0 if sent is None else sent.tokens
    meta: dict[str, Any] = {"id": request.rid, "finish_reason": finish, "weight_version": weight_version}
    aborted_waiting = finish is not None and finish.get("message") == "Abort in waiting queue"
    if not aborted_waiting:
        meta |= {
            "prompt_tokens": len(request.input_ids),
            "num_retractions": request.num_retractions,
            "reasoning_tokens": 0,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
    meta["completion_tokens"] = visible
    if request.return_logprob:
        meta |= _logprobs(request, start, visible)
    if finish is not None:
        meta["weight_versions"] = spans = _spans(request, visible, weight_version)
        meta["weight_version"] = spans[-1]["version"]
        meta["e2e_latency"] = time.perf_counter() - request.created_s
        if not request.stream:
            meta["response_sent_to_client_ts"] = time.time()
    reply: dict[str, Any] = {"output_ids": request.output_ids[start:visible], "meta_info": meta}
    if text is not None:
        reply["text"] = _text(request, visible, finish, text, sent)
    if request.return_prompt_token_ids:
        reply["prompt_token_ids"] = request.input_ids
    if sent is not None:
        sent.tokens = visible
    return reply


def rejection(error: Exception) -> dict[str, Any]:
    """The one chunk of a stream that the scheduler refused. (SGLang's holds a token of its own making, which nobody may believe.)"""
    finish = {"type": "abort", "message": str(error), "status_code": 400, "err_type": "BadRequestError"}
    return {"text": "", "output_ids": [], "meta_info": {"finish_reason": finish, "completion_tokens": 0}}


def _logprobs(request: Request, start: int, visible: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "input_token_logprobs": request.input_logprobs or [],
        "output_token_logprobs": request.output_logprobs[start:visible],
        "output_token_logprobs_length": visible,
    }
    if request.top_logprobs_num:
        found["input_top_logprobs"] = request.input_tops
        found["output_top_logprobs"] = request.output_tops[start:visible]
    return found


def _spans(request: Request, visible: int, weight_version: str) -> list[dict[str, Any]]:
    """[start, end) over the output for each version; one empty span when there is no output."""
    spans = [span for span in request.spans if span[1] < visible] or [(weight_version, 0)]
    ends = [start for _, start in spans[1:]] + [visible]
    return [{"version": version, "start": start, "end": end} for (version, start), end in zip(spans, ends, strict=True)]


def _text(request: Request, visible: int, finish: dict[str, Any] | None, text: Text, sent: Sent | None) -> str:
    """The output as text: without what stopped it, unless asked for, and without half a character while more may come."""
    ids, sampling = request.output_ids[:visible], request.sampling
    matched = finish.get("matched") if finish is not None and not sampling.no_stop_trim else None
    if isinstance(matched, int):
        ids = ids[:-1]
    whole = text.decode(ids, sampling.skip_special_tokens)
    if isinstance(matched, str):
        whole = whole[: whole.index(matched)] if matched in whole else whole
    if finish is None:
        whole = whole.rstrip(HALF_A_CHARACTER)
    if sent is None:
        return whole
    new = whole[sent.characters :]
    sent.characters = len(whole)
    return new
