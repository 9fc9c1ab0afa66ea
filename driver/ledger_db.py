"""The ledger on disk: SQLite in WAL mode, written in group commits by one thread, rebuilt into a `Ledger` at start.

Promise: what `durable()` has waited for survives the death of the process and of the host; one driver per ledger; a database of a
newer schema or a damaged one is refused with a sentence, never opened half. When a write fails (disk full, read-only) nothing
further is accepted and `failure` says why: the run stops taking work and nothing already durable is lost.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from driver.events import Leaf
from driver.ledger import ASSEMBLED, COMMITTED, FINISHED, Batch, Ledger, Sample, Trajectory, Upsert, kind_of, traj_uid_of

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE datasets (dataset_id TEXT PRIMARY KEY, name TEXT NOT NULL, closed INTEGER NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (segment INTEGER PRIMARY KEY, dataset_id TEXT NOT NULL REFERENCES datasets, rows INTEGER NOT NULL,
  idempotency_key TEXT UNIQUE, digest TEXT);
CREATE TABLE dataset_rows (segment INTEGER NOT NULL, row_index INTEGER NOT NULL, payload BLOB NOT NULL,
  PRIMARY KEY (segment, row_index)) WITHOUT ROWID;
CREATE TABLE samples (uid INTEGER PRIMARY KEY, segment INTEGER, row_index INTEGER, pass_index INTEGER, version_tag INTEGER,
  deadline_batch INTEGER, batch_id INTEGER, over INTEGER NOT NULL);
CREATE INDEX samples_live ON samples (uid) WHERE over = 0;
CREATE TABLE trajectories (uid INTEGER NOT NULL, idx INTEGER NOT NULL, state TEXT NOT NULL, outcome TEXT, reason TEXT,
  infrastructure_attempts INTEGER NOT NULL, data_attempts INTEGER NOT NULL, leaves BLOB, reward REAL, finish_reason TEXT,
  started_at REAL, ready_at REAL, PRIMARY KEY (uid, idx)) WITHOUT ROWID;
CREATE TABLE batches (batch_id INTEGER PRIMARY KEY, state TEXT NOT NULL, uids BLOB, plan BLOB, skipped TEXT, report BLOB,
  assembled_at REAL, applied_at REAL, committed_at REAL);
"""
_KEYS = {
    "meta": ("name",),
    "datasets": ("dataset_id",),
    "segments": ("segment",),
    "dataset_rows": ("segment", "row_index"),
    "samples": ("uid",),
    "trajectories": ("uid", "idx"),
    "batches": ("batch_id",),
}


DATASET_TABLES = ("datasets", "segments", "dataset_rows")


class LedgerError(RuntimeError):
    """The ledger can not be used; the text says why and what to do."""


@dataclass
class _Group:
    writes: list[Upsert] = field(default_factory=list)
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = field(default_factory=list)


def _statement(write: Upsert) -> str:
    columns = list(write.values)
    keys = _KEYS[write.table]
    rest = [c for c in columns if c not in keys]
    update = ", ".join(f"{c} = excluded.{c}" for c in rest)
    action = f"UPDATE SET {update}" if rest else "NOTHING"
    # Table and column names are ours (from ledger.py), never from outside; values are bound.
    return (
        f"INSERT INTO {write.table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({', '.join(keys)}) DO {action}"
    )


