"""Copies of objects on disk, one by one, for a host that goes down without warning.

Unlike `parking`, which moves everything when its owner ends, this follows a store that lives: `save` copies what is new, forgets what is no
longer wanted, and leaves the store as it is. Each object is there whole or not at all, with a checksum of its bytes; what `save` has
returned survives the host.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from store.base import Exists, Full, Gone, Store, StoreError, Unavailable

log = logging.getLogger("headrace.store")
FORMAT = 1
AT_ONCE_BYTES = 64 << 20  # in one transaction: so much lies in memory, and in SQLite's log before it is in the file


@dataclass(frozen=True)
class Saved:
    """What one `save` did."""

    copied: int
    copied_bytes: int
    forgotten: int
    held: int


class RowFile:
    """One file, one owner. A damaged one is begun anew: what it held is still in the store, or is lost as without it."""

    def __init__(self, path: Path) -> None:
        """Raises Unavailable when the file can not be made."""
        self.path = path
        self._guard = threading.Lock()  # a save may run in a thread when the owner ends
        self._closed = False
        try:
            try:
                self._connection = self._open()
            except sqlite3.DatabaseError as error:
                log.warning("the copies of rows in %s can not be used: %s; they are begun anew", path, error)
                self._unlink()
                self._connection = self._open()
            self.held: set[str] = {key for (key,) in self._connection.execute("SELECT key FROM objects")}
        except sqlite3.Error as error:
            raise Unavailable(f"cannot keep copies of rows in {path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                connection.executescript(
                    "BEGIN; CREATE TABLE objects (key TEXT PRIMARY KEY, sum INTEGER NOT NULL, bytes BLOB NOT NULL); "
                    f"PRAGMA user_version = {FORMAT}; COMMIT;"
                )
            elif version != FORMAT:
                raise sqlite3.DatabaseError(f"format {version}, not {FORMAT}")
            return connection
        except BaseException:
            connection.close()
            raise

    def save(self, store: Store, wanted: Iterable[str]) -> Saved:
        """Afterwards the file holds those of these keys that the store has, and no others. Raises Unavailable (a full disk, say): what was
        held is then still there, and the next `save` goes on."""
        with self._guard:
            return Saved(0, 0, 0, len(self.held)) if self._closed else self._save(store, set(wanted))

    def _save(self, store: Store, keys: set[str]) -> Saved:
        gone = self.held - keys
        copied = copied_bytes = 0
        try:
            if gone:
                self._write("DELETE FROM objects WHERE key = ?", [(key,) for key in gone])
                self.held -= gone
            for rows in _portions(store, sorted(keys - self.held)):
                self._write("INSERT OR REPLACE INTO objects VALUES (?, ?, ?)", rows)
                self.held |= {key for key, _, _ in rows}
                copied += len(rows)
                copied_bytes += sum(len(encoded) for _, _, encoded in rows)
        except sqlite3.Error as error:
            raise Unavailable(f"cannot keep copies of rows in {self.path}: {error}; free space on its disk") from error
        return Saved(copied, copied_bytes, len(gone), len(self.held))

    def restore(self, store: Store, missing: Iterable[str]) -> set[str]:
        """Put those of these keys that are held into the store; returns them. A damaged copy is left out, and so is what does not fit."""
        restored = set()
        for key in sorted(self.held & set(missing)):
            try:
                found, encoded = self._connection.execute("SELECT sum, bytes FROM objects WHERE key = ?", (key,)).fetchone()
                if zlib.crc32(encoded) != found:
                    raise Unavailable("its bytes are not what was written")
                store.put_encoded(key, encoded)
            except Exists:
                pass
            except Full as error:
                log.warning("not all copied rows fit into the store: %s", error)
                break
            except (StoreError, sqlite3.Error, TypeError) as error:
                log.warning("the copy of %s in %s can not be used: %s", key, self.path, error)
                continue
            restored.add(key)
        return restored

    def close(self, *, remove: bool = False) -> None:
        """Waits for a save that runs."""
        with self._guard:
            self._closed = True
            self._connection.close()
            if remove:
                self._unlink()

    def _unlink(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def _write(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            self._connection.executemany(sql, rows)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _portions(store: Store, keys: list[str]) -> Iterator[list[tuple[str, int, bytes]]]:
    """The objects of these keys that are there, a transaction's worth at a time."""
    rows: list[tuple[str, int, bytes]] = []
    size_bytes = 0
    for key in keys:
        try:
            encoded = store.encoded(store.ref(key))
        except Gone:  # freed meanwhile
            continue
        rows.append((key, zlib.crc32(encoded), encoded))
        size_bytes += len(encoded)
        if size_bytes >= AT_ONCE_BYTES:
            yield rows
            rows, size_bytes = [], 0
    if rows:
        yield rows
