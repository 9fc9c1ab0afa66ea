"""The prefix log: tokens of trajectories in flight, on disk at most every 2 s or 256 tokens, so that they survive the driver.

Promise: after the death of the driver, or its end in order, a trajectory that was running goes on from its last logged token, with the
log-probs and versions of those tokens as they were; what is sampled from its prompt again is counted, never silent. A log that can not be
written or read costs that and nothing else: the run goes on, says so, and the log is made anew by the next start.

    Turns ──▶ Prefixes (what is due) ──a thread, one transaction──▶ RUN_DIR/prefixes.sqlite
    Dispatch ──ended──▶ its rows go, once the ledger has on disk that it ended

A file of its own, without syncs: it must survive a process, not a host; see docs/choices.md.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import hashlib
import logging
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from driver.ledger_db import LedgerDB
from driver.prefixes import Logged, Prefixes, Record, TurnBuffer, assembled

log = logging.getLogger("headrace.prefixes")
FORMAT = 1
LOOK_S = 0.25  # what is due by its number of tokens waits this long at most
_TABLES = f"""
CREATE TABLE prefixes (seq INTEGER PRIMARY KEY, traj_uid TEXT NOT NULL, turn INTEGER NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL,
  log_probs BLOB NOT NULL, spans BLOB NOT NULL, finish TEXT, digest BLOB NOT NULL, sum INTEGER NOT NULL);
