"""Where an event loop stands when it is late: a thread looks at it every few milliseconds and takes its stack once it is behind its time.

    with watching(path): …the loop runs…

Each stop becomes one line of JSON: how long, how much CPU the loop's thread and all threads used in it, what Python's cyclic collector
took, and the stacks, innermost calls first. A stop in C code that holds the interpreter shows the stack it left with. Looking takes time
of its own: figures of how late the loop is are taken without it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LOOK_S = 0.003
LATE_S = 0.015
BEAT_S = 0.005
DEPTH = 14  # calls of a stack


@contextmanager
def watching(path: Path) -> Iterator[Watch]:
    """To be entered in the loop's thread."""
    watch = Watch(path)
    beat = asyncio.create_task(watch.beat(), name="loop watch")
    thread = threading.Thread(target=watch.look, name="loop watch", daemon=True)
    gc.callbacks.append(watch.collects)
    thread.start()
    try:
        yield watch
    finally:
        gc.callbacks.remove(watch.collects)
        watch.over.set()
        beat.cancel()


class Watch:
    def __init__(self, path: Path) -> None:
        self.over = threading.Event()
        self._path = path
        self._thread = threading.get_ident()
        self._beat_s = time.monotonic()
        self.stacks: Counter[str] = Counter()
        self._collections: list[dict[str, float]] = []
        self._began_s = 0.0

    async def beat(self) -> None:
        with self._path.open("w") as file:
            while True:
                began_s, used_s, all_used_s = time.monotonic(), time.thread_time(), time.process_time()
                self._beat_s = began_s
                await asyncio.sleep(BEAT_S)
                stop_s = time.monotonic() - began_s - BEAT_S
                stacks, self.stacks = self.stacks, Counter()
                collections, self._collections = self._collections, []
                if stop_s > LATE_S:
                    cpu_ms, all_ms = (time.thread_time() - used_s) * 1e3, (time.process_time() - all_used_s) * 1e3
                    line = {"at": time.time(), "stop_ms": stop_s * 1e3, "cpu_ms": cpu_ms, "all_cpu_ms": all_ms, "collections": collections}
                    file.write(json.dumps(line | {"stacks": stacks.most_common(8)}) + "\n")
                    file.flush()

    def look(self) -> None:
        """Its own thread."""
        while not self.over.wait(LOOK_S):
            if time.monotonic() - self._beat_s > BEAT_S + LATE_S:
                frame = sys._current_frames().get(self._thread)
                if frame is not None:
                    self.stacks[_words(frame)] += 1

    def collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.monotonic()
        elif threading.get_ident() == self._thread:
            self._collections.append({**info, "ms": (time.monotonic() - self._began_s) * 1e3})


def _words(frame: FrameType) -> str:
    calls: list[str] = []
    at: FrameType | None = frame
    while at is not None and len(calls) < DEPTH:
        calls.append(f"{Path(at.f_code.co_filename).name}:{at.f_lineno} {at.f_code.co_name}")
        at = at.f_back
    return " < ".join(calls)


def told(path: Path, skip: int = 0) -> str:
    """In words: the stops from line `skip` on, the longest first."""
    stops = [json.loads(line) for line in path.read_text().splitlines()[skip:]]
    out = [f"{len(stops)} stops above {LATE_S * 1e3:g} ms"]
    for stop in sorted(stops, key=lambda stop: -stop["stop_ms"])[:40]:
        collected = ", ".join(f"{one['ms']:.0f} ms (generation {one['generation']})" for one in stop["collections"]) or "nothing"
        out.append(f"{stop['stop_ms']:.0f} ms, CPU {stop['cpu_ms']:.0f} of {stop['all_cpu_ms']:.0f} in all threads, collector {collected}")
        out += [f"    {count} × {stack}" for stack, count in stop["stacks"][:4]]
    return "\n".join(out)
