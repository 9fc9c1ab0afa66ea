"""A ledger and its events, made by hand."""

from __future__ import annotations

import copy

from driver.events import Leaf, SampleRegistered, TrajectoryReady
from driver.ledger import Ledger
from driver.ledger_state import FINISHED, traj_uid_of
from driver.mix import Walk


def register(ledger: Ledger, *, tag: int = 0, bound: int = 2, n: int = 2) -> SampleRegistered:
    walk = ledger.cursor.get("", Walk())
    position = walk.position
    return SampleRegistered(
        uid=ledger.next_uid,
        segment=0,
        row_index=position,
        pass_index=walk.pass_index,
        position=position,
        version_tag=tag,
        deadline_batch=tag + bound,
        n=n,
        time=1.0,
    )


def leaf(traj_uid: str, score: float = 1.0) -> Leaf:
    def ref(hop: str) -> dict[str, object]:
        return {"key": f"run/{traj_uid}/{hop}", "size_bytes": 4096, "location": "tmpfs:/nowhere"}

    return Leaf(f"{traj_uid}a0000l0000", ref("rollout"), ref("reward"), 12, 5, score, score == 1.0)


def ready(uid: int, index: int, score: float = 1.0) -> TrajectoryReady:
    traj_uid = traj_uid_of(uid, index)
    return TrajectoryReady(traj_uid=traj_uid, leaves=(leaf(traj_uid, score),), reward=score, finish_reason="stop", time=2.0)


def fields(ledger: Ledger) -> dict[str, object]:
    """Every field of a ledger, with the order of what is ordered. The rows that an ended trajectory still names are not state."""
    found = copy.deepcopy(vars(ledger))
    del found["just_over"], found["settlings"]  # of the last event, and a clock of a driver's life
    for sample in found["samples"].values():
        for trajectory in sample.trajectories:
            if trajectory.state == FINISHED:
                trajectory.leaves = ()
    return found | {"order": [list(ledger.samples), list(ledger.batches)]}
