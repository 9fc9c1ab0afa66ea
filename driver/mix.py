"""Which dataset the next new sample comes from: by priority, then in shares that hold over short windows too. Arithmetic alone.

Promise: `choose` is a function of what the ledger keeps of each dataset (`Walk`) and of nothing else: no dice, no clock, no order of
answers. So a restart goes on with the same choice that the process before it would have made.

Mechanism: smooth weighted round-robin. At each choice every dataset of the highest priority that has a row now earns its share of one
sample (weight over the sum of weights), the one with the most credit gives the sample and pays 1. With constant weights no dataset is
ever one sample or more ahead of its share, nor, of `k` datasets, `k - 1` behind. A dataset that has no row now neither earns nor pays.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

HEAVIEST = 1e9
LIGHTEST = 1e-9
PRIORITIES = 1_000_000


class FeedError(ValueError):
    """A sentence for the user."""


class Walk(msgspec.Struct, omit_defaults=True):
    """What the ledger keeps of one dataset: its share, its next row, and what was made of the rows before it.

    `passes` counts only with `own_passes`; without, the run's `stop.epochs` does. `credit` is in samples.
    """

    weight: float = 1.0
    priority: int = 0
    passes: int | None = None
    own_passes: bool = False
    pass_index: int = 0
    segment: int = 0
    position: int = 0
    credit: float = 0.0
    registered: int = 0  # samples
    filtered: int = 0
    skipped: int = 0


Cursor = dict[str, Walk]
"""By dataset: its share and the next row to register."""


class Change(msgspec.Struct, frozen=True):
    """New settings of one dataset; what is None stays. `passes` counts only with `own_passes`: None then means for ever."""

    weight: float | None = None
    priority: int | None = None
    passes: int | None = None
    own_passes: bool = False

    def __bool__(self) -> bool:
        return self != Change()


def choose(waiting: Mapping[str, Walk]) -> tuple[str, dict[str, float]] | None:
    """Of these datasets, each with a row to give now: the one that gives it, and the credits after it. None when all have weight 0.

    Of equal credits the dataset that arrived first wins: `waiting` is in order of arrival.
    """
    shares = planned(waiting)
    if not shares:
        return None
    if len(shares) == 1:
        return next(iter(shares)), {}  # alone it owes nobody anything
    credits = {dataset_id: waiting[dataset_id].credit + share for dataset_id, share in shares.items()}
    chosen = max(credits, key=credits.__getitem__)
    credits[chosen] -= 1.0
    return chosen, credits


def planned(waiting: Mapping[str, Walk]) -> dict[str, float]:
    """The share of each dataset that would be chosen among these: those of the highest priority, by weight. They add up to 1."""
    weighty = {dataset_id: walk for dataset_id, walk in waiting.items() if walk.weight > 0}
    top = max((walk.priority for walk in weighty.values()), default=0)
    tier = {dataset_id: walk.weight for dataset_id, walk in weighty.items() if walk.priority == top}
    total = math.fsum(tier.values())
    return {dataset_id: weight / total for dataset_id, weight in tier.items()}


def check_weight(weight: float, *, of: str = "") -> None:
    """FeedError unless it is 0 or a number that can be compared with the others."""
    if not (weight == 0 or LIGHTEST <= weight <= HEAVIEST):  # not-a-number fails every comparison
        raise FeedError(
            f"weight {weight}{of} is no share: give a number from {LIGHTEST:g} to {HEAVIEST:g} (only its ratio to the others counts), "
            "or 0 for no rows until it has another"
        )


def check(cursor: Mapping[str, Walk], known: Collection[str], changes: Mapping[str, Change]) -> None:
    """FeedError when these changes name a dataset that is not there, are no shares, or leave nothing that gives rows."""
    for dataset_id, change in changes.items():
        if dataset_id not in known:
            raise FeedError(f"there is no dataset {dataset_id}; known: {', '.join(known) or 'none'}")
        check_one(change, of=f" for {dataset_id}")
    weights = {dataset_id: cursor.get(dataset_id, Walk()).weight for dataset_id in known}
    check_sum((weights | {dataset_id: each.weight for dataset_id, each in changes.items() if each.weight is not None}).values())


def check_one(change: Change, *, of: str = "") -> None:
    """FeedError for settings that are wrong whatever the other datasets have."""
    if change.weight is not None:
        check_weight(change.weight, of=of)
    if change.priority is not None and abs(change.priority) > PRIORITIES:
        raise FeedError(f"priority {change.priority}{of} is beyond {PRIORITIES}: higher ones come first, 0 is the usual one")
    if change.own_passes and change.passes is not None and change.passes < 1:
        raise FeedError(f"epochs {change.passes}{of}: a dataset is walked at least once; to get no more of its rows give it weight 0")


def check_sum(weights: Iterable[float]) -> None:
    """FeedError when all of them are 0."""
    if not any(weights):
        raise FeedError("all weights would be 0, and no dataset would give a row: leave one above 0, or pause the run (headrace pause)")
