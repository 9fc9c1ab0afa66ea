"""The store of one host: one tmpfs file per object.

    ROOT/objects/KEY   published objects, the key percent-quoted
    ROOT/temp/…        being written; a shared lock says that the writer lives
    ROOT/freed/…       freed while somebody read them
    ROOT/spare/…       pages for the next large objects, see store/spare.py
    ROOT/account       bytes in use, see store/account.py

A put reserves its bytes, writes a temporary file and links it under its key, so a reader finds all of an object or nothing. A lease is a
shared `flock` on the open file, and Python's mapping keeps that open file: the lock lives exactly as long as the last view, and a killed
reader's lock goes with it. Free takes away what nobody locks and sets the rest aside in `freed/`, where it still counts until it is let go.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote

import numpy as np

from store import files, parking
from store.account import Account, Balance
from store.base import Damaged, Exists, Full, Gone, Lease, Ref, StoreError, StoreStats, Unavailable, Value
from store.format import PAGE_BYTES, aligned, encode, lease_over, quoted, read_table
from store.kept import Kept
from store.places import check_private, check_room
from store.spare import LEAST_BYTES, Spares

SCHEME = "tmpfs:"
FREED_AT_ONCE = 64  # while the account is locked, and nobody can put: one or two milliseconds
_CLAIM_TRIES, _CLAIM_PAUSE_S = 10, 0.05


class EmbeddedStore:
    """Attach to the store at `root`; with `capacity_bytes` also create it, or set its capacity anew.

    Raises Unavailable when there is none to attach to, ValueError when the capacity cannot be had or the directory is not ours alone.
    """

    def __init__(self, root: Path, capacity_bytes: int | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self._objects, self._temp, self._freed = (self._root / name for name in ("objects", "temp", "freed"))
        self._spares = Spares(self._root / "spare")
        self._kept = Kept()
        self._account = Account(self._root / "account", self._count_bytes)
        self._owner: int | None = None
        files.raise_file_limit()
        if capacity_bytes is None:
            check_private(self._root)
            return
        if capacity_bytes <= 0:
            raise ValueError(f"the store's capacity must be above 0 bytes, not {capacity_bytes}")
        check_room(self._root, capacity_bytes)
        with contextlib.suppress(FileExistsError):
            self._root.mkdir(mode=0o700, parents=True)
        check_private(self._root)
        for directory in self._directories:
            directory.mkdir(mode=0o700, exist_ok=True)
        with self._account.locked(create=True) as balance:
            self._collect(balance)
            self._spares.shrink()
            balance.used_bytes = self._count_bytes()
            balance.capacity_bytes = capacity_bytes

    def claim(self) -> None:
        handle = os.open(self._root / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock_as_owner(handle)
        except BlockingIOError:
            owner = os.pread(handle, 64, 0).decode() or "unknown"
            os.close(handle)
            raise ValueError(
                f"another run (process {owner}) has its store in {self._root}: end it, or give this run another run_id or store.directory"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        self._owner = handle
        self._account.owned = True

    @property
    def location(self) -> str:
        return f"{SCHEME}{self._root}"

    def put(self, key: str, columns: Mapping[str, Value]) -> Ref:
        target = self._path_of(key)
        head, placed, length_bytes = encode(columns)
        pieces = [(0, memoryview(head))]
        pieces += [(offset, array.reshape(-1).view(np.uint8).data) for offset, array in placed if array.nbytes]
        return self._publish(key, target, pieces, length_bytes)

    def put_encoded(self, key: str, encoded: bytes) -> Ref:
        read_table(encoded, len(encoded), f"the parked object {key!r}")
        return self._publish(key, self._path_of(key), [(0, memoryview(encoded))], len(encoded))

    def open(self, ref: Ref, columns: Iterable[str] | None = None) -> Lease:
        handle, size_bytes = self._open_locked(ref)
        try:
            # The mapping keeps a duplicate of the handle, and so the lock, until its last view is gone.
            mapping = mmap.mmap(handle, size_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise Unavailable(f"cannot map {ref.key!r}: {error.strerror}{files.remedy(error)}") from error
        finally:
            os.close(handle)
        return lease_over(ref, mapping, repr(ref.key), columns)

    def encoded(self, ref: Ref) -> bytes:
        handle, size_bytes = self._open_locked(ref)
        with open(handle, "rb") as file:
            return file.read(size_bytes)

    def free(self, refs: Iterable[Ref]) -> None:
        paths = []
        for ref in refs:
            self._check_ref(ref)
            paths.append(self._path_of(ref.key))
        for first in range(0, len(paths), FREED_AT_ONCE):
            with self._account.locked() as balance:
                for path in paths[first : first + FREED_AT_ONCE]:
                    if not self._let_go(path, balance) and path.exists():
                        path.rename(self._freed / uuid.uuid4().hex)
                self._collect(balance)

    def room_bytes(self) -> int:
        with self._account.locked() as balance:
            self._collect(balance)
            return balance.capacity_bytes - balance.used_bytes

    def stats(self) -> StoreStats:
        with self._account.locked() as balance:
            self._collect(balance)
            since = [item.stat().st_ctime for item in os.scandir(self._freed)]  # a rename sets it
            return StoreStats(
                len(os.listdir(self._objects)),
                balance.used_bytes,
                balance.capacity_bytes,
                pending_frees=len(since),
                oldest_pending_s=max(0.0, time.time() - min(since)) if since else 0.0,
                spare_bytes=self._spares.size_bytes(),
            )

    def gauges(self) -> dict[str, float]:
        stats = self.stats()
        return {
            "headrace_store_objects_count": stats.objects,
            "headrace_store_used_bytes": stats.used_bytes,
            "headrace_store_capacity_bytes": stats.capacity_bytes,
            "headrace_store_spare_bytes": stats.spare_bytes,
            "headrace_store_pending_frees_count": stats.pending_frees,
            "headrace_store_oldest_pending_free_seconds": stats.oldest_pending_s,
        }

    def keys(self) -> list[str]:
        return [unquote(name) for name in os.listdir(self._objects)]

    def ref(self, key: str) -> Ref:
        try:
            size_bytes = self._path_of(key).stat().st_size
        except FileNotFoundError as error:
            raise _gone(key) from error
        return Ref(key, aligned(size_bytes, PAGE_BYTES), self.location)

    def park(self, directory: Path) -> int:
        return parking.park(self, directory)

    def unpark(self, directory: Path) -> int:
        return parking.unpark(self, directory)

    def parts(self) -> frozenset[str]:
        return frozenset({self.location})

    def close(self) -> None:
        """The mappings of a writer go; what views hold stays."""
        self._kept.close()

    def remove(self) -> None:
        self._kept.close()
        if self._spares.directory.exists():
            self._spares.shrink()
        for directory in self._directories:
            for path in directory.iterdir() if directory.exists() else ():
                path.unlink(missing_ok=True)
            if directory.exists():
                directory.rmdir()
        for name in ("account", "owner"):
            (self._root / name).unlink(missing_ok=True)
        if self._root.exists():
            self._root.rmdir()
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    @property
    def _directories(self) -> tuple[Path, ...]:
        return self._objects, self._temp, self._freed, self._spares.directory

    # Reading

    def _open_locked(self, ref: Ref) -> tuple[int, int]:
        """A handle with a lease on the object's file, and its length. Raises Gone, Unavailable, Damaged."""
        self._check_ref(ref)
        path = self._path_of(ref.key)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _gone(ref.key) from error
        except OSError as error:
            raise Unavailable(f"cannot open {ref.key!r}: {error.strerror}{files.remedy(error)}") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            facts = os.fstat(handle)
            # Only now: before the lock the file could become another object's.
            if not os.path.samestat(facts, os.stat(path)):
                raise _gone(ref.key)
            if facts.st_size == 0:
                raise Damaged(f"{path} is empty")
            return handle, facts.st_size
        except BaseException as error:
            os.close(handle)
            if isinstance(error, BlockingIOError | FileNotFoundError):
                raise _gone(ref.key) from error  # just now
            if isinstance(error, OSError):
                raise Unavailable(f"cannot lock {ref.key!r}: {error.strerror}") from error
            raise

    # Writing

    def _publish(self, key: str, target: Path, pieces: list[tuple[int, memoryview]], length_bytes: int) -> Ref:
        size_bytes = aligned(length_bytes, PAGE_BYTES)
        temp = self._temp / uuid.uuid4().hex
        handle = self._reserve(key, target, temp, length_bytes, size_bytes)
        try:
            if length_bytes < LEAST_BYTES:
                files.write_pieces(handle, pieces)
            else:
                self._kept.write(handle, temp, pieces, length_bytes)
            os.link(temp, target)
            temp.unlink()
        except OSError as error:
            refusal = _taken(key) if isinstance(error, FileExistsError) else files.refused(key, self._root, error)
            raise refusal from error
        finally:
            os.close(handle)  # a temporary file left behind is nobody's from here on, and goes with the next collection
        return Ref(key, size_bytes, self.location)

    def _reserve(self, key: str, target: Path, temp: Path, length_bytes: int, size_bytes: int) -> int:
        """A handle on a temporary file whose bytes are counted and present. Raises Exists, Full, Unavailable."""
        with self._account.locked() as balance:
            refusal: StoreError | None = self._refusal(key, target, size_bytes, balance)
            if refusal is None:
                try:
                    handle = self._filled(temp, length_bytes)
                    balance.used_bytes += size_bytes
                    self._spares.make_room(balance.used_bytes, balance.capacity_bytes)
                    return handle
                except OSError as error:
                    refusal = files.refused(key, self._root, error)
        raise refusal

    def _filled(self, temp: Path, length_bytes: int) -> int:
        try:
            handle = self._spares.take(temp, length_bytes)
            return files.create_filled(temp, length_bytes) if handle is None else handle
        except OSError:
            self._spares.shrink()  # on a full file system the spare pages are needed
            return files.create_filled(temp, length_bytes)

    def _refusal(self, key: str, target: Path, size_bytes: int, balance: Balance) -> StoreError | None:
        if target.exists():
            return _taken(key)
        if balance.used_bytes + size_bytes > balance.capacity_bytes:
            self._collect(balance)
        if balance.used_bytes + size_bytes > balance.capacity_bytes:
            used, capacity = balance.used_bytes, balance.capacity_bytes
            return Full(f"{key!r} needs {size_bytes} bytes, but {used} of {capacity} are in use; free objects or raise the capacity")
        return None

    # Accounting; the account's lock is held in all of these

    def _collect(self, balance: Balance) -> None:
        """Take away what dead writers left, and what was freed and has lost its last reader."""
        for directory in (self._temp, self._freed):
            for name in os.listdir(directory):
                self._let_go(directory / name, balance)

    def _let_go(self, path: Path, balance: Balance) -> bool:
        """Whether the file is gone: taken away here, or not there at all. False while someone holds a lock on it."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = os.fstat(handle)
            # A writer that was still at it when the file was opened has published it since: its one name is that of an object.
            if not _is_at(path, facts):
                return True
            # A writer that died between link and unlink leaves a second name; the bytes stay with the first.
            if facts.st_nlink == 1:
                balance.used_bytes -= aligned(facts.st_size, PAGE_BYTES)
                self._spares.receive(path, facts.st_size, balance.capacity_bytes)
            else:
                path.unlink(missing_ok=True)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(handle)

    def _count_bytes(self) -> int:
        sizes: dict[int, int] = {}
        for directory in (self._objects, self._temp, self._freed):
            with os.scandir(directory) as found:
                for item in found:
                    facts = item.stat(follow_symlinks=False)
                    sizes[facts.st_ino] = aligned(facts.st_size, PAGE_BYTES)
        return sum(sizes.values())

    # Checks

    def _path_of(self, key: str) -> Path:
        return self._objects / quoted(key)

    def _check_ref(self, ref: Ref) -> None:
        if ref.location != self.location:
            raise ValueError(f"{ref.key!r} lies in {ref.location}, this store is {self.location}; use open_store(ref.location)")


def _lock_as_owner(handle: int) -> None:
    """Raises BlockingIOError when another process owns it; one that only looks whether somebody does is gone in a moment."""
    for attempt in range(_CLAIM_TRIES):
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == _CLAIM_TRIES - 1:
                raise
            time.sleep(_CLAIM_PAUSE_S)


def _gone(key: str) -> Gone:
    return Gone(f"{key!r} is not in the store: it was freed, or never put")


def _taken(key: str) -> Exists:
    return Exists(f"{key!r} is in the store already; objects are written once")


def _is_at(path: Path, facts: os.stat_result) -> bool:
    try:
        return os.path.samestat(facts, os.stat(path))
    except FileNotFoundError:
        return False
