"""The policy loss and the metrics that go with it, as sums over tokens.

Pure functions of tensors of any float dtype, so that they can be checked in float64 without a model. Nothing here divides by a count: sums
are added up over micro-batches and ranks, and divided once, which makes every number the same for every split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def clipped_policy_loss(
    log_probs: torch.Tensor, behaviour: torch.Tensor, advantage: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_probs - behaviour); all [n].

    PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with the two sides of the clip apart (DAPO, Yu et al. 2025).
    """
    ratio = torch.exp(log_probs - behaviour)
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))


@dataclass(frozen=True)
class Sums:
    """What one micro-batch adds. `total` is added up, `highest` is maximised."""

    total: torch.Tensor
    highest: torch.Tensor

    TOTALS = ("loss", "tokens", "clipped", "entropy", "kl")
    HIGHEST = ("ratio", "gap")

    @classmethod
    def nothing(cls) -> Sums:
        return cls(torch.zeros(len(cls.TOTALS), dtype=torch.float64), torch.full((len(cls.HIGHEST),), -torch.inf, dtype=torch.float64))

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.total + other.total, torch.maximum(self.highest, other.highest))


def token_sums(
    losses: torch.Tensor,
    log_probs: torch.Tensor,
    behaviour: torch.Tensor,
    advantage: torch.Tensor,
    entropy: torch.Tensor,
    same_weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> Sums:
    """All [n], over trained tokens; only `losses` [m] leaves out those without an advantage.

    `same_weights` says of which tokens the weights at hand are those that sampled them.

    KL is from the behaviour to the current policy, estimated on the behaviour's own tokens as r - 1 - log r (Schulman 2020, "k3").
    """
    if not len(log_probs):
        return Sums.nothing()
    log_ratio = (log_probs.detach() - behaviour).double()
    ratio = log_ratio.exp()
    clipped = ((advantage > 0) & (ratio > 1.0 + clip_high)) | ((advantage < 0) & (ratio < 1.0 - clip_low))
    gap = log_ratio[same_weights].abs()
    total = (float(losses.detach().double().sum()), len(log_probs), int(clipped.sum()), float(entropy.double().sum()))
    highest = (float(ratio.max()), float(gap.max()) if len(gap) else -torch.inf)
    kl = float((ratio - 1.0 - log_ratio).sum())
    return Sums(torch.tensor([*total, kl], dtype=torch.float64), torch.tensor(highest, dtype=torch.float64))


@torch.no_grad()
def vocab_entropy(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """Entropy of softmax(logits) when the vocabulary is split over `group`. [n, V / tp] -> [n]"""
    shift = logits.amax(-1, keepdim=True)
    dist.all_reduce(shift, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - shift
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
