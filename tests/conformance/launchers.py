"""Start the engine that the suite is run against: `embedded` (rollout.engine) or `sglang` (the real server, on the CPU)."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from rollout.sglang.launch import CPU_FLAGS, environment
from rollout.sglang.spec import SglangSpec

ROOT = Path(__file__).parents[2]
PYTHON_VARIABLE = "HEADRACE_SGLANG_PYTHON"
STOP_S = 30.0
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

# Both engines understand these.
COMMON_FLAGS = ("--max-running-requests", "8", "--max-total-tokens", "4096", "--context-length", "512")
SGLANG_FLAGS = (
    *("--device", "cpu", *CPU_FLAGS, "--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup"),
    *("--load-snapshot-publish-interval", "1"),  # of /v1/loads, in steps
)
SGLANG_ENVIRONMENT = environment(SglangSpec(device="cpu"), 1) | {"PYTHONWARNINGS": "ignore"}


def sglang_python() -> Path | None:
    """The interpreter that has SGLang installed, or None."""
    path = Path(os.environ.get(PYTHON_VARIABLE) or ROOT / ".venv-sglang" / "bin" / "python")
    return path if path.exists() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(kind: str, model: Path, port: int, log_path: Path, flags: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """A process that will serve `model` on `port`. It has a session of its own, so that all of it can be ended together."""
    if kind == "embedded":
        command = [sys.executable, "-P", "-m", "rollout.engine"]
        told = {"PYTHONPATH": str(ROOT)}
    else:
        command = [str(sglang_python()), "-m", "sglang.launch_server", *SGLANG_FLAGS]
        told = SGLANG_ENVIRONMENT
    command += ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), *COMMON_FLAGS, *flags]
    with log_path.open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **told},
            start_new_session=True,
            preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # a server does not outlive the tests, however they end
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, and wait for that."""
    group = process.pid
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # children of a server that died
