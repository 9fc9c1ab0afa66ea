"""A real service whose trainer is the scripted one: `python -P -m benchmarks.bound_service CONFIG --tau S`. All else is the product's."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import driver.processes
import driver.run
from benchmarks.loop_watch import watching
from driver.config import load_config
from driver.dispatch import Dispatch
from driver.life import ProcessSpec
from driver.process_specs import Specs
from driver.processes import Processes
from driver.up import main as up
from rollout.tree import Trajectory
from rollout.workflow import Generate, Task, single_turn

TAU_S = [0.0]
WATCH = [False]


class ScriptedSpecs(Specs):
    """Starts `benchmarks.scripted_trainer` where the product starts `trainer.main`."""

    def trainer(self) -> ProcessSpec:
        spec = super().trainer()

        def build(incarnation: int, port: int) -> list[str]:
            argv = spec.build(incarnation, port)
            assert "trainer.main" in argv
            return [part.replace("trainer.main", "benchmarks.scripted_trainer") for part in argv] + ["--tau", str(TAU_S[0])]

        return replace(spec, build=build)


class ProbedProcesses(Processes):
    """Beside the product's, a look at how late the event loop is."""

    async def run(self) -> None:
        directory = self._config.directory
        probe = asyncio.create_task(loop_lag(directory / "loop_lag.txt"), name="loop lag")
        try:
            with watching(directory / "loop_stops.jsonl") if WATCH[0] else contextlib.nullcontext():
                await super().run()
        finally:
            probe.cancel()


async def loop_lag(path: Path) -> None:
    """One line for each look, a hundred a second: how many milliseconds after its time the event loop came to it, and how many of CPU its
    thread used since the look before: what other processes take from a shared machine is in the first number only."""
    loop = asyncio.get_running_loop()
    flushed = 0.0
    with path.open("w") as file:
        while True:
            due, used = loop.time() + 0.01, time.thread_time()
            await asyncio.sleep(0.01)
            file.write(f"{max(0.0, loop.time() - due) * 1000:.3f} {(time.thread_time() - used) * 1000:.3f}\n")
            if due > flushed + 0.5:
                file.flush()
                flushed = due


class WaitsAfter:
    """One prompt, one answer, and an environment that takes its time over it: until so many others wait behind it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[asyncio.Event] = deque()

    async def __call__(self, task: Task, generate: Generate) -> Trajectory:
        trajectory = await single_turn(task, generate)
        self._waiting.append(asyncio.Event())
        mine = self._waiting[-1]
        if len(self._waiting) > self._count:
            self._waiting.popleft().set()
        await mine.wait()
        return trajectory


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--tau", type=float, required=True, help="seconds a batch")
    parser.add_argument("--aside", type=int, metavar="N", help="so many trajectories have their answer and wait for an environment")
    parser.add_argument("--watch", action="store_true", help="where the loop stands when it is late, in run/loop_stops.jsonl")
    options = parser.parse_args()
    TAU_S[0], WATCH[0] = options.tau, options.watch
    if options.aside:
        driver.run.Dispatch = partial(Dispatch, workflow=WaitsAfter(options.aside))  # type: ignore[misc, assignment]
    driver.processes.Specs = ScriptedSpecs  # type: ignore[misc]
    driver.run.Processes = ProbedProcesses  # type: ignore[misc]
    return up(load_config(options.config), exit_when_done=False, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
