"""From logits to log-probs and entropies, with the vocabulary split over tensor-parallel ranks.

Logits are the widest thing there is, and each pass over them costs as much as a layer's matrix product. So there is one tensor of
them: it becomes exp(logits - their maximum) where it stands, in pieces that stay in the processor's cache, and in the backward that
becomes the gradient. The ranks' parts meet as four numbers a token (maximum, sum, weighted sum, the target's logit).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_NOWHERE = -1e30
"""The maximum over no logits. Not infinite: infinity less infinity is NaN."""
_PIECE = 1 << 17
"""Logits at a time: two pieces are 1 MiB in float32."""
_PIECE_ON_GPU = 1 << 28
"""Nearly always all of them. No more, for a piece is there twice: 1 GiB in float32."""


def token_log_probs(
    logits: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor, vocab_size: int, group: Any, steered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) [n] and entropy [n] of softmax(logits / temperature).

    `logits` [n, V / ranks] are overwritten, so the caller's must be the last use of them; columns past `vocab_size` are padding, whatever
    they hold. A gradient reaches them through the log-probs, and through the entropies when `steered`. Backward once.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _TokenLogProbs.apply(logits, target, temperature, vocab_size, group, steered)
    return found


class _TokenLogProbs(torch.autograd.Function):
    """z = logits / temperature, log p = z_target - log Z, H = log Z - sum p z; dlog p / dz = 1_target - p, dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor, vocab_size: int, group: Any, steered: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count, width = logits.shape
        start = group.rank() * width
        real = min(max(vocab_size - start, 0), width)
        column = (target - start).clamp(0, max(real - 1, 0))[:, None]
        here = (target >= start) & (target < start + real)
        highest = logits.new_full((count,), _NOWHERE)
        sums = logits.new_zeros(3, count)
        total, weighted, hit = sums
        scaled = logits.is_cuda or not bool((temperature == 1.0).all())  # a GPU would have to be waited for to know
        for rows in _pieces(logits) if real else ():
            piece = logits[rows, :real]
            if scaled:
                piece.div_(temperature[rows, None])
            highest[rows] = piece.amax(-1)
            piece.sub_(highest[rows, None])
            hit[rows] = piece.gather(1, column[rows])[:, 0]
            weights = piece.exp()
            total[rows] = weights.sum(-1)
            weighted[rows] = torch.linalg.vecdot(weights, piece)
            piece.copy_(weights)
        logits[:, real:] = 0.0
        lower = torch.zeros_like(highest)
        if group.size() > 1:
            everywhere = highest.clone()
            dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)
            lower = highest - everywhere
            weighted += total * lower
            sums[:2] *= lower.exp()
            hit += lower
            sums[2] = torch.where(here, hit, 0.0)
            dist.all_reduce(sums, group=group)
        log_total = total.log()
        entropy = log_total - weighted / total
        if ctx.needs_input_grad[0]:
            ctx.steered = steered
            ctx.save_for_backward(logits, column, here, temperature, lower.exp() / total, entropy)
        if not steered:
            ctx.mark_non_differentiable(entropy)
        return hit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weights, column, here, temperature, share, entropy = ctx.saved_tensors
        toward = gradients[0] / temperature
        if ctx.steered:
            flatten = gradients[1] / temperature
            for rows in _pieces(weights):
                probability = weights[rows] * share[rows, None]
                slope = torch.special.xlogy(probability, probability).add_(probability * entropy[rows, None])
                weights[rows] = -probability * toward[rows, None] - slope * flatten[rows, None]
        else:
            weights *= -(toward * share)[:, None]
        if weights.shape[1]:
            weights.scatter_add_(1, column, torch.where(here, toward, 0.0)[:, None])
        return weights, None, None, None, None, None


def _pieces(logits: torch.Tensor) -> Iterator[slice]:
    count, width = logits.shape
    step = max(1, (_PIECE_ON_GPU if logits.is_cuda else _PIECE) // max(width, 1))
    return (slice(start, start + step) for start in range(0, count, step))
