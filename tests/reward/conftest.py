"""The reward service as a real process, and clients of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from reward.client import RewardClient

REPOSITORY = Path(__file__).parents[2]
SCORERS: dict[str, Any] = {
    "*": {"rule": "exact"},
    "number": {"rule": "numeric", "params": {"tolerance": 0.01}},
    "length": {"function": "scorers.py:length"},
    "told": {"function": "scorers:told"},
    "returns": {"function": "scorers.py:returns"},
    "bad": {"function": "scorers.py:bad", "time_limit_s": 0.8},
    "batch": {"function": "scorers.py:batch", "time_limit_s": 0.8},
}


@dataclass
class Service:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def wait_until_up(self) -> None:
        """Fails at once when the process has ended."""
        give_up = time.monotonic() + 30
        while True:
            try:
                httpx.get(self.url + "/health", timeout=5)
                return
            except httpx.TransportError:
                assert self.process.poll() is None, "the reward service ended"
                assert time.monotonic() < give_up, "the reward service does not come up"
                time.sleep(0.02)


Start = Callable[..., Service]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    return find


@pytest.fixture(scope="session")
def write_spec(tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]) -> Callable[..., tuple[list[str], str]]:
    """`write_spec(workers=…, scorers=…, …)` gives the command of a service, and its URL."""

    def write(**changes: Any) -> tuple[list[str], str]:
        spec = {"port": free_port(), "workers": 2, "plugin_dir": str(Path(__file__).parent), "scorers": SCORERS} | changes
        path = tmp_path_factory.mktemp("reward") / "spec.json"
        path.write_text(json.dumps(spec))
        return [sys.executable, "-P", "-m", "reward.main", "--spec", str(path)], f"http://127.0.0.1:{spec['port']}"

    return write


@pytest.fixture(scope="session")
def start(write_spec: Callable[..., tuple[list[str], str]]) -> Iterator[Start]:
    """`start(env={…}, port=…, scorers=…, …)` starts a service of its own; it is killed at the end."""
    started: list[Service] = []

    def begin(env: dict[str, str] | None = None, **changes: Any) -> Service:
        command, url = write_spec(**changes)
        log = Path(command[-1]).with_suffix(".log")
        with log.open("wb") as sink:
            process = subprocess.Popen(command, env=ENVIRONMENT | (env or {}), stderr=sink)
        started.append(Service(process, url, log))
        return started[-1]

    yield begin
    for service in started:
        service.process.kill()
        service.process.wait(10)


@pytest.fixture(scope="session")
def service(start: Start) -> Service:
    """One that all tests may use, and none may harm."""
    shared = start(incarnation=7)
    shared.wait_until_up()
    return shared


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient() as client:
        yield client


@pytest.fixture
def client(service: Service, http: httpx.AsyncClient) -> RewardClient:
    return RewardClient(service.url, http)
