"""A moment in a process at which somebody is killed or stopped, ordered from outside by a file.

The test writes DIRECTORY/order.json; the process that comes to the place it names for the `count`-th time since then writes
DIRECTORY/done.json, and sends the signal. Exactly one process does so: it takes the order away by renaming it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ORDER, DONE = "order.json", "done.json"
DIRECTORY = "HEADRACE_CHAOS"  # the environment variable that names it
BEFORE, LOST, AFTER = "before", "lost", "after"
"""Before anything of it is done; when all that follows from it began and its commit never came; when it is committed and nothing else is
done. Of a function: before it, and after it (no LOST)."""


@dataclass(frozen=True)
class Order:
    number: int
    point: str
    moment: str
    count: int
    victim: str  # driver | engine | reward | worker | trainer | rank
    signal: str  # KILL | STOP | TERM

    def write(self, directory: Path) -> None:
        (directory / DONE).unlink(missing_ok=True)
        partial = directory / "order.partial"
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(directory / ORDER)


class Points:
    """In one process. `pid_of` names the process to be hit, by victim; None when there is none now."""

    def __init__(self, directory: Path, pid_of: Callable[[str], int | None]) -> None:
        self._directory = directory
        self._pid_of = pid_of
        self._seen: tuple[int, int] | None = None
        self._order: Order | None = None
        self._passed: Counter[tuple[str, str]] = Counter()
        self._guard = threading.Lock()

    def ordered(self, point: str, moment: str) -> Order | None:
        """The order, if it is for this place and this is the time; it stays until `fire`."""
        with self._guard:
            self._look()
            if self._order is None or (self._order.point, self._order.moment) != (point, moment):
                return None
            self._passed[point, moment] += 1
            return self._order if self._passed[point, moment] >= self._order.count else None

    def at(self, point: str, moment: str) -> None:
        """Somebody's last moment, if it was ordered so."""
        order = self.ordered(point, moment)
        if order is not None:
            self.fire(order)

    def fire(self, order: Order) -> None:
        pid = self._pid_of(order.victim)
        if pid is None:
            return  # it is being started anew: the next time
        try:
            (self._directory / ORDER).rename(self._directory / f"taken.{os.getpid()}")
        except FileNotFoundError:
            return
        partial = self._directory / "done.partial"
        partial.write_text(json.dumps({**asdict(order), "pid": pid, "time": time.time()}))
        partial.rename(self._directory / DONE)
        os.kill(pid, signal.Signals[f"SIG{order.signal}"])
        if pid == os.getpid():
            time.sleep(0.05)  # a signal to oneself may come a little later

    def _look(self) -> None:
        try:
            facts = (self._directory / ORDER).stat()
        except FileNotFoundError:
            self._order = self._seen = None
            return
        if self._seen == (facts.st_ino, facts.st_mtime_ns):
            return
        try:
            self._order = Order(**json.loads((self._directory / ORDER).read_text()))
        except FileNotFoundError:
            return
        self._seen = (facts.st_ino, facts.st_mtime_ns)
        self._passed.clear()


def step(points: Points, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a moment before and one after it."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **more: Any) -> Any:
            points.at(name, BEFORE)
            result = await function(*args, **more)
            points.at(name, AFTER)
            return result

        return awaited

    @functools.wraps(function)
    def called(*args: Any, **more: Any) -> Any:
        points.at(name, BEFORE)
        result = function(*args, **more)
        points.at(name, AFTER)
        return result

    return called
