"""What a trajectory costs the driver from registration to finished: CPU microseconds with ledger, store and scores; and the loop's lag.

A real service (`benchmarks.bound_service`: scripted trainer, two paced engines) with a fixed number of trajectories decoding at once, at
a pace that lets about RATE of them end a second; the trainer takes half the time that would make it the slow side. CPU is the driver
process's, with its threads (SQLite, the archive); lag is how late the event loop comes to a task that wants to run every 10 ms, own is the
CPU time that the loop used in between, which other work on the machine does not change.

    python -m benchmarks.driver [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.bound import ENGINES, N, Service, longer_base, prompts
from benchmarks.common import Aim, arguments, report

RUNNING = (512, 4096)
TOKENS, INTERVAL = 64, 16  # as in benchmarks.client: an answer comes in 4 chunks
RATE = 100.0  # trajectories that end a second
SAMPLES = 32
BOUND = 40  # room for 4,096 in flight beside what is trained: staleness is not what is measured


def configuration(running: int, directory: Path, store: Path) -> dict[str, Any]:
    at_once = running // ENGINES
    return {
        "run_id": f"driver-{running}",
        "run_dir": str(directory / "run"),
        "model": {"path": str(longer_base(directory))},
        "data": str(prompts(directory)),
        "rollout": {
            "engines": ENGINES,
            "n": N,
            "context_length": 128,
            "sampling": {"max_new_tokens": TOKENS},
            "max_running_requests": at_once,
            "max_open_requests": at_once * 2,
            "stream_interval": INTERVAL,
            "engine_args": ["--paced", f"{TOKENS * RATE / running:.6f}", "--paced-pushes"],
        },
        "batch": {"samples": SAMPLES, "micro_batch_tokens": 4096},
        "staleness": {"bound": BOUND},
        "reward": {"scorers": {"*": {"function": f"{Path(__file__).with_name('bound_reward.py')}:score"}}},
        "checkpoint": {"every": 5},
        "stop": {"epochs": None},
        "store": {"directory": str(store), "capacity_bytes": 4 << 30},
        "service": {"port": 0},
        "trainer": {"device": "cpu"},
    }


def measure(running: int, seconds: float) -> dict[str, float]:
    """Over `seconds`, after as long as every slot needs to have been used twice."""
    batch_s = SAMPLES * N / RATE
    store = Path(f"/dev/shm/headrace-driver-{time.time_ns():x}")
    with tempfile.TemporaryDirectory(prefix="headrace-driver-") as name:
        directory = Path(name)
        (directory / "config.yaml").write_text(yaml.safe_dump(configuration(running, directory, store)))
        service = Service(directory, batch_s / 2)
        try:
            while service.trained() < 2 or service.gauges()["headrace_dispatch_in_flight_trajectories"] < running:
                time.sleep(0.5)
            time.sleep(2 * running / RATE)
            lag = directory / "run" / "loop_lag.txt"
            before, cpu, began = _done(service), service.cpu_s(), time.monotonic()
            time.sleep(1.0)  # these questions took the loop's time too, and are no part of its day
            looks = len(lag.read_text().splitlines())
            time.sleep(seconds)
            lines = [line.split() for line in lag.read_text().splitlines()[looks:-1]]
            cpu_s = [now - then for now, then in zip(service.cpu_s(), cpu, strict=True)]
            span_s, done = time.monotonic() - began, _done(service) - before
            lags, own = ([float(line[column]) for line in lines] for column in (0, 1))
        finally:
            service.close()
    return {
        "per_s": done / span_s,
        "cpu_us": cpu_s[0] / done * 1e6,
        "cpu_share": cpu_s[0] / span_s,
        "engines_cpu_share": cpu_s[1] / span_s,
        "lag_p99_ms": statistics.quantiles(lags, n=100)[98],
        "own_p99_ms": statistics.quantiles(own, n=100)[98],
        "own_max_ms": max(own),
    }


def _done(service: Service) -> float:
    """Trajectories that are ready or further: those that finish by and by, in jumps of a checkpoint."""
    gauges = service.gauges()
    return gauges["headrace_ledger_registered_trajectories_total"] - gauges["headrace_ledger_running_trajectories"]


def main() -> int:
    options = arguments(__doc__)
    figures: dict[str, float] = {}
    for running in RUNNING[:1] if options.quick else RUNNING:
        found = measure(running, 20.0 if options.quick else 60.0)
        figures |= {f"{name}_{running}": value for name, value in found.items()}
    aims: dict[str, Aim] = {name: ("<=", 50.0) for name in figures if name.startswith("lag_p99_ms")}
    return report("driver: a trajectory from registration to finished", figures, aims, options, ["httpx", "aiohttp", "orjson", "uvloop"])


if __name__ == "__main__":
    sys.exit(main())
