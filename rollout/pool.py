"""Which engine gets the next request.

Each engine is a slot with a gate. Requests are given to open slots only, never more than a slot's capacity at once: to the least loaded by
its score, or to the one that holds a request's prefix, if that is little more loaded and has room. Nobody waits for a preference.
A caller that must wait has a future of its own; whoever makes room (a request that ends, a gate that opens) takes room and hands it
to the longest waiting caller before anything else runs, so no wake-up can be lost and no one is polled. A slot belongs to one
incarnation of an engine: a respawned engine gets a new slot, and what the old one still says can be told by its lease.

    register -> starting -> open <-> shut          (the push shuts and opens)
                    |         |       |
                    +---------+-------+--> quarantined -> shut     (repair), any -> gone
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollout.capabilities import Capabilities
from rollout.client import EngineClient
from rollout.slot import NEXT_STATES, EngineSlot, Stopwatch
from rollout.version import Version

# How much more loaded than the least loaded engine the preferred one may be, as a share of what it can run. A prefix that is there saves
# its prefill once; every token of the answer pays for a longer batch. At an eighth both are small, and n siblings of one sample fit.
PREFERENCE = 0.125


@dataclass(frozen=True)
class Lease:
    """The right to have one request open on a slot."""

    slot: EngineSlot
    pool: "EnginePool"

    @property
    def client(self) -> EngineClient:
        return self.slot.client

    @property
    def incarnation(self) -> int:
        return self.slot.incarnation

    def is_current(self) -> bool:
        """False when the engine has died or been replaced meanwhile: what this life of it still says is to be ignored."""
        return self.pool.slots.get(self.slot.engine_id) is self.slot


class Waiter:
    """One caller of `acquire` that has no slot yet."""

    future: "asyncio.Future[EngineSlot]"

    def __init__(self, avoid: Collection[str], prefer: EngineSlot | None) -> None:
        self.avoid = avoid
        self.prefer = prefer


class EnginePool:
    """All engines of one policy. Runs on one event loop; every method but `acquire` is immediate."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.slots: dict[str, EngineSlot] = {}
        self.absent: dict[str, str] = {}  # engines that belong to the run and cannot be used, with the reason
        self._monotonic = monotonic
        self._some_shut = Stopwatch(monotonic)
        self._gone_busy_s = 0.0
        self._preferring = 0
        self._preferred = 0
        self._waiters: OrderedDict[Waiter, None] = OrderedDict()

    def register(
        self,
        engine_id: str,
        client: EngineClient,
        incarnation: int,
        capacity: int,
        capabilities: Capabilities | None = None,
        pid: int | None = None,
    ) -> EngineSlot:
        """A new engine, or a new life of one. It gets no requests until `open`; the slot of its life before is gone."""
        old = self.slots.get(engine_id)
        if old is not None:
            if incarnation <= old.incarnation:
                raise ValueError(f"engine {engine_id}: incarnation {incarnation} is not newer than {old.incarnation}")
            self.gone(old, f"replaced by incarnation {incarnation}")
        if capacity < 1:
            raise ValueError(f"engine {engine_id}: capacity must be at least 1 request, not {capacity}")
        slot = EngineSlot(engine_id, client, incarnation, capacity, self._monotonic)
        slot.capabilities = capabilities
        slot.pid = pid
        self.slots[engine_id] = slot
        self.absent.pop(engine_id, None)
        return slot

    def clock(self) -> float:
        """Seconds that pass only while no gate is shut: the clock of requests whose engine somebody else chooses."""
        return self._monotonic() - self._some_shut.elapsed_s()

    def _look_at_gates(self) -> None:
        self._some_shut.run(any(slot.state == "shut" for slot in self.slots.values()))

    def open(self, slot: EngineSlot, verified: Version) -> None:
        """Let requests in: the engine was seen to carry `verified`."""
        if verified.incarnation != slot.life:
            raise ValueError(f"engine {slot.engine_id} is life {slot.life}, but {verified} was verified on another one")
        slot._go("open", f"serves {verified}")
        slot.verified = verified
        slot.was_open = True
        self._look_at_gates()
        self._hand_out()

    def shut(self, slot: EngineSlot, reason: str) -> None:
        """No new requests. Those that are open stay, and their clock stands still until the gate opens."""
        slot._go("shut", reason)
        self._look_at_gates()

    def quarantine(self, slot: EngineSlot, reason: str) -> None:
        """Not to be trusted. The clock of its open requests runs again, so that they end and go elsewhere."""
        slot._go("quarantined", reason)
        slot.verified = None
        self._look_at_gates()

    def gone(self, slot: EngineSlot, reason: str) -> None:
        """This life of the engine is over."""
        slot._go("gone", reason)
        slot.verified = None
        if self.slots.get(slot.engine_id) is slot:
            del self.slots[slot.engine_id]
            self._look_at_gates()
            self._gone_busy_s += slot.busy_s()
            self._hand_out()  # somebody may have waited for this engine's sake, avoiding another

    @asynccontextmanager
    async def acquire(
        self, deadline_s: float, reason: str, *, avoid: Collection[str] = (), prefer: EngineSlot | None = None
    ) -> AsyncIterator[Lease]:
        """Wait for room on the least loaded open engine; TimeoutError after `deadline_s`, saying what was in the way.

        `avoid` names engines that just failed this request: they get it only when no other engine is open. `prefer` is the life of an
        engine that holds a prefix of it: it is taken when it is open, has room, is not avoided and little more loaded than the best.
        """
        slot = await self._wait(deadline_s, reason, Waiter(avoid, prefer))
        try:
            yield Lease(slot, self)
        finally:
            self._return(slot)

    async def _wait(self, deadline_s: float, reason: str, waiter: Waiter) -> EngineSlot:
        try:
            async with asyncio.timeout(deadline_s):
                slot = await self._next_slot(waiter)
                while slot.state != "open":  # the gate was shut after the hand-over and before this caller ran
                    self._return(slot)
                    slot = await self._next_slot(waiter, first=True)
                return slot
        except TimeoutError:
            raise TimeoutError(f"{reason}: no engine was free within {deadline_s:g} s; {self.why()}") from None

    async def _next_slot(self, waiter: Waiter, *, first: bool = False) -> EngineSlot:
        waiter.future = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        self._waiters.move_to_end(waiter, last=not first)
        self._hand_out()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # A slot may have been handed over in the very turn of the loop in which this caller was cancelled or ran out of time.
            if waiter.future.done() and not waiter.future.cancelled():
                self._return(waiter.future.result())
            self._waiters.pop(waiter, None)
            raise

    def _return(self, slot: EngineSlot) -> None:
        slot._give_back()
        self._hand_out()

    def _hand_out(self) -> None:
        """Give all the room there is to those who wait, oldest first. Room is taken here, before the caller runs."""
        for waiter in list(self._waiters) if self._waiters and self._has_room() else ():
            slot = self._best(waiter.avoid, waiter.prefer)
            if slot is not None:
                slot._take()
                if waiter.prefer is not None:
                    waiter.prefer.preferring_requests += 1
                    waiter.prefer.preferred_requests += slot is waiter.prefer
                    self._preferring += 1
                    self._preferred += slot is waiter.prefer
                waiter.future.set_result(slot)
                del self._waiters[waiter]
                if not self._has_room():
                    return

    def _has_room(self) -> bool:
        return any(slot.has_room() for slot in self.slots.values())

    def _best(self, avoid: Collection[str], prefer: EngineSlot | None) -> EngineSlot | None:
        wanted = [slot for slot in self.slots.values() if slot.state == "open"]
        if avoid:
            wanted = [slot for slot in wanted if slot.engine_id not in avoid] or wanted
        now_s = self._monotonic()
        free = {slot: slot.score(now_s) for slot in wanted if slot.open_requests < slot.capacity}
        if not free:
            return None
        least = min(free.values())
        if prefer is not None and prefer in free and free[prefer] <= least + PREFERENCE:
            return prefer
        return min((slot for slot in free if free[slot] == least), key=lambda slot: (slot.open_requests, slot.served_requests))

    @property
    def serving_version(self) -> int | None:
        """The lowest verified version among engines open to dispatch; None while there is none."""
        return min((slot.verified.version for slot in self.slots.values() if slot.state == "open" and slot.verified), default=None)

    def why(self) -> str:
        """Why a request has to wait now, in words."""
        absent = [f"{engine_id}: {reason}" for engine_id, reason in self.absent.items()]
        if not self.slots:
            return "; ".join(["no engine is registered", *absent])
        open_slots = [slot for slot in self.slots.values() if slot.state == "open"]
        if open_slots:
            return f"{len(open_slots)} of {len(self.slots)} engines are open, with {sum(s.open_requests for s in open_slots)} requests"
        return "no engine is open: " + "; ".join([*(f"{s.engine_id} is {s.state} ({s.reason})" for s in self.slots.values()), *absent])

    def gauges(self) -> dict[str, float]:
        slots = list(self.slots.values())
        states = {f"headrace_rollout_engines_{state}_count": 0.0 for state in NEXT_STATES if state != "gone"}
        for slot in slots:
            states[f"headrace_rollout_engines_{slot.state}_count"] += 1
        return states | {
            "headrace_rollout_engines_absent_count": float(len(self.absent)),
            "headrace_rollout_requests_open_count": float(sum(slot.open_requests for slot in slots)),
            "headrace_rollout_requests_waiting_count": float(len(self._waiters)),
            "headrace_rollout_requests_preferring_total": float(self._preferring),
            "headrace_rollout_requests_preferred_total": float(self._preferred),
            "headrace_rollout_busy_s": self._gone_busy_s + sum(slot.busy_s() for slot in slots),
        }
