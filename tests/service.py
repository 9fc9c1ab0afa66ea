"""A real service for tests: `headrace up` in its own process, on the demo's model, talked to over REST."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/sort_digits/config.yaml"
DATA = ROOT / "examples/sort_digits/data.jsonl"


class ServiceUnderTest:
    """One run directory; `up` may be called again after an end, as a user would."""

    def __init__(
        self,
        directory: Path,
        *settings: str,
        module: str = "driver.cli",
        environment: dict[str, str] | None = None,
        on: Callable[[list[str]], list[str]] = lambda argv: argv,
    ) -> None:
        """`on` makes a command one that runs elsewhere: in a network namespace."""
        self._on = on
        self.directory = directory
        self.settings = settings
        self._module = module
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None
        self.http = httpx.Client(timeout=30.0, trust_env=False)

    def up(self, *more: str) -> None:
        settings = [f"run_dir={self.directory}", f"store.directory={self.store}", "service.port=0", *self.settings, *more]
        argv = [sys.executable, "-P", "-m", self._module, "up", str(CONFIG), "--quiet"]
        flags = [part for setting in settings for part in ("--set", setting)]
        said = self.directory.parent / f"{self.directory.name}-stderr"
        with said.open("wb") as errors:  # not a pipe that nobody reads: who writes much to it would stand still
            self.process = subprocess.Popen(self._on([*argv, *flags]), stderr=errors, cwd=self.directory.parent, env=self._environment)
        path = self.directory / "service.json"
        until = time.monotonic() + 240
        while not path.exists() or json.loads(path.read_text())["pid"] != self.process.pid:
            assert self.process.poll() is None, said.read_text()
            assert time.monotonic() < until, "no service.json within 240 s"
            time.sleep(0.05)
        self.url = json.loads(path.read_text())["url"]

    @property
    def store(self) -> Path:
        """One for each place on this machine: another checkout may run the same test."""
        place = zlib.crc32(str(self.directory).encode())
        return Path("/dev/shm") / f"headrace-test-{self.directory.parent.name}-{self.directory.name}-{place:08x}"

    def get(self, path: str, **params: Any) -> Any:
        reply = self.http.get(self.url + path, params=params)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def run(self, path: str = "", **params: Any) -> Any:
        return self.get(f"/v1/runs/sort-digits{path}", **params)

    def submit(self, body: bytes = b"", **params: Any) -> httpx.Response:
        return self.http.post(f"{self.url}/v1/runs/sort-digits/datasets", params=params, content=body or DATA.read_bytes())

    def wait(self, condition: Callable[[dict[str, Any]], Any], what: str, deadline_s: float = 180.0) -> dict[str, Any]:
        until = time.monotonic() + deadline_s
        while True:
            status = self.run()
            if condition(status):
                return status
            assert status["state"] != "failed", status["failure"]
            assert time.monotonic() < until, f"not within {deadline_s} s: {what}; {json.dumps(status, indent=1)}; {self.log()[-3000:]}"
            time.sleep(0.1)

    def log(self, role: str = "driver") -> str:
        return (self.directory / "logs" / f"{role}.log").read_text()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
        self.http.close()


def trained_rows(directory: Path) -> list[dict[str, Any]]:
    """The trainer's own account of what it trained, one line a batch."""
    return [json.loads(line) for line in (directory / "trained_rows.jsonl").read_text().splitlines()]
