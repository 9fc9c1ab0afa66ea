"""At start: the ledger against what is really there, and in one line what was found and decided.

The rows of what is ready or consumed are in the ledger itself where they are small; else they are looked for in shared memory, then among
what was parked, then in the snapshot; a ready trajectory whose rows are nowhere is made again, under its old tag. What was running goes on
from the prefix log where it holds some of it, and counts one more try, since nobody knows whether it had been sent. What lies in the store
and has no owner is freed. The ledger keeps how many of which.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from driver.core import Core
from driver.events import Found, Restarted, RowsLost, TrajectoryRetried
from driver.ledger_state import CONSUMED, Sample
from driver.prefix_log import PrefixLog
from driver.row_snapshot import RowSnapshot, wanted_keys
from driver.store_gate import moved
from store import Store, StoreError

log = logging.getLogger("headrace.reconcile")


class CannotContinue(RuntimeError):
    """A configuration with which this run can not go on. A sentence for the user."""


def reconcile(core: Core, store: Store, settle: Callable[[Sample], None], prefixes: PrefixLog, snapshot: RowSnapshot) -> Found | None:
    """Before any loop runs. `settle` is told each live sample, and decides on those of which nothing runs. Returns what was found; None at
    the first start. CannotContinue."""
    ledger, config = core.ledger, core.config
    continued = ledger.next_uid > 0
    _move(core, store.location)
    sources = _find_rows(core, store, snapshot, config.directory / "parked")
    nowhere = [ledger.trajectory(traj_uid) for traj_uid, source in sources.items() if source == "again"]
    lost = [t for t in nowhere if t is not None and t.state != CONSUMED]
    for trajectory in lost:
        core.apply(RowsLost(traj_uid=trajectory.traj_uid, reason="its rows are in neither memory, parked nor snapshot"))
    running = [t for s in ledger.live() for t in s.in_state("running")]
    resumed = prefixes.keep(t.traj_uid for t in running)
    for trajectory in [t for t in running if t.reason is None]:
        # Whether it had been sent is not known: its next request counts as another try.
        core.apply(TrajectoryRetried(traj_uid=trajectory.traj_uid, kind="infrastructure", reason="the driver was restarted"))
    counted = Counter(sources.values())
    found = Found(
        ledger=counted["ledger"],
        memory=counted["memory"],
        parked=counted["parked"],
        snapshot=counted["snapshot"],
        again=len(lost),
        consumed_without_rows=len(nowhere) - len(lost),
        resumed=len(resumed),
        resumed_tokens=sum(resumed.values()),
        from_prompt=len(running) - len(resumed),
    )
    if continued:
        core.apply(Restarted(found=found, time=time.time()))
    for sample in list(ledger.live()):
        settle(sample)
    owned = {ref.key for s in ledger.samples.values() for t in s.trajectories for leaf in t.leaves for ref in leaf.stored}
    orphans = [store.ref(key) for key in set(store.keys()) - owned]
    store.free(orphans)
    if not continued:
        return None
    log.info(
        "continuing at version %d (committed %d, epoch %d): %d samples live, %d batches to finish. Trajectories with rows: "
        "%d in the ledger, %d in memory, "
        "%d parked, %d from the snapshot; without: %d ready ones are made again, %d consumed ones unless a checkpoint holds them. "
        "Running: %d go on from %d logged tokens, %d from their prompts. %d orphans freed",
        ledger.trained_version,
        ledger.committed_version,
        ledger.epoch,
        sum(ledger.live_by_deadline.values()),
        len(ledger.batches),
        found.ledger,
        found.memory,
        found.parked,
        found.snapshot,
        found.again,
        found.consumed_without_rows,
        found.resumed,
        found.resumed_tokens,
        found.from_prompt,
        len(orphans),
    )
    return found


def _move(core: Core, location: str) -> None:
    """The store may be another one than in the run's last life: what comes back from disk comes into this one."""
    for trajectory in (t for s in core.ledger.samples.values() for t in s.trajectories):
        trajectory.leaves = tuple(
            msgspec.structs.replace(
                leaf,
                rollout=moved(leaf.rollout, location),
                reward=moved(leaf.reward, location),
                extras=None if leaf.extras is None else moved(leaf.extras, location),
            )
            for leaf in trajectory.leaves
        )


def _find_rows(core: Core, store: Store, snapshot: RowSnapshot, parked: Path) -> dict[str, str]:
    """Where the rows of each ready or consumed trajectory were: the last of ledger, memory, parked, snapshot, again that any of them
    needed."""
    wanted = wanted_keys(core)
    memory = set(store.keys())
    try:
        store.unpark(parked)
    except (StoreError, OSError) as error:
        raise CannotContinue(
            f"the rows parked in {parked} can not be put back: {error}; raise store.capacity_bytes if they do not fit, or move the folder "
            "away: its rows are then generated again"
        ) from error
    unparked = set(store.keys()) - memory
    missing = {key for keys in wanted.values() for key in keys} - memory - unparked
    restored = snapshot.restore(missing)
    order = ["ledger", "memory", "parked", "snapshot", "again"]

    def rank(key: str) -> int:
        return 1 if key in memory else 2 if key in unparked else 3 if key in restored else 4

    return {traj_uid: order[max(map(rank, keys), default=0)] for traj_uid, keys in wanted.items()}
