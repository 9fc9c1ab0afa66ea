"""A real service whose trainer is the scripted one: `python -P -m benchmarks.bound_service CONFIG --tau S`. All else is the product's."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import driver.processes
import driver.run
from driver.config import load_config
from driver.life import ProcessSpec
from driver.process_specs import Specs
from driver.processes import Processes
from driver.up import main as up

TAU_S = [0.0]


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
        probe = asyncio.create_task(loop_lag(self._config.directory / "loop_lag.txt"), name="loop lag")
        try:
            await super().run()
        finally:
            probe.cancel()


async def loop_lag(path: Path) -> None:
    """One line for each look, a hundred a second: how many milliseconds after its time the event loop came to it, and how many of CPU its
    thread used since the look before: what other processes take from a shared machine is in the first number only."""
    loop = asyncio.get_running_loop()
    with path.open("w") as file:
        while True:
            due, used = loop.time() + 0.01, time.thread_time()
            await asyncio.sleep(0.01)
            file.write(f"{max(0.0, loop.time() - due) * 1000:.3f} {(time.thread_time() - used) * 1000:.3f}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--tau", type=float, required=True, help="seconds a batch")
    options = parser.parse_args()
    TAU_S[0] = options.tau
    driver.processes.Specs = ScriptedSpecs  # type: ignore[misc]
    driver.run.Processes = ProbedProcesses  # type: ignore[misc]
    return up(load_config(options.config), exit_when_done=False, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