CREATE INDEX prefixes_of ON prefixes (traj_uid, seq);
PRAGMA user_version = {FORMAT};
"""
_spans = msgspec.json.Decoder(list[tuple[str, int, int]]).decode


def digest_of(prompt_ids: list[int], temperature: float) -> bytes:
    """Names what a prefix continues: another prompt, or another temperature, and its log-probs would be of something else."""
    return hashlib.blake2b(array.array("q", prompt_ids).tobytes() + repr(temperature).encode(), digest_size=8).digest()


class PrefixLog:
    """One run's. `every_s` None: nothing is kept. Everything but `run`, `flush` and `close` is cheap and called between two tokens."""

    def __init__(
        self,
        path: Path,
        db: LedgerDB,
        *,
        every_s: float | None,
        every_tokens: int,
        verified: Callable[[str], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._db = db
        self._every_s = every_s
        self._verified = verified
        self._turns = Prefixes(every_s, every_tokens, now)
        self._guard = threading.Lock()  # one transaction at a time
        self._seq = 0
        self._in_log: set[str] = set()
        self._ended: dict[str, tuple[int, int]] = {}  # trajectory → (the ledger's write that ended it, its last row here)
        self._connection: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None  # a thread may be writing
        self.failure: str | None = None
        self.tokens_resumed = 0
        self.resumed = 0
        if every_s is not None:
            try:
                self._open()
            except sqlite3.Error as error:
                self._fail(error)

    # ---- at start ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """The file as it is, or a new one: what it holds can be sampled again, so a damaged one is not worth a question."""
        try:
            connection = self._connect()
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, FORMAT) or connection.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
                connection.close()
                raise sqlite3.DatabaseError(f"it is damaged, or of another Headrace (format {version})")
        except sqlite3.DatabaseError as error:
            log.warning("the prefix log %s is begun anew: %s; what was in flight is sampled from its prompt again", self._path, error)
            self._unlink()
            connection = self._connect()
            version = 0
        if version == 0:
            connection.executescript(f"BEGIN; {_TABLES} COMMIT;")
        self._seq = connection.execute("SELECT coalesce(max(seq), 0) FROM prefixes").fetchone()[0]
        self._connection, self._reader = connection, self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    def keep(self, running: Iterable[str]) -> dict[str, int]:
        """Before anything is sampled: of all but these trajectories the rows go. Returns how many tokens there are of which."""
        if self._connection is None:
            return {}
        try:
            found = self._connection.execute("SELECT traj_uid, sum(length(ids)) / 4 FROM prefixes GROUP BY 1").fetchall()
            wanted = set(running)
            gone = [(traj_uid,) for traj_uid, _ in found if traj_uid not in wanted]
            self._connection.execute("BEGIN")
            self._connection.executemany("DELETE FROM prefixes WHERE traj_uid = ?", gone)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._fail(error)
            return {}
        kept = {traj_uid: int(tokens) for traj_uid, tokens in found if traj_uid in wanted}
        self._in_log = set(kept)
        return kept

    # ---- while a trajectory is in flight -----------------------------------------------------------------------------------

    def turn(self, traj_uid: str, turn: int, prompt_ids: list[int], temperature: float) -> tuple[TurnBuffer, Logged | None, int]:
        """The turn's buffer; what the log holds of it, from a life of the driver before this one; and how many tokens it holds that are of
        no use, because the prompt is another one."""
        if self._connection is None:  # nobody looks at it
            return self._turns.begin(traj_uid, turn, b"", 0), None, 0
        digest = digest_of(prompt_ids, temperature)
        logged = self._read(traj_uid).get(turn) if traj_uid in self._in_log else None
        if logged is None:
            return self._turns.begin(traj_uid, turn, digest, 0), None, 0
        tokens = len(logged.prefix.output_ids)
        if logged.digest != digest:
            log.warning("%s has another prompt or temperature than before: its %d tokens are sampled again", traj_uid, tokens)
            return self._turns.begin(traj_uid, turn, digest, 0), None, tokens
        self.resumed += 1
        self.tokens_resumed += tokens
        return self._turns.begin(traj_uid, turn, digest, tokens), logged, 0

    def _read(self, traj_uid: str) -> dict[int, Logged]:
        assert self._reader is not None
        sql = "SELECT turn, start, ids, log_probs, spans, finish, digest, sum FROM prefixes WHERE traj_uid = ? ORDER BY seq"
        records = []
        try:
            for turn, start, ids, log_probs, spans, finish, digest, found in self._reader.execute(sql, (traj_uid,)):
                if found != _sum(traj_uid, turn, start, ids, log_probs, spans, finish, digest):
                    log.warning("a row of the prefix log is damaged: %s goes on from before it", traj_uid)
                    break
                tokens, numbers = array.array("i", ids).tolist(), array.array("d", log_probs).tolist()
                records.append(Record(traj_uid, turn, start, tokens, numbers, _spans(spans), finish, digest))
        except sqlite3.Error as error:
            self._fail(error)
        return assembled(records)

    def ended(self, traj_uid: str) -> None:
        """It is running no more, by the ledger's last write: its rows go when that is on disk."""
        self._turns.end(traj_uid)
        if traj_uid in self._in_log:
            self._in_log.discard(traj_uid)
            self._ended[traj_uid] = (self._db.written, self._seq)

    # ---- writing -----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consumes what is due; waits for the next look, or for a turn that has many tokens pending. Ends never: its owner cancels it."""
        assert self._every_s is not None
        while True:
            await asyncio.sleep(min(LOOK_S, self._every_s / 4))
            await self.flush()

    async def flush(self, *, everything: bool = False) -> None:
        """Write what is due, and take away what the ledger no longer needs. Never raises for what a disk did."""
        work = self._work(everything)
        if self._connection is not None and any(work):
            await asyncio.shield(asyncio.to_thread(self._write, *work))  # cancelled, it is still whole

    def close(self, *, remove: bool = False) -> int:
        """Log all that may be, and let go of the file. Returns how many tokens have arrived that are not in it: those are sampled again."""
        work = self._work(True)
        if self._connection is not None:
            self._write(*work)
        self._close()
        if remove:
            self._unlink()
        return self._turns.lost()

    def _unlink(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _close(self) -> None:
        for connection in (self._reader, self._connection):
            if connection is not None:
                with contextlib.suppress(sqlite3.Error):
                    connection.close()
        self._connection = self._reader = None

    def _work(self, everything: bool) -> tuple[list[tuple[int, Record]], list[tuple[str, int]]]:
        records = []
        for record in self._turns.take(self._verified, everything=everything):
            self._seq += 1
            records.append((self._seq, record))
            self._in_log.add(record.traj_uid)
        over = [(traj_uid, seq) for traj_uid, (written, seq) in self._ended.items() if written <= self._db.committed]
        for traj_uid, _ in over:
            del self._ended[traj_uid]
        return records, over

    def _write(self, records: list[tuple[int, Record]], over: list[tuple[str, int]]) -> None:
        with self._guard:
            connection = self._connection
            if connection is None:  # closed meanwhile
                return
            try:
                connection.execute("BEGIN IMMEDIATE")
                try:
                    connection.executemany(
                        "INSERT INTO prefixes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [_row(seq, r) for seq, r in records]
                    )
                    connection.executemany("DELETE FROM prefixes WHERE traj_uid = ? AND seq <= ?", over)
                    connection.execute("COMMIT")
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                self._fail(error)

    def _fail(self, error: sqlite3.Error) -> None:
        """The run goes on without it. What it holds stays true: tokens that were sampled, and are continued from where they end."""
        self.failure = f"the prefix log {self._path} is off: {error}; after a restart what is in flight is sampled from its prompt"
        log.warning("%s", self.failure)
        self._close()


def _row(seq: int, record: Record) -> tuple[object, ...]:
    ids, log_probs = array.array("i", record.output_ids).tobytes(), array.array("d", record.log_probs).tobytes()
    spans = msgspec.json.encode(record.spans)
    facts = (record.traj_uid, record.turn, record.start, ids, log_probs, spans, record.finish, record.digest)
    return (seq, *facts, _sum(*facts))


def _sum(traj_uid: str, turn: int, start: int, ids: bytes, log_probs: bytes, spans: bytes, finish: str | None, digest: bytes) -> int:
    """SQLite does not sum its pages, and a wrong token would be trained."""
    found = zlib.crc32(f"{traj_uid} {turn} {start} {finish}".encode())
    for part in (ids, log_probs, spans, digest):
        found = zlib.crc32(part, found)
    return found
