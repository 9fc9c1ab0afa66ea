"""Kill -9 of an engine to its trajectories generating again elsewhere: seconds, for each trajectory it had.

A whole service on the demo's model with two embedded engines behind proxies, which read the request ids that pass. A trajectory generates
again when the first token of its next request leaves the other engine. The clock starts before the signal.

    python -m benchmarks.recovery [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import restored
from benchmarks.common import Aim, arguments, median, report
from tests.fleet import Engine, fleet
from tests.service import ServiceUnderTest

AIMS: dict[str, Aim] = {"worst_s": ("<=", 3.0), "never_again": ("<=", 0.0), "lost": ("<=", 0.0)}
AIMS |= {f"{kind}: {what}, s": ("<=", 10.0) for kind in restored.KINDS for what in ("full rate", "next batch")}
RID = re.compile(rb'"rid":"([^"]+)"')
SLOW_S = 0.02  # a step of an engine: an answer of 16 tokens takes a third of a second
BUSY_REQUESTS = 8  # the engine has at least so many when it dies


class Watch:
    """Which trajectories one engine works on, and when each began to get tokens there."""

    def __init__(self, engine: Engine) -> None:
        self._at: dict[object, str] = {}  # connection → the trajectory whose request is open on it
        self.began: dict[str, list[float]] = {}
        engine.proxy.on_request = self._request
        engine.proxy.on_reply = self._reply

    @property
    def open(self) -> set[str]:
        return set(self._at.values())

    def _request(self, connection: object, data: bytes) -> None:
        if data.startswith(b"POST /generate ") and (found := RID.search(data)):
            self._at[connection] = found[1].decode().split(".")[-4]
        else:
            self._at.pop(connection, None)

    def _reply(self, connection: object, data: bytes) -> None:
        if (trajectory := self._at.get(connection)) is None:
            return
        if b"data: {" in data:
            self.began.setdefault(trajectory, []).append(time.monotonic())
        if b"[DONE]" in data:
            self._at.pop(connection, None)

    def forget(self) -> None:
        self._at.clear()


def whole(service: ServiceUnderTest, traj_uid: str) -> bool:
    """Its last token had come before its engine died: there was nothing left to generate."""
    found = service.run(f"/trajectories/{traj_uid}")
    return found["state"] != "running" and found["outcome"] != "discarded"


def kill_once(service: ServiceUnderTest, victim: Engine, watches: tuple[Watch, Watch]) -> tuple[list[float], int, int]:
    """Seconds for each trajectory that was generating on the victim; how many of its answers were whole; how many never came again."""
    there, elsewhere = watches
    while len(there.open) < BUSY_REQUESTS:
        time.sleep(0.002)
    lost = there.open
    killed_at = time.monotonic()
    victim.kill()
    took: dict[str, float] = {}
    until, look_at = killed_at + 60, killed_at + 3
    were_whole: set[str] = set()
    while time.monotonic() < until and len(took) + len(were_whole) < len(lost):
        for trajectory in lost - took.keys():
            after = [at for at in elsewhere.began.get(trajectory, []) if at > killed_at]
            if after:
                took[trajectory] = after[0] - killed_at
        if time.monotonic() > look_at:
            look_at += 3
            were_whole = {trajectory for trajectory in lost - took.keys() if whole(service, trajectory)}
        time.sleep(0.005)
    there.forget()
    victim.start()
    victim.wait(60)
    return list(took.values()), len(were_whole), len(lost - took.keys() - were_whole)


def main() -> int:
    options = arguments(__doc__)
    rounds = 3 if options.quick else 20
    took: list[float] = []
    were_whole = never = 0
    with tempfile.TemporaryDirectory() as name, fleet(Path(name), 2, None, SLOW_S) as engines:
        service = ServiceUnderTest(
            Path(name) / "run",
            "rollout.engines=0",
            f"rollout.engine_urls={json.dumps([engine.proxy.url for engine in engines])}",
            "rollout.infrastructure_retries=1000",
            "rollout.stream_interval=2",
            "stop.batches=100000",
            "stop.epochs=null",
        )
        try:
            for engine in engines:
                engine.wait(60)
            watches = [Watch(engine) for engine in engines]
            service.up()
            service.submit()
            for number in range(rounds):
                service.wait(lambda s: [e["state"] for e in service.run("/engines")] == ["open"] * 2, "both engines", 120)
                dies = number % 2
                seconds, ended, missing = kill_once(service, engines[dies], (watches[dies], watches[1 - dies]))
                took, were_whole, never = took + seconds, were_whole + ended, never + missing
        finally:
            service.close()
    figures = {
        "trajectories": float(len(took)),
        "whole_already": float(were_whole),
        "median_s": median(took),
        "worst_s": max(took),
        "never_again": float(never),
    }
    with tempfile.TemporaryDirectory() as name:
        figures |= restored.measure(Path(name), 1 if options.quick else 5)
    return report("From the death of a process to the run going on as before", figures, AIMS, options, ["aiohttp", "httpx", "torch"])


if __name__ == "__main__":
    sys.exit(main())
