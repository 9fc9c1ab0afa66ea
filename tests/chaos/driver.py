"""`headrace` with moments to die at: `python -P -m tests.chaos.driver up …` is `driver.cli` with these functions wrapped.

event X of the ledger   before: nothing of it is done · lost: all that follows ran on, its group commit never came
                        after: it is committed, and nothing else has been done
a step of the protocol  before and after the call (STEPS)
"""

from __future__ import annotations

import functools
import json
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from driver import cli
from driver.core import Core
from driver.events import Event
from driver.finished import Finished
from driver.ledger_db import LedgerDB
from driver.ledger_state import Trajectory
from driver.process_specs import Specs
from driver.processes import Processes
from driver.turns import Turns
from reward.client import RewardClient
from rollout.client import EngineClient
from store import EmbeddedStore
from store.account import Account
from tests.chaos.points import AFTER, BEFORE, DIRECTORY, LOST, Order, Points, step
from trainer.client import TrainerClient

LENGTHS = "HEADRACE_CHAOS_LENGTHS"  # a JSON list: how long the answer of each trajectory is
RUNS_ON_S = 0.15  # how long everything else goes on before a group that never comes

STEPS: dict[str, tuple[type, str]] = {
    "put": (EmbeddedStore, "put"),
    "free": (EmbeddedStore, "free"),
    "lock": (Account, "_read"),  # with the store's lock held
    "park": (EmbeddedStore, "park"),
    "unpark": (EmbeddedStore, "unpark"),
    "score": (RewardClient, "score"),
    "train": (TrainerClient, "train"),
    "snapshot": (TrainerClient, "snapshot"),
    "save": (TrainerClient, "save"),
    "archive": (Finished, "committed"),
    "pause": (EngineClient, "pause"),
    "set_version": (EngineClient, "set_version"),
    "continue": (EngineClient, "continue_generation"),
}
_processes: list[Processes] = []


def pid_of(victim: str) -> int | None:
    if victim == "driver":
        return os.getpid()
    role = {"worker": "reward", "rank": "trainer"}.get(victim, victim)
    for processes in _processes:
        for facts in processes.facts:
            if facts["role"] != role or facts["state"] != "ready":
                continue
            if victim == role:
                return int(facts["pid"])
            try:
                children = psutil.Process(facts["pid"]).children()
            except psutil.Error:
                return None
            return children[-1].pid if children else None
    return None


class Transitions:
    """Every event of the ledger is a place."""

    def __init__(self, points: Points) -> None:
        self._points = points
        self._waited: tuple[Order, list[Any], threading.Event] | None = None  # the order, the rows that it writes, its commit

    def install(self) -> None:
        apply, commit = Core.apply, LedgerDB._commit

        @functools.wraps(apply)
        def applied(core: Core, event: Event) -> None:
            name = type(event).__name__
            self._points.at(name, BEFORE)
            order = self._points.ordered(name, LOST) or self._points.ordered(name, AFTER)
            if order is None or (self._waited is not None and self._waited[0] == order):
                return apply(core, event)
            committed = threading.Event()
            write = core.db.write

            def written(rows: Any) -> None:
                known = list(rows)
                self._waited = (order, known, committed)
                write(known)

            core.db.write = written  # type: ignore[method-assign]
            try:
                apply(core, event)
            finally:
                del core.db.write
            if order.moment == AFTER:
                committed.wait(30)
                self._waited = None
                self._points.fire(order)

        @functools.wraps(commit)
        def commits(db: LedgerDB, writes: list[Any]) -> None:
            waited = self._waited
            # By any of its rows: one that was superseded before its commit is not written at all.
            if waited is None or {id(row) for row in writes}.isdisjoint(map(id, waited[1])):
                return commit(db, writes)
            if waited[0].moment == LOST:
                time.sleep(RUNS_ON_S)
                self._waited = None
                self._points.fire(waited[0])
            commit(db, writes)
            waited[2].set()

        Core.apply = applied  # type: ignore[method-assign]
        LedgerDB._commit = commits  # type: ignore[method-assign]


def take_lengths(lengths: list[int]) -> None:
    """An answer ends by its length alone, the same one in every try."""
    sampling = Turns._sampling

    def sampled(self: Turns, trajectory: Trajectory, turn: int, prompt_tokens: int) -> dict[str, Any]:
        asked = sampling(self, trajectory, turn, prompt_tokens)
        length = random.Random(trajectory.traj_uid).choice(lengths)
        return {**asked, "max_new_tokens": min(length, asked["max_new_tokens"]), "ignore_eos": True}

    Turns._sampling = sampled  # type: ignore[method-assign]


def install(directory: Path) -> None:
    points = Points(directory, pid_of)
    Transitions(points).install()
    for name, (owner, attribute) in STEPS.items():
        setattr(owner, attribute, step(points, name, getattr(owner, attribute)))
    begin, module = Processes.__init__, Specs._module

    def begins(self: Processes, *args: Any) -> None:
        begin(self, *args)
        _processes.append(self)

    def modules(self: Specs, name: str, *flags: str) -> list[str]:
        return module(self, "tests.chaos.trainer" if name == "trainer.main" else name, *flags)

    if LENGTHS in os.environ:
        take_lengths(json.loads(Path(os.environ[LENGTHS]).read_text()))
    Processes.__init__ = begins  # type: ignore[method-assign]
    Specs._module = modules  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(os.environ[DIRECTORY]))
    cli.main()
