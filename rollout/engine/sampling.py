"""Drawing tokens, many requests at a time, and the log-probs that go with them.

Log-probs are of the temperature-scaled distribution, log_softmax(logits / T), before top-k, top-p and min-p cut it (as SGLang reports
them); a greedy request has T = 1. A token is drawn by the Gumbel trick, argmax(log p + g) with g = −log(−log u): one argmax a row, and
it stays correct when the cut sets log p to −inf.

A seeded request takes its u from a counter, not from a generator: u is a hash of (seed, absolute position, token id), so the draw at a
position is the same whatever ran before, beside, or how the request came to that position. The hash is SplitMix64's finalizer
(Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.engine.request import LogProb, Request

# Prompt log-probs are computed for so many positions at a time: 50 MB of logits for a vocabulary of 50,000.
PIECE_ROWS = 256


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each row. A log-prob that is not finite says that the row's logits were not."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[LogProb] | None]


def draw(logits: Tensor, requests: list[Request], generator: torch.Generator) -> Drawn:
    """`logits` [B, V] float32, row i for `requests[i]` at position `requests[i].length`."""
    params = [request.sampling for request in requests]
    temperatures = torch.tensor([p.temperature for p in params]).unsqueeze(1)
    logprobs = torch.log_softmax(logits / temperatures, dim=-1)
    scores = logprobs
    cut = [row for row, p in enumerate(params) if p.filtered]
    if cut:
        scores = logprobs.clone()
        scores[cut] = _cut(logprobs[cut], [requests[row] for row in cut])
    if not all(p.greedy for p in params):
        scores = scores + _noise(requests, logprobs.shape, generator)
    tokens = scores.argmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return Drawn(tokens.tolist(), chosen.tolist(), _tops(logprobs, requests))


def _noise(requests: list[Request], shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Gumbel noise [B, V]: from the generator, or from the counter for seeded rows, or 0 for greedy ones."""
    seeded = [row for row, r in enumerate(requests) if r.sampling.seed is not None and not r.sampling.greedy]
    greedy = [row for row, r in enumerate(requests) if r.sampling.greedy]
    if len(seeded) + len(greedy) < len(requests):
        noise = torch.empty(shape).exponential_(generator=generator).clamp_min_(1e-30).log_().neg_()
    else:
        noise = torch.zeros(shape)
    if greedy:
        noise[greedy] = 0.0
    if seeded:
        noise[seeded] = torch.from_numpy(
            seeded_gumbel([(requests[row].sampling.seed or 0, requests[row].length) for row in seeded], shape[1])
        )
    return noise


def seeded_gumbel(keys: list[tuple[int, int]], vocab_size: int) -> np.ndarray:
    """Gumbel noise, float32 [len(keys), vocab_size], from each (seed, position) alone."""
    seeds = np.array([seed % 2**64 for seed, _ in keys], dtype=np.uint64)
    positions = np.array([position for _, position in keys], dtype=np.uint64)
    streams = _mix(_mix(seeds) + positions)
    # SplitMix64 proper: the stream's state steps by the golden ratio, one step a token id.
    counters = streams[:, None] + np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    # 52 bits and a half step: exact in float64, never 0 and never 1.
    uniform = ((_mix(counters) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform)).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _cut(logprobs: Tensor, requests: list[Request]) -> Tensor:
    """−inf where top-k, top-p or min-p forbid the token. All three look at the whole distribution, in SGLang's order."""
    params = [request.sampling for request in requests]
    vocab_size = logprobs.shape[1]
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    before = probs.cumsum(dim=-1) - probs
    top_k = torch.tensor([min(p.top_k, vocab_size) for p in params]).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params]).unsqueeze(1)
    least = torch.tensor([p.min_p for p in params]).unsqueeze(1) * probs[:, :1]
    forbidden = (torch.arange(vocab_size) >= top_k) | (before > top_p) | (probs < least)
    return torch.empty_like(logprobs).scatter_(1, order, ordered.masked_fill(forbidden, float("-inf")))


def _tops(logprobs: Tensor, requests: list[Request]) -> list[list[LogProb] | None]:
    most = max(r.top_logprobs_num for r in requests)
    if most == 0:
        return [None] * len(requests)
    values, ids = (found.tolist() for found in logprobs.topk(min(most, logprobs.shape[1]), dim=-1))
    return [_pairs(values[row], ids[row], r.top_logprobs_num) if r.top_logprobs_num else None for row, r in enumerate(requests)]


def _pairs(values: list[float], ids: list[int], count: int) -> list[LogProb]:
    return [[value, token, None] for value, token in zip(values[:count], ids[:count], strict=True)]


def record_input_logprobs(request: Request, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
    """Log-probs of the prompt from `logprob_start_len` on; `hidden` [prompt length, hidden], `head` maps hidden to logits.

    They are of the plain distribution, whatever the temperature: SGLang scales only what is sampled. The first is null, whatever the
    start: SGLang gives it no context.
    """
    start, targets = request.logprob_start_len, request.input_ids[request.logprob_start_len + 1 :]
    found: list[LogProb] = [[None, request.input_ids[start], None]]
    tops: list[list[LogProb] | None] = [None]
    contexts = hidden[start : len(request.input_ids) - 1]
    for step in range(0, len(targets), PIECE_ROWS):
        logprobs = torch.log_softmax(head(contexts[step : step + PIECE_ROWS]), dim=-1)
        wanted = targets[step : step + PIECE_ROWS]
        chosen = logprobs.gather(1, torch.tensor(wanted).unsqueeze(1)).squeeze(1).tolist()
        found += [[value, token, None] for value, token in zip(chosen, wanted, strict=True)]
        tops += _tops(logprobs, [request] * len(wanted))
    request.input_logprobs = found
    if request.top_logprobs_num:
        request.input_tops = tops
