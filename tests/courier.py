"""A courier process for tests, started as the driver starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx

from driver.life import CHILD, free_port
from trainer.courier_wire import CourierSpec

START_S = 60.0


class CourierProcess:
    """Call `start` again after `kill`, for the next incarnation. Ends with this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.incarnation = 0

    def start(self) -> None:
        self.incarnation += 1
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        spec = self._directory / f"courier-{port}.json"
        spec.write_text(CourierSpec(port=port, incarnation=self.incarnation, device="cpu").model_dump_json())
        command = [sys.executable, "-P", "-m", "trainer.courier", "--spec", str(spec)]
        self.log_path = spec.with_suffix(".log")
        with self.log_path.open("wb") as log:
            argv = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), *command]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + START_S
        while True:
            try:
                if self.health()["role"] == "courier":
                    return
            except httpx.TransportError:
                time.sleep(0.05)
            assert self.process.poll() is None and time.monotonic() < until, self.log_path.read_text()[-3000:]

    def health(self) -> dict:
        return httpx.get(self.url + "/health", trust_env=False, timeout=5).json()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
