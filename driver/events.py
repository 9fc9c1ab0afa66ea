"""What can happen to a run, as data: each event is one legal change of the ledger, with the times and ids it needs inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from driver.mix import Change
from store import INLINE, Ref


def named(ref: Mapping[str, Any]) -> dict[str, Any]:
    """The reference without the bytes that may ride in it."""
    return {name: value for name, value in ref.items() if name != "inline"}


class Leaf(msgspec.Struct, frozen=True):
    """One row: where its columns are, or small ones themselves, and the numbers the plan needs. Refs are `Ref.to_wire()`.

    The leaves of a trajectory share the objects of a hop, in which this is number `row`; its extras are its own.
    """

    row_id: str
    rollout: dict[str, Any]
    reward: dict[str, Any]
    length: int
    response_tokens: int
    score: float
    is_correct: bool | None = None
    row: int = 0
    extras: dict[str, Any] | None = None

    @property
    def refs(self) -> tuple[dict[str, Any], ...]:
        return (self.rollout, self.reward) if self.extras is None else (self.rollout, self.reward, self.extras)

    @property
    def stored(self) -> list[Ref]:
        """What of it lies in the store, and is freed when the row has ended."""
        return [Ref.from_wire(ref) for ref in self.refs if ref["location"] != INLINE]


class SampleRegistered(msgspec.Struct, frozen=True, kw_only=True):
    """`credits` are those of the datasets after this choice: see `driver.mix`."""

    uid: int
    segment: int
    row_index: int
    pass_index: int
    position: int
    version_tag: int
    deadline_batch: int
    n: int
    time: float
    dataset_id: str = ""
    credits: dict[str, float] = {}


class TrajectoryReady(msgspec.Struct, frozen=True, kw_only=True):
    """Generated and scored. `leaves` in tree order; `reward` is the trajectory's own (it counts once in the baseline)."""

    traj_uid: str
    leaves: tuple[Leaf, ...]
    reward: float
    finish_reason: str
    time: float


class TrajectoryRetried(msgspec.Struct, frozen=True, kw_only=True):
    """Lost with its engine, or failed by itself and within budget: still running, same tag."""

    traj_uid: str
    kind: str  # infrastructure | data
    reason: str


class TrajectoryDiscarded(msgspec.Struct, frozen=True, kw_only=True):
    traj_uid: str
    reason: str
    time: float


class SampleDiscarded(msgspec.Struct, frozen=True, kw_only=True):
    """Every trajectory of the sample that is running or ready ends here. `filtered_from`: the filter's work, and of which dataset."""

    uid: int
    reason: str
    time: float
    filtered_from: str | None = None


class RowsLost(msgspec.Struct, frozen=True, kw_only=True):
    """A ready trajectory whose rows are gone (host restart): generated again under its old tag."""

    traj_uid: str
    reason: str


class BatchAssembled(msgspec.Struct, frozen=True, kw_only=True):
    batch_id: int
    uids: tuple[int, ...]
    plan: bytes
    time: float


class BatchApplied(msgspec.Struct, frozen=True, kw_only=True):
    batch_id: int
    epoch: int
    skipped: str | None
    report: bytes
    time: float


class BatchUnmade(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that can not be replayed, because rows of it are gone: its samples go back. Only the newest batch can be unmade."""

    batch_id: int
    lost: frozenset[str]


class VersionCommitted(msgspec.Struct, frozen=True, kw_only=True):
    """A durable checkpoint holds this version: all batches below it are finished."""

    version: int
    checkpoint: str
    time: float


class EpochBegan(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer came back at an older version: weights of later versions are new ones, under a new epoch."""

    epoch: int
    version: int


class VersionServed(msgspec.Struct, frozen=True, kw_only=True):
    version: int


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a start found of what was not finished, in trajectories. Ready and consumed ones by where their rows were."""

    ledger: int = 0
    """Small rows, which ride in the ledger itself."""
    memory: int = 0
    parked: int = 0
    snapshot: int = 0
    again: int = 0
    """Ready, and its rows are nowhere: made again."""
    consumed_without_rows: int = 0
    """Their batch is made again, unless a checkpoint holds it."""
    resumed: int = 0
    """Running ones that go on from the prefix log."""
    resumed_tokens: int = 0
    from_prompt: int = 0
    """Running ones without a prefix: sampled from their prompt."""


class Restarted(msgspec.Struct, frozen=True, kw_only=True):
    """The driver has started on a ledger that is not empty, and this is what it found."""

    found: Found
    time: float


class EvaluationBegan(msgspec.Struct, frozen=True, kw_only=True):
    """All trajectories of one evaluation are registered: `rows` samples of `n`, in no batch and under no bound."""

    first_uid: int
    rows: int
    n: int
    version: int
    time: float


class EvaluationEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Every trajectory of it ends here: (row, index, reward) as evaluated, (row, index, reason) as discarded. `report` is what is told of
    it, and is kept in the same commit: answers are never counted as evaluated without the result that they made."""

    first_uid: int
    epoch: int
    report: bytes
    rewards: tuple[tuple[int, int, float], ...]
    failed: tuple[tuple[int, int, str], ...]
    time: float


class MixChanged(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of datasets, from the next sample on. `by` says who decided (submit, configuration, request, curriculum), `why` in words."""

    changes: dict[str, Change]
    by: str
    time: float
    why: str = ""


class RowSolved(msgspec.Struct, frozen=True, kw_only=True):
    """Every trajectory of this sample was right: its row may be left out of the next pass."""

    uid: int
    of: int
    time: float


class RowSkipped(msgspec.Struct, frozen=True, kw_only=True):
    """The next row of a dataset is left out of this pass, because it was solved in the one before."""

    dataset_id: str
    segment: int
    row_index: int
    pass_index: int
    position: int
    time: float


class RunEnded(msgspec.Struct, frozen=True, kw_only=True):
    how: str


Event = (
    SampleRegistered
    | TrajectoryReady
    | TrajectoryRetried
    | TrajectoryDiscarded
    | SampleDiscarded
    | RowsLost
    | BatchAssembled
    | BatchApplied
    | BatchUnmade
    | VersionCommitted
    | EpochBegan
    | VersionServed
    | EvaluationBegan
    | EvaluationEnded
    | Restarted
    | MixChanged
    | RowSolved
    | RowSkipped
    | RunEnded
)
