"""The process: it starts or says why not, and it ends when told to or when its parent does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import SOURCES, Served, end, wait_for


def run_engine(*flags: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """An engine that is not expected to serve."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "rollout.engine", *flags],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(SOURCES), **(env or {})},
    )


def one_sentence(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr and len(ended.stderr.strip().splitlines()) == 1
    return ended.stderr


def test_o2_a_taken_port_is_one_sentence_and_code_2(checkpoints: Callable[..., Path]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        says = one_sentence(run_engine("--model-path", str(checkpoints("Qwen3")), "--port", str(port)))
    assert f"cannot listen on 127.0.0.1 port {port} (Address already in use); choose another --port" in says


def test_a_missing_or_strange_model_is_one_sentence_and_code_2(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    assert "there is no model directory" in one_sentence(run_engine("--model-path", str(tmp_path / "nowhere"), "--port", "0"))
    assert "not a Hugging Face checkpoint" in one_sentence(run_engine("--model-path", str(tmp_path), "--port", "0"))
    raw = json.loads((checkpoints("Qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["GPT2LMHeadModel"]}))
    assert "holds a GPT2LMHeadModel" in one_sentence(run_engine("--model-path", str(tmp_path), "--port", "0"))
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert "has no *.safetensors file" in one_sentence(run_engine("--model-path", str(tmp_path), "--port", "0"))


@pytest.mark.parametrize("flags", [["--context-length", "0"], ["--dtype", "int8"], ["--port", "70000"]])
def test_a_flag_that_cannot_be_is_refused(flags: list[str]) -> None:
    ended = run_engine("--model-path", "x", *flags)
    assert ended.returncode == 2 and flags[0] in ended.stderr


def test_h6_sigterm_ends_it_within_two_seconds_whatever_runs(start: Callable[..., Served], checkpoints: Callable[..., Path]) -> None:
    served = start(checkpoints("Llama"), "--weight-version", "run/0/3/1", "--dtype", "bfloat16")
    assert served.get("/model_info").json()["weight_version"] == "run/0/3/1"
    served.post("/slow_down", {"forward_sleep_time": 0.1})
    client = subprocess.Popen(
        ["curl", "-sN", f"{served.url}/generate", "-d", '{"input_ids":[5],"stream":true,"sampling_params":{"ignore_eos":true}}'],
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None and client.stdout.readline()
    asked_s = time.monotonic()
    end(served)
    client.communicate(timeout=5)
    assert served.process.returncode == 0
    assert time.monotonic() - asked_s < 2.0


def test_it_dies_with_its_parent(checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    log_path = tmp_path / "engine.log"
    code = (
        "import os, subprocess, sys, time\n"
        "os.environ['HEADRACE_PARENT_PID'] = str(os.getpid())\n"
        f"log = open({str(log_path)!r}, 'wb')\n"
        "engine = [sys.executable, '-P', '-m', 'rollout.engine', '--port', '0', '--model-path', sys.argv[1]]\n"
        "child = subprocess.Popen(engine, stderr=log)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(checkpoints("Qwen3"))], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCES)}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(lambda: "serving" in log_path.read_text(), "the engine to serve", 30.0)
    parent.send_signal(signal.SIGKILL)
    parent.wait(5)
    try:
        wait_for(lambda: not alive(child), "the engine to die", 2.0)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_does_not_start_for_a_parent_that_is_gone(checkpoints: Callable[..., Path]) -> None:
    ended = run_engine("--model-path", str(checkpoints("Qwen3")), "--port", "0", env={"HEADRACE_PARENT_PID": "1"})
    assert "named by HEADRACE_PARENT_PID is gone" in one_sentence(ended)


def test_a_loop_that_fails_ends_the_process_with_code_1(checkpoints: Callable[..., Path]) -> None:
    """H8: nothing goes on answering /health over a dead loop."""
    code = (
        "import sys\n"
        "from rollout.engine import __main__ as entry, scheduler\n"
        "def broken(self): raise RuntimeError('the loop is broken')\n"
        "scheduler.Scheduler._turn = broken\n"
        "import threading, time, urllib.request\n"
        "def ask():\n"
        "    time.sleep(0.2)\n"
        "    urllib.request.urlopen('http://127.0.0.1:' + sys.argv[-1] + '/generate', data=b'{\"input_ids\":[5]}')\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "entry.main()\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ended = subprocess.run(
        [sys.executable, "-c", code, "--model-path", str(checkpoints("Qwen3")), "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    assert ended.returncode == 1, ended.stderr
    assert "RuntimeError: the loop is broken" in ended.stderr and "the engine ends" in ended.stderr
