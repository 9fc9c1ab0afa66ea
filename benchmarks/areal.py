"""AReaL's executor on paced servers of its own: the peer of `benchmarks.driver`, asked by it in AReaL's environment (`make areal`)."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.bound import BASE, ROOT, N
from benchmarks.client import TOKENS, start, url_of

PYTHON = ROOT / ".venv-areal/bin/python"


def measure(python: Path, running: int, engines: int, seconds: float) -> dict[str, float]:
    """Trajectories a second, and CPU microseconds of its process for each, over `seconds` after half as long."""
    with tempfile.TemporaryDirectory(prefix="headrace-areal-") as name:
        logs = [Path(name) / f"engine-{number}.log" for number in range(engines)]
        processes = [start(running // engines, log) for log in logs]
        try:
            for process in processes:
                os.sched_setaffinity(process.pid, os.sched_getaffinity(0))
            addresses = [urlsplit(url_of(log, process)).netloc for log, process in zip(logs, processes, strict=True)]
            argv = [str(python), "-P", str(ROOT / "benchmarks/areal_peer.py"), "--model", str(BASE), "--addr", *addresses]
            argv += ["--running", str(running), "--group", str(N), "--batch", str(running), "--tokens", str(TOKENS)]
            asked = subprocess.run(
                [*argv, "--seconds", f"{seconds:g}"],
                capture_output=True,
                text=True,
                timeout=4 * seconds + 300,
                env=_environment(),
                check=False,
            )
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(10)
    if asked.returncode:
        raise RuntimeError(f"AReaL's side has failed: {asked.stderr[-2000:]}")
    found = json.loads(asked.stdout.strip().splitlines()[-1])
    return {name: found[name] for name in ("per_s", "cpu_us")}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
