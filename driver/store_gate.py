"""The store as the driver's loops use it: they never stand still for it, and while it is away they wait in words.

Embedded, every call is a few microseconds and is made at once. One that is reached over the network may take seconds when something is
wrong there: then puts are made in threads of their own, and what a caller does not wait for (frees, what is read before one) is done in a
thread behind it, in order. `shut` closes the gate with a reason: puts wait, no new sample is registered, nothing is trained. `epoch` grows
each time that all that lay in the store was lost; `driver/store_watch.py` says when.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from store import INLINE, Ref, Store, StoreError, StoreStats, Unavailable, Value

log = logging.getLogger("headrace.store")
PUTS_AT_ONCE = 16
PUT_S = 30.0  # longer than the client's own time-outs together: what has not come back by then will not
AGAIN_S = 0.2
T = TypeVar("T")
STATS_S = 0.2  # how old what is known of the store's use may be


class StoreGate:
    def __init__(self, store: Store, *, elsewhere: bool = False, capacity_bytes: int = 0) -> None:
        """`elsewhere`: a call may take long. The gate is open, until somebody shuts it."""
        self.store = store
        self.elsewhere = elsewhere
        self.epoch = 0
        self.reason: str | None = None
        self.on_doubt: Callable[[], None] = lambda: None  # somebody met a fault, and what is the matter should be looked at now
        self._opened = asyncio.Event()
        self._opened.set()
        self._puts = ThreadPoolExecutor(PUTS_AT_ONCE, "store puts") if elsewhere else None
        self._behind = ThreadPoolExecutor(1, "store") if elsewhere else None
        self._stats = StoreStats(0, 0, capacity_bytes)
        self._stats_at: float | None = None
        self._room_at: float | None = None
        self._room_bytes = capacity_bytes
        self._put_bytes = 0  # in all
        self._counted_bytes = 0  # of these, before the last look at how full it is
        self._counting: Future[None] | None = None
        self._unfreed: list[Ref] = []

    # ---- is it there? ------------------------------------------------------------------------------------------------------

    def shut(self, reason: str) -> None:
        self.reason = reason
        self._opened.clear()

    def lost(self) -> None:
        """What lay in it, or a part of that, is gone for good. Frees that were left undone may be of the same keys as what comes."""
        self.epoch += 1
        self._unfreed.clear()

    def open(self) -> None:
        """It can be used."""
        self.reason = None
        self._opened.set()
        unfreed, self._unfreed = self._unfreed, []
        self.free(unfreed)

    def doubt(self, reason: str) -> None:
        """A call of somebody's has failed: nothing more is tried until it is known what is the matter."""
        if self.reason is None:
            self.shut(reason)
        self.on_doubt()

    async def usable(self) -> None:
        await self._opened.wait()

    # ---- what lies in it ---------------------------------------------------------------------------------------------------

    async def put(self, key: str, columns: Mapping[str, Value]) -> Ref:
        """Waits while the store is away. Raises Exists, Full, ValueError; Unavailable only of a store that is here.

        Of a put that failed nobody knows what it left behind, so the next try has a key of its own.
        """
        tried: list[str] = []
        while True:
            await self.usable()
            name = f"{key}~{len(tried)}" if tried else key
            try:
                ref = self.store.put(name, columns) if self._puts is None else await self._in_thread(self._puts, name, columns)
            except Unavailable as error:
                if not self.elsewhere:
                    raise
                tried.append(name)
                self.doubt(str(error))
                await asyncio.sleep(AGAIN_S)
                continue
            self._put_bytes += ref.size_bytes
            self.free(Ref(before, 0, self.store.location) for before in tried)
            return ref

    async def ask(self, question: Callable[[], T]) -> T:
        """What `question`, which asks the store, answers. Raises what it raises."""
        return question() if self._puts is None else await asyncio.wrap_future(self._puts.submit(question))

    async def _in_thread(self, threads: ThreadPoolExecutor, key: str, columns: Mapping[str, Value]) -> Ref:
        """What is put for a caller that is cancelled meanwhile is freed: nobody else knows of it. One that does not come back is left to
        itself."""
        putting = threads.submit(self.store.put, key, columns)
        try:
            done, _ = await asyncio.wait([asyncio.wrap_future(putting)], timeout=PUT_S)
            if not done:
                raise Unavailable(f"a put has not come back for {PUT_S:g} s")
            return done.pop().result()
        except asyncio.CancelledError:
            putting.add_done_callback(lambda done: None if done.cancelled() or done.exception() else self.free([done.result()]))
            raise

    def free(self, refs: Iterable[Ref]) -> None:
        """Does not wait. What can not be freed because the store is away is freed when it is back."""
        these = list(refs)
        if these:
            self.behind(lambda: self._free(these))

    async def free_many(self, refs: Iterable[Ref]) -> None:
        """Thousands: in a thread of their own, embedded too. Who is cancelled waits all the same: the store may be parked next."""
        if self._behind is not None:
            return self.free(refs)
        freeing = asyncio.create_task(asyncio.to_thread(self.store.free, list(refs)), name="free rows")
        try:
            await asyncio.shield(freeing)
        except asyncio.CancelledError:
            await freeing
            raise

    def _free(self, refs: list[Ref]) -> None:
        try:
            self.store.free(refs)
        except Unavailable:
            if not self.elsewhere:
                raise
            self._unfreed += refs

    def behind(self, work: Callable[[], None]) -> None:
        """Done at once, or in its turn after what was given before."""
        if self._behind is None:
            return work()
        self._behind.submit(self._quietly, work)

    def _quietly(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StoreError as error:
            log.warning("left undone, the store being away: %s", error)
        except Exception:
            log.exception("what was to be done behind the loop has failed")

    # ---- how full it is ------------------------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """As of a moment ago. Does not wait."""
        now = time.monotonic()
        if self._stats_at is None or now - self._stats_at > STATS_S:
            self._stats_at = now
            if self._behind is None:
                self._stats = self.store.stats()
            elif self.reason is None and (self._counting is None or self._counting.done()):
                self._counting = self._behind.submit(self._quietly, self._count)
        return self._stats

    def room_bytes(self) -> int:
        """What is not in use, as of a moment ago, less what was put since. Does not wait, and counts no objects: it is asked for each new
        sample."""
        now = time.monotonic()
        if self.elsewhere:
            stats = self.stats()
            self._room_bytes = stats.capacity_bytes - stats.used_bytes
        elif self._room_at is None or now - self._room_at > STATS_S:
            self._room_at, self._room_bytes, self._counted_bytes = now, self.store.room_bytes(), self._put_bytes
        return self._room_bytes - (self._put_bytes - self._counted_bytes)

    def _count(self) -> None:
        before = self._put_bytes
        self._stats = self.store.stats()
        self._counted_bytes = before

    # ---- the end -------------------------------------------------------------------------------------------------------------

    async def settle(self, deadline_s: float) -> None:
        """Until what was given to be done behind is done, or the deadline."""
        if self._behind is not None:
            last = self._behind.submit(lambda: None)
            await asyncio.wait([asyncio.wrap_future(last)], timeout=deadline_s)

    def close(self) -> None:
        for threads in (self._puts, self._behind):
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)


def moved(ref: dict[str, Any], location: str) -> dict[str, Any]:
    """A reference as the ledger has it, to the same object in the store that there is now."""
    return ref if ref["location"] in (location, INLINE) else {**ref, "location": location}
