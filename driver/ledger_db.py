"""The ledger on disk: SQLite in WAL mode, written in group commits by one thread, rebuilt into a `Ledger` at start.

Promise: what `durable()` has waited for survives the death of the process and of the host; one driver per ledger; a database of a
newer schema or a damaged one is refused with a sentence, never opened half. When a write fails (disk full, read-only, damaged) nothing
further is accepted, not even what was queued behind it and would fit: a ledger has no holes. `failure` says why, the run stops taking work,
and nothing already durable is lost.

    events ──upserts──▶ pending group ──one transaction──▶ WAL, synced ──▶ those who wait for `durable`
             counters and meta: the last value of a group, once
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import queue
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from driver import feed_tables, ledger_load
from driver.ledger import Ledger
from driver.ledger_load import DoesNotBalance
from driver.ledger_rows import Upsert
from driver.ledger_schema import DAMAGED, KEYS, LedgerError, open_database, remedy

__all__ = ["LedgerDB", "LedgerError"]
LATEST = frozenset({"meta", "counters"})  # tables of which a commit writes a row once, as it is last: whatever the events were
DATASET_TABLES = ("datasets", "segments", "dataset_rows")


@dataclass
class _Group:
    writes: list[Upsert] = field(default_factory=list)
    latest: dict[tuple[Any, ...], Upsert] = field(default_factory=dict)
    number: int = 0  # of the last `write` in it
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list)


def _statement(table: str, columns: tuple[str, ...]) -> str:
    keys = KEYS[table]
    rest = [c for c in columns if c not in keys]
    update = ", ".join(f"{c} = excluded.{c}" for c in rest)
    action = f"UPDATE SET {update}" if rest else "NOTHING"
    # Table and column names are ours (from ledger.py), never from outside; values are bound.
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) ON CONFLICT ({', '.join(keys)}) DO {action}"
    )


class LedgerDB:
    """Open with `LedgerDB(path)`; `load()` once; `write()` as often as wanted; `close()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        self._lock = self._take_lock(path.with_suffix(".lock"))
        try:
            self._connection = open_database(path)
            try:
                self._reader = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            except sqlite3.Error as error:
                self._connection.close()
                raise LedgerError(f"{path} can not be read ({error}); {remedy(error)}") from error
        except BaseException:
            self._lock.close()
            raise
        self._statements: dict[tuple[str, tuple[str, ...]], str] = {}
        self._pending = _Group()
        self.written = 0  # calls of `write` so far
        self.committed = 0  # the last of them that is on disk
        self._guard = threading.Lock()
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_groups, name="ledger-writer", daemon=True)
        self._thread.start()

    @staticmethod
    def _take_lock(path: Path) -> Any:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = path.open("a+")
        except OSError as error:
            raise LedgerError(f"the ledger's directory {path.parent} can not be written ({error}); {remedy(error)}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise LedgerError(
                f"another driver (process {owner}) holds this run's ledger {path.with_suffix('.sqlite')}; end it first: headrace down"
            ) from None
        with contextlib.suppress(OSError):  # a full disk: who holds it is then not known, and that it is held all the same
            handle.truncate(0)
            handle.write(str(os.getpid()))
            handle.flush()
        return handle

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, writes: Iterable[Upsert]) -> None:
        """Queue rows for the next group commit. Raises LedgerError when an earlier one failed."""
        if self.failure:
            raise LedgerError(self.failure)
        with self._guard:
            self.written += 1
            self._pending.number = self.written
            for write in writes:
                if write.table in LATEST:
                    key = (write.table, *(write.values[name] for name in KEYS[write.table]))
                    self._pending.latest[key] = write
                else:
                    self._pending.writes.append(write)
        self._bell.put(True)

    async def durable(self, deadline_s: float = 30.0) -> None:
        """Wait until everything written so far is on disk. Raises LedgerError when it can not be."""
        if self.failure:
            raise LedgerError(self.failure)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._guard:
            self._pending.waiters.append((loop, future))
        self._bell.put(True)
        try:
            async with asyncio.timeout(deadline_s):
                await future
        except TimeoutError:
            raise LedgerError(f"the ledger {self.path} took no write for {deadline_s:.0f} s; is its disk well?") from None

    def _write_groups(self) -> None:
        """Thread: takes all that is pending, commits it in one transaction, wakes the waiters. Ends at the False bell."""
        alive = True
        while alive:
            alive = self._bell.get()
            while not self._bell.empty():
                alive = self._bell.get() and alive
            with self._guard:
                group, self._pending = self._pending, _Group()
            error: LedgerError | None = None
            if (group.writes or group.latest) and not self.failure:
                try:
                    self._commit([*group.writes, *group.latest.values()])
                    self.committed = group.number
                except Exception as cause:  # whatever it is: a writer that died in silence would let writes pile up
                    self.failure = f"the ledger {self.path} can not be written: {cause}; {remedy(cause)}"
            if self.failure:
                error = LedgerError(self.failure)
            for loop, future in group.waiters:
                loop.call_soon_threadsafe(_resolve, future, error)

    def _commit(self, writes: list[Upsert]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for shape, alike in itertools.groupby(writes, key=lambda write: (write.table, tuple(write.values))):
                statement = self._statements.get(shape)
                if statement is None:
                    statement = self._statements[shape] = _statement(*shape)
                self._connection.executemany(statement, [tuple(write.values.values()) for write in alike])
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def take_datasets(self, other: Path) -> None:
        """Copy all datasets of another ledger into this one, which has none yet, with their shares; they are walked from the first row."""
        self._connection.execute("ATTACH DATABASE ? AS other", (f"{other.absolute().as_uri()}?mode=ro",))
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for table in DATASET_TABLES:
                self._connection.execute(f"INSERT INTO main.{table} SELECT * FROM other.{table}")
            for name, value in self._connection.execute("SELECT name, value FROM other.meta WHERE name LIKE 'cursor/%'").fetchall():
                self._connection.execute("INSERT INTO main.meta VALUES (?, ?)", (name, feed_tables.begun_anew(value)))
            self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._connection.execute("DETACH DATABASE other")

    def close(self) -> None:
        """Write what is pending and let go of the ledger."""
        self._bell.put(False)
        self._thread.join(timeout=30.0)
        self._reader.close()
        self._connection.close()
        self._lock.close()

    # ---- reading -----------------------------------------------------------------------------------------------------

    def query(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """A read of committed rows, for REST and for start-up. LedgerError when they can not be read."""
        try:
            return self._reader.execute(sql, parameters).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise LedgerError(f"the ledger {self.path} can not be read ({error}); {remedy(error)}") from error

    def load(self) -> Ledger:
        """Rebuild the live view: counters, and what is not over. LedgerError when what is there can not be a ledger's."""
        try:
            return ledger_load.load(self.query)
        except DoesNotBalance as error:
            raise LedgerError(f"the ledger {self.path} does not balance: {error}; {DAMAGED}") from error
        except (msgspec.MsgspecError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LedgerError(f"the ledger {self.path} holds a row that can not be read ({error}); {DAMAGED}") from error


def _resolve(future: asyncio.Future[None], error: LedgerError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
