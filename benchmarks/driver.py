"""What a trajectory costs the driver from registration to finished: CPU microseconds with ledger, store and scores; and the loop's lag.

A real service (`benchmarks.bound_service`: scripted trainer, paced engines) with a fixed number of trajectories running at once, at a
pace that lets some 100 of them end a second; the trainer takes half the time that would make it the slow side. At most 8,192 have a
request open: with 32,768 the others wait for an environment that takes its time over their answer. CPU is the driver
process's, with its threads (SQLite, the archive); lag is how late the event loop comes to a task that wants to run every 10 ms, own is
the CPU time that the loop used in between, which other work on the machine does not change.

Beside it AReaL's executor (`RemoteSGLangEngine`, `prepare_batch`), where `make areal` has made its environment: trajectories a second with
1,024 at once on two paced servers that could end thousands. AReaL generates, scores and makes tensors in memory; ours is the whole service
as a user has it: streams, ledger, store, archive, scores, batches of as many, and a push of each.

    python -m benchmarks.driver [--quick] [--json FILE] [--only RUNNING …] [--rounds N] [--watch]
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import areal
from benchmarks.bound import N, Service, longer_base, prompts
from benchmarks.client import OFFERED
from benchmarks.client import TOKENS as FLAT_TOKENS
from benchmarks.common import Aim, flags, median, report
from benchmarks.loop_watch import told

INTERVAL = 16
LENGTHS = range(INTERVAL, 8 * INTERVAL, INTERVAL)  # of answers, in tokens: 1 to 7 chunks, 4 on average, as in benchmarks.client
TOKENS = sum(LENGTHS) / len(LENGTHS)
BESIDE = 1024  # trajectories at once, in the comparison with AReaL
TAU_S = 0.05  # a batch, in the same


@dataclass(frozen=True)
class Level:
    """`open` of the trajectories that run can have a request open, on so many engines; `per_s` end a second."""

    running: int
    open: int
    engines: int
    per_s: float
    samples: int

    @property
    def aside(self) -> int:
        """Those that wait for an environment."""
        return self.running - self.open

    @property
    def bound(self) -> int:
        """Room for twice what runs: staleness is not what is measured."""
        return max(40, 2 * self.running // (N * self.samples))


LEVELS = {
    level.running: level for level in (Level(512, 512, 2, 100.0, 32), Level(4096, 4096, 2, 100.0, 32), Level(32768, 8192, 8, 100.0, 128))
}


def configuration(level: Level, directory: Path, store: Path) -> dict[str, Any]:
    at_once = level.open // level.engines
    lengths = directory / "lengths.txt"
    lengths.write_text("\n".join(map(str, LENGTHS)))
    pace = ["--paced", f"{TOKENS * level.per_s / level.open:.6f}", "--paced-lengths", str(lengths), "--paced-apart", "--paced-pushes"]
    return {
        "run_id": f"driver-{level.running}",
        "run_dir": str(directory / "run"),
        "model": {"path": str(longer_base(directory))},
        "data": str(prompts(directory)),
        "rollout": {
            "engines": level.engines,
            "n": N,
            "context_length": 192,
            "sampling": {"max_new_tokens": max(LENGTHS)},
            "max_running_requests": at_once,
            "max_open_requests": at_once if level.aside else at_once * 2,
            "stream_interval": INTERVAL,
            "engine_args": pace,
        },
        "batch": {"samples": level.samples, "micro_batch_tokens": 4096},
        "staleness": {"bound": level.bound},
        "reward": {"scorers": {"*": {"function": f"{Path(__file__).with_name('bound_reward.py')}:score"}}},
        "checkpoint": {"every": 5},
        "stop": {"epochs": None},
        "store": {"directory": str(store), "capacity_bytes": 4 << 30},
        "service": {"port": 0},
        "trainer": {"device": "cpu"},
    }


def measure(level: Level, seconds: float, *, watch: bool) -> dict[str, float]:
    """Over `seconds`, after as long as it takes until so many run, and as long again."""
    batch_s = level.samples * N / level.per_s
    store = Path(f"/dev/shm/headrace-driver-{time.time_ns():x}")
    options = ["--watch"] if watch else []
    if level.aside:
        options += ["--aside", str(level.aside)]
    with tempfile.TemporaryDirectory(prefix="headrace-driver-") as name:
        directory = Path(name)
        (directory / "config.yaml").write_text(yaml.safe_dump(configuration(level, directory, store)))
        service = Service(directory, batch_s / 2, *options)
        try:
            while service.trained() < 2 or _running(service) < 0.9 * level.running:
                time.sleep(0.5)
            time.sleep(level.running / level.per_s)
            lag, stops = directory / "run" / "loop_lag.txt", directory / "run" / "loop_stops.jsonl"
            before, cpu, began = _done(service), service.cpu_s(), time.monotonic()
            time.sleep(1.0)  # these questions took the loop's time too, and are no part of its day
            looks, stopped = len(lag.read_text().splitlines()), len(stops.read_text().splitlines()) if watch else 0
            time.sleep(seconds)
            lines = [line.split() for line in lag.read_text().splitlines()[looks:-1]]
            if watch:
                print(told(stops, stopped))
            cpu_s = [now - then for now, then in zip(service.cpu_s(), cpu, strict=True)]
            span_s, done = time.monotonic() - began, _done(service) - before
            lags, own = ([float(line[column]) for line in lines] for column in (0, 1))
            facts = {"running": _running(service), "open": service.gauges()["headrace_rollout_requests_open_count"]}
            memory = psutil.Process(service.pid).memory_info().rss
        finally:
            service.close()
            shutil.rmtree(store, ignore_errors=True)
    return facts | {
        "per_s": done / span_s,
        "cpu_us": cpu_s[0] / done * 1e6,
        "cpu_share": cpu_s[0] / span_s,
        "engines_cpu_share": cpu_s[1] / span_s,
        "lag_p99_ms": statistics.quantiles(lags, n=100)[98],
        "lag_max_ms": max(lags),
        "own_p99_ms": statistics.quantiles(own, n=100)[98],
        "own_max_ms": max(own),
        "memory_mb": memory / 1e6,
    }


def flat_out(seconds: float) -> dict[str, float]:
    """With nothing to wait for but itself: servers that could end thousands a second, a trainer that takes no time to speak of."""
    level = Level(BESIDE, BESIDE, 2, 0.0, BESIDE // N)
    at_once = level.open // level.engines
    store = Path(f"/dev/shm/headrace-driver-{time.time_ns():x}")
    with tempfile.TemporaryDirectory(prefix="headrace-driver-") as name:
        directory = Path(name)
        config = configuration(level, directory, store)
        config["rollout"] |= {
            "sampling": {"max_new_tokens": FLAT_TOKENS},
            "max_open_requests": at_once,
            "engine_args": ["--paced", f"{OFFERED / at_once * FLAT_TOKENS:g}", "--paced-pushes"],
        }
        (directory / "config.yaml").write_text(yaml.safe_dump(config))
        service = Service(directory, TAU_S)
        try:
            while service.trained() < 2:
                time.sleep(0.5)
            time.sleep(seconds / 2)
            before, cpu_s, began = _done(service), service.cpu_s()[0], time.monotonic()
            time.sleep(seconds)
            count, span_s = _done(service) - before, time.monotonic() - began
            return {"per_s": count / span_s, "cpu_us": (service.cpu_s()[0] - cpu_s) / count * 1e6}
        finally:
            service.close()
            shutil.rmtree(store, ignore_errors=True)


def beside(python: Path, rounds: int, seconds: float) -> dict[str, float]:
    """AReaL and ours in turn."""
    found: dict[str, list[dict[str, float]]] = {"areal": [], "ours": []}
    for _ in range(rounds):
        found["areal"].append(areal.measure(python, BESIDE, 2, seconds))
        found["ours"].append(flat_out(seconds))
    figures = {f"{who}_{name}_{BESIDE}": median([one[name] for one in runs]) for who, runs in found.items() for name in runs[0]}
    ratios = [ours["per_s"] / theirs["per_s"] for ours, theirs in zip(found["ours"], found["areal"], strict=True)]
    return figures | {f"ours_over_areal_{BESIDE}": median(ratios)}


def _running(service: Service) -> float:
    return service.gauges()["headrace_ledger_running_trajectories"]


def _done(service: Service) -> float:
    """Trajectories that are ready or further: those that finish by and by, in jumps of a checkpoint."""
    gauges = service.gauges()
    return gauges["headrace_ledger_registered_trajectories_total"] - gauges["headrace_ledger_running_trajectories"]


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument(
        "--only", nargs="+", type=int, choices=[*LEVELS, BESIDE], metavar="RUNNING", help="512, 4096, 32768, and 1024 beside AReaL"
    )
    parser.add_argument("--rounds", type=int, default=1, help="of all levels, one after the other; figures are medians")
    parser.add_argument("--watch", action="store_true", help="also print where the loop stood when it was late, which costs it time")
    parser.add_argument("--areal", type=Path, default=areal.PYTHON, help="the Python that has AReaL (make areal); without, it is left out")
    options = parser.parse_args()
    chosen = options.only or (list(LEVELS)[:1] if options.quick else [*LEVELS, BESIDE])
    with_peer = BESIDE in chosen and options.areal.exists()
    chosen = [running for running in chosen if running != BESIDE]
    found: dict[int, list[dict[str, float]]] = {running: [] for running in chosen}
    for _ in range(options.rounds):
        for running in chosen:
            found[running].append(measure(LEVELS[running], 20.0 if options.quick else 60.0, watch=options.watch))
    figures = {f"{name}_{running}": median([one[name] for one in rounds]) for running, rounds in found.items() for name in rounds[0]}
    if with_peer:
        figures |= beside(options.areal, options.rounds, 10.0 if options.quick else 20.0)
    least, most = min(chosen, default=0), max(chosen, default=0)
    if most > least:
        figures["memory_kb_a_trajectory"] = (figures[f"memory_mb_{most}"] - figures[f"memory_mb_{least}"]) * 1e3 / (most - least)
    aims: dict[str, Aim] = {name: ("<=", 50.0) for name in figures if name.startswith("lag_p99_ms")}
    if with_peer:
        aims[f"ours_over_areal_{BESIDE}"] = (">=", 3.0)
    return report("driver: a trajectory from registration to finished", figures, aims, options, ["httpx", "aiohttp", "orjson", "uvloop"])


if __name__ == "__main__":
    sys.exit(main())
