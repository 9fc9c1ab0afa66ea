"""Keeps a router's workers the same as the engines that carry verified weights, and says when it can not be used.

One loop, once a second: what should be there, what is there, the difference. An engine that is quarantined or gone leaves; one that was
verified comes (back). While one is being pushed to it stays, paused: its requests wait there. A worker that this run does not know would
make tokens of nobody's weights, which are never kept: it is named, and until it is gone nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from driver.core import Core
from rollout.answer import EngineError
from rollout.pool import EnginePool, EngineSlot
from rollout.router import RouterClient

log = logging.getLogger("headrace.routing")
LOOK_S = 1.0


class Routing:
    def __init__(
        self, core: Core, pool: EnginePool, client: RouterClient, engine_api_key: str | None, known: Callable[[], Iterable[str]]
    ) -> None:
        """`known`: the addresses of engines that belong to the run, also of those that cannot be used now."""
        self._core = core
        self._pool = pool
        self._known = known
        self.client = client
        self._engine_api_key = engine_api_key
        self._usable = asyncio.Event()
        self._seen: set[str] = set()  # addresses that are or were ours: an engine that died is no stranger
        self.reason: str | None = "the router was not asked yet"

    async def run(self) -> None:
        """Never ends; a router that does not answer is asked again."""
        while True:
            try:
                reason = await self._look()
            except EngineError as error:
                reason = str(error)
            if reason != self.reason:
                log.warning("router %s: %s", self.client.url, reason or "in use")
                self.reason = reason
                self._core.ring()
            if reason is None:
                self._usable.set()
            else:
                self._usable.clear()
            await asyncio.sleep(LOOK_S)

    async def usable(self, deadline_s: float) -> None:
        """Wait until it passes requests on. Raises TimeoutError with the reason."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._usable.wait()
        except TimeoutError:
            raise TimeoutError(f"no router within {deadline_s:g} s: {self.reason}") from None

    async def without(self, url: str) -> None:
        """This engine goes: the router is told at once, and sends nothing there any more. Never raises."""
        try:
            for worker in await self.client.workers():
                if worker.url == url:
                    await self.client.remove(worker.worker_id)
        except EngineError as error:  # its loop may have been faster
            log.info("router %s, asked to let go of %s: %s", self.client.url, url, error)

    async def _look(self) -> str | None:
        """Mend the difference; why nothing can be sent now, or None."""
        slots = list(self._pool.slots.values())
        there = {worker.url: worker for worker in await self.client.workers()}
        wanted = {slot.url for slot in slots if serves(slot)}
        self._seen |= {slot.url for slot in slots} | set(self._known())
        foreign = sorted(there.keys() - self._seen)
        for url in sorted(wanted - there.keys()):
            await self.client.add(url, self._engine_api_key)
        for url in sorted((there.keys() & self._seen) - wanted):
            await self.client.remove(there[url].worker_id)
        if foreign:
            return f"it has a worker that is not of this run ({foreign[0]}); remove it there, or name it in rollout.engine_urls"
        if not any(there[url].healthy for url in wanted & there.keys()):
            return f"none of the {len(wanted)} engines with verified weights is one of its healthy workers yet"
        return None


def serves(slot: EngineSlot) -> bool:
    return slot.verified is not None and slot.state in ("open", "shut")
