"""SIGKILL of each kind of process to the full rate again: what `benchmarks.recovery` measures beside an engine's requests.

A whole service on the demo's model, two embedded engines, and a trainer that takes a second a batch, so that it is the trainer that sets
the rate and the engines have something in hand, as the design means it. The rate is that of trajectories that are scored, counted over
REST ten times a second; it is full again from the first moment from which it is at least 90 % of what it was before, over a window of
4 s. A driver that is killed is started again at once, as a service manager does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.common import median
from tests.chaos.accounts import check_end
from tests.chaos.attacks import BOUND, N_PER_SAMPLE, Chaos

KINDS = {"driver": "driver", "engine": "engine", "reward service": "reward", "trainer rank": "rank", "trainer parent": "trainer"}
WINDOW_S = 4.0
BEFORE_S = 10.0
LOOK_S = 0.1
FULL = 0.9
GIVE_UP_S = 120.0
STEP_S = 1.0


class Watch:
    """Trajectories that have been scored, and versions that have been trained, by time."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        self.seen: list[tuple[float, int, int]] = []

    def look(self) -> None:
        """Nothing is seen while nobody answers."""
        with contextlib.suppress(httpx.TransportError):
            status = self._chaos.service.run()
            counted = status["trajectories"]
            self.seen.append((time.monotonic(), counted["registered"] - counted["running"], status["trained_version"]))
        time.sleep(LOOK_S)

    def at(self, moment: float) -> float:
        """How many had been scored, between two looks in proportion."""
        before = max((s for s in self.seen if s[0] <= moment), default=self.seen[0])
        after = min((s for s in self.seen if s[0] >= moment), default=self.seen[-1])
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        return before[1] + share * (after[1] - before[1])

    def rate(self, start: float, end: float) -> float:
        return (self.at(end) - self.at(start)) / (end - start)


def kill_once(chaos: Chaos, victim: str) -> tuple[float, float]:
    """Seconds to the full rate, and to the next batch that is trained."""
    watch = Watch(chaos)
    began = time.monotonic()
    while time.monotonic() < began + BEFORE_S:
        watch.look()
    before = watch.rate(began, time.monotonic())
    pid = None
    while pid is None:
        pid = chaos.pid_of(victim)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    version = trained_on_disk(chaos.run_dir)  # a look may have missed the last one
    if victim == "driver":
        assert chaos.service.process is not None
        chaos.service.process.wait(30)
        chaos.start()
    batch_s: float | None = None
    while time.monotonic() < killed + GIVE_UP_S:
        watch.look()
        # A replay brings back versions that were there before; the next batch is one that was not.
        if batch_s is None and watch.seen[-1][2] > version:
            batch_s = watch.seen[-1][0] - killed
        if batch_s is not None and (restored_s := full_again(watch, killed, FULL * before)) is not None:
            return restored_s, batch_s
    return GIVE_UP_S, batch_s if batch_s is not None else GIVE_UP_S


def trained_on_disk(run_dir: Path) -> int:
    reader = sqlite3.connect(f"file:{run_dir}/ledger.sqlite?mode=ro", uri=True)
    try:
        found = reader.execute("SELECT value FROM meta WHERE name = 'trained_version'").fetchone()
        return int(found[0])
    finally:
        reader.close()


def full_again(watch: Watch, killed: float, wanted: float) -> float | None:
    moment, last = killed, watch.seen[-1][0]
    while moment + WINDOW_S <= last:
        if watch.rate(moment, moment + WINDOW_S) >= wanted:
            return moment - killed
        moment += LOOK_S
    return None


@contextlib.contextmanager
def service(directory: Path) -> Iterator[Chaos]:
    settings = ("checkpoint.every=5", "checkpoint.keep_last=2", "batch.samples=8", "rollout.stream_interval=2")
    chaos = Chaos(directory / "it", random.Random(0), *settings, step_s=STEP_S)
    body = "".join(json.dumps({"prompt": f"sort {n} =", "answer": str(n), "task_type": "sort"}) + "\n" for n in range(1000, 1500))
    try:
        chaos.start()
        chaos.service.submit(body.encode())
        chaos.service.wait(lambda s: s["trained_version"] >= 6, "six batches")
        yield chaos
    finally:
        chaos.close()


def measure(directory: Path, rounds: int) -> dict[str, float]:
    """Medians and worst of each kind; `lost`: trajectories that were registered and not trained once, by the accounts at the end."""
    figures: dict[str, float] = {}
    with service(directory) as chaos:
        for name, victim in KINDS.items():
            found = []
            for _ in range(rounds):
                chaos.healthy()
                found.append(kill_once(chaos, victim))
            restored, batches = [pair[0] for pair in found], [pair[1] for pair in found]
            figures |= {f"{name}: full rate, s": median(restored), f"{name}: full rate, worst s": max(restored)}
            figures |= {f"{name}: next batch, s": median(batches), f"{name}: next batch, worst s": max(batches)}
        chaos.drain()
        books = check_end(chaos.run_dir, N_PER_SAMPLE, BOUND, ())
        counted = chaos.service.run()["trajectories"]
        assert counted["registered"] == N_PER_SAMPLE * len(books.samples)
        figures["lost"] = float(counted["registered"] - counted["trained"])
    return figures
