"""The memory that one host gives, as its own processes see it.

    DIRECTORY/ID.bytes          the objects' bytes; its owner holds a lock on it
    DIRECTORY/NET-ENDPOINT.json what that endpoint's addresses mean: file, base, length, the segment's name, the master

A process of the same host copies out of the file instead of asking the owner for it over TCP. Two processes are on one host when they see
the same directory and the same network: else an endpoint would not mean the same.

A file is never mounted twice. Its owner ends when its master does, so what lies at an address changes only under that one master's leases.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np

from store.base import Unavailable
from store.mooncake_client import Place

DIRECTORY = Path(f"/dev/shm/headrace-{os.getuid()}-mooncake")
_SUFFIX, _FACTS = ".bytes", ".json"
KEPT_S = 600.0
LEAST_BYTES = 16 << 20  # Mooncake mounts no smaller one


class Facts(msgspec.Struct, frozen=True):
    file: str
    base: int
    size_bytes: int
    segment: str
    master: str


def network() -> int:
    """Tells one network namespace of this machine from another."""
    return os.stat("/proc/self/ns/net").st_ino


def checked(directory: Path) -> Path:
    """The directory, which must be this user's alone. Raises ValueError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = os.lstat(directory)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise ValueError(f"{directory} must be a directory of user {os.getuid()} with mode 700; remove what is there")
    return directory


class Segment:
    """The owner's side: a file of `size_bytes`, every page of it there, mounted by `publish`."""

    def __init__(self, size_bytes: int, directory: Path = DIRECTORY) -> None:
        """Raises Unavailable when there is not so much shared memory."""
        self._directory = checked(directory)
        self._facts: Path | None = None
        self.size_bytes = size_bytes
        self.path = self._directory / f"{uuid.uuid4().hex}{_SUFFIX}"
        with _locked(self._directory):
            _sweep(self._directory)
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            os.posix_fallocate(self._handle, 0, size_bytes)  # touched now: the first touch is what is slow, and may fail
        except OSError as error:
            self.remove()
            raise Unavailable(
                f"{directory} has no room for {size_bytes} bytes ({error.strerror}); lower the capacity, or enlarge /dev/shm "
                "(Docker: --shm-size)"
            ) from error

    def base(self) -> int:
        """Where the file was mapped in this process: Mooncake's addresses count from there."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(str(self.path)):
                return int(line.partition("-")[0], 16)
        raise Unavailable(f"{self.path} is not mapped")

    def publish(self, endpoint: str, segment: str, master: str) -> None:
        """From here on the processes of this host read it themselves."""
        facts = Facts(self.path.name, self.base(), self.size_bytes, segment, master)
        self._facts = _facts_path(self._directory, endpoint)
        partial = self._facts.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(facts))
        partial.rename(self._facts)

    def give_up(self) -> None:
        """The bytes go. What says that they were here stays, as after a kill: a master may name them for a while, and this host's
        processes are to know better."""
        self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Those who have it mapped keep what they see."""
        for path in (self._facts, self.path):
            if path is not None:
                path.unlink(missing_ok=True)


class Mapped:
    """The readers' side: what the owners on this host have published."""

    def __init__(self, master: str, directory: Path = DIRECTORY) -> None:
        self._master, self._directory = master, directory
        self._network = network()
        self._guard = threading.Lock()
        self._listed: tuple[int, list[Facts]] | None = None
        self._known: dict[str, tuple[tuple[int, int], Facts, np.ndarray | None]] = {}

    def bytes_of(self, place: Place) -> np.ndarray | None:
        """The object's bytes in place, read-only; None when they lie on another host. Valid as long as the lease.

        Raises LookupError when their owner, a process of this host, has died: the master will need a while to see it.
        """
        path = _facts_path(self._directory, place.endpoint, self._network)
        try:
            found = os.stat(path)
            identity = (found.st_ino, found.st_mtime_ns)
            with self._guard:
                known = self._known.get(place.endpoint)
                if known is None or known[0] != identity:
                    known = (identity, *self._map(path))
                    self._known[place.endpoint] = known
        except FileNotFoundError:
            return None
        _, facts, memory = known
        start = place.address - facts.base
        if facts.master != self._master or start < 0 or start + place.size_bytes > facts.size_bytes:
            return None
        if memory is None or _is_dead(self._directory / facts.file):
            raise LookupError(f"the process that held {facts.segment} has died")
        return memory[start : start + place.size_bytes]

    def preferred(self) -> str | None:
        """The segment that a living process of this host gives to the master: what is put here is written there first."""
        return next((facts.segment for facts in self._published() if not _is_dead(self._directory / facts.file)), None)

    def lost(self) -> set[str]:
        """The segments of this host whose process has died. The master will name them for a while."""
        found = self._published()
        return {facts.segment for facts in found} - {facts.segment for facts in found if not _is_dead(self._directory / facts.file)}

    def _published(self) -> list[Facts]:
        try:
            changed = os.stat(self._directory).st_mtime_ns
            with self._guard:
                if self._listed is None or self._listed[0] != changed:
                    found = [_read(path) for path in self._directory.glob(f"{self._network}-*{_FACTS}")]
                    self._listed = (changed, [facts for facts in found if facts.master == self._master])
                return self._listed[1]
        except OSError:
            return []

    def _map(self, path: Path) -> tuple[Facts, np.ndarray | None]:
        checked(self._directory)
        facts = _read(path)
        try:
            handle = os.open(self._directory / facts.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return facts, None
        try:
            return facts, np.frombuffer(mmap.mmap(handle, facts.size_bytes, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(handle)


def _facts_path(directory: Path, endpoint: str, net: int | None = None) -> Path:
    return directory / f"{network() if net is None else net}-{quote(endpoint, safe='')}{_FACTS}"


def _sweep(directory: Path) -> None:
    """Take away what owners that have died left; with the directory's lock held. The facts are kept for as long as a master may still
    name that memory: that its owner has died is seen by them first."""
    for path in directory.glob(f"*{_FACTS}"):
        with contextlib.suppress(FileNotFoundError):
            memory = directory / _read(path).file
            if memory.exists() and _is_dead(memory):
                path.touch()
            elif not memory.exists() and time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
    for path in directory.glob(f"*{_SUFFIX}"):
        if _is_dead(path):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    handle = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path) -> Facts:
    return msgspec.json.decode(path.read_bytes(), type=Facts)


def _is_dead(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)
