"""A run that has ended, in words: how, with what, and how to go on. Of a live ledger, and of one on disk that nobody serves."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driver import ledger_load
from driver.ledger import Ledger
from driver.ledger_state import DISCARDED, EVALUATED, TRAINED


@dataclass(frozen=True)
class Ended:
    how: str
    batches: int
    trained: int
    evaluated: int
    discarded: int
    checkpoint: str | None

    @classmethod
    def of(cls, ledger: Ledger) -> Ended | None:
        """None: the run goes on at its next start."""
        if ledger.ended is None:
            return None
        ends = ledger.counts.by_outcome
        return cls(ledger.ended, ledger.trained_version, ends[TRAINED], ends[EVALUATED], ends[DISCARDED], ledger.checkpoint)

    def words(self, run_id: str) -> str:
        evaluated = f", {self.evaluated:,} evaluated" if self.evaluated else ""
        begin = "another run_id (--set run_id=NAME) or run_dir"
        if self.checkpoint is not None:
            begin += f", and for its weights --set model.path={self.checkpoint}/hf"
        return (
            f"run {run_id} has ended ({self.how}): {self.batches:,} batches, {self.trained:,} trajectories trained{evaluated}, "
            f"{self.discarded:,} discarded. It can not be taken back, and a larger stop.batches or stop.epochs does not make it go on; to "
            f"train on begin another: {begin}"
        )


def ended_in(directory: Path) -> Ended | None:
    """Of a run directory. None: there is no run in it, it goes on at its next start, or only that start can read it."""
    path = directory / "ledger.sqlite"
    if not path.is_file():
        return None

    def query(sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return connection.execute(sql, parameters).fetchall()

    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            return Ended.of(ledger_load.load(query))
    except (sqlite3.Error, ValueError, TypeError, KeyError, AttributeError):  # an older schema, or damaged: the start says so
        return None
