"""Writing one object's file, and what the file system's refusals mean to a user."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Sequence
from pathlib import Path

from store.base import Full, Unavailable

FILES_WANTED = 65_536
ENLARGE = "enlarge it (Docker: --shm-size), take a roomier store.directory, or lower store.capacity_bytes"


def create_filled(path: Path, length_bytes: int) -> int:
    """A handle on a new file of that length whose pages are there, locked by its writer. Raises OSError, and leaves nothing then."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Shared, not exclusive: a reader may come between the link and the close of this handle.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.ftruncate(handle, length_bytes)  # first, because a file system with huge=within_size looks at the length
        os.posix_fallocate(handle, 0, length_bytes)
    except OSError:
        os.close(handle)
        path.unlink()
        raise
    return handle


def write_pieces(handle: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Each piece at its offset, whole. Raises OSError."""
    for offset, piece in pieces:
        write_all(handle, piece, offset)


def write_all(handle: int, piece: memoryview, offset: int) -> None:
    while piece:
        written = os.pwrite(handle, piece, offset)
        piece, offset = piece[written:], offset + written


def refused(key: str, root: Path, error: OSError) -> Full | Unavailable:
    """What to raise for an error of a write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return Full(f"{key!r} does not fit: the file system of {root} is full ({error.strerror}); {ENLARGE}")
    return Unavailable(f"cannot write {key!r} under {root}: {error.strerror}{remedy(error)}")


def remedy(error: OSError) -> str:
    return "; raise the limit with `ulimit -n`" if error.errno in (errno.EMFILE, errno.ENFILE) else ""


def raise_file_limit() -> None:
    """Each mapped object is an open file, and 1,024, the usual soft limit, is less than one batch of rows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, FILES_WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
