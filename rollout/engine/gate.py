"""Who may enter the engine, and when: SGLang's pause and its reader-writer lock, in one place.

A /generate call is a reader from the moment it is let in until it is answered. While the engine is paused, or a weight update waits or
runs without a pause, nobody is let in. An update in a pause needs no lock: the loop stands still.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    def __init__(self) -> None:
        self.paused = False
        self.readers = 0
        self._writers = 0
        self._writing = False
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        """Waits, for as long as its client does, until calls are let in."""
        if self.paused or self._writers:
            async with self._changed:
                await self._changed.wait_for(lambda: not self.paused and not self._writers)
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            if self.readers == 0 and (self.paused or self._writers):
                await self._notify()

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        """Keeps new readers out, waits for those inside, and for another writer."""
        self._writers += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self.readers == 0 and not self._writing)
                self._writing = True
            try:
                yield
            finally:
                self._writing = False
        finally:
            self._writers -= 1
            await self._notify()

    async def open(self) -> None:
        self.paused = False
        await self._notify()

    async def empty(self, wait_s: float) -> bool:
        """True once nobody is inside, False after `wait_s`."""
        try:
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self.readers == 0)
        except TimeoutError:
            return False
        return True

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
