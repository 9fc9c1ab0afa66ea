"""Mooncake's client, with a guard before every call and an exception behind every code.

What the bare client does otherwise: a call after `close` or before `setup` ends the process (SIGSEGV), one after a fork hangs for ever, an
absent master costs 90 s, a put of a key that exists answers 0, and a read that fails for any reason is empty. So each call here goes
through `_using`, puts are sessions (they alone say that a key is taken), and codes are given on as they come, for the store to name.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from store.base import Unavailable

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
LIBRARIES = Path(sys.prefix) / "lib" / "mooncake-libraries"  # where `make mooncake` lays them without root
CHUNK_BYTES = 16 << 20  # measured over TCP: 4 to 16 MB are fastest
BUFFERS = 2
CONNECT_S = 1.0

# Return codes of mooncake-store/include/types.h
IN_SESSION = -600  # to a put's start: this client has begun a put of that key already
FULL, BEING_WRITTEN, NOT_FOUND, EXISTS, LEASED, LEASE_EXPIRED, BUSY, TRANSFER_FAILED = -200, -703, -704, -705, -706, -707, -714, -800
MASTER_LOST = (-900, -901)

# Read once, when the library is loaded: a master that is not there is to be known in seconds, and a miss is no news.
_ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_TRANSFER_TIMEOUT": "15",
    "MC_LOG_LEVEL": "ERROR",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object's bytes lie: an address in the process that answers at `endpoint`."""

    endpoint: str
    address: int
    size_bytes: int


def installed() -> str:
    """Mooncake's version here. Raises Unavailable, with the remedy, when it cannot be used."""
    _load()
    return next(number for number in map(_version_of, PACKAGES) if number is not None)


def _version_of(package: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def _load() -> Any:
    if not any(map(_version_of, PACKAGES)):
        raise Unavailable("Mooncake is not installed; run `make mooncake`, or choose the embedded store")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        refusal = error
    try:
        for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
            ctypes.CDLL(str(LIBRARIES / name), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module("mooncake.store")
    except (ImportError, OSError):
        raise Unavailable(f"Mooncake cannot be loaded: {refusal}; run `make mooncake`, which installs libibverbs1") from refusal


def is_reachable(host: str, port: int, timeout_s: float = CONNECT_S) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), timeout_s).close()
    except OSError:
        return False
    return True


class Client:
    """One process's connection to one master, made by the first call. Its threads may call at the same time."""

    def __init__(self, host: str, port: int, local_host: str = "127.0.0.1") -> None:
        self._host, self._port, self._local_host = host, port, local_host
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._within = threading.local()
        self._connecting = threading.Lock()
        self._calls = 0
        self._closed = False
        self._suspect = False
        self._bare: Any = None
        self._config: Any = None
        self._buffers: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        for _ in range(BUFFERS):
            self._buffers.put(None)  # made when it is first needed

    def put_start(self, key: str, size_bytes: int, preferred: str | None) -> int:
        with self._using() as bare:
            config = self._config()
            config.with_hard_pin = True  # else it is a cache, and drops what nobody has read
            if preferred is not None:
                config.preferred_segment = preferred
            return self._seen(bare.batch_put_session_start([key], [size_bytes], config)[0])

    def write(self, key: str, data: np.ndarray, offset: int) -> int:
        """The number of bytes written, or a code. `data` is (part of) a `staging` buffer."""
        with self._using() as bare:
            return self._seen(bare.batch_put_from_multi_buffer_ranges([key], [[data.ctypes.data]], [[data.nbytes]], [[offset]])[0])

    def put_end(self, key: str) -> int:
        with self._using() as bare:
            return self._seen(bare.batch_put_session_end([key])[0])

    def put_revoke(self, key: str) -> int:
        with self._using() as bare:
            return self._seen(bare.batch_put_session_revoke([key])[0])

    def find(self, key: str) -> Place | int:
        """Where the object lies, or a code. The master keeps the object for as long as its lease lasts from here on."""
        with self._using() as bare:
            found = bare.get_replica_desc(key)
            if not found:
                return min(-1, self._seen(bare.get_size(key)))
            memory = found[0].get_memory_descriptor().buffer_descriptor
            return Place(memory.transport_endpoint, memory.buffer_address, memory.size)

    def size(self, key: str) -> int:
        """In bytes, or a code."""
        with self._using() as bare:
            return self._seen(bare.get_size(key))

    def read(self, key: str, data: np.ndarray, offset: int) -> int:
        """The number of bytes read into (part of) a `staging` buffer, or a code. Grants a lease, like `find`."""
        with self._using() as bare:
            return self._seen(bare.get_into_ranges([data.ctypes.data], [[key]], [[[0]]], [[[offset]]], [[[data.nbytes]]])[0][0][0])

    def remove(self, keys: Sequence[str]) -> list[int]:
        with self._using() as bare:
            return [self._seen(code) for code in bare.batch_remove(list(keys), False)]

    @contextlib.contextmanager
    def staging(self) -> Iterator[np.ndarray]:
        """CHUNK_BYTES of memory that the transport knows: registered once, for registering is what costs."""
        buffer = self._buffers.get()
        try:
            if buffer is None:
                made = np.empty(CHUNK_BYTES, np.uint8)
                with self._using() as bare:
                    code = bare.register_buffer(made.ctypes.data, made.nbytes)
                if code != 0:
                    raise Unavailable(f"Mooncake would not take {made.nbytes} bytes of memory for transfers (code {code})")
                buffer = made
            yield buffer
        finally:
            self._buffers.put(buffer)

    def local(self) -> Any:
        """The bare client, for the process that mounts a segment and does nothing else with it."""
        with self._using() as bare:
            return bare

    def close(self) -> None:
        """Waits for the calls of other threads."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._calls == 0)
            bare, self._bare = self._bare, None
        if bare is not None and os.getpid() == self._process:
            bare.close()

    def check_open(self) -> None:
        """Raises Unavailable after `close`, and in a child forked from the process that made this."""
        if self._closed:
            raise Unavailable(f"the store at {self._host}:{self._port} was closed in this process")
        if os.getpid() != self._process:
            raise Unavailable("this process was forked from one that had the store open; open it after the fork, or spawn processes")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls of this thread that belong together: `close` comes before them or after, not in between."""
        if getattr(self._within, "one", False):
            yield
            return
        with self._changed:
            self.check_open()
            self._calls += 1
        self._within.one = True
        try:
            yield
        finally:
            self._within.one = False
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def _using(self) -> Iterator[Any]:
        with self.together():
            if self._suspect or self._bare is None:
                self._reach()
            yield self._bare

    def _reach(self) -> None:
        """Costs nothing when the master is away: Mooncake's own attempt would take 4 s each time."""
        with self._connecting:
            if not is_reachable(self._host, self._port):
                raise Unavailable(f"the store's master at {self._host}:{self._port} does not answer; is its process running?")
            if self._bare is None:
                module = _load()
                bare = module.MooncakeDistributedStore()
                code = bare.setup(self._local_host, "P2PHANDSHAKE", 0, 0, "tcp", "", f"{self._host}:{self._port}")
                if code != 0:
                    raise Unavailable(
                        f"cannot attach to the store's master at {self._host}:{self._port} (code {code}); is it a Mooncake master?"
                    )
                self._config = module.ReplicateConfig
                self._bare = bare
            self._suspect = False

    def _seen(self, code: int) -> int:
        if code in MASTER_LOST:
            self._suspect = True
        return code
