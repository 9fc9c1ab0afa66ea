"""How often prompts were answered right lately, by dataset and by task type: what a curriculum looks at, and a person. No clock, no I/O.

Each settled sample is one observation, whether the filter kept it or not: a window of kept ones alone would never see a rate of 0 or 1.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from driver.ledger_state import Trajectory


@dataclass(frozen=True)
class Observation:
    """One settled sample: of its ready trajectories, how many there were, how many were right, and their mean reward."""

    task_type: str
    version_tag: int
    right: int
    of: int
    reward: float


def is_right(trajectory: Trajectory, right_from: float) -> bool:
    """What the scorer said of its leaves; where it said nothing, whether the reward is at least `right_from`."""
    said = [leaf.is_correct for leaf in trajectory.leaves if leaf.is_correct is not None]
    return all(said) if said else (trajectory.reward or 0.0) >= right_from


def observation(ready: list[Trajectory], task_type: str, version_tag: int, right_from: float) -> Observation:
    rewards = [t.reward or 0.0 for t in ready]
    return Observation(task_type, version_tag, sum(is_right(t, right_from) for t in ready), len(ready), sum(rewards) / len(rewards))


class PassRates:
    """The last `window` samples of each dataset."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._by_dataset: dict[str, collections.deque[Observation]] = {}

    def observe(self, dataset_id: str, observed: Observation) -> None:
        self._by_dataset.setdefault(dataset_id, collections.deque(maxlen=self._window)).append(observed)

    def of(self, dataset_id: str) -> dict[str, Any]:
        """`samples`, and over them `pass_rate`, `reward_mean`, the oldest and newest `version_tag`; and so for each task type."""
        observed = list(self._by_dataset.get(dataset_id, ()))
        by_task: dict[str, list[Observation]] = {}
        for each in observed:
            by_task.setdefault(each.task_type, []).append(each)
        return _summary(observed) | {"by_task_type": {name: _summary(some) for name, some in sorted(by_task.items())}}


def _summary(observed: Iterable[Observation]) -> dict[str, Any]:
    some = list(observed)
    trajectories = sum(each.of for each in some)
    return {
        "samples": len(some),
        "pass_rate": sum(each.right for each in some) / trajectories if trajectories else None,
        "reward_mean": sum(each.reward for each in some) / len(some) if some else None,
        "version_tag_min": min((each.version_tag for each in some), default=None),
        "version_tag_max": max((each.version_tag for each in some), default=None),
    }
