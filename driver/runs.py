"""All runs of a service: the one it was started with, and those begun from it over REST.

A run is begun from another one by a list of changes (`driver/derive.py`). It has its own ledger, store, trainer and budget; its engines are
its own, or those of the run it follows: then the older one is cancelled first (the batch in training ends, a checkpoint is saved), its
engines and its reward service go on running, and the new run pushes its weights to them before it asks for a token. Datasets are copied
from ledger to ledger, and walked from the first row.

What was begun is durable in the first run's ledger before anything is cancelled, so a service that is started again has the same runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Literal

import msgspec

from driver.config import ConfigError
from driver.derive import derived, other_engines, same_reward
from driver.launcher import LocalProcess
from driver.ledger_db import LedgerDB, LedgerError
from driver.ledger_rows import Upsert
from driver.planned import plan_of
from driver.planner import Plan, PlanError
from driver.run import Run
from driver.settings import RunConfig

log = logging.getLogger("headrace.runs")
ENDED = ("finished", "failed", "stopped")
STOP_S = 10.0
OWN_ENGINES = "begin with engines: own (headrace begin without --take-over)"


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """A run begun over REST, as it is kept."""

    run_id: str
    origin: str
    changes: dict[str, Any]
    engines: Literal["own", "take_over"]
    datasets: bool


class RunExists(ConfigError):
    """The run_id is taken."""


class Runs:
    """`runs` are those that have begun, by run_id; `waiting` says of the others why they have not."""

    def __init__(self, first: Run) -> None:
        self.first = first
        self.runs: dict[str, Run] = {}
        self.waiting: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: list[Begun] = []
        self._changed = asyncio.Event()
        self._stopping = False
        self._add(first)

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def run(self, ended: asyncio.Event, *, exit_when_done: bool) -> None:
        """Until `ended` is set and every run is stopped; with `exit_when_done`, until every run has ended. Raises what a run's own task
        raised."""
        self._start(self.first)
        kept = self.first.core.db.query("SELECT value FROM meta WHERE name = 'runs'")
        for begun in msgspec.json.decode(kept[0][0], type=list[Begun]) if kept else []:
            self._begun.append(begun)
            self._succeed(begun)
        telling = asyncio.create_task(ended.wait(), name="service ends")
        try:
            while not (ended.is_set() and not self._tasks):
                for name, task in list(self._tasks.items()):
                    if task.done():
                        del self._tasks[name]
                        task.result()
                if not self._tasks:
                    if exit_when_done or self._stopping:
                        return
                    self._say_all_ended()
                    await self._either(telling)
                else:
                    await self._either(telling, *self._tasks.values())
        finally:
            telling.cancel()

    async def _either(self, *tasks: asyncio.Task[Any]) -> None:
        """Until a task ends or a run begins. `telling` alone wakes nobody twice: once it is done, only the others are waited for."""
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        pending = [task for task in tasks if not task.done()]
        await asyncio.wait([changed, *pending], return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()

    def _say_all_ended(self) -> None:
        states = ", ".join(f"{name} is {run.state}" for name, run in self.runs.items())
        log.info("%s; the service stays for reading until headrace down", states)

    def _add(self, run: Run) -> None:
        self.runs[run.core.run_id] = run
        run.beside = lambda: self._beside(run.core.run_id)

    def _beside(self, *run_ids: str) -> dict[str, Plan]:
        """What the runs other than these hold of the hosts."""
        return {name: run.processes.plan for name, run in self.runs.items() if name not in run_ids and run.state not in ENDED}

    def _start(self, run: Run) -> None:
        self._add(run)
        self._task(run.core.run_id, run.run())

    def _task(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[name] = asyncio.create_task(work, name=name)
        self._changed.set()

    def stop(self) -> None:
        """SIGTERM: every run holds what it has for the next start."""
        self._stopping = True
        for run in self.runs.values():
            run.stop()
        self._changed.set()

    def close(self) -> None:
        for run in self.runs.values():
            run.close()

    @property
    def failed(self) -> bool:
        return any(run.failure for run in self.runs.values())

    # ---- begin ---------------------------------------------------------------------------------------------------------

    async def begin(self, begun: Begun) -> str:
        """Record it and set about it; says in a sentence what happens first. ConfigError, with nothing changed."""
        config = self._config(begun)
        if begun.run_id in self.runs or begun.run_id in self.waiting:
            raise RunExists(f"there is a run {begun.run_id!r} already; choose another run_id")
        if (config.directory / "ledger.sqlite").exists():
            raise RunExists(f"{config.directory} holds a run that this service did not begin; choose another run_id, or move it away")
        origin = self.runs[begun.origin]
        if begun.engines == "take_over":
            if origin.state in ENDED:
                raise ConfigError(f"run {begun.origin} is {origin.state} and its engines are gone; {OWN_ENGINES}")
            if key := other_engines(origin.config, config):
                raise ConfigError(f"{key} differs from run {begun.origin}'s, whose engines were started with it; {OWN_ENGINES}")
            if not origin.config.rollout.engines and not origin.processes.outside.engines:
                raise ConfigError(f"run {begun.origin} has no engines to take over; {OWN_ENGINES}")
            if any(one.origin == begun.origin and one.engines == "take_over" for one in self._begun if one.run_id in self.waiting):
                raise ConfigError(f"another run waits for the engines of {begun.origin}")
        try:
            plan_of(config, others=self._beside(*[begun.origin] * (begun.engines == "take_over")))
        except PlanError as error:
            raise ConfigError(str(error)) from None
        self._begun.append(begun)
        self.first.core.db.write([Upsert("meta", {"name": "runs", "value": msgspec.json.encode(self._begun)})])
        await self.first.core.db.durable()
        self._succeed(begun)
        return self.waiting.get(begun.run_id, f"run {begun.run_id} begins")

    def _config(self, begun: Begun) -> RunConfig:
        if begun.origin in self.waiting:
            raise ConfigError(f"run {begun.origin!r} has not begun itself: {self.waiting[begun.origin]}; ask again when it has")
        if begun.origin not in self.runs:
            raise ConfigError(f"there is no run {begun.origin!r} to begin from; runs here: {', '.join(self.runs)}")
        return derived(self.runs[begun.origin].config, begun.run_id, begun.changes)

    def _succeed(self, begun: Begun) -> None:
        self.waiting[begun.run_id] = f"it begins when run {begun.origin} has ended" if begun.engines == "take_over" else "it begins"
        self._task(_beginning_of(begun.run_id), self._begin(begun))

    async def _begin(self, begun: Begun) -> None:
        """End the run before, if its engines are wanted; copy its datasets; start. What goes wrong is said in `waiting`."""
        taken: list[LocalProcess] = []
        before = self._tasks.get(_beginning_of(begun.origin))
        if before is not None:  # at a start of the service
            await asyncio.wait([before])
        try:
            config = self._config(begun)
            origin = self.runs[begun.origin]
            begins_anew = (config.directory / "ledger.sqlite").exists()
            if begun.engines == "take_over" and origin.state not in ENDED:
                roles = {"engine", "reward"} if same_reward(origin.config, config) else {"engine"}
                origin.processes.hand_over = frozenset(roles)
                ending = self._tasks[begun.origin]  # `run` forgets it as soon as it has ended
                origin.cancel()
                await origin.core.db.durable()
                await asyncio.wait([ending])
                taken = origin.processes.released
            if self._stopping:
                return  # recorded: it begins at the next start
            if begun.datasets and not begins_anew:
                await asyncio.to_thread(_copy_datasets, origin.config.directory, config.directory)
            run = Run(config)
            if begun.engines == "take_over":
                run.processes.wanted.follow(origin.processes.wanted)
            run.processes.taken, taken = taken, []
        except (ConfigError, LedgerError, ValueError, OSError) as error:
            self.waiting[begun.run_id] = f"it could not begin: {error}"
            log.error("run %s could not begin: %s", begun.run_id, error)
            return
        finally:
            await asyncio.gather(*(process.stop(STOP_S) for process in taken))
        del self.waiting[begun.run_id]
        log.info("run %s begins, from %s", begun.run_id, begun.origin)
        self._start(run)


def _beginning_of(run_id: str) -> str:
    return f"beginning of {run_id}"  # no run_id has a space


def _copy_datasets(origin: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    db = LedgerDB(target / "ledger.sqlite")
    try:
        db.take_datasets(origin / "ledger.sqlite")
    finally:
        db.close()
