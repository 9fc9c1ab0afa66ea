"""From the rewards of one batch's samples to one scalar per trajectory, by a registry of kinds.

A kind is a function of all groups of the batch, because one of them needs the whole batch. A group is a sample's trajectories and goes by
its uid, never by a position (M6): groups may have any sizes, and their order changes no bit. In every kind a group of equal rewards gets
exactly 0 (N3), so that its rows can stay out of the plan (N6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

Groups = Mapping[int, Sequence[float]]
Lengths = Mapping[int, Sequence[int]]
"""By uid, the tokens that each trajectory sampled."""
Made = dict[int, list[float]]


def group_mean(groups: Groups, lengths: Lengths) -> Made:
    """r - mean(group). GRPO without the division by the deviation (Liu et al. 2025, "Understanding R1-Zero-Like Training", 3.2)."""
    return {uid: _centred(rewards) for uid, rewards in groups.items()}


def grpo(groups: Groups, lengths: Lengths) -> Made:
    """(r - mean(group)) / (std(group) + 1e-6), std of the population (Shao et al. 2024, "DeepSeekMath", 4.1.2, outcome supervision)."""
    return {uid: _scaled(centred, _root_mean_square(centred)) for uid, centred in group_mean(groups, lengths).items()}


def rloo(groups: Groups, lengths: Lengths) -> Made:
    """r - mean of the others' rewards, which is n / (n - 1) of `group_mean` (Ahmadian et al. 2024, "Back to Basics", the RLOO estimator).

    A trajectory without others has no baseline and gets 0.
    """
    return {uid: [c * len(made) / max(1, len(made) - 1) for c in made] for uid, made in group_mean(groups, lengths).items()}


def reinforce_pp(groups: Groups, lengths: Lengths) -> Made:
    """(r - mean(group)) / (std + 1e-6), std over all trajectories of the batch (Hu et al. 2025, "REINFORCE++", variant with baseline).

    The paper also subtracts the batch's mean, which is 0 after the groups' own means are gone: leaving that out keeps exact zeros exact.
    Each trajectory weighs the same in the std; implementations that whiten token by token weigh the longer ones more.
    """
    centred = group_mean(groups, lengths)
    deviation = _root_mean_square([c for made in centred.values() for c in made])
    return {uid: _scaled(made, deviation) for uid, made in centred.items()}


def length_aware(groups: Groups, lengths: Lengths) -> Made:
    """r - sum(length r) / sum(length): a baseline in which a longer trajectory, whose gradient is larger, weighs more.

    The baseline of least variance when the gradient's square grows with the length (Hao et al. 2025, "On-policy RL with optimal reward
    baseline", OPO). The length is in tokens sampled, those of all turns.
    """
    return {uid: _centred(rewards, [max(1, length) for length in lengths[uid]]) for uid, rewards in groups.items()}


ADVANTAGES: dict[str, Callable[[Groups, Lengths], Made]] = {
    "group_mean": group_mean,
    # The same advantage. Dr. GRPO's other half is how the loss is averaged: trainer.loss.aggregation `constant`.
    "dr_grpo": group_mean,
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "length_aware": length_aware,
}


def advantages(groups: Groups, kind: str, lengths: Lengths) -> Made:
    """By uid, one advantage per trajectory, in the order of its rewards. `groups` is the whole batch; rewards must be finite."""
    if kind not in ADVANTAGES:
        raise ValueError(f"unknown advantage {kind!r}; known: {', '.join(ADVANTAGES)}")
    assert all(math.isfinite(r) for rewards in groups.values() for r in rewards), "a failed score never reaches the baseline (L4, N4)"
    assert all(len(lengths[uid]) == len(rewards) for uid, rewards in groups.items())
    return ADVANTAGES[kind](groups, lengths)


def _centred(rewards: Sequence[float], weights: Sequence[int] | None = None) -> list[float]:
    # Exactly 0, where the mean of equal rewards may differ from them in the last bit.
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    weights = weights or [1] * len(rewards)
    mean = math.fsum(w * r for w, r in zip(weights, rewards, strict=True)) / sum(weights)
    return [r - mean for r in rewards]


def _root_mean_square(centred: Sequence[float]) -> float:
    """fsum rounds once, so any order of the numbers has the same sum."""
    return math.sqrt(math.fsum(c * c for c in centred) / len(centred)) if centred else 0.0


def _scaled(centred: Sequence[float], deviation: float) -> list[float]:
    return [c / (deviation + 1e-6) for c in centred]
