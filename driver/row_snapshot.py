"""The snapshot of ready rows: every N seconds the rows that would be lost with the host's memory are copied to RUN_DIR.

What is ready, or consumed and not committed, is wanted; what is committed or discarded goes from the file with the next copy. A copy that
fails is said and tried again: the run goes on, with as little protection as a run without a snapshot has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from driver.core import Core
from driver.ledger_state import CONSUMED, READY
from store import Store, Unavailable
from store.row_file import RowFile, Saved

log = logging.getLogger("headrace.snapshot")


def wanted_keys(core: Core) -> dict[str, list[str]]:
    """By trajectory that is ready or consumed: the keys of its rows' objects in the store. No key where they are in the ledger itself."""
    return {
        trajectory.traj_uid: [ref.key for leaf in trajectory.leaves for ref in leaf.stored]
        for sample in core.ledger.samples.values()
        for trajectory in sample.trajectories
        if trajectory.state in (READY, CONSUMED)
    }


class RowSnapshot:
    """One run's. `every_s` None: nothing is copied any more, and what an earlier start copied is still used."""

    def __init__(self, path: Path, core: Core, store: Store, every_s: float | None) -> None:
        self.every_s = every_s
        self._core = core
        self._store = store
        self.failure: str | None = None
        self.last: Saved | None = None
        self._last_at: float | None = None
        self._last_s = 0.0
        self._file: RowFile | None = None
        if every_s is not None or path.exists():
            try:
                self._file = RowFile(path)
            except Unavailable as error:
                self._say(error)

    def restore(self, missing: set[str]) -> set[str]:
        """At start: put what is missing in memory back from the copies; returns which."""
        return self._file.restore(self._store, missing) if self._file is not None and missing else set()

    async def run(self) -> None:
        """Consumes what became ready; waits for its time. Ends never: its owner cancels it."""
        assert self.every_s is not None
        while True:
            await asyncio.sleep(self.every_s)
            await self.save()

    async def save(self) -> None:
        """Copy what is new. Never raises for what a disk did."""
        if self._file is None:
            return
        began = time.monotonic()
        keys = [key for keys in wanted_keys(self._core).values() for key in keys]
        try:
            self.last = await asyncio.shield(asyncio.to_thread(self._file.save, self._store, keys))
        except Unavailable as error:
            self._say(error)
            return
        self.failure, self._last_at, self._last_s = None, time.monotonic(), time.monotonic() - began

    def _say(self, error: Unavailable) -> None:
        if self.failure != str(error):
            log.warning("the snapshot of ready rows is behind: %s", error)
        self.failure = str(error)

    def facts(self) -> dict[str, Any] | None:
        """For the status: None when nothing is copied."""
        if self.every_s is None:
            return None
        age_s = None if self._last_at is None else round(time.monotonic() - self._last_at, 3)
        return {
            "every_s": self.every_s,
            "objects": self.last.held if self.last else 0,
            "age_s": age_s,
            "seconds": round(self._last_s, 3),
            "failure": self.failure,
        }

    def close(self, *, remove: bool) -> None:
        if self._file is not None:
            self._file.close(remove=remove)
            self._file = None
