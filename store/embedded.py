"""The store of one host: one tmpfs file per object.

    ROOT/objects/KEY   published objects, the key percent-quoted
    ROOT/temp/…        being written; a shared lock says that the writer lives
    ROOT/freed/…       freed while somebody read them
    ROOT/account       bytes in use, see store/account.py

A put reserves its bytes, writes a temporary file and links it under its key, so a reader finds all of an object or nothing. A lease is a
shared `flock` on the open file, and Python's mapping keeps that open file: the lock lives exactly as long as the last view, and a killed
reader's lock goes with it. Free unlinks what nobody locks and sets the rest aside in `freed/`, where it still counts until it is let go.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import stat
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np

from store import parking
from store.account import Account, Balance
from store.base import Damaged, Exists, Full, Gone, Lease, Ref, StoreError, StoreStats, Unavailable, Value
from store.format import PAGE_BYTES, aligned, encode, quoted, read_table, schema_version, view

SCHEME = "tmpfs:"
FILES_WANTED = 65_536
FREED_AT_ONCE = 64  # while the account is locked, and nobody can put: one or two milliseconds


def default_root(store_id: str) -> Path:
    """Where this user's store of that name lies."""
    return Path(f"/dev/shm/headrace-{os.getuid()}-{quote(store_id, safe='')}")


