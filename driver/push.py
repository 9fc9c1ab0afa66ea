"""Weights to engines: one push is one transaction per engine (L3), and all engines of a run go in parallel.

    gate shut → pause(retract) → release KV → begin → buckets → end → checksums agree → version → resume KV → continue
      → log-probs of a fixed sequence match the trainer's → gate open

Every attempt begins with the pause and the release, which are legal in whatever state an engine is, twice in a row too, and where one may
be open ends the update session in between: an illegal call (memory resumed that is not released) kills a real server, and the one behind
an address may have been started anew in between. A failure is retried once; then the engine is quarantined: its gate stays shut and its
process is replaced. A version is shown for an engine only after that engine has reported it and passed the checks (A5).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from driver.agreement import Agreements
from driver.release import Release
from driver.snapshot import MadeTokens, PushRefused, Snapshot
from driver.store_gate import StoreGate
from driver.transport import Parcel, StoreTransport, Transports
from rollout.answer import EngineError, Prefix
from rollout.client import EngineClient
from rollout.pool import EnginePool, EngineSlot

log = logging.getLogger("headrace.push")
AGAIN_S = 0.2  # a connection that was cut is seldom there again at once
LEAVE_S = 10.0
UNFINISHED_VERSION = "unfinished"
REMEMBERED_VERSIONS = 10_000  # more than any trajectory in flight can span


@dataclass(frozen=True)
class Outcome:
    engine_id: str
    verified: bool
    seconds: float
    logprob_gap: float | None
    reason: str | None = None
    attempts: int = 1
    skipped: tuple[str, ...] = ()
    """Steps that had no effect or could not be checked, each a sentence."""


class Pusher:
    """Pushes, and remembers which weights were verified where: tokens of other weights are provisional (L3)."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        deadline_s: float,
        logprob_tolerance: float,
        replace: Callable[[EngineSlot, str], Awaitable[None]],
        transports: Transports | None = None,
        agreements: Agreements | None = None,
        gate: StoreGate | None = None,
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._transports = transports or Transports("auto", {"store": StoreTransport})
        self._agreements = agreements or Agreements()
        self._deadline_s = deadline_s
        self._tolerance = logprob_tolerance
        self._replace = replace
        self._verified: dict[str, None] = {}  # version texts, which name the engine too; the oldest first
        self._pushing: dict[str, tuple[str, asyncio.Future[None]]] = {}  # engine_id → the version text on its way there, its end
        self.skipped: dict[str, tuple[str, ...]] = {}  # by engine_id, of its last push that was verified
        self.gap_max = 0.0
        self.seconds = 0.0

    async def push_all(self, snapshot: Snapshot) -> list[Outcome]:
        """Push to every engine that does not serve this version yet, in parallel. An engine's fault is an outcome, not an exception.

        Raises SnapshotGone, and PushImpossible when the fault is the snapshot's or this host's.
        """
        slots = [s for s in self._pool.slots.values() if s.verified != snapshot.label(s.life) and s.state != "quarantined"]
        async with self._transports.prepared(snapshot, slots) as parcels:
            return list(await asyncio.gather(*(self.push(slot, snapshot, parcels[slot.engine_id]) for slot in slots)))

    async def push(self, slot: EngineSlot, snapshot: Snapshot, parcel: Parcel) -> Outcome:
        """One engine, one retry, then quarantine. Restartable from any point with the same end. While the store is away no engine is at
        fault: it stays shut, and is pushed to when the weights can be read again."""
        began = time.monotonic()
        epoch = None if self._gate is None else self._gate.epoch
        reason = "unknown"
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pushing[slot.engine_id] = (str(snapshot.label(slot.life)), decided)
        release: Release | None = None
        try:
            for attempt in (1, 2):
                try:
                    async with asyncio.timeout(self._deadline_s) as limit:
                        with slot.bounds(limit):
                            release = release or await Release.of(slot)
                            gap, skipped = await self._transaction(slot, snapshot, parcel, release, again=attempt > 1)
                    self.gap_max = max(gap, self.gap_max)
                    self.seconds = time.monotonic() - began
                    self._say_skipped(slot, skipped)
                    return Outcome(slot.engine_id, True, self.seconds, gap, attempts=attempt, skipped=skipped)
                except (EngineError, PushRefused, TimeoutError) as error:
                    left = f"it is gone: {slot.reason}" if slot.state == "gone" else f"not done within {self._deadline_s:.0f} s"
                    reason = str(error) or left
                    log.warning("push of version %d to %s failed (attempt %d): %s", snapshot.version, slot.engine_id, attempt, reason)
                    slot.push_error = error
                    if slot.state == "gone" or isinstance(error, MadeTokens) or self._store_is_away(epoch):
                        break
                    if attempt == 1:
                        await asyncio.sleep(AGAIN_S)
            if slot.state == "shut" and self._store_is_away(epoch):
                slot.verified = None  # it may hold a part of the new weights, and its update may be open
            elif slot.state not in ("quarantined", "gone"):  # where it is, somebody else has found it hanging
                self._pool.quarantine(slot, f"push of version {snapshot.version} failed: {reason}")
                await self._replace(slot, f"push of version {snapshot.version} failed: {reason}")
            return Outcome(slot.engine_id, False, time.monotonic() - began, None, reason)
        finally:
            if self._pushing.get(slot.engine_id, ("", None))[1] is decided:
                del self._pushing[slot.engine_id]
            decided.set_result(None)

    def _store_is_away(self, epoch: int | None) -> bool:
        """Or was, since the push began."""
        return self._gate is not None and (self._gate.reason is not None or self._gate.epoch != epoch)

    async def leave(self, slot: EngineSlot) -> bool:
        """An engine that goes on without us: not paused, and not under the name of weights that it may hold in part. Never raises; False
        when it did not answer.

        Waits for the end of its push, if there is one: the calls of two hands together may be illegal.
        """
        if slot.engine_id in self._pushing:
            await asyncio.wait([self._pushing[slot.engine_id][1]])
        client: EngineClient = slot.client
        try:
            async with asyncio.timeout(LEAVE_S):
                await client.pause("retract")
                await self._end_if_open(client)
                await client.release(["kv_cache"])
                await client.set_version(UNFINISHED_VERSION)
                await client.resume(["kv_cache"])
                await client.continue_generation()
        except (EngineError, TimeoutError) as error:
            log.warning("%s was left in the middle of a push: %s", slot.engine_id, error or f"no answer within {LEAVE_S:.0f} s")
            return False
        return True

    def verified(self, version: str) -> bool:
        """Did these weights, on this life of an engine, pass every check?"""
        return version in self._verified

    async def trusted(self, answer: Prefix) -> Prefix:
        """The tokens of this answer that verified weights made: all of them, but for a push that did not pass its checks.

        While the push that made some of them is still being checked, waits for its end (bounded by the push's own deadlines).
        """
        doubtful = {version for version, _, _ in answer.spans if version not in self._verified}
        for label, decided in list(self._pushing.values()) if doubtful else ():
            if label in doubtful:
                await asyncio.shield(decided)
        kept = 0
        for version, _, end in answer.spans:
            if version not in self._verified:
                break
            kept = end
        if kept == len(answer.output_ids):
            return answer
        spans = [(version, start, min(end, kept)) for version, start, end in answer.spans if start < kept]
        return Prefix(answer.output_ids[:kept], answer.log_probs[:kept], spans)

    def _say_skipped(self, slot: EngineSlot, skipped: tuple[str, ...]) -> None:
        """In the log when it is news, not with each push."""
        if skipped != self.skipped.get(slot.engine_id, ()):
            log.warning("pushes to %s: %s", slot.engine_id, "; ".join(skipped) or "no step is skipped any more")
        self.skipped[slot.engine_id] = skipped

    async def _transaction(
        self, slot: EngineSlot, snapshot: Snapshot, parcel: Parcel, release: Release, *, again: bool
    ) -> tuple[float, tuple[str, ...]]:
        """The largest difference of the fixed sequence's log-probs, and the steps that count as skipped."""
        client: EngineClient = slot.client
        label = snapshot.label(slot.life)
        agreement = self._agreements.of(slot.capabilities)
        if slot.state != "shut":
            self._pool.shut(slot, f"version {snapshot.version} is being pushed")
        await client.pause("retract")
        if again or slot.verified is None:  # an update may be open: from the attempt before, or from the life of a driver before
            await self._end_if_open(client)
        not_released = await release.do()
        if parcel.in_session:
            await client.begin_update()
        slot.weights_sent = True
        await parcel.send(slot)
        if parcel.in_session:
            await client.end_update()
        sums = await parcel.held(slot)
        agreement.check(snapshot, sums)
        await client.set_version(str(label))
        await client.resume(["kv_cache"])
        await client.continue_generation()
        reported = (await client.model_info()).get("weight_version")
        if reported != str(label):
            raise MadeTokens(f"the engine says its weights are {reported!r}, not {str(label)!r}")
        log_probs = await client.score_sequence(list(snapshot.canary_ids))
        gap = max((abs(a - b) for a, b in zip(log_probs, snapshot.canary_log_probs, strict=True)), default=0.0)
        if not gap <= self._tolerance:
            raise MadeTokens(f"log-probs of the fixed sequence differ by {gap:.2e} (tolerance {self._tolerance:.0e})")
        agreement.passed(snapshot, sums)
        self._verified[str(label)] = None
        if len(self._verified) > REMEMBERED_VERSIONS:
            del self._verified[next(iter(self._verified))]
        self._pool.open(slot, label)
        return gap, () if not_released is None else (not_released,)

    @staticmethod
    async def _end_if_open(client: EngineClient) -> None:
        try:
            await client.end_update()
        except EngineError as error:
            if error.status != 400:  # 400: none was open
                raise
