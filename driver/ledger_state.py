"""What a run's ledger holds: trajectories in their samples, batches not yet committed, and counts. Plain facts; `ledger` changes them."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

from driver.events import Leaf

RUNNING, READY, CONSUMED, FINISHED = "running", "ready", "consumed", "finished"
TRAINED, EVALUATED, DISCARDED = "trained", "evaluated", "discarded"
EVALUATION = -1  # the segment of held-out rows, which are in no dataset of the run
ASSEMBLED, APPLIED, COMMITTED = "assembled", "applied", "committed"
UNMADE = "unmade"  # of a batch: its number is given again
STATE, OUTCOME, REASON, STALENESS = "state", "outcome", "reason", "staleness"  # kinds of counters


@dataclass
class Trajectory:
    traj_uid: str
    uid: int
    index: int
    state: str = RUNNING
    outcome: str | None = None
    reason: str | None = None
    infrastructure_attempts: int = 0
    data_attempts: int = 0
    leaves: tuple[Leaf, ...] = ()
    reward: float | None = None
    finish_reason: str | None = None
    started_at: float = 0.0
    ready_at: float | None = None


@dataclass
class Sample:
    uid: int
    segment: int
    row_index: int
    pass_index: int
    version_tag: int
    deadline_batch: int
    trajectories: list[Trajectory]
    batch_id: int | None = None

    @property
    def evaluation(self) -> bool:
        """Of a held-out row: in no batch, in no bound."""
        return self.segment == EVALUATION

    @property
    def waiting(self) -> bool:
        return any(t.state == RUNNING for t in self.trajectories)

    @property
    def settled(self) -> bool:
        """Live, and it can be taken into a batch: nothing of it runs, and something is ready."""
        return self.batch_id is None and not self.evaluation and not self.waiting and any(t.state == READY for t in self.trajectories)

    def in_state(self, state: str) -> list[Trajectory]:
        return [t for t in self.trajectories if t.state == state]


@dataclass
class Batch:
    batch_id: int
    state: str
    uids: tuple[int, ...]
    plan: bytes
    skipped: str | None = None


@dataclass
class Counts:
    """Over all trajectories ever registered."""

    registered: int = 0
    by_state: collections.Counter[str] = field(default_factory=collections.Counter)
    by_outcome: collections.Counter[str] = field(default_factory=collections.Counter)
    by_reason: collections.Counter[str] = field(default_factory=collections.Counter)

    def balanced(self) -> bool:
        return self.registered == sum(self.by_state.values()) and self.by_state[FINISHED] == sum(self.by_outcome.values())


def traj_uid_of(uid: int, index: int) -> str:
    """Fixed width, so that no id is a prefix of another (an engine aborts by prefix)."""
    return f"s{uid:016d}t{index:04d}"


def kind_of(reason: str) -> str:
    """What discards are counted by: the reason up to its second colon, without the particulars of one trajectory."""
    return ":".join(reason.split(":")[:2])
