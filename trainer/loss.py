"""The loss and the metrics that go with it, as sums over tokens; policy losses and aggregations by registry.

Pure functions of tensors of any float dtype, so that they can be checked in float64 without a model. Nothing here divides by a count of a
micro-batch: sums are added up over micro-batches and ranks, and divided once by `denominator` of a mini-batch's units, which makes every
number the same for every split. A sequence is a row, or all rows of a trajectory, and its length its trained tokens, wherever they are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from trainer.loss_spec import LossSpec

SumRows = Callable[[torch.Tensor], torch.Tensor]
"""[rows] sums over this rank's tokens -> sums over the rows' tokens wherever they are; not differentiated"""


def alone(sums: torch.Tensor) -> torch.Tensor:
    """The SumRows of a rank that has all tokens of its rows."""
    return sums


@dataclass(frozen=True, eq=False)
class Tokens:
    """The trained tokens of a micro-batch on this rank, one after the other: all [n] but those that say [rows].

    What a policy loss may use. `log_probs` and `entropy` carry gradients, the entropy only if the loss has an entropy bonus.
    """

    log_probs: torch.Tensor
    behaviour: torch.Tensor
    """The log-probs the tokens were sampled with."""
    old: torch.Tensor
    """What the ratio is against: `behaviour`, or recomputed when the global batch began."""
    advantage: torch.Tensor
    weight: torch.Tensor
    """The importance weight of the off-policy correction; 1 without one. Multiplied in after the policy loss."""
    reference: torch.Tensor | None
    """Log-probs under the frozen reference model; None when none is loaded (`loss.kl`)."""
    entropy: torch.Tensor
    counts: torch.Tensor
    """bool: whether the token is in the loss. Others are in the metrics only; a policy loss is never asked about them."""
    row: torch.Tensor
    """int64: which of the micro-batch's rows."""
    row_tokens: torch.Tensor
    """[rows] all trained tokens of the row, those on other context-parallel ranks too."""
    sequence_tokens: torch.Tensor
    """[rows] all trained tokens of the row's sequence."""
    sum_rows: SumRows = alone

    def at(self, index: torch.Tensor) -> Tokens:
        """Some of the tokens, of the same rows."""
        per_token = [field.name for field in fields(self) if field.name not in ("row_tokens", "sequence_tokens", "sum_rows")]
        picked: dict[str, Any] = {name: None if (column := getattr(self, name)) is None else column[index] for name in per_token}
        return replace(self, **picked)

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """[n] -> [n]: for each token the mean over its whole row, tokens on other ranks included. Not differentiated."""
        sums = torch.zeros(len(self.row_tokens), dtype=torch.float64, device=values.device)
        sums = self.sum_rows(sums.index_add(0, self.row, values.detach().double()))
        return (sums / self.row_tokens)[self.row].to(values.dtype)


Bounded = tuple[torch.Tensor, torch.Tensor]
"""[n] losses, and [n] whether a clip took effect"""
Policy = Callable[[Tokens, LossSpec], Any]
"""A policy loss. Contract: one loss for each token, [n], differentiable in `log_probs`, or a pair of that and [n] bool (clipped). It may
look at its token's own numbers and at `row_means`, and at nothing that depends on which rows share the micro-batch: no mean, no count, no
position."""


def _clipped(ratio: torch.Tensor, advantage: torch.Tensor, spec: LossSpec) -> Bounded:
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high))
    return loss, ((advantage > 0) & (ratio > 1.0 + spec.clip_high)) | ((advantage < 0) & (ratio < 1.0 - spec.clip_low))


