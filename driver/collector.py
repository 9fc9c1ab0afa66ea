"""Python's cyclic collector, and its threads, in a process with thousands of requests in flight.

What a request allocates dies with it, by its reference count. What is left for the collector are the answers of httpx's own client, a few a
second, whose parts know each other. Left to itself it looks at everything that is in flight again and again (at Python's own threshold that
was half of the process's time with 4,096 open requests) or, with a high threshold, seldom and then for a second or two, for it counts what
is born less what dies, and what lives on grows meanwhile (benchmarks/README.md). So it is asked by the clock:

    every YOUNG_S           what was born since: little, and a cycle seldom lives so long. Where a thousand end a second it is all that is
                            in flight, up to 100 ms, of which hundredths of a percent are to be freed; then as seldom as SHARE asks, and
                            what the looks would have been at is mostly gone by itself
    memory grown by OLD     everything but what was there before the first request: a stop of the loop, when what is not seen adds up
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable

import psutil

YOUNG_S = 0.2
YOUNG_MOST_S = 5.0
SHARE = 0.02  # of the thread's time, for looks at what was born
BURST = 1_000_000  # containers more than at the last look: collected without being asked, should the loop not come to it
NEVER = 1_000_000_000
OLD = 1.25  # times the memory after the last look at everything, or when the run had its size
OLD_S = 600.0  # between two looks at everything, at least
# The loop gives the interpreter away in each system call, some 25 of them to put one row, and a thread that computes (the archive's) may
# keep it for so long each time. Python's own 5 ms made up to 34 ms of 25 calls beside one such thread, 0.5 ms at most 8.
SWITCH_S = 0.0005


def settle() -> None:
    """Once, when everything is imported."""
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(BURST, NEVER, NEVER)


def _memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


class Collector:
    """What to look at now."""

    def __init__(self, now: float, memory_bytes: Callable[[], int] = _memory_bytes, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self._memory_bytes, self._cpu_s = memory_bytes, cpu_s
        self._looked_at = now
        self._after: int | None = None

    def look(self, now: float) -> float:
        """Seconds until the next."""
        began = self._cpu_s()
        if now - self._looked_at < OLD_S:
            gc.collect(0)
        else:
            self._look_further(now)
        return min(YOUNG_MOST_S, max(YOUNG_S, (self._cpu_s() - began) / SHARE))

    def _look_further(self, now: float) -> None:
        self._looked_at = now
        if self._after is not None and self._memory_bytes() > OLD * self._after:
            gc.collect()
            self._after = None
        else:
            gc.collect(0)
        if self._after is None:
            self._after = self._memory_bytes()


async def collect() -> None:
    """Consumes nothing; waits for the clock. Ends never: its owner cancels it."""
    collector = Collector(time.monotonic())
    wait_s = YOUNG_S
    while True:
        await asyncio.sleep(wait_s)
        wait_s = collector.look(time.monotonic())
