"""How many instances each role has while the run goes on: `headrace scale rollout 4`, and back.

    asked over REST ─▶ checked against the plan ─▶ wanted, on disk ─▶ converge: start what is missing, let go of what is too many

The configuration says with how many a run begins. What is asked for later holds over restarts, until the configuration says another number
than it did when that was asked: the later word counts. Converging looks only at what is wanted and what there is, so the same request
twice is one, and 4 → 1 → 4 in a second ends at 4. Nothing here waits for a process, and nothing here touches the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from driver.ledger_db import LedgerDB
from driver.ledger_rows import Upsert

log = logging.getLogger("headrace.scale")
PREFIX = "scale/"  # in the ledger's table `meta`
TRAINER = (
    "the trainer is not scaled while it runs. Stop the run (headrace down), set trainer.dp in its configuration, and start it again "
    "(headrace up): a checkpoint is of no layout, and what is pending is planned anew"
)


class NotScalable(ValueError):
    """A sentence for the user: why this role can not have this number, and what to do."""


class Asked(msgspec.Struct, frozen=True):
    """What was asked for, and what the configuration said then."""

    count: int
    configured: int


@dataclass(frozen=True)
class Scaled:
    role: str
    was: int
    count: int
    starting: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    """were left alone after too many deaths, and are started again"""

    @property
    def words(self) -> str:
        parts = [f"{self.role}: {self.count}, as before" if self.was == self.count else f"{self.role}: {self.was} → {self.count}"]
        parts += [f"{', '.join(names)} {what}" for names, what in self._changes() if names]
        return "; ".join(parts)

    def _changes(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        return (self.starting, "will start"), (self.ending, "will end"), (self.again, "had died too often and will start again")


class Wanted:
    """The numbers themselves. `configured` is what the configuration says, by role."""

    def __init__(self, db: LedgerDB, configured: Mapping[str, int]) -> None:
        self._db = db
        self._configured = dict(configured)
        self._asked: dict[str, Asked] = {}
        for name, value in db.query("SELECT name, value FROM meta WHERE name LIKE 'scale/%'"):
            role, asked = name.removeprefix(PREFIX), msgspec.json.decode(value, type=Asked)
            if self._configured.get(role) == asked.configured:
                self._asked[role] = asked
            elif role in self._configured:
                configured_now = self._configured[role]
                log.info("%s: the configuration now says %d; %d, asked for before, is over", role, configured_now, asked.count)

    def __getitem__(self, role: str) -> int:
        return self._asked[role].count if role in self._asked else self._configured[role]

    def __contains__(self, role: str) -> bool:
        return role in self._configured

    @property
    def roles(self) -> list[str]:
        return list(self._configured)

    @property
    def counts(self) -> dict[str, int]:
        return {role: self[role] for role in self._configured}

    def follow(self, before: Wanted) -> None:
        """Of the run whose processes this one takes over: what was asked for there, where both configurations say the same."""
        for role, asked in before._asked.items():
            if self._configured.get(role) == asked.configured and role not in self._asked:
                self.ask(role, asked.count)

    def ask(self, role: str, count: int) -> None:
        asked = self._asked[role] = Asked(count, self._configured[role])
        self._db.write([Upsert("meta", {"name": PREFIX + role, "value": msgspec.json.encode(asked)})])


class Leaving:
    """Processes on their way out, each in a task of its own: half of a good-bye would leave one alive. `done` is called after each."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.tasks

    def add(self, name: str, task: asyncio.Task[None]) -> None:
        self.tasks[name] = task
        task.add_done_callback(lambda _: self._ended(name))

    def _ended(self, name: str) -> None:
        task = self.tasks.pop(name)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s was not ended in order", name, exc_info=error)
        self._done()

    def cancel(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    async def wait(self) -> None:
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()))
