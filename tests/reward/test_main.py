"""The process: what it says when it cannot start, and that it leaves nobody behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from reward.wire import Job, ScoreRequest

REPOSITORY = Path(__file__).parents[2]
Start = Callable[..., Any]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scorers": {"*": {"function": "missing.py:f"}}}, "the scorer of task type '*': 'missing.py:f': there is no file"),
        ({"scorers": {"x": {"function": "scorers:not_callable"}}}, "is a int, which cannot be called"),
        ({"wokers": 2}, "wokers: Extra inputs"),
    ],
)
def test_O1_a_mistake_is_one_sentence_and_exit_code_2(start: Start, changes: dict[str, Any], said: str) -> None:
    service = start(**changes)
    assert service.process.wait(30) == 2
    errors = service.log.read_text()
    assert said in errors and errors.startswith("headrace reward: ") and len(errors.splitlines()) == 1


def test_O2_a_taken_port_is_said_with_the_remedy(start: Start) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        service = start(port=other.getsockname()[1])
        assert service.process.wait(30) == 2
    errors = service.log.read_text()
    assert "choose a free port" in errors and len(errors.splitlines()) == 1


def busy_service(start: Start, **more: Any) -> tuple[Any, list[psutil.Process]]:
    """A service whose two workers hang in functions of ten minutes, and those workers."""
    service = start(scorers={"*": {"function": "scorers.py:bad", "time_limit_s": 600}}, **more)
    service.wait_until_up()
    jobs = [Job(leaf_id=how, task_type="t", prompt="", response=how) for how in ("loop", "hold the GIL")]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(service.url + "/v1/score", content=msgspec.json.encode(ScoreRequest(jobs)), timeout=0.3)
    workers = psutil.Process(service.process.pid).children()
    assert len(workers) == 2 and httpx.get(service.url + "/health").json()["busy_workers"] == 2
    return service, workers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_H6_however_it_ends_no_worker_is_left(start: Start, number: signal.Signals) -> None:
    service, workers = busy_service(start)
    began = time.monotonic()
    service.process.send_signal(number)
    assert service.process.wait(10) == (-9 if number == signal.SIGKILL else 0)
    assert time.monotonic() - began < 8
    assert psutil.wait_procs(workers, timeout=5)[1] == []


def test_it_dies_with_the_parent_it_was_given(write_spec: Callable[..., tuple[list[str], str]]) -> None:
    command, url = write_spec()
    shell = ["sh", "-c", 'export HEADRACE_PARENT_PID=$$; "$@" & echo $!; wait', "sh", *command]
    with subprocess.Popen(shell, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        reward = psutil.Process(int(parent.stdout.readline()))
        give_up = time.monotonic() + 30
        while not _answers(url):
            assert reward.is_running() and time.monotonic() < give_up
            time.sleep(0.02)
        family = [reward, *reward.children()]
        assert len(family) == 3
        parent.kill()
    assert psutil.wait_procs(family, timeout=5)[1] == []


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_a_parent_that_is_gone_already_means_no_start(start: Start) -> None:
    process = start(env={"HEADRACE_PARENT_PID": "1"}).process
    assert process.wait(30) == 1


def test_the_client_and_the_spec_are_light() -> None:
    heavy = ("torch", "fastapi", "uvicorn", "numpy")
    code = f"import sys, reward.client, reward.spec, reward.wire; print([name for name in {heavy} if name in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
