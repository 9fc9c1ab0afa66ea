"""Where embedded stores lie, that they are this user's alone, and which of them belong to nobody any more."""

from __future__ import annotations

import fcntl
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from store.base import Unavailable
from store.files import ENLARGE

SHARED_MEMORY = Path("/dev/shm")


def default_root(store_id: str) -> Path:
    """Where this user's store of that name lies."""
    return SHARED_MEMORY / f"headrace-{os.getuid()}-{quote(store_id, safe='')}"


def check_private(root: Path) -> None:
    """Raises Unavailable when there is nothing, ValueError when others could read or replace what lies there."""
    try:
        facts = os.lstat(root)
    except FileNotFoundError as error:
        raise Unavailable(f"there is no store at {root}; its owner has not made it yet, or has removed it") from error
    if not stat.S_ISDIR(facts.st_mode):
        raise ValueError(f"{root} is not a directory; remove it, or choose another store.directory")
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ValueError(
            f"{root} belongs to user {facts.st_uid} with mode {facts.st_mode & 0o777:o}; "
            f"a store must be of user {os.getuid()} and mode 700: remove the directory, or choose another store.directory"
        )
    for parent in root.parents:
        mode = os.stat(parent).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ValueError(
                f"everybody may rename what lies in {parent} (mode {mode & 0o7777:o}), so a store below it could be replaced: "
                f"set its sticky bit (chmod +t {parent}), or choose another store.directory"
            )


def check_room(root: Path, capacity_bytes: int) -> None:
    """Raises ValueError when the file system cannot hold so much there, with what is there already."""
    facts = os.statvfs(next(path for path in (root, *root.parents) if path.is_dir()))
    room_bytes = facts.f_bavail * facts.f_frsize + occupied(root)
    if capacity_bytes > room_bytes:
        said = f"the store should hold {capacity_bytes:,} bytes but the file system of {root} has room for {room_bytes:,}; {ENLARGE}"
        raise ValueError(said + "".join(f"; {left.words}" for left in left_over(root.parent) if left.root != root))


@dataclass(frozen=True, slots=True)
class LeftOver:
    """A store whose owner has ended without giving it back: killed, or cut off from power."""

    root: Path
    size_bytes: int

    @property
    def words(self) -> str:
        return f"{self.root} ({self.size_bytes:,} bytes) is of a run that ended: start it again to go on, or remove it with rm -r"


def left_over(directory: Path = SHARED_MEMORY) -> list[LeftOver]:
    """This user's stores there that no process owns. They are named, never removed: a run that starts again finds its rows in its own."""
    found = []
    for root in sorted(directory.glob(f"headrace-{os.getuid()}-*")):
        try:
            check_private(root)
            if (root / "account").is_file() and not _owned(root / "owner"):
                found.append(LeftOver(root, occupied(root)))
        except (OSError, ValueError, Unavailable):  # not a store, or going just now
            continue
    return found


def occupied(root: Path) -> int:
    """How many bytes lie there; 0 when there is nothing."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def _owned(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