class EmbeddedStore:
    """Attach to the store at `root`; with `capacity_bytes` also create it, or set its capacity anew.

    Raises Unavailable when there is none to attach to, ValueError when the capacity cannot be had or the directory is not ours alone.
    """

    def __init__(self, root: Path, capacity_bytes: int | None = None) -> None:
        self._root = Path(os.path.abspath(root))
        self._objects, self._temp, self._freed = (self._root / name for name in ("objects", "temp", "freed"))
        self._account = Account(self._root / "account", self._count_bytes)
        self._owner: int | None = None
        _raise_file_limit()
        if capacity_bytes is None:
            self._check_root()
            return
        if capacity_bytes <= 0:
            raise ValueError(f"the store's capacity must be above 0 bytes, not {capacity_bytes}")
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_root()
        for directory in (self._objects, self._temp, self._freed):
            directory.mkdir(mode=0o700, exist_ok=True)
        with self._account.locked(create=True) as balance:
            self._collect(balance)
            balance.used_bytes = self._count_bytes()
            self._check_room(capacity_bytes, balance.used_bytes)
            balance.capacity_bytes = capacity_bytes

    def claim(self) -> None:
        handle = os.open(self._root / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        self._check_ref(ref)
        path = self._path_of(ref.key)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _gone(ref.key) from error
        except OSError as error:
            raise Unavailable(f"cannot open {ref.key!r}: {error.strerror}{_remedy(error)}") from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Gone(f"{ref.key!r} is being freed") from error
            facts = os.fstat(handle)
            if facts.st_nlink == 0:
                raise Gone(f"{ref.key!r} was freed")
            if facts.st_size == 0:
                raise Damaged(f"{path} is empty")
            # The mapping keeps a duplicate of the handle, and so the lock, until its last view is gone.
            mapping = mmap.mmap(handle, facts.st_size, prot=mmap.PROT_READ)
        except OSError as error:
            raise Unavailable(f"cannot map {ref.key!r}: {error.strerror}{_remedy(error)}") from error
        finally:
            os.close(handle)
        entries = {entry.name: entry for entry in read_table(mapping, facts.st_size, str(path))}
        names = list(entries) if columns is None else list(columns)
        missing = [name for name in names if name not in entries]
        if missing:
            raise ValueError(f"{ref.key!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(entries) or 'none'}")
        views = {name: view(entries[name], mapping) for name in names}
        return Lease(ref, views, {name: entries[name].dtype for name in names}, schema_version(mapping))

    def encoded(self, ref: Ref) -> bytes:
        self._check_ref(ref)
        try:
            return self._path_of(ref.key).read_bytes()
        except FileNotFoundError as error:
            raise _gone(ref.key) from error
        except OSError as error:
            raise Unavailable(f"cannot read {ref.key!r}: {error.strerror}{_remedy(error)}") from error

    def free(self, refs: Iterable[Ref]) -> None:
        paths = []
        for ref in refs:
            self._check_ref(ref)
            paths.append(self._path_of(ref.key))
        for first in range(0, len(paths), FREED_AT_ONCE):
            with self._account.locked() as balance:
                for path in paths[first : first + FREED_AT_ONCE]:
                    if not self._unlink_if_idle(path, balance) and path.exists():
                        path.rename(self._freed / uuid.uuid4().hex)
                self._collect(balance)

    def room_bytes(self) -> int:
        with self._account.locked() as balance:
            self._collect(balance)
            return balance.capacity_bytes - balance.used_bytes

    def stats(self) -> StoreStats:
        with self._account.locked() as balance:
            self._collect(balance)
            return StoreStats(len(os.listdir(self._objects)), balance.used_bytes, balance.capacity_bytes)

    def gauges(self) -> dict[str, float]:
        stats = self.stats()
        return {
            "headrace_store_objects_count": stats.objects,
            "headrace_store_used_bytes": stats.used_bytes,
            "headrace_store_capacity_bytes": stats.capacity_bytes,
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
        """Nothing is kept open but what views hold."""

    def remove(self) -> None:
        for directory in (self._objects, self._temp, self._freed):
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

    # Writing

    def _publish(self, key: str, target: Path, pieces: list[tuple[int, memoryview]], length_bytes: int) -> Ref:
        size_bytes = aligned(length_bytes, PAGE_BYTES)
        temp = self._temp / uuid.uuid4().hex
        handle = self._reserve(key, target, temp, length_bytes, size_bytes)
        try:
            for offset, piece in pieces:
                _write_all(handle, piece, offset)
            os.link(temp, target)
            temp.unlink()
        except OSError as error:
            refusal = _taken(key) if isinstance(error, FileExistsError) else _file_system_refusal(key, self._root, error)
            raise refusal from error
        finally:
            os.close(handle)  # a temporary file left behind is nobody's from here on, and goes with the next collection
        return Ref(key, size_bytes, self.location)

    def _reserve(self, key: str, target: Path, temp: Path, length_bytes: int, size_bytes: int) -> int:
        """A handle on a new temporary file whose bytes are counted and present. Raises Exists, Full, Unavailable."""
        with self._account.locked() as balance:
            refusal: StoreError | None = self._refusal(key, target, size_bytes, balance)
            if refusal is None:
                try:
                    handle = _create_filled(temp, length_bytes)
                    balance.used_bytes += size_bytes
                    return handle
                except OSError as error:
                    refusal = _file_system_refusal(key, self._root, error)
        raise refusal

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
                self._unlink_if_idle(directory / name, balance)

    def _unlink_if_idle(self, path: Path, balance: Balance) -> bool:
        """Whether the file is gone: unlinked here, or not there at all. False while someone holds a lock on it."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = os.fstat(handle)
            # A writer that died between link and unlink leaves a second name; the bytes stay with the first.
            path.unlink(missing_ok=True)
            if facts.st_nlink == 1:
                balance.used_bytes -= aligned(facts.st_size, PAGE_BYTES)
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

    def _check_root(self) -> None:
        try:
            facts = os.lstat(self._root)
        except FileNotFoundError as error:
            raise Unavailable(f"there is no store at {self._root}; its owner has not made it yet, or has removed it") from error
        if not stat.S_ISDIR(facts.st_mode):
            raise ValueError(f"{self._root} is not a directory; remove it, or choose another store id")
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise ValueError(
                f"{self._root} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o777:o}; "
                f"a store must be of user {os.getuid()} and mode 700: remove the directory, or choose another store id"
            )

    def _check_room(self, capacity_bytes: int, used_bytes: int) -> None:
        facts = os.statvfs(self._root)
        room_bytes = facts.f_bavail * facts.f_frsize + used_bytes
        if capacity_bytes > room_bytes:
            raise ValueError(
                f"the store should hold {capacity_bytes} bytes but {self._root} has room for {room_bytes}; "
                "lower the capacity, or enlarge the file system (Docker: --shm-size)"
            )


def _create_filled(path: Path, length_bytes: int) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Shared, not exclusive: a reader may come between the link and the close of this handle.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.posix_fallocate(handle, 0, length_bytes)
    except OSError:
        os.close(handle)
        path.unlink()
        raise
    return handle


def _write_all(handle: int, piece: memoryview, offset: int) -> None:
    while piece:
        written = os.pwrite(handle, piece, offset)
        piece, offset = piece[written:], offset + written


def _gone(key: str) -> Gone:
    return Gone(f"{key!r} is not in the store: it was freed, or never put")


def _taken(key: str) -> Exists:
    return Exists(f"{key!r} is in the store already; objects are written once")


def _file_system_refusal(key: str, root: Path, error: OSError) -> Full | Unavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Full(f"{key!r} does not fit: the file system of {root} is full ({error.strerror}); enlarge it (Docker: --shm-size)")
    return Unavailable(f"cannot write {key!r} under {root}: {error.strerror}{_remedy(error)}")


def _raise_file_limit() -> None:
    # Each mapped object is an open file, and 1,024, the usual soft limit, is less than one batch of rows.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _remedy(error: OSError) -> str:
    return "; raise the limit with `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
