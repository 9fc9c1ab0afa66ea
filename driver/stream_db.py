"""Streams on disk: what was published and not done, the newest values, and the state that roles keep. RUN_DIR/streams.sqlite.

A file beside the ledger's, because none of it is part of a trajectory's account, and a role that writes much must not slow the ledger's
commits. The same promises: WAL, `synchronous=FULL`, written by one thread in the order in which it was asked, each commit whole.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from driver.planner import Plan
from driver.streams import Latest, Queue, Streams, Write

SCHEMA_VERSION = 1
_SCHEMA = """
CREATE TABLE items (stream TEXT NOT NULL, seq INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (stream, seq)) WITHOUT ROWID;
CREATE TABLE done (stream TEXT NOT NULL, role TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (stream, role, seq)) WITHOUT ROWID;
CREATE TABLE positions (stream TEXT PRIMARY KEY, next_seq INTEGER NOT NULL, last_key INTEGER) WITHOUT ROWID;
CREATE TABLE readers (stream TEXT NOT NULL, role TEXT NOT NULL, since INTEGER NOT NULL, done INTEGER NOT NULL, given_up INTEGER NOT NULL,
  reason TEXT, PRIMARY KEY (stream, role)) WITHOUT ROWID;
CREATE TABLE latest (stream TEXT PRIMARY KEY, version INTEGER NOT NULL, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE states (role TEXT NOT NULL, idx INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (role, idx)) WITHOUT ROWID;
"""
_STATEMENTS = {
    "item": ("INSERT INTO items VALUES (?, ?, ?)", (2,)),
    "position": ("INSERT OR REPLACE INTO positions VALUES (?, ?, ?)", ()),
    "done": ("INSERT INTO done VALUES (?, ?, ?)", ()),
    "counted": ("INSERT OR REPLACE INTO readers VALUES (?, ?, ?, ?, ?, ?)", ()),
    "latest": ("INSERT OR REPLACE INTO latest VALUES (?, ?, ?)", (2,)),
    "state": ("INSERT OR REPLACE INTO states VALUES (?, ?, ?)", (2,)),
}
"""name → statement, and which of its values are JSON"""


class StreamError(RuntimeError):
    """The streams can not be kept any more; the text says why and what to do."""


class StreamDB:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        except sqlite3.DatabaseError as error:
            raise StreamError(f"{path} can not be opened ({error}); move it away: your roles then begin anew") from error
        if version > SCHEMA_VERSION:
            raise StreamError(f"{path} was written by a newer Headrace (schema {version}, known {SCHEMA_VERSION}); upgrade")
        self._thread = ThreadPoolExecutor(1, "streams-writer")
        self.states: dict[tuple[str, int], Any] = {
            (role, index): orjson.loads(value) for role, index, value in self._connection.execute("SELECT * FROM states")
        }

    def load(self, plan: Plan) -> Streams:
        """As they were, for the roles there are now: a new one reads what is published from now on, one that left holds nothing."""
        queues, latest = {}, {}
        positions = {name: (seq, key) for name, seq, key in self._connection.execute("SELECT * FROM positions")}
        values = {name: (version, orjson.loads(value)) for name, version, value in self._connection.execute("SELECT * FROM latest")}
        own = {role.name for role in plan.roles if role.own}
        for route in plan.routes:
            readers = [name for name in route.subscribers if name in own]
            if route.publisher not in own and not readers:
                continue  # of the run's own loops
            name = route.stream.name
            if route.stream.kind == "latest":
                latest[name] = Latest(route.stream, *values.get(name, (0, None)))
                continue
            queue = queues[name] = Queue(route.stream, readers)
            queue.next_seq, queue.last_key = positions.get(name, (0, None))
            self._fill(queue)
        return Streams(queues, latest)

    def _fill(self, queue: Queue) -> None:
        name = queue.stream.name
        readers = self._connection.execute("SELECT role, since, done, given_up, reason FROM readers WHERE stream = ?", (name,)).fetchall()
        for role, since, count, given_up, reason in readers:
            if (reader := queue.readers.get(role)) is not None:
                reader.since, reader.done, reader.given_up, reader.last_reason = since, count, given_up, reason
            else:
                self._connection.execute("DELETE FROM readers WHERE stream = ? AND role = ?", (name, role))
                self._connection.execute("DELETE FROM done WHERE stream = ? AND role = ?", (name, role))
        for role in queue.readers.keys() - {row[0] for row in readers}:
            queue.readers[role].since = queue.next_seq
            self._connection.execute(_STATEMENTS["counted"][0], (name, role, queue.next_seq, 0, 0, None))
        done = set(self._connection.execute("SELECT role, seq FROM done WHERE stream = ?", (name,)))
        for seq, value in self._connection.execute("SELECT seq, value FROM items WHERE stream = ? ORDER BY seq", (name,)).fetchall():
            waiting = [role for role, reader in queue.readers.items() if seq >= reader.since and (role, seq) not in done]
            queue.hold(seq, orjson.loads(value), waiting)
            if not waiting:
                self._forget(name, seq)

    async def commit(self, writes: Sequence[Write]) -> None:
        """All of it or nothing, after all that was asked before. StreamError."""
        if writes:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._commit, writes)

    def _commit(self, writes: Sequence[Write]) -> None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for name, values in writes:
                if name == "forget":
                    self._forget(*values)
                    continue
                statement, as_json = _STATEMENTS[name]
                self._connection.execute(statement, [orjson.dumps(v) if i in as_json else v for i, v in enumerate(values)])
            self._connection.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise StreamError(f"{self.path} can not be written ({error}); free space or make it writable, then start again") from error

    def _forget(self, stream: str, seq: int) -> None:
        self._connection.execute("DELETE FROM items WHERE stream = ? AND seq = ?", (stream, seq))
        self._connection.execute("DELETE FROM done WHERE stream = ? AND seq = ?", (stream, seq))

    def close(self) -> None:
        self._thread.shutdown()
        self._connection.close()
