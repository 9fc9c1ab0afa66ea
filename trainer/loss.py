"""The loss and the metrics that go with it, as sums over tokens; policy losses and aggregations by registry.

Pure functions of tensors of any float dtype, so that they can be checked in float64 without a model. Nothing here divides by a count of a
micro-batch: sums are added up over micro-batches and ranks, and divided once by `denominator` of a mini-batch's units, which makes every
number the same for every split. A row is a sequence, and its length its trained tokens, wherever they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainer.spec import LossSpec


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokens of a micro-batch; all [n] but `length`."""

    log_probs: torch.Tensor
    behaviour: torch.Tensor
    """The log-probs the tokens were sampled with."""
    advantage: torch.Tensor
    entropy: torch.Tensor
    row: torch.Tensor
    length: torch.Tensor
    """[rows] all trained tokens of the row, those on other context-parallel ranks too."""

    def at(self, index: torch.Tensor) -> Tokens:
        return Tokens(
            self.log_probs[index], self.behaviour[index], self.advantage[index], self.entropy[index], self.row[index], self.length
        )


Bounded = tuple[torch.Tensor, torch.Tensor]
"""[n] losses, and [n] whether a clip took effect"""
SumRows = Callable[[torch.Tensor], torch.Tensor]
"""[rows] sums over this rank's tokens -> sums over the rows' tokens wherever they are; not differentiated"""


def _clipped(ratio: torch.Tensor, advantage: torch.Tensor, spec: LossSpec) -> Bounded:
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high))
    return loss, ((advantage > 0) & (ratio > 1.0 + spec.clip_high)) | ((advantage < 0) & (ratio < 1.0 - spec.clip_low))


def ppo_clip(tokens: Tokens, spec: LossSpec, sum_rows: SumRows) -> Bounded:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_probs - behaviour).

    PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with the two sides of the clip apart (DAPO, Yu et al. 2025, 3.1).
    """
    return _clipped(torch.exp(tokens.log_probs - tokens.behaviour), tokens.advantage, spec)


def dual_clip(tokens: Tokens, spec: LossSpec, sum_rows: SumRows) -> Bounded:
    """`ppo_clip`, but at most -c A where A < 0, with c = dual_clip (Ye et al. 2020, "Mastering Complex Control in MOBA Games").

    There alone PPO's loss has no bound: an unlikely token that became likely.
    """
    loss, clipped = ppo_clip(tokens, spec, sum_rows)
    bound = -spec.dual_clip * tokens.advantage
    above = (tokens.advantage < 0) & (loss > bound)
    return torch.where(above, bound, loss), clipped | above


def gspo(tokens: Tokens, spec: LossSpec, sum_rows: SumRows) -> Bounded:
    """`ppo_clip` with one ratio a row, exp(mean over its tokens of log r), at each token (Zheng et al. 2025, "GSPO", 4.1).

    A token's ratio has the row's value and its own token's gradient (the paper's GSPO-token). With one advantage a row, and tokens
    of a row weighing the same, that is GSPO's gradient, and none has to travel to other ranks.
    """
    log_ratio = (tokens.log_probs.detach() - tokens.behaviour).double()
    sums = torch.zeros(len(tokens.length), dtype=torch.float64, device=log_ratio.device).index_add(0, tokens.row, log_ratio)
    means = (sum_rows(sums) / tokens.length)[tokens.row].to(tokens.log_probs.dtype)
    return _clipped(torch.exp(means + (tokens.log_probs - tokens.log_probs.detach())), tokens.advantage, spec)


def cispo(tokens: Tokens, spec: LossSpec, sum_rows: SumRows) -> Bounded:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log_probs, the clipped ratio a constant (MiniMax-M1, 2025, 3.1, "CISPO").

    Every token keeps a gradient. The paper has no lower bound, which is clip_low 1.
    """
    ratio = torch.exp(tokens.log_probs.detach() - tokens.behaviour)
    weight = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    return -weight * tokens.advantage * tokens.log_probs, weight != ratio


POLICIES: dict[str, Callable[[Tokens, LossSpec, SumRows], Bounded]] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
}


@dataclass(frozen=True)
class Aggregation:
    """The sum over tokens of weight x loss, over the sum over rows of units. Both see the row's length alone, so no split matters."""

    weight: Callable[[torch.Tensor], torch.Tensor]
    units: Callable[[int], float]


AGGREGATIONS: dict[str, Aggregation] = {
    # Every token the same (DAPO, Yu et al. 2025, 3.3).
    "token_mean": Aggregation(torch.ones_like, float),
    # Every row the same, so a token of a long row weighs less (GRPO, Shao et al. 2024, eq. 3; GSPO).
    "sequence_mean_token_mean": Aggregation(torch.reciprocal, lambda length: 1.0),
    "sequence_mean_token_sum": Aggregation(torch.ones_like, lambda length: 1.0),
    # Units only say whether there is anything to train; the divisor is given (Dr. GRPO, Liu et al. 2025, 3.2 and its listing).
    "constant": Aggregation(torch.ones_like, float),
}


def units(spec: LossSpec, lengths: Sequence[int]) -> float:
    """What rows add to the count of their mini-batch; `lengths` are of the rows that have an advantage and a trained token."""
    return sum(map(AGGREGATIONS[spec.aggregation].units, lengths), 0.0)


def denominator(spec: LossSpec, all_units: float) -> float:
    """What the loss is divided by, once, given the units of the whole mini-batch."""
    return spec.divisor if spec.divisor is not None else all_units


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


def alone(sums: torch.Tensor) -> torch.Tensor:
    """The SumRows of a rank that has all tokens of its rows."""
    return sums


def loss_sums(spec: LossSpec, tokens: Tokens, same_weights: torch.Tensor, sum_rows: SumRows = alone) -> tuple[torch.Tensor, Sums]:
    """(the loss, not yet divided; all sums) of one micro-batch's trained tokens.

    Tokens of advantage 0 are in the metrics only, with no entropy bonus either: their row, sent or left out, is the same step.
    `same_weights` [n] says of which tokens the weights at hand are those that sampled them.
    """
    # By index, not by a factor 0: an infinite ratio in a row of no advantage would be NaN.
    moved = tokens.at(tokens.advantage.nonzero().squeeze(1))
    losses, clipped = POLICIES[spec.policy](moved, spec, sum_rows)
    if spec.entropy_bonus:
        losses = losses - spec.entropy_bonus * moved.entropy
    weight = AGGREGATIONS[spec.aggregation].weight(moved.length.to(losses.dtype))[moved.row]
    losses = weight * losses
    return losses.sum(), _sums(losses, clipped, tokens, same_weights)


def _sums(losses: torch.Tensor, clipped: torch.Tensor, tokens: Tokens, same_weights: torch.Tensor) -> Sums:
    """KL is from the behaviour to the current policy, estimated on the behaviour's own tokens as r - 1 - log r (Schulman 2020, "k3")."""
    if not len(tokens.log_probs):
        return Sums.nothing()
    log_ratio = (tokens.log_probs.detach() - tokens.behaviour).double()
    ratio = log_ratio.exp()
    gap = log_ratio[same_weights].abs()
    total = (float(losses.detach().double().sum()), len(ratio), int(clipped.sum()), float(tokens.entropy.detach().double().sum()))
    highest = (float(ratio.max()), float(gap.max()) if len(gap) else -torch.inf)
    kl = float((ratio - 1.0 - log_ratio).sum())
    return Sums(torch.tensor([*total, kl], dtype=torch.float64), torch.tensor(highest, dtype=torch.float64))
