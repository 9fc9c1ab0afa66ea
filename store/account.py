"""How many bytes of a store are spoken for, agreed on by every process that has it open.

One small file holds capacity and use; whoever changes either holds its `flock`. Before a change the file is marked dirty and after it
clean, so that the next process notices when one died in between, and counts the directory again. No process keeps the file open: a lock
then belongs to one operation, in threads and forked children too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from store.base import Unavailable

_RECORD = struct.Struct("<8sQQQ")
_MAGIC = b"HRACCNT1"
_RETRY_S = 0.0005


@dataclass(slots=True)
class Balance:
    capacity_bytes: int
    used_bytes: int


class Account:
    """`recount` says how many bytes are really there; it is called with the lock held."""

    def __init__(self, path: Path, recount: Callable[[], int], deadline_s: float = 10.0) -> None:
        self._path = path
        self._recount = recount
        self._deadline_s = deadline_s

    @contextmanager
    def locked(self, create: bool = False) -> Iterator[Balance]:
        """The balance, to be changed in place. Raises Unavailable when the store is gone or the lock is not had in time."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError as error:
            raise Unavailable(f"there is no store at {self._path.parent}; its owner has not made it yet, or has removed it") from error
        except OSError as error:
            raise Unavailable(f"cannot open {self._path}: {error.strerror}") from error
        try:
            self._lock(handle)
            balance = self._read(handle, create)
            self._write(handle, balance, dirty=True)
            # An error below leaves the mark, and the next user counts again.
            yield balance
            self._write(handle, balance, dirty=False)
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        give_up = time.monotonic() + self._deadline_s
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    raise Unavailable(f"cannot lock {self._path}: {error.strerror}") from error
            if time.monotonic() > give_up:
                raise Unavailable(f"another process has held the lock of {self._path} for {self._deadline_s:g} s; is one of them stopped?")
            time.sleep(_RETRY_S)

    def _read(self, handle: int, create: bool) -> Balance:
        record = os.pread(handle, _RECORD.size, 0)
        if not record and create:
            return Balance(0, self._recount())
        if not record:
            raise Unavailable(f"the store at {self._path.parent} is just being made; try again")
        if len(record) != _RECORD.size or not record.startswith(_MAGIC):
            raise Unavailable(f"{self._path} is not the account of a store; choose an empty directory")
        _, capacity_bytes, used_bytes, dirty = _RECORD.unpack(record)
        return Balance(capacity_bytes, self._recount() if dirty else used_bytes)

    @staticmethod
    def _write(handle: int, balance: Balance, dirty: bool) -> None:
        os.pwrite(handle, _RECORD.pack(_MAGIC, balance.capacity_bytes, max(0, balance.used_bytes), int(dirty)), 0)
