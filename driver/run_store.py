"""The store of one run, from before its first process to after its last: made or reached, and at the end kept on disk or taken away."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from driver.mooncake import Place, lacking, place_of
from driver.reconcile import CannotContinue
from driver.settings import RunConfig
from store import EmbeddedStore, Store, StoreError, StoreStats, Unavailable, open_store

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.store")


class RunStore:
    """`place` is None for the embedded store, which is there from here on. Raises ValueError for what can not be had, with the remedy."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.gone = False
        self.place: Place | None = None
        if config.store_kind == "mooncake":
            if missing := lacking(config):
                raise ValueError("; ".join(missing))
            self.place = place_of(config)
            self.store: Store = open_store(self.place.location)  # nothing is asked of it yet
            self._there = False
        else:
            self.store = EmbeddedStore(config.store_directory, config.store.capacity_bytes)
            self.store.claim()
            self._there = True

    async def open(self, run: Run) -> None:
        """What holds it is started, and there is as much of it as was asked for. StartFailed, Unavailable, CannotContinue."""
        await run.processes.begin()
        if self.place is None:
            return
        await run.store_watch.begin()
        given, wanted = self.store.stats().capacity_bytes, self._config.store.capacity_bytes
        if given < wanted:
            raise CannotContinue(
                f"the store's hosts give {given:,} bytes together, and store.capacity_bytes is {wanted:,}: start an owner on the others "
                "(README, Many machines), raise store.mooncake.segment_bytes, or lower store.capacity_bytes"
            )
        try:
            self.store.claim()
        except ValueError as error:
            raise CannotContinue(str(error)) from error
        self._there = True
        run.core.gate.open()
        log.info("the store is %s, of %d bytes", self.store.location, given)

    def keep(self, parked: Path | None) -> str | None:
        """At the end. What lies in it goes to `parked`, if that is given, and the store goes. Where it can not be parked it stays for the
        next start, while its memory lives: then the answer says why."""
        if not self._there:
            return None
        if parked is not None:
            try:
                kept = self.store.park(parked)
            except (OSError, StoreError) as error:
                if isinstance(error, Unavailable) and self.place is not None:
                    log.warning("the ready rows are lost with the store, and are made again at the next start: %s", error)
                    return None
                log.warning(
                    "the ready rows stay in %s: %s; a start finds them there, unless the host is restarted before",
                    self.store.location,
                    error,
                )
                return f"the ready rows can not be kept in {parked}: {error}; free space there"
            log.info("%d objects are kept in %s for the next start", kept, parked)
        else:
            self._say_what_is_left()
        with contextlib.suppress(*[Unavailable] * (self.place is not None)):  # its processes end next
            self.store.remove()
        self.gone = True
        return None

    def _say_what_is_left(self) -> None:
        """A1: at rest there is nothing."""
        with contextlib.suppress(Unavailable):
            left = self.store.stats()
            level = logging.WARNING if left.used_bytes else logging.INFO
            log.log(level, "the run has ended, and its store holds %d objects, %d bytes", left.objects, left.used_bytes)

    def stats(self, run: Run) -> StoreStats:
        if self.gone:
            return StoreStats(0, 0, self._config.store.capacity_bytes)
        return self.store.stats() if self.place is None else run.core.gate.stats()
