"""Files of large objects that were freed, kept for the next ones: to write into pages that are there takes a third of what new ones take.

    ROOT/spare/…   nobody's: no key, no reader, no writer

A file comes here only from one who holds its exclusive lock and finds that it has no other name. Then no view of it exists, for a lease is
a lock that lives as long as its mapping; and nobody gets a new one, for whoever opened it by its key finds that the key is no longer its. A
writer takes it away, to `temp/`, with a lock of its own, before it writes. Whoever dies leaves a spare file or a dead writer's.

Spare bytes are not in use: a put that needs the room has it. They count against the capacity all the same, and are at most half of it.
Every method is called with the account's lock held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

from store.format import PAGE_BYTES, aligned

LEAST_BYTES = 1 << 20
_SHARE = 2  # of the capacity: one half
_FITS = 4  # a file four times as long as the object is left for a longer one


class Spares:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def receive(self, path: Path, length_bytes: int, capacity_bytes: int) -> None:
        """Keep the file, or take it away. The caller holds its exclusive lock and knows that it has one name."""
        if length_bytes < LEAST_BYTES:
            path.unlink(missing_ok=True)
        elif self.size_bytes() + aligned(length_bytes, PAGE_BYTES) > capacity_bytes // _SHARE:
            _give_up(path)
        else:
            path.rename(self.directory / uuid.uuid4().hex)

    def take(self, path: Path, length_bytes: int) -> int | None:
        """A handle on a file of that length, its pages there, moved to `path` and locked by its writer; None when none fits. OSError."""
        if length_bytes < LEAST_BYTES:
            return None
        found = [(size, spare) for size, spare in self._files() if size <= length_bytes * _FITS]
        if not found:
            return None
        _, spare = min(found, key=lambda item: (item[0] < length_bytes, abs(item[0] - length_bytes)))
        handle = os.open(spare, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else has it; in doubt it is left
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            spare.rename(path)
            there_bytes = os.fstat(handle).st_size  # to look at each page again takes two thirds of a copy
            os.ftruncate(handle, length_bytes)
            if length_bytes > there_bytes:
                os.posix_fallocate(handle, there_bytes, length_bytes - there_bytes)
            return handle
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError:
            os.close(handle)
            _give_up(path)
            raise

    def make_room(self, used_bytes: int, capacity_bytes: int) -> None:
        """Leave no more than fits beside what is in use."""
        if used_bytes > capacity_bytes - capacity_bytes // _SHARE:
            self.shrink(capacity_bytes - used_bytes)

    def shrink(self, most_bytes: int = 0) -> None:
        files = sorted(self._files())
        left = sum(size for size, _ in files)
        for size, path in files:
            if left <= most_bytes:
                return
            _give_up(path)
            left -= size

    def size_bytes(self) -> int:
        return sum(size for size, _ in self._files())

    def _files(self) -> list[tuple[int, Path]]:
        with os.scandir(self.directory) as found:
            return [(aligned(item.stat(follow_symlinks=False).st_size, PAGE_BYTES), Path(item.path)) for item in found]


def _give_up(path: Path) -> None:
    """A file that nobody reads. Its pages go at once, though a writer may still have them mapped (store/kept.py)."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)
        path.unlink()
