"""What engines do between our requests: how loaded they say they are, and whether they still move.

Engines are asked in turn, each once an interval, so that many of them are no burst, and more slowly where there are very many. A question
that fails leaves what was known, which grows old. An open engine that has said nothing to any of its requests for `stall_s` hangs, whatever
its /health says (E14): no request may go there any more, it is replaced, and its requests go on elsewhere from their last token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from driver.core import Core
from rollout.answer import EngineError
from rollout.pool import EnginePool
from rollout.slot import EngineSlot

log = logging.getLogger("headrace.engines")
MOST_A_SECOND = 8  # questions: each costs the driver a millisecond or two of computing
TRUST_ROUNDS = 3.0  # a report is believed for so many rounds: one or two questions may fail and nothing changes


class EngineWatch:
    def __init__(
        self,
        core: Core,
        pool: EnginePool,
        *,
        interval_s: float,
        stall_s: float | None,
        replace: Callable[[EngineSlot, str], Awaitable[None]],
    ) -> None:
        """`stall_s` None: requests go through a router, and nobody knows whose silence it is when one gets no token."""
        self._core = core
        self._pool = pool
        self._interval_s = interval_s
        self._stall_s = stall_s
        self._replace = replace
        self._asking: set[EngineSlot] = set()
        self._hung: dict[str, EngineSlot] = {}

    async def run(self) -> None:
        """Consumes nothing; waits for an engine's turn to be looked at; unblocked by the clock. Never ends: its owner cancels it."""
        async with asyncio.TaskGroup() as group:
            while True:
                slots = list(self._pool.slots.values())
                round_s = max(self._interval_s, len(slots) / MOST_A_SECOND)
                for slot in slots:
                    await self._look()
                    if slot.state in ("starting", "open", "shut") and slot not in self._asking:
                        self._asking.add(slot)
                        group.create_task(self._ask(slot, TRUST_ROUNDS * round_s), name=f"load of {slot.engine_id}")
                    await asyncio.sleep(round_s / len(slots))
                if not slots:
                    await asyncio.sleep(round_s)

    async def _ask(self, slot: EngineSlot, trust_s: float) -> None:
        try:
            slot.reported(await slot.client.loads(), trust_s)
        except EngineError as error:
            log.debug("%s did not say how loaded it is: %s", slot.engine_id, error)
        finally:
            self._asking.discard(slot)

    async def _look(self) -> None:
        if self._stall_s is None:
            return
        for slot in list(self._pool.slots.values()):
            silent_s = slot.silent_s()
            if slot.state == "open" and silent_s >= self._stall_s:
                await self._hangs(slot, silent_s)
        self._returned()

    async def _hangs(self, slot: EngineSlot, silent_s: float) -> None:
        reason = (
            f"it hangs: no token and no answer in {silent_s:.1f} s while requests were open, {slot.open_requests} of them now "
            f"(rollout.stall_s is {self._stall_s:g})"
        )
        log.warning("%s (incarnation %d): %s", slot.engine_id, slot.incarnation, reason)
        self._pool.quarantine(slot, reason)
        self._hung[slot.engine_id] = slot
        self._core.waiting(f"engine {slot.engine_id}", f"{slot.engine_id} is out of use: {reason}", "hangs")
        await self._replace(slot, reason)

    def _returned(self) -> None:
        """Engines that were replaced and are open again are no news any more."""
        for engine_id, old in list(self._hung.items()):
            now = self._pool.slots.get(engine_id)
            if now is not None and now is not old and now.state == "open":
                self._core.waiting(f"engine {engine_id}", None)
                del self._hung[engine_id]
