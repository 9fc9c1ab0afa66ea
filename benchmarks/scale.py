"""Engines added while a run goes on, 1 → 4 → 8: seconds to a new one's first token, throughput gained, and what the trainer notices.

One service on the demo's model. Eight engines that compute would share two cores, so each sleeps in every step (`--slow-step`) and its rate
is set by that; its tokens, its pushes and its checks are real. (`--paced` engines take no weights, so no run can use them.) The clock of a
new engine starts before the request to scale, so it holds the process's start, its import of torch and its push. Throughput is the
tokens of finished trajectories over a window, each number of engines in the same run; `per_engine` is what one more engine brought, over
what the first one made.

    python -m benchmarks.scale [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Aim, arguments, report
from driver.archive import read_metrics
from tests.service import ServiceUnderTest

AIMS: dict[str, Aim] = {"first_token_worst_s": ("<=", 10.0), "per_engine": (">=", 0.83), "trainer_restarts": ("<=", 0.0)}
SLOTS, STEP_S = 32, 0.4  # 80 tokens a second and engine, for a few percent of a core
SETTINGS = (
    f"rollout.engine_args=[--slow-step, '{STEP_S}']",
    f"rollout.max_running_requests={SLOTS}",
    f"rollout.max_open_requests={SLOTS + 8}",
    "rollout.stream_interval=1",
    "batch.samples=32",
    "staleness.bound=4",
    "stop.batches=100000",
    "stop.epochs=null",
    "trainer.schedule=constant",
)


def tokens(service: ServiceUnderTest) -> float:
    text = service.http.get(service.url + "/metrics").text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith("headrace_dispatch_tokens_total{"))


def rate(service: ServiceUnderTest, window_s: float) -> float:
    """Tokens a second over a window that begins two answers from now."""
    time.sleep(4 * STEP_S * 4)
    began, before = time.monotonic(), tokens(service)
    time.sleep(window_s)
    return (tokens(service) - before) / (time.monotonic() - began)


def scale(service: ServiceUnderTest, count: int) -> dict[str, float]:
    """Seconds from the request to each new engine's first token."""
    known = {engine["engine_id"] for engine in service.run("/engines")}
    asked = time.monotonic()
    reply = service.http.post(f"{service.url}/v1/runs/sort-digits/scale", json={"role": "rollout", "count": count})
    assert reply.status_code == 202, reply.text
    took: dict[str, float] = {}
    until = asked + 180
    while len(took) < count - len(known):
        assert time.monotonic() < until, f"after 180 s {sorted(took)} of {count - len(known)} engines made a token"
        for engine in service.run("/engines"):
            if engine["engine_id"] not in known and engine["first_token_age_s"] is not None:
                took.setdefault(engine["engine_id"], time.monotonic() - engine["first_token_age_s"] - asked)
        time.sleep(0.05)
    return took


def learner(service: ServiceUnderTest) -> list[Any]:
    return [(p["pid"], p["incarnation"], p["children"]) for p in service.run("/processes") if p["role"] == "trainer"]


def main() -> int:
    options = arguments(__doc__)
    counts, window_s = ((4,), 8.0) if options.quick else ((4, 8), 40.0)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        service = ServiceUnderTest(Path(name) / "run", *SETTINGS)
        try:
            service.up()
            service.submit()
            service.wait(lambda s: s["trained_version"] >= 1, "a batch", 180)
            before, engines = learner(service), 1
            first = last = figures["tokens_per_s_1"] = rate(service, window_s)
            took: list[float] = []
            gained: list[float] = []
            waits: list[float] = []
            for count in counts:
                version = service.run()["trained_version"]
                seconds = scale(service, count)
                took += seconds.values()
                reached = service.run()["trained_version"]
                steps = [line["step_s"] for line in read_metrics(service.directory) if version <= line["batch_id"] < reached]
                waits += steps
                figures[f"first_token_worst_s_to_{count}"] = max(seconds.values())
                now = figures[f"tokens_per_s_{count}"] = rate(service, window_s)
                gained.append((now - last) / ((count - engines) * first))
                figures[f"per_engine_{engines}_to_{count}"] = gained[-1]
                last, engines = now, count
            figures["first_token_worst_s"], figures["per_engine"] = max(took), min(gained)
            figures["trainer_restarts"] = float(learner(service) != before)
            others = [line["step_s"] for line in read_metrics(service.directory)]
            figures["step_s_median"] = sorted(others)[len(others) // 2]
            figures["step_s_longest_while_engines_came"] = max(waits, default=0.0)
            binding = service.run("/queues")["watermark"]["binding"]
        finally:
            service.close()
    print(f"at the end the watermark was bound by {binding}")
    return report("Engines added while a run goes on", figures, AIMS, options, ["torch", "aiohttp", "httpx"])


if __name__ == "__main__":
    sys.exit(main())
