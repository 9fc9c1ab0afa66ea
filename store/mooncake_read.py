"""Reading one object out of Mooncake: a copy, made under a lease.

The master does not remove an object for LEASE_S after it was asked where it lies, so whatever is copied within that time is whole. Long
copies ask again on the way, and all at their end. One that its lease has overtaken all the same (its process was stopped, or the owner of
the bytes was) is worth nothing: `Expired`.

An object is LABEL_BYTES that name its key, and then what `store.format` makes of the columns.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from store import mooncake_client as codes
from store.base import Damaged, Gone, Lease, Ref, Unavailable
from store.format import ALIGNMENT_BYTES, Entry, head_bytes, read_table, schema_version, view
from store.mooncake_client import CHUNK_BYTES, Client, Place
from store.mooncake_segment import Mapped

LEASE_S = 1.0
SAFE_S = 0.8 * LEASE_S
LABEL_BYTES = ALIGNMENT_BYTES
FIRST_BYTES, WHOLE_BYTES = 64 << 10, 1 << 20  # what is read before the table is known; all of a small object
_LABEL = struct.Struct("<8s16sQ")
_MAGIC = b"HRMOON01"


class Expired(Exception):
    """The lease may have ended while the bytes were copied."""


def label(name: str, length_bytes: int) -> bytes:
    """What stands before an object: should an address ever be misread, it is seen."""
    said = _LABEL.pack(_MAGIC, hashlib.blake2b(name.encode(), digest_size=16).digest(), length_bytes)
    return said.ljust(LABEL_BYTES, b"\0")


class Found:
    """An object whose place is known, and its lease running. Raises Gone, Unavailable."""

    def __init__(self, client: Client, mapped: Mapped, name: str, key: str) -> None:
        self._client, self._name, self._key = client, name, key
        self._place = self._ask()
        self._here = _in_reach(mapped, self._place, key)
        self.length_bytes = self._place.size_bytes - LABEL_BYTES

    def first(self, size_bytes: int) -> np.ndarray:
        """As `fetch` from the beginning on. Raises Damaged when it is not this object."""
        fetched = self.fetch(-LABEL_BYTES, LABEL_BYTES + size_bytes)
        if fetched[:LABEL_BYTES].tobytes() != label(self._name, self.length_bytes):
            raise Damaged(f"what lies where {self._key!r} should be is not that object")
        return fetched[LABEL_BYTES:]

    def fetch(self, offset: int, size_bytes: int) -> np.ndarray:
        """These bytes of the object, read-only, aligned as they are in it. Raises Expired besides."""
        made = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
        skip = (offset - made.ctypes.data) % ALIGNMENT_BYTES
        made = made[skip : skip + size_bytes]
        for start in range(0, size_bytes, CHUNK_BYTES):
            if start and self._ask() != self._place:
                raise Expired
            self._copy(made[start : start + CHUNK_BYTES], LABEL_BYTES + offset + start)
            if time.clock_gettime(time.CLOCK_BOOTTIME) - self._granted_s > SAFE_S:
                raise Expired
        if self._ask() != self._place:  # not even a master that gave up its owner has given these bytes to another object
            raise Expired
        return np.frombuffer(made.data.toreadonly(), np.uint8)

    def _ask(self) -> Place:
        self._granted_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        place = self._client.find(self._name)
        if isinstance(place, int):
            raise refusal(self._key, place)
        return place

    def _copy(self, into: np.ndarray, offset: int) -> None:
        if self._here is not None:
            into[:] = self._here[offset : offset + into.size]
            return
        with self._client.staging() as buffer:
            code = self._client.read(self._name, buffer[: into.size], offset)
            if code == codes.LEASE_EXPIRED:
                raise Expired
            if code != into.size:
                raise refusal(self._key, code)
            into[:] = buffer[: into.size]


def _in_reach(mapped: Mapped, place: Place, key: str) -> np.ndarray | None:
    try:
        return mapped.bytes_of(place)
    except LookupError as error:
        raise Gone(f"{key!r} is lost: {error}") from error


def size_of(client: Client, mapped: Mapped, name: str, key: str) -> int:
    """Raises Gone, Unavailable."""
    place = client.find(name)
    if isinstance(place, int):
        raise refusal(key, place)
    _in_reach(mapped, place, key)
    return place.size_bytes


def refusal(key: str, code: int) -> Gone | Unavailable:
    if code in (codes.NOT_FOUND, codes.BEING_WRITTEN):
        return Gone(f"{key!r} is not in the store: it was freed, or never put, or lost with the memory it lay in")
    if code == codes.TRANSFER_FAILED:
        return Unavailable(f"{key!r} cannot be read: the process that holds its bytes does not answer")
    return Unavailable(f"{key!r} cannot be reached in the store (Mooncake's code {code}); is its master running?")


def lease(ref: Ref, found: Found, columns: Iterable[str] | None) -> Lease:
    """Views of these columns, or of all. Raises ValueError for one that the object does not have, and what `Found` does."""
    length = found.length_bytes
    first = found.first(length if length <= WHOLE_BYTES else FIRST_BYTES)
    if len(first) < (needed := min(head_bytes(first), length)):
        first = found.first(needed)
    entries = {entry.name: entry for entry in read_table(first, length, repr(ref.key))}
    names = list(entries) if columns is None else list(columns)
    if missing := [name for name in names if name not in entries]:
        raise ValueError(f"{ref.key!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(entries) or 'none'}")
    wanted = [entries[name] for name in names]
    views = dict(zip(names, _views(found, first, wanted), strict=True))
    return Lease(ref, views, {name: entries[name].dtype for name in names}, schema_version(first))


def _views(found: Found, first: np.ndarray, wanted: list[Entry]) -> list[np.ndarray]:
    """Columns that lie behind one another are fetched together."""
    if all(entry.offset + entry.size_bytes <= len(first) for entry in wanted):
        return [view(entry, first) for entry in wanted]
    made: dict[str, np.ndarray] = {}
    for run in _runs(wanted):
        start, end = run[0].offset, run[-1].offset + run[-1].size_bytes
        fetched: Any = found.fetch(start, end - start)
        made |= {entry.name: view(msgspec.structs.replace(entry, offset=entry.offset - start), fetched) for entry in run}
    return [made[entry.name] for entry in wanted]


def _runs(wanted: list[Entry]) -> list[list[Entry]]:
    runs: list[list[Entry]] = []
    for entry in sorted(wanted, key=lambda entry: (entry.offset, entry.size_bytes)):
        before = runs[-1][-1] if runs else None
        if before is not None and entry.offset - (before.offset + before.size_bytes) < ALIGNMENT_BYTES:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs
