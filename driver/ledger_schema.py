"""The ledger's tables, and how a ledger of an older Headrace becomes one of this one.

Promise: a migration is whole or not at all, and the file as it was lies beside the ledger before the first byte changes. A ledger of a
newer schema, a damaged file, a full or a read-only disk are refused with a sentence that says which of these it is, and what to do.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec

from driver import feed_tables
from driver.ledger_state import kind_of

log = logging.getLogger("headrace.ledger")

SCHEMA_VERSION = 2
_TABLES_1 = """
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
_TABLES_2 = """
CREATE TABLE counters (kind TEXT NOT NULL, name TEXT NOT NULL, value INTEGER NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE restarts (number INTEGER PRIMARY KEY, time REAL NOT NULL, found BLOB NOT NULL);
CREATE INDEX trajectories_untrained ON trajectories (outcome, uid, idx) WHERE outcome = 'discarded' OR outcome = 'evaluated';
"""
KEYS = {
    **feed_tables.KEYS,
    "meta": ("name",),
    "datasets": ("dataset_id",),
    "segments": ("segment",),
    "dataset_rows": ("segment", "row_index"),
    "samples": ("uid",),
    "trajectories": ("uid", "idx"),
    "batches": ("batch_id",),
    "counters": ("kind", "name"),
    "restarts": ("number",),
}


class LedgerError(RuntimeError):
    """The ledger can not be used; the text says why and what to do."""


DAMAGED = (
    "it is damaged: restore a copy of it, or begin a new run_id with model.path at the newest checkpoint's hf folder; "
    "`headrace ledger check` says what is wrong"
)
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free space on its disk, then start again",
    sqlite3.SQLITE_READONLY: "make the file, its directory and their disk writable, then start again",
    sqlite3.SQLITE_IOERR: "look at its disk (full, gone, or failing), then start again",
    sqlite3.SQLITE_CANTOPEN: "look at its directory and disk (gone, or not writable), then start again",
    sqlite3.SQLITE_BUSY: "another program holds the file: end it, then start again",
    sqlite3.SQLITE_LOCKED: "another program holds the file: end it, then start again",
}


def remedy(error: BaseException) -> str:
    """What a person should do about this failure of a ledger."""
    if isinstance(error, OSError):
        return "free space there or make it writable, then start again"
    code = getattr(error, "sqlite_errorcode", None)
    return DAMAGED if code is None else _REMEDIES.get(code & 0xFF, DAMAGED)  # the low byte is the kind, the rest its particulars


def open_database(path: Path) -> sqlite3.Connection:
    """The ledger's connection for writing, in this schema: made, or migrated, where need be. Raises LedgerError."""
    try:
        connection = sqlite3.connect(path.absolute().as_uri(), uri=True, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise LedgerError(
                    f"{path} was written by a newer Headrace (schema {version}, known {SCHEMA_VERSION}); upgrade, or use another run_dir"
                )
            if version == 0:
                connection.executescript(f"BEGIN; {_TABLES_1} {_TABLES_2} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
            elif version < SCHEMA_VERSION:
                _migrate(connection, path, version)
            connection.executescript(f"BEGIN; {feed_tables.TABLES} COMMIT;")
            return connection
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, UnicodeDecodeError) as error:  # a damaged file's own text may be in the message, as bytes
        raise LedgerError(f"{path} can not be opened as a ledger ({error}); {remedy(error)}") from error


def _migrate(connection: sqlite3.Connection, path: Path, version: int) -> None:
    """One version after the other, each in one transaction; a copy of the file as it was is kept beside it."""
    kept = path.with_name(f"{path.stem}.schema{version}{path.suffix}")
    _copy(connection, kept)
    for number in range(version + 1, SCHEMA_VERSION + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            MIGRATIONS[number](connection)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    log.info("%s was of schema %d and is now of schema %d; as it was it lies in %s", path, version, SCHEMA_VERSION, kept)


def _copy(connection: sqlite3.Connection, kept: Path) -> None:
    """SQLite's own backup, which sees what is still in the WAL; in place only when whole."""
    partial = kept.with_name(kept.name + ".partial")
    try:
        partial.unlink(missing_ok=True)
        copy = sqlite3.connect(partial)
        try:
            connection.backup(copy)
        finally:
            copy.close()
        partial.rename(kept)
    except (sqlite3.Error, OSError) as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise LedgerError(f"no copy of the ledger could be kept in {kept} before it is migrated ({error}); {remedy(error)}") from error


def _to_2(connection: sqlite3.Connection) -> None:
    """Counters as rows, counted here for the last time; what an ended trajectory no longer has is dropped."""
    for statement in filter(None, map(str.strip, _TABLES_2.split(";"))):
        connection.execute(statement)
    connection.execute("UPDATE trajectories SET leaves = NULL WHERE state = 'finished' AND leaves IS NOT NULL")
    connection.executemany("INSERT INTO counters VALUES (?, ?, ?)", [(kind, name, n) for (kind, name), n in recount(connection).items()])
    newest = connection.execute("SELECT max(batch_id) FROM batches WHERE state != 'unmade'").fetchone()[0]
    next_batch = 0 if newest is None else newest + 1
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('next_batch', ?)", (msgspec.json.encode(next_batch),))


MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {2: _to_2}
"""By the version that they lead to."""


def recount(connection: sqlite3.Connection) -> dict[tuple[str, str], int]:
    """Every counter, made anew from the rows: a scan of all that was ever registered."""
    counts: dict[tuple[str, str], int] = {}

    def add(kind: str, name: str, by: int) -> None:
        counts[kind, name] = counts.get((kind, name), 0) + by

    for state, outcome, reason, n in connection.execute("SELECT state, outcome, reason, count(*) FROM trajectories GROUP BY 1, 2, 3"):
        add("state", state, n)
        if state == "finished":
            add("outcome", outcome or "none", n)
            if reason:
                add("reason", kind_of(reason), n)
    taken = "SELECT batch_id - version_tag, count(*) FROM samples WHERE batch_id IS NOT NULL GROUP BY 1"
    for staleness, n in connection.execute(taken):
        add("staleness", str(staleness), n)
    return counts
