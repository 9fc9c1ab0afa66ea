"""The engine under test, named by the environment variable ENGINE: `embedded` (when unset) or `sglang`, the real server on the CPU."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from .lab import Server, save_checkpoint, wait_for
from .launchers import PYTHON_VARIABLE, free_port, launch, sglang_python, stop

KIND = os.environ.get("ENGINE", "embedded")
START_S = 300.0

Start = Callable[..., Server]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and KIND == "sglang":
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def kind() -> str:
    if KIND not in ("embedded", "sglang"):
        raise ValueError(f"ENGINE is {KIND!r}; it can be embedded or sglang")
    if KIND == "sglang" and sglang_python() is None:
        pytest.skip(f"there is no SGLang here: make sglang builds .venv-sglang, or {PYTHON_VARIABLE} names a Python that has it")
    return KIND


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model that is served, and one of the same shape with other weights."""
    return save_checkpoint(tmp_path_factory.mktemp("first"), 0), save_checkpoint(tmp_path_factory.mktemp("second"), 1)


@pytest.fixture(scope="session")
def start(kind: str, checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start engines with more flags. All are ended with the session."""
    started: list[Server] = []

    def go(*flags: str) -> Server:
        port, log_path = free_port(), tmp_path_factory.mktemp("engine") / "engine.log"
        server = Server(kind, launch(kind, checkpoints[0], port, log_path, flags), port, log_path, checkpoints[0])
        started.append(server)
        wait_ready(server)
        return server

    yield go
    for server in started:
        end(server)


@pytest.fixture
def start_briefly(start: Start) -> Iterator[Start]:
    """As `start`, for engines that end with the test: a real server takes 1.5 GB."""
    started: list[Server] = []

    def go(*flags: str) -> Server:
        started.append(start(*flags))
        return started[-1]

    yield go
    for server in started:
        end(server)


def end(server: Server) -> None:
    stop(server.process)
    server.background.shutdown(wait=False, cancel_futures=True)
    server.client.close()


def wait_ready(server: Server) -> None:
    def answers() -> bool:
        assert server.alive(), server.log_path.read_text()[-3000:]
        try:
            return server.get("/ready").status_code == 200
        except httpx.TransportError:
            time.sleep(0.2)
            return False

    wait_for(answers, "the engine to be ready", START_S)


@pytest.fixture(scope="session")
def running(start: Start) -> Iterator[list[Server]]:
    """The engine that most tests share, in a list of one: a test that it did not survive leaves the next one a new engine."""
    yield [start()]


@pytest.fixture
def engine(running: list[Server], start: Start) -> Iterator[Server]:
    """The shared engine, at full speed, unpaused, idle, without a session, with the first checkpoint as version "default"."""
    if not running[0].alive():
        running[0] = start()
    server = running[0]
    yield server
    if not server.alive():
        return
    server.post("/slow_down", {"forward_sleep_time": None})
    server.post("/continue_generation", {})
    server.request("POST", "/end_weight_update", {})
    server.post("/abort_request", {"abort_all": True})
    wait_for(lambda: server.request("POST", "/flush_cache").status_code == 200, "the engine to be idle")
    about = server.info()
    if about["model_path"] != str(server.model):
        server.post("/update_weights_from_disk", {"model_path": str(server.model), "weight_version": "default"})
    elif about["weight_version"] != "default":
        server.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})


@pytest.fixture
def victim(request: pytest.FixtureRequest, kind: str, start_briefly: Start) -> Server:
    """An engine that the test may kill; the embedded one, which is not supposed to die, is the shared one."""
    return request.getfixturevalue("engine") if kind == "embedded" else start_briefly()