def ppo_clip(tokens: Tokens, spec: LossSpec) -> Bounded:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(log_probs - old).

    PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with the two sides of the clip apart (DAPO, Yu et al. 2025, 3.1).
    """
    return _clipped(torch.exp(tokens.log_probs - tokens.old), tokens.advantage, spec)


def decoupled_ppo(tokens: Tokens, spec: LossSpec) -> Bounded:
    """`ppo_clip` times exp(old - behaviour): the policy that sampled and the one that is clipped around are two.

    Hilton et al. 2022, "Batch size-invariance for policy optimization", eq. 6; `old` is the proximal policy, that which began the batch.
    """
    loss, clipped = ppo_clip(tokens, spec)
    return torch.exp(tokens.old - tokens.behaviour) * loss, clipped


def dual_clip(tokens: Tokens, spec: LossSpec) -> Bounded:
    """`ppo_clip`, but at most -c A where A < 0, with c = dual_clip (Ye et al. 2020, "Mastering Complex Control in MOBA Games").

    There alone PPO's loss has no bound: an unlikely token that became likely.
    """
    loss, clipped = ppo_clip(tokens, spec)
    bound = -spec.dual_clip * tokens.advantage
    above = (tokens.advantage < 0) & (loss > bound)
    return torch.where(above, bound, loss), clipped | above


def gspo(tokens: Tokens, spec: LossSpec) -> Bounded:
    """`ppo_clip` with one ratio a row, exp(mean over its tokens of log r), at each token (Zheng et al. 2025, "GSPO", 4.1).

    A token's ratio has the row's value and its own token's gradient (the paper's GSPO-token). With one advantage a row, and tokens
    of a row weighing the same, that is GSPO's gradient, and none has to travel to other ranks. Its ratio is a row's (a leaf's) always.
    """
    means = tokens.row_means(tokens.log_probs - tokens.old)
    return _clipped(torch.exp(means + (tokens.log_probs - tokens.log_probs.detach())), tokens.advantage, spec)


def cispo(tokens: Tokens, spec: LossSpec) -> Bounded:
    """-clip(r, 1 - clip_low, 1 + clip_high) A log_probs, the clipped ratio a constant (MiniMax-M1, 2025, 3.1, "CISPO").

    Every token keeps a gradient. The paper has no lower bound, which is clip_low 1.
    """
    ratio = torch.exp(tokens.log_probs.detach() - tokens.old)
    weight = ratio.clamp(1.0 - spec.clip_low, 1.0 + spec.clip_high)
    return -weight * tokens.advantage * tokens.log_probs, weight != ratio


REGISTRY: dict[str, Policy] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
}


def kl_penalty(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Of KL(policy, reference) at the policy's tokens; log_ratio = log_probs - reference, [n] (Schulman 2020: k1, k2, k3)."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio


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
    """What sequences add to the count of their mini-batch; `lengths` are their tokens in the loss, and none is 0."""
    return sum(map(AGGREGATIONS[spec.aggregation].units, lengths), 0.0)


def denominator(spec: LossSpec, all_units: float) -> float:
    """What the loss is divided by, once, given the units of the whole mini-batch."""
    return spec.divisor if spec.divisor is not None else all_units


@dataclass(frozen=True)
class Sums:
    """What one micro-batch adds. `total` is added up, `highest` is maximised."""

    total: torch.Tensor
    highest: torch.Tensor

    TOTALS = ("loss", "tokens", "clipped", "entropy", "kl", "reference_kl")
    HIGHEST = ("ratio", "gap")

    @classmethod
    def nothing(cls) -> Sums:
        return cls(torch.zeros(len(cls.TOTALS), dtype=torch.float64), torch.full((len(cls.HIGHEST),), -torch.inf, dtype=torch.float64))

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.total + other.total, torch.maximum(self.highest, other.highest))


def loss_sums(spec: LossSpec, tokens: Tokens, same_weights: torch.Tensor, policy: Policy) -> tuple[torch.Tensor, Sums]:
    """(the loss, not yet divided; all sums) of one micro-batch's trained tokens.

    Tokens that do not count are in the metrics only, with no entropy bonus and no KL penalty either: their row, sent or left out, is the
    same step. `same_weights` [n] says of which tokens the weights at hand are those that sampled them.
    """
    # By index, not by a factor 0: an infinite ratio in a row of no advantage would be NaN.
    moved = tokens.at(tokens.counts.nonzero().squeeze(1))
    losses, clipped = _policy_losses(policy, moved, spec)
    losses = moved.weight * losses
    if spec.kl.in_loss:
        assert moved.reference is not None
        losses = losses + spec.kl.coefficient * kl_penalty(moved.log_probs - moved.reference, spec.kl.estimator)
    if spec.entropy_bonus:
        losses = losses - spec.entropy_bonus * moved.entropy
    weight = AGGREGATIONS[spec.aggregation].weight(moved.sequence_tokens.to(losses.dtype))[moved.row]
    losses = weight * losses
    return losses.sum(), _sums(spec, losses, clipped, tokens, same_weights)


def _policy_losses(policy: Policy, tokens: Tokens, spec: LossSpec) -> Bounded:
    """Raises ValueError, naming what came, for a function that breaks the contract."""
    made = policy(tokens, spec)
    pair = isinstance(made, tuple) and len(made) == 2
    losses, clipped = made if pair else (made, torch.zeros_like(tokens.row, dtype=torch.bool))
    for name, column in (("losses", losses), ("clipped", clipped)):
        if not isinstance(column, torch.Tensor) or column.shape != tokens.log_probs.shape:
            what = tuple(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
            raise ValueError(f"the policy loss {spec.policy} gave {name} of {what} for {len(tokens.row)} tokens: it must give one for each")
    return losses, clipped


def _sums(spec: LossSpec, losses: torch.Tensor, clipped: torch.Tensor, tokens: Tokens, same_weights: torch.Tensor) -> Sums:
    """KL is from the behaviour to the current policy, estimated on the behaviour's own tokens as r - 1 - log r (Schulman 2020, "k3")."""
    if not len(tokens.log_probs):
        return Sums.nothing()
    log_probs = tokens.log_probs.detach()
    log_ratio = (log_probs - tokens.behaviour).double()
    ratio = log_ratio.exp()
    gap = log_ratio.abs().where(same_weights, -torch.inf)
    reference_kl = log_ratio.new_zeros(1)
    if tokens.reference is not None:
        reference_kl = kl_penalty((log_probs - tokens.reference).double(), spec.kl.estimator)
    sums = (
        losses.detach().double().sum(),
        clipped.sum().double(),
        tokens.entropy.detach().double().sum(),
        (ratio - 1.0 - log_ratio).sum(),
        reference_kl.sum(),
    )
    # One stack, so that a GPU is waited for once.
    loss, clips, *others, highest_ratio, highest_gap = torch.stack([*sums, ratio.max(), gap.max()]).tolist()
    total = (loss, len(ratio), clips, *others)
    return Sums(torch.tensor(total, dtype=torch.float64), torch.tensor((highest_ratio, highest_gap), dtype=torch.float64))


@dataclass(frozen=True, eq=False)
class ValueTokens:
    """The trained tokens of a micro-batch as the critic sees them, all [n]. `values` carries the gradient."""

    values: torch.Tensor
    old: torch.Tensor
    """The critic's values when the global batch began."""
    returns: torch.Tensor


def value_sums(clip: float | None, tokens: ValueTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(half the squared error, summed; [3] the same, how many were clipped, and the squared error of the old values).

    The larger of the error and the error of the value moved by at most `clip` from its old one, the pessimism of PPO's policy clip.
    """
    errors = (tokens.values - tokens.returns).square()
    clipped = torch.zeros_like(errors, dtype=torch.bool)
    if clip is not None:
        bounded = (tokens.old + (tokens.values - tokens.old).clamp(-clip, clip) - tokens.returns).square()
        clipped = bounded > errors
        errors = torch.maximum(errors, bounded)
    loss = 0.5 * errors.sum()
    before = (tokens.old - tokens.returns).double().square().sum()
    return loss, torch.stack([0.5 * errors.detach().double().sum(), clipped.sum().double(), before]).cpu()
