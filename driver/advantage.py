"""From the rewards of one sample's trajectories to one scalar per trajectory (M6: groups are by uid, never by position).

`group_mean` is GRPO without the division by the standard deviation, as argued in "Understanding R1-Zero-Like Training" (Liu et
al. 2025, section 3); `grpo` is DeepSeekMath (Shao et al. 2024), equation in section 4.1.2, with outcome supervision.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """One advantage per trajectory of one sample. A group of equal rewards gets exactly 0 (N3); rewards must be finite."""
    if not rewards:
        return []
    assert all(math.isfinite(r) for r in rewards), "a failed score never reaches the baseline (L4, N4)"
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    centred = [r - mean for r in rewards]
    if kind == "group_mean":
        return centred
    if kind == "grpo":
        deviation = statistics.pstdev(rewards, mean)
        return [c / (deviation + 1e-6) for c in centred]
    raise ValueError(f"unknown advantage {kind!r}; known: group_mean, grpo")
