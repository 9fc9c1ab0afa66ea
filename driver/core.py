"""What the loops of one run share: its configuration, ledger, store, feed, and the one way to change state.

`Core.apply(event)` changes the ledger, queues its writes, and rings every loop's bell, so that no loop polls. A loop clears its bell,
looks, and only then waits: nothing is awaited between the look and the wait, so no ring is lost (H10). `Core.waiting` records why a
side waits, since when, in words: `/why` reads it (L1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from driver.events import Event
from driver.feed import Feed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.ledger_state import Sample
from driver.limits import Limits, load_limits, save_limits
from driver.lost_time import LostTime
from driver.measured import Measured
from driver.settings import RunConfig
from driver.store_gate import StoreGate
from store import Store

log = logging.getLogger("headrace.core")


@dataclass(frozen=True)
class Wait:
    """Why a side waits: a sentence and what kind of reason it is; since when for this reason, and since when at all (monotonic seconds)."""

    reason: str
    since: float
    kind: str = "other"
    idle_since: float | None = None

    @property
    def began(self) -> float:
        """When the side began to wait, whatever its reasons since."""
        return self.since if self.idle_since is None else self.idle_since


@dataclass
class Busy:
    """Seconds a side has worked, and whether it works now."""

    total_s: float = 0.0
    _since: float | None = None

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self.total_s += time.monotonic() - self._since
            self._since = None

    def seconds(self) -> float:
        return self.total_s + (self.now_s or 0.0)

    @property
    def now_s(self) -> float | None:
        """For how long it has been at what it is at, in seconds; None while it does not work."""
        return None if self._since is None else time.monotonic() - self._since


class Bell:
    """Rung on every change of state; each loop has its own."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    async def wait(self, at_most_s: float) -> None:
        """Until rung, or until a loop should look at the clock again."""
        # Not wait_for: before Python 3.12 it can swallow a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                await self._event.wait()


@dataclass
class Core:
    config: RunConfig
    ledger: Ledger
    db: LedgerDB
    feed: Feed
    store: Store
    bells: list[Bell] = field(default_factory=list)
    waits: dict[str, Wait] = field(default_factory=dict)
    lost_time: LostTime = field(default_factory=LostTime)
    measured: Measured = field(default_factory=Measured)
    alarms: dict[str, str] = field(default_factory=dict)  # by who raises it: what a person should look at, though the run goes on
    paused: bool = False
    draining: str | None = None  # why no new sample is registered any more
    ending: str | None = None  # why the run ends after the batch in training
    on_over: list[Callable[[Sample], None]] = field(default_factory=list)  # told each sample of which all has finished
    stopping: bool = False  # the process ends; everything is kept for the next start
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.gate = StoreGate(self.store, elsewhere=self.config.store_kind == "mooncake", capacity_bytes=self.config.store.capacity_bytes)
        if self.gate.elsewhere:
            self.gate.shut("it is being started")
        self.limits = load_limits(self.db, self._configured)

    @property
    def _configured(self) -> Limits:
        return Limits(self.config.staleness.bound, self.config.batch.samples)

    def change_limits(self, limits: Limits) -> None:
        """Another S or P, from now on and after restarts."""
        self.limits = limits
        save_limits(self.db, limits, self._configured)
        self.ring()

    @property
    def samples_per_batch(self) -> int:
        """P of the next batch."""
        return self.limits.samples_now(self.ledger.live_by_deadline, self.ledger.next_batch)

    def bell(self) -> Bell:
        bell = Bell()
        self.bells.append(bell)
        return bell

    def ring(self) -> None:
        for bell in self.bells:
            bell.ring()

    def apply(self, event: Event) -> None:
        """Change the state by one event and queue what it writes. LedgerError when the ledger can no longer be written."""
        if self.db.failure:
            self.db.write(())  # raises with the reason, before the state moves away from the disk
        self.db.write(self.ledger.apply(event))
        for sample in self.ledger.just_over:
            for tell in self.on_over:
                tell(sample)
        self.ring()

    def waiting(self, side: str, reason: str | None, kind: str = "other") -> None:
        """Side `side` waits for this reason (kept with the time it began), or no longer."""
        before = self.waits.get(side)
        if reason is None:
            if before is not None:
                del self.waits[side]
                self.lost_time.over(side, time.monotonic())
        elif before is None or (before.reason, before.kind) != (reason, kind):
            now = time.monotonic()
            same = before is not None and before.kind == kind
            self.waits[side] = Wait(reason, before.since if before and same else now, kind, before.began if before else now)
            self.lost_time.waits(side, kind, reason, now)

    def alarm(self, who: str, words: str | None) -> None:
        """Raise this alarm, or take it back. Said in the log too, when it is new."""
        if words is None:
            self.alarms.pop(who, None)
        elif self.alarms.get(who) != words:
            self.alarms[who] = words
            log.warning("%s", words)

    @property
    def run_id(self) -> str:
        return self.config.run_id
