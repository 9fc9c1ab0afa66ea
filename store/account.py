"""How many bytes of a store are spoken for, agreed on by every process that has it open.

One small file holds capacity and use; whoever changes either holds its `flock`. Before a change the file is marked dirty and after it
clean, so that the next process notices when one died in between, and counts the directory again. No process keeps the file open: a lock
then belongs to one operation, in threads and forked children too.

A process that is stopped (SIGSTOP, a debugger) with the lock held would hold up everybody else, and first of all those who would find it
hanging. So the owner of the store ends such a process when it is one of its own; and everybody waits for an owner that is stopped.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from store.base import Unavailable

log = logging.getLogger("headrace.store")
_RECORD = struct.Struct("<8sQQQ")
_MAGIC = b"HRACCNT1"
_RETRY_S = 0.0005
_LOOK_S = 1.0  # a lock is held for microseconds: who holds it for so long is looked at
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


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
        self.owned = False
        """This process is the owner of the store, and may end what it started."""

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
        began = time.monotonic()
        give_up, look = began + self._deadline_s, began + _LOOK_S
        while True:
            try:
                return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    raise Unavailable(f"cannot lock {self._path}: {error.strerror}") from error
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                if self._more_to_wait_for(handle):
                    give_up = now + self._deadline_s
            if now > give_up:
                raise Unavailable(f"another process has held the lock of {self._path} for {self._deadline_s:g} s; is one of them stopped?")
            time.sleep(_RETRY_S)

    def _more_to_wait_for(self, handle: int) -> bool:
        """Whether there is more to wait for: who holds the lock is stopped, and was ended now, or is a parent of this process."""
        try:
            holder = _holder(handle)
            if holder is None or psutil.Process(holder).status() not in _STOPPED:
                return False
            if self.owned and os.getpid() in (parent.pid for parent in psutil.Process(holder).parents()):
                log.warning("process %d is stopped and holds the lock of %s: it is killed, so that the others go on", holder, self._path)
                os.kill(holder, signal.SIGKILL)
                return True
            return holder in (parent.pid for parent in psutil.Process().parents())
        except (psutil.Error, OSError):
            return False  # it has ended meanwhile, or is not ours to look at

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


def _holder(handle: int) -> int | None:
    """Who holds the file's lock, as /proc/locks has it; None when nobody does, or it is not seen from here."""
    inode = str(os.fstat(handle).st_ino)
    for line in Path("/proc/locks").read_text().splitlines():
        #  12: FLOCK  ADVISORY  WRITE 4711 00:1a:1234 0 EOF
        words = line.split()
        if "->" not in words and words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode and int(words[4]) > 0:
            return int(words[4])
    return None
