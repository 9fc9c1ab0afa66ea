"""At start: the ledger against what is really there, and in one line what was found and decided.

Rows that a live trajectory owns and that are gone are made again, under the old tag; what lies in the store and has no owner is freed;
what was running counts one more try, since nobody knows whether it had been sent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from driver.core import Core
from driver.events import RowsLost, TrajectoryRetried
from driver.ledger import Sample
from driver.training import rows_present
from store import EmbeddedStore

log = logging.getLogger("headrace.reconcile")


class CannotContinue(RuntimeError):
    """A configuration with which this run can not go on. A sentence for the user."""


def reconcile(core: Core, store: EmbeddedStore, settle: Callable[[Sample], None]) -> None:
    """Before any loop runs. `settle` is told each live sample, and decides on those of which nothing runs. CannotContinue."""
    ledger, config = core.ledger, core.config
    restored = store.unpark(config.directory / "parked")
    owned = set()
    lost = 0
    for sample in ledger.samples.values():
        for trajectory in sample.trajectories:
            if trajectory.state == "ready" and not rows_present(core, trajectory.leaves):
                core.apply(RowsLost(traj_uid=trajectory.traj_uid, reason="rows lost with the host's memory"))
                lost += 1
            owned |= {ref["key"] for leaf in trajectory.leaves for ref in (leaf.rollout, leaf.reward)}
    for trajectory in [t for s in ledger.live() for t in s.in_state("running") if t.reason is None]:
        # Whether it had been sent is not known: its next request counts as another try.
        core.apply(TrajectoryRetried(traj_uid=trajectory.traj_uid, kind="infrastructure", reason="the driver was restarted"))
    for sample in list(ledger.live()):
        settle(sample)
    published = store.keys()
    orphans = [store.ref(key) for key in published if key not in owned]
    store.free(orphans)
    if ledger.next_uid:
        log.info(
            "continuing at version %d (committed %d, epoch %d): %d samples live, %d batches to finish, "
            "%d objects restored, %d trajectories without rows, %d orphans freed",
            ledger.trained_version,
            ledger.committed_version,
            ledger.epoch,
            sum(ledger.live_by_deadline.values()),
            len(ledger.batches),
            restored,
            lost,
            len(orphans),
        )
