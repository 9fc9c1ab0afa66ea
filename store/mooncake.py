"""The store of many hosts, on Mooncake: one master that knows where every object lies, and on each host a process that gives memory.

A put is a session: the master reserves the key and the bytes, they are written, and only then is there an object to read. The master tells
a taken key from a free one, so objects are written once; a put that failed is taken back, and one whose writer died is given up by the
master after PUT_DISCARD_S, which whoever puts that key next waits for.

A read is a copy, made under a lease: the master removes nothing for LEASE_S after it was asked. Bytes on this host are copied out of the
owner's shared memory, others come over the network; a copy that took longer than its lease is made again. So a view is the reader's own
memory, and outlives everything. A free that meets a lease is kept and tried again until it succeeds.

Objects are hard-pinned: a full store refuses, and drops nothing. They live as long as their host's owner process and the master: `parts`
says whether one of those was lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote

import numpy as np

from store import mooncake_client as codes
from store import parking
from store.base import Exists, Full, Gone, Lease, Ref, StoreError, StoreStats, Unavailable, Value
from store.format import encode, quoted, read_table
from store.mooncake_client import Client
from store.mooncake_frees import Frees
from store.mooncake_read import LABEL_BYTES, LEASE_S, Expired, Found, label, lease, refusal, size_of
from store.mooncake_segment import DIRECTORY, Mapped, checked

SCHEME = "mooncake:"
PUT_DISCARD_S = 5.0
PART, PART_BYTES = "#part/", 32  # before a segment's name: where its owner says who it is
SPARE = (5, 4)  # a segment's bytes for each byte of capacity: the allocator rounds up by an eighth, and leaves gaps
TRIES = 5
AGAIN_S = 0.02
FINISH_S = 5.0
HTTP_S = 5.0
_LOCATION = re.compile(r"mooncake:(?P<host>[^/:]+|\[[^]/]+\]):(?P<port>\d+)/(?P<name>[A-Za-z0-9._-]+)\?http=(?P<http_port>\d+)")
_SEGMENT = re.compile(r'segment_(?P<what>allocated|total_capacity)_bytes\{segment="(?P<segment>[^"]*)"\}')
Read = TypeVar("Read")
log = logging.getLogger("headrace.store")


@dataclass(frozen=True, slots=True)
class Address:
    """A location, taken apart."""

    host: str
    port: int
    name: str
    http_port: int

    @classmethod
    def of(cls, location: str) -> Address:
        found = _LOCATION.fullmatch(location)
        if found is None:
            raise ValueError(f"unknown store location {location!r}; it must be mooncake:HOST:PORT/NAME?http=HTTP_PORT")
        return cls(found["host"], int(found["port"]), found["name"], int(found["http_port"]))

    @property
    def master(self) -> str:
        return f"{self.host}:{self.port}"


def mooncake_location(host: str, port: int, name: str, http_port: int) -> str:
    """Raises ValueError for a name that cannot be one."""
    location = f"{SCHEME}{host}:{port}/{name}?http={http_port}"
    Address.of(location)
    return location


class MooncakeStore:
    """Attaches to the store at `location` with its first verb. Raises ValueError for what is no location."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._address = Address.of(location)
        self._client = Client(self._address.host, self._address.port)
        self._mapped = Mapped(self._address.master)
        self._frees = Frees(self._client.remove)
        self._parts: dict[str, str] = {}
        self._kept: set[str] = set()  # keys of puts that could not be taken back: the client keeps their sessions
        self._claim: int | None = None

    @property
    def location(self) -> str:
        return self._location

    # Writing

    def put(self, key: str, columns: Mapping[str, Value]) -> Ref:
        name = self._name_of(key)
        head, placed, length_bytes = encode(columns)
        pieces = [(0, np.frombuffer(head, np.uint8)), *((offset, array.reshape(-1).view(np.uint8)) for offset, array in placed)]
        return self._publish(key, name, pieces, length_bytes)

    def put_encoded(self, key: str, encoded: bytes) -> Ref:
        read_table(encoded, len(encoded), f"the parked object {key!r}")
        return self._publish(key, self._name_of(key), [(0, np.frombuffer(encoded, np.uint8))], len(encoded))

    def _publish(self, key: str, name: str, pieces: list[tuple[int, np.ndarray]], length_bytes: int) -> Ref:
        head = np.frombuffer(label(name, length_bytes), np.uint8)
        pieces = [(0, head), *((LABEL_BYTES + offset, piece) for offset, piece in pieces if piece.size)]
        size_bytes = LABEL_BYTES + length_bytes
        code = codes.TRANSFER_FAILED
        for _ in range(TRIES):
            with self._client.together():
                self._reserve(key, name, size_bytes)
                code = self._write(name, pieces, size_bytes)
            if code == 0:
                return Ref(key, size_bytes, self._location)
            if code != codes.TRANSFER_FAILED:  # an owner that has died is chosen until the master knows
                break
        raise Unavailable(f"{key!r} could not be written (Mooncake's code {code}); did a process that gives memory, or the master, end?")

    def _reserve(self, key: str, name: str, size_bytes: int) -> None:
        """Raises Exists, Full, Unavailable. Waits for a put of this key by a process that may have died, and for frees of ours."""
        give_up = time.monotonic() + PUT_DISCARD_S + LEASE_S
        while True:
            # A free of it that was kept over the loss of a master would take the new object away.
            code = codes.EXISTS if name in self._frees else self._client.put_start(name, size_bytes, self._mapped.preferred())
            if code == 0:
                return
            if code == codes.FULL:
                if not self._frees:
                    raise self._full(key, size_bytes)
            elif code == codes.IN_SESSION:
                if name in self._kept:
                    self._take_back(name)
            elif code != codes.EXISTS:
                if code in codes.MASTER_LOST:
                    self._kept.add(name)
                raise Unavailable(f"{key!r} cannot be put (Mooncake's code {code}); is the store's master running?")
            elif name not in self._frees and self._client.size(name) >= 0:
                raise Exists(f"{key!r} is in the store already; objects are written once")
            if time.monotonic() > give_up:
                if code == codes.FULL:
                    raise self._full(key, size_bytes)
                raise Unavailable(f"{key!r} is being written by another process, and has been for {PUT_DISCARD_S + LEASE_S:g} s")
            time.sleep(AGAIN_S)
            self._frees.drain()

    def _write(self, name: str, pieces: list[tuple[int, np.ndarray]], size_bytes: int) -> int:
        """0, or the code of what failed; the put is then taken back, as it is when this raises."""
        code = -1
        try:
            with self._client.staging() as buffer:
                for start in range(0, size_bytes, buffer.size):
                    part = buffer[: min(buffer.size, size_bytes - start)]
                    _fill(part, start, pieces)
                    code = self._client.write(name, part, start)
                    if code != part.size:
                        break
                else:
                    code = self._client.put_end(name)
            return code
        finally:
            if code != 0:
                self._take_back(name)

    def _take_back(self, name: str) -> None:
        """The master gives up what it was not told of; but the client would refuse the key for ever, so the next put of it tries again."""
        self._kept.add(name)
        with contextlib.suppress(StoreError):
            if self._client.put_revoke(name) not in codes.MASTER_LOST:
                self._kept.discard(name)

    # Reading

    def open(self, ref: Ref, columns: Iterable[str] | None = None) -> Lease:
        names = None if columns is None else list(columns)
        return self._read(ref, lambda found: lease(ref, found, names))

    def encoded(self, ref: Ref) -> bytes:
        return self._read(ref, lambda found: found.first(found.length_bytes).tobytes())

    def _read(self, ref: Ref, copied: Callable[[Found], Read]) -> Read:
        self._check_ref(ref)
        name = self._name_of(ref.key)
        if name in self._frees:
            raise refusal(ref.key, codes.NOT_FOUND)
        for _ in range(TRIES):
            try:
                return copied(Found(self._client, self._mapped, name, ref.key))
            except Expired:
                continue
        raise Unavailable(f"copying {ref.key!r} took longer than its lease of {LEASE_S:g} s, {TRIES} times; is this process being stopped?")

    def free(self, refs: Iterable[Ref]) -> None:
        names = []
        for ref in refs:
            self._check_ref(ref)
            names.append(self._name_of(ref.key))
        if names:
            self._frees.free(names)

    # What there is

    def room_bytes(self) -> int:
        stats = self.stats()
        return stats.capacity_bytes - stats.used_bytes

    def stats(self) -> StoreStats:
        """Of the whole master."""
        lost = self._mapped.lost()
        objects = used = total = parts = 0
        for line in self._ask("/metrics").splitlines():
            name, _, value = line.partition(" ")
            if name == "master_key_count":
                objects = int(float(value))
            elif (found := _SEGMENT.fullmatch(name)) and found["segment"] not in lost:
                if found["what"] == "allocated":
                    used += int(float(value))
                else:
                    total, parts = total + int(float(value)), parts + 1
        objects, used = max(0, objects - parts - len(self._frees)), max(0, used - parts * PART_BYTES)
        return StoreStats(objects, used, total * SPARE[1] // SPARE[0], pending_frees=len(self._frees))

    def gauges(self) -> dict[str, float]:
        stats = self.stats()
        return {
            "headrace_store_objects_count": stats.objects,
            "headrace_store_used_bytes": stats.used_bytes,
            "headrace_store_capacity_bytes": stats.capacity_bytes,
            "headrace_store_pending_frees_count": len(self._frees),
        }

    def keys(self) -> list[str]:
        prefix = f"{self._address.name}/"
        names = [name for name in self._ask("/get_all_keys").splitlines() if name.startswith(prefix) and name not in self._frees]
        if self._mapped.lost():
            names = [name for name in names if self._is_here(name)]
        return [unquote(name.removeprefix(prefix)) for name in names]

    def _is_here(self, name: str) -> bool:
        try:
            return size_of(self._client, self._mapped, name, name) > 0
        except Gone:
            return False

    def ref(self, key: str) -> Ref:
        name = self._name_of(key)
        if name in self._frees:
            raise refusal(key, codes.NOT_FOUND)
        return Ref(key, size_of(self._client, self._mapped, name, key), self._location)

    def parts(self) -> frozenset[str]:
        found = set()
        for segment in self._ask("/get_all_segments").split():
            place = self._client.find(marker := part_name(segment))
            if isinstance(place, int):
                if place in codes.MASTER_LOST:
                    raise Unavailable(f"the store's master at {self._address.master} does not answer (Mooncake's code {place})")
                continue
            with contextlib.suppress(LookupError), self._client.staging() as buffer:  # a dead one of this host is gone at once
                self._mapped.bytes_of(place)
                code = self._client.read(marker, buffer[:PART_BYTES], 0)
                if code == PART_BYTES:
                    self._parts[segment] = buffer[:PART_BYTES].tobytes().decode()
                # One elsewhere that does not answer is gone when the master gives it up.
                if code in (PART_BYTES, codes.TRANSFER_FAILED) and segment in self._parts:
                    found.add(f"{segment}/{self._parts[segment]}")
        return frozenset(found)

    # The owner

    def claim(self) -> None:
        path = self._claim_path()
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ValueError(f"another run has its store at {self._location}: end it, or give this run another run_id") from None
        self._claim = handle

    def _claim_path(self) -> Path:
        return checked(DIRECTORY) / f"{self._address.name}-{quoted(self._address.master)}.owner"

    def park(self, directory: Path) -> int:
        return parking.park(self, directory)

    def unpark(self, directory: Path) -> int:
        return parking.unpark(self, directory)

    def remove(self) -> None:
        try:
            self.free([Ref(key, 0, self._location) for key in self.keys()])
            self._frees.finish(LEASE_S + FINISH_S)
        except Unavailable as error:
            if codes.is_reachable(self._address.host, self._address.port):
                raise
            log.warning("%s. What was stored is gone with it", error)
        if self._claim is not None:
            self._claim_path().unlink(missing_ok=True)
            os.close(self._claim)
            self._claim = None
        self.close()

    def close(self) -> None:
        self._frees.close()
        self._client.close()

    # Checks, and the master's own page

    def _name_of(self, key: str) -> str:
        return f"{self._address.name}/{quoted(key)}"

    def _check_ref(self, ref: Ref) -> None:
        if ref.location != self._location:
            raise ValueError(f"{ref.key!r} lies in {ref.location}, this store is {self._location}; use open_store(ref.location)")

    def _full(self, key: str, size_bytes: int) -> Full | Unavailable:
        stats = self.stats()
        if stats.capacity_bytes == 0:
            return Unavailable(f"{key!r} cannot be put: no host gives memory to the store's master at {self._address.master} just now")
        return Full(
            f"{key!r} needs {size_bytes} bytes in one piece, but {stats.used_bytes} of {stats.capacity_bytes} are in use; "
            "free objects or raise the capacity"
        )

    def _ask(self, path: str) -> str:
        self._client.check_open()
        connection = http.client.HTTPConnection(self._address.host.strip("[]"), self._address.http_port, timeout=HTTP_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._address.host}:{self._address.http_port}"
            raise Unavailable(f"the store's master does not answer at {where}: {error}; is its process running?") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Unavailable(f"the store's master answers {path} with {answer.status}: {text[:200]}")
        return text


def _fill(part: np.ndarray, start: int, pieces: list[tuple[int, np.ndarray]]) -> None:
    """The bytes of the object from `start` on; 0 between the pieces."""
    filled = 0
    for offset, piece in pieces:
        begin, end = max(start, offset), min(start + part.size, offset + piece.size)
        if begin < end:
            part[filled : begin - start] = 0
            part[begin - start : end - start] = piece[begin - offset : end - offset]
            filled = end - start
    part[filled:] = 0


def part_name(segment: str) -> str:
    """The object that says which owner a segment is of."""
    return f"{PART}{quoted(segment)}"
