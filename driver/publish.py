"""Which version the engines should have, which they have, and the buckets of both.

    training ──offer──▶ newest ──push_all──▶ kept (on an engine: repair, late joiners) ──▶ freed when the next one is
                          │ superseded before its push: freed

Pending pushes coalesce to the newest. A version is served (and becomes the tag of new samples) when the lowest open engine has it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from driver.core import Core
from driver.events import VersionServed
from driver.push import Outcome, Pusher
from driver.snapshot import Snapshot, SnapshotGone
from driver.why import Push
from rollout.pool import EnginePool, EngineSlot
from store import Ref

log = logging.getLogger("headrace.publish")
AGAIN_S = 1.0  # what a trainer needs to put a version it makes anew


class Publisher:
    def __init__(self, core: Core, pool: EnginePool, pusher: Pusher) -> None:
        self._core = core
        self._pool = pool
        self._pusher = pusher
        self._bell = core.bell()
        self._newest: Snapshot | None = None  # what the engines should have
        self._kept: Snapshot | None = None  # the newest that is on an engine
        self._pushing: Snapshot | None = None
        self._held: tuple[Snapshot, ...] = ()  # by the evaluator
        self.gap_max: float | None = None
        self._offered_at = 0.0

    @property
    def pending(self) -> bool:
        """Some engine lacks the newest version."""
        return self._newest is not None and any(self._lacks(slot, self._newest) for slot in self._pool.slots.values())

    @staticmethod
    def _lacks(slot: EngineSlot, snapshot: Snapshot) -> bool:
        return slot.state in ("starting", "open", "shut") and slot.verified != snapshot.label(slot.life)

    @property
    def why(self) -> Push | None:
        """What a push waits for, or is at; None while every engine has the newest version."""
        if self._newest is None or not self.pending:
            return None
        lacking = [slot.engine_id for slot in self._pool.slots.values() if self._lacks(slot, self._newest)]
        seconds = time.monotonic() - self._offered_at
        if self._pushing is not None:
            return Push(self._pushing.version, seconds, under_way=tuple(lacking))
        return Push(self._newest.version, seconds, lacking=tuple(lacking))

    def offer(self, snapshot: Snapshot) -> None:
        """A newer version; one that was not pushed yet is superseded by it."""
        superseded, self._newest = self._newest, snapshot
        self._offered_at = time.monotonic()
        if superseded is not None:
            self._free(superseded)
        self._core.ring()

    async def run(self) -> None:
        """Consumes snapshots; waits for a newer one, or an engine that lacks the newest; unblocked by any change. Never ends."""
        while True:
            self._bell.clear()
            if self._newest is None or not self.pending:
                await self._bell.wait(1.0)
                continue
            await self._core.gate.usable()
            snapshot = self._pushing = self._newest
            began = time.monotonic()
            outcomes = await self._push(snapshot)
            if outcomes and all(outcome.verified and outcome.attempts == 1 for outcome in outcomes):
                pause_s = max(outcome.seconds for outcome in outcomes)
                self._core.measured.pushed(time.monotonic() - began - pause_s, pause_s)
            self._pushing = None
            gaps = [outcome.logprob_gap for outcome in outcomes if outcome.logprob_gap is not None]
            self.gap_max = max([*gaps, *([] if self.gap_max is None else [self.gap_max])], default=None)
            if any(outcome.verified for outcome in outcomes):
                self._serve(snapshot)
            self._free(snapshot)
            self._core.ring()

    async def _push(self, snapshot: Snapshot) -> list[Outcome]:
        try:
            return await self._pusher.push_all(snapshot)
        except SnapshotGone as error:
            log.warning("version %d waits to be offered again: %s", snapshot.version, error)
            await asyncio.sleep(AGAIN_S)
            return []

    def _serve(self, snapshot: Snapshot) -> None:
        previous, self._kept = self._kept, snapshot
        if previous is not None:
            self._free(previous)
        ledger = self._core.ledger
        open_slots = [slot for slot in self._pool.slots.values() if slot.state == "open" and slot.verified is not None]
        versions = [slot.verified.version for slot in open_slots if slot.verified is not None and slot.verified.epoch == ledger.epoch]
        serving = min(versions, default=None)
        if serving is not None and serving != ledger.serving_version and serving <= ledger.trained_version:
            self._core.apply(VersionServed(version=serving))

    def _free(self, snapshot: Snapshot) -> None:
        """Free what no snapshot still in use holds. By key: a trainer that came back makes the same version under the same keys."""
        used = {bucket["key"] for s in self._in_use() for bucket in s.buckets}
        self._core.gate.free(Ref.from_wire(bucket) for bucket in snapshot.buckets if bucket["key"] not in used)

    def _in_use(self) -> list[Snapshot]:
        return [s for s in (self._newest, self._kept, self._pushing, *self._held) if s is not None]

    @property
    def newest(self) -> Snapshot | None:
        """What the engines should have."""
        return self._newest

    def hold(self, *snapshots: Snapshot) -> None:
        """Keep the buckets of these, and no longer of those that were held before, whatever the engines of the run get."""
        before, self._held = self._held, snapshots
        for snapshot in before:
            self._free(snapshot)

    def free_all(self) -> None:
        """At the end of the run."""
        done = {bucket["key"]: bucket for s in self._in_use() for bucket in s.buckets}
        self._newest = self._kept = self._pushing = None
        self._held = ()
        self._core.gate.free(Ref.from_wire(bucket) for bucket in done.values())
