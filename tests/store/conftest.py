"""The stores under test, and processes that use them: the embedded one in the machine's real tmpfs, Mooncake's with its real master."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from store import EmbeddedStore, MooncakeStore, Ref, Store, StoreStats, Unavailable, default_root, mooncake_location
from store.mooncake_client import installed
from store.mooncake_segment import DIRECTORY

REPOSITORY = Path(__file__).parents[2]
CAPACITY_BYTES = 64 << 20
START_S = 60.0
PUT_RELEASE_S = 6  # the least that the master takes: what killed writers held is to come back soon
Child = subprocess.Popen[str]
Spawn = Callable[..., Child]


@pytest.fixture
def root() -> Path:
    return default_root(f"test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def store(root: Path) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(root, 8 << 20)
    yield made
    made.remove()
    assert not root.exists()


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """`spawn(code, *arguments)` runs a Python program; it talks by lines, and is killed when the test ends."""
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        child = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def said(child: Child) -> str:
    """Its next line."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


def tell(child: Child, line: str = "") -> None:
    assert child.stdin is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class MooncakeHost:
    """Owner processes of one master, as a supervisor would start them."""

    port: int = field(default_factory=free_port)
    http_port: int = field(default_factory=free_port)
    owners: list[Child] = field(default_factory=list)

    def location(self, name: str) -> str:
        return mooncake_location("127.0.0.1", self.port, name, self.http_port)

    def start(self, capacity_bytes: int, *, master: bool = False) -> Child:
        """Returns when it is usable."""
        for _ in range(3):  # a port that was free may be taken by the time it is used
            health = free_port()
            command = [sys.executable, "-P", "-m", "store.mooncake_owner", "--location", self.location("test"), "--port", str(health)]
            command += ["--capacity-bytes", str(capacity_bytes), *["--master", f"--put-release-s={PUT_RELEASE_S}"][: 2 * master]]
            owner = subprocess.Popen(command, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, text=True)
            wait_for(lambda: answers(f"http://127.0.0.1:{health}/health") or owner.poll() is not None, "an owner to be ready")  # noqa: B023
            if owner.poll() is None:
                self.owners.append(owner)
                return owner
            if not self.owners:
                self.port, self.http_port = free_port(), free_port()
        raise AssertionError("an owner ended thrice")

    def master(self) -> psutil.Process:
        """Of the owner that runs it."""
        return next(child for owner in self.owners if owner.poll() is None for child in psutil.Process(owner.pid).children())

    def stop(self) -> None:
        for owner in reversed(self.owners):
            owner.send_signal(signal.SIGCONT)
            owner.terminate()
            try:
                owner.wait(20)
            except subprocess.TimeoutExpired:
                owner.kill()
                owner.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = START_S) -> None:
    give_up = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up, f"waited {deadline_s:g} s for {what}"
        time.sleep(0.02)


def why_no_mooncake() -> str | None:
    try:
        installed()
    except Unavailable as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def _mooncake() -> Iterator[MooncakeHost]:
    if reason := why_no_mooncake():
        pytest.skip(reason)
    host = MooncakeHost()
    try:
        host.start(CAPACITY_BYTES, master=True)
        yield host
    finally:
        host.stop()


@pytest.fixture
def mooncake_host() -> Iterator[MooncakeHost]:
    """One of the test's own, to be broken; nothing of it runs yet."""
    if reason := why_no_mooncake():
        pytest.skip(reason)
    host = MooncakeHost()
    yield host
    host.stop()


@dataclass
class Backend:
    """One of the stores that the contract is tested on."""

    name: str
    store: Store

    def empty(self) -> None:
        """What other tests freed is gone, so that the account is this test's."""
        self.has_room(CAPACITY_BYTES)

    def has_room(self, size_bytes: int) -> None:
        """Other tests' objects leave that much."""
        wait_for(lambda: self.store.stats().used_bytes <= CAPACITY_BYTES - size_bytes, "the objects of other tests to go")

    def settled(self, objects: int, used_bytes: int) -> None:
        """The account says so: embedded at once, with Mooncake when the last lease has run out."""
        wanted = StoreStats(objects, used_bytes, self.store.stats().capacity_bytes)
        if self.name == "mooncake":
            wait_for(lambda: self.store.stats() == wanted, f"{wanted}, not {self.store.stats()}", 30.0)
        assert self.store.stats() == wanted


@pytest.fixture(params=["embedded", "mooncake"])
def backend(request: pytest.FixtureRequest, root: Path) -> Iterator[Backend]:
    """A store of each kind without a key, and with room for half of CAPACITY_BYTES at least."""
    if request.param == "embedded":
        store: Store = EmbeddedStore(root, CAPACITY_BYTES)
    else:
        store = MooncakeStore(request.getfixturevalue("_mooncake").location(root.name))
    made = Backend(request.param, store)
    made.has_room(CAPACITY_BYTES // 2)
    yield made
    if request.param == "embedded":
        store.remove()
    else:  # what the test read is leased: it goes while other tests run
        keys = store.keys()
        store.free(Ref(key, 0, store.location) for key in keys)
        for claim in DIRECTORY.glob(f"{root.name}-*.owner"):
            claim.unlink()
