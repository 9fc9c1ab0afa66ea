"""`trainer.main` with moments to die at: between the optimizer's step and the trainer's account of it, before and after a checkpoint gets
its name, and after a load. Also slower, so that a kill finds something under way (HEADRACE_CHAOS_STEP_S)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from store.account import Account
from tests.chaos.points import DIRECTORY, Points, step
from trainer import checkpoints
from trainer import main as program

STEP_S = "HEADRACE_CHAOS_STEP_S"


def pid_of(victim: str) -> int | None:
    return {"rank": os.getpid(), "trainer": os.getppid(), "driver": int(os.environ["HEADRACE_PARENT_PID"])}.get(victim)


def install(directory: Path) -> None:
    points = Points(directory, pid_of)
    begin = program.Parent.__init__
    Account._read = step(points, "trainer lock", Account._read)  # type: ignore[method-assign]
    checkpoints.publish = step(points, "publish", checkpoints.publish)

    def begins(self: Any, *args: Any) -> None:
        from trainer.rank import Rank  # once the parent has settled the device

        Rank._account = step(points, "account", Rank._account)  # type: ignore[method-assign]
        Rank.resume = step(points, "resume", Rank.resume)  # type: ignore[method-assign]
        train, slow_s = Rank.train, float(os.environ.get(STEP_S, "0"))

        def trains(rank: Rank, request: Any) -> Any:
            time.sleep(slow_s)
            return train(rank, request)

        Rank.train = trains  # type: ignore[method-assign]
        begin(self, *args)

    program.Parent.__init__ = begins  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(os.environ[DIRECTORY]))
    sys.exit(program.main())