class LedgerDB:
    """Open with `LedgerDB(path)`; `load()` once; `write()` as often as wanted; `close()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: str | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock(path.with_suffix(".lock"))
        try:
            self._connection = self._open(path)
            self._reader = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
        except BaseException:
            self._lock.close()
            raise
        self._statements: dict[tuple[str, tuple[str, ...]], str] = {}
        self._pending = _Group()
        self._guard = threading.Lock()
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_groups, name="ledger-writer", daemon=True)
        self._thread.start()

    @staticmethod
    def _take_lock(path: Path) -> Any:
        handle = path.open("a+")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            handle.seek(0)
            owner = handle.read().strip() or "unknown"
            handle.close()
            raise LedgerError(
                f"another driver (process {owner}) holds this run's ledger {path.with_suffix('.sqlite')}; end it first: headrace down"
            ) from None
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        return handle

    @staticmethod
    def _open(path: Path) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(f"file:{path}", uri=True, check_same_thread=False, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version > SCHEMA_VERSION:
                raise LedgerError(
                    f"{path} was written by a newer Headrace (schema {version}, known {SCHEMA_VERSION}); upgrade, or use another run_dir"
                )
            return connection
        except sqlite3.DatabaseError as error:
            raise LedgerError(f"{path} can not be opened as a ledger ({error}); move it away to start anew, or restore a copy") from error

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, writes: Iterable[Upsert]) -> None:
        """Queue rows for the next group commit. Raises LedgerError when an earlier one failed."""
        if self.failure:
            raise LedgerError(self.failure)
        with self._guard:
            self._pending.writes.extend(writes)
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
            if group.writes:
                try:
                    self._commit(group.writes)
                except Exception as cause:  # whatever it is: a writer that died in silence would let writes pile up
                    self.failure = f"the ledger {self.path} can not be written: {cause}; free space or make it writable, then start again"
            if self.failure:
                error = LedgerError(self.failure)
            for loop, future in group.waiters:
                loop.call_soon_threadsafe(_resolve, future, error)

    def _commit(self, writes: list[Upsert]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for write in writes:
                shape = (write.table, tuple(write.values))
                statement = self._statements.get(shape)
                if statement is None:
                    statement = self._statements[shape] = _statement(write)
                self._connection.execute(statement, tuple(write.values.values()))
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def take_datasets(self, other: Path) -> None:
        """Copy all datasets of another ledger into this one, which has none yet."""
        self._connection.execute("ATTACH DATABASE ? AS other", (f"file:{other}?mode=ro",))
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for table in DATASET_TABLES:
                self._connection.execute(f"INSERT INTO main.{table} SELECT * FROM other.{table}")
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
        """A read of committed rows, for REST and for start-up."""
        return self._reader.execute(sql, parameters).fetchall()

    def load(self) -> Ledger:
        """Rebuild the live view. Finished samples are only counted (one grouped scan, at start)."""
        ledger = Ledger()
        meta = {name: msgspec.json.decode(value) for name, value in self.query("SELECT name, value FROM meta")}
        ledger.next_uid = meta.get("next_uid", 0)
        ledger.trained_version = meta.get("trained_version", 0)
        ledger.committed_version = meta.get("committed_version", 0)
        ledger.serving_version = meta.get("serving_version", 0)
        ledger.epoch = meta.get("epoch", 0)
        ledger.checkpoint = meta.get("checkpoint")
        ledger.ended = meta.get("ended")
        ledger.cursor = tuple(meta.get("cursor", (0, 0, 0)))
        for state, outcome, reason, count in self.query("SELECT state, outcome, reason, count(*) FROM trajectories GROUP BY 1, 2, 3"):
            ledger.counts.registered += count
            ledger.counts.by_state[state] += count
            if state == FINISHED:
                ledger.counts.by_outcome[outcome] += count
                if reason:
                    ledger.counts.by_reason[kind_of(reason)] += count
        for sample in self._live_samples():
            ledger.samples[sample.uid] = sample
            if sample.batch_id is None:
                ledger.live_by_deadline[sample.deadline_batch] += 1
        for batch_id, state, uids, plan, skipped in self.query(
            "SELECT batch_id, state, uids, plan, skipped FROM batches WHERE state NOT IN (?, 'unmade') ORDER BY batch_id", (COMMITTED,)
        ):
            ledger.batches[batch_id] = Batch(batch_id, state, tuple(msgspec.json.decode(uids)), plan, skipped)
        for staleness, count in self.query("SELECT batch_id - version_tag, count(*) FROM samples WHERE batch_id IS NOT NULL GROUP BY 1"):
            ledger.staleness[staleness] += count
        newest = self.query("SELECT max(batch_id) FROM batches WHERE state != 'unmade'")[0][0]
        ledger.next_batch = 0 if newest is None else newest + 1
        ledger.samples_taken = sum(ledger.staleness.values())
        assert ledger.counts.balanced(), "A1: the ledger on disk does not balance"
        assert all(b.state != ASSEMBLED or b.batch_id >= ledger.trained_version for b in ledger.batches.values())
        return ledger

    def _live_samples(self) -> Iterator[Sample]:
        decode = msgspec.json.Decoder(tuple[Leaf, ...])
        rows = self.query(
            "SELECT uid, segment, row_index, pass_index, version_tag, deadline_batch, batch_id FROM samples WHERE over = 0 ORDER BY uid"
        )
        for uid, segment, row_index, pass_index, version_tag, deadline_batch, batch_id in rows:
            sample = Sample(uid, segment, row_index, pass_index, version_tag, deadline_batch, [], batch_id)
            for row in self.query(
                "SELECT idx, state, outcome, reason, infrastructure_attempts, data_attempts, leaves, reward, finish_reason, started_at, "
                "ready_at FROM trajectories WHERE uid = ? ORDER BY idx",
                (uid,),
            ):
                index, state, outcome, reason, infrastructure, data, leaves, reward, finish_reason, started_at, ready_at = row
                sample.trajectories.append(
                    Trajectory(
                        traj_uid_of(uid, index),
                        uid,
                        index,
                        state,
                        outcome,
                        reason,
                        infrastructure,
                        data,
                        decode.decode(leaves) if leaves else (),
                        reward,
                        finish_reason,
                        started_at,
                        ready_at,
                    )
                )
            yield sample


def _resolve(future: asyncio.Future[None], error: LedgerError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
