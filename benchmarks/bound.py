"""The fraction of min(C / E[L], B / tau) that the service reaches under a hard bound S: measured over HTTP, and beside it the model's.

A real driver process (`benchmarks.bound_service`) with two paced engines of C / 2 slots each, whose answers have the lengths of a trace at
a constant rate of tokens, a real reward service, and a scripted trainer that takes tau seconds a batch; generation and training in balance.
Pushes are whole transactions that carry the demo's weights. Each case's result is a JSON file under --results; one that is there is not
measured again, so the full run may be stopped and goes on. Policies of others are run in the model (`benchmarks/policies.py`).

    python -m benchmarks.bound [--quick] [--json FILE] [--results DIR] [--only mild-S3 …] [--more]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks import policies
from benchmarks.common import median, versions
from driver.whatif import Facts, Reached, simulate

ROOT = Path(__file__).parents[1]
BASE = ROOT / "examples/sort_digits/base"
TRACES = {"mild": ROOT / "benchmarks/data/lengths_mild.csv", "heavy": ROOT / "benchmarks/data/lengths_heavy.csv"}
CHUNK_TOKENS = 4  # of a streamed chunk, and of a step of the paced engine: lengths are multiples of it, so that no slot waits for a step
MEAN_TOKENS = 80
N = 8
ENGINES = 2
AHEAD = 0.25  # the driver's own (driver/watermark.py)
SEEDS = 5  # of the model
AIM = 0.03  # below the modelled figure at most


@dataclass(frozen=True)
class Scale:
    slots: int
    samples: int
    mean_s: float  # E[L]
    warm: int
    batches: Callable[[int], int]  # by S


FULL = Scale(256, 32, 4.0, 20, lambda bound: 120)
# A batch at the bound takes as long as a mean length: 1 s here, and 6 times that with S = 0.
QUICK = Scale(64, 8, 1.0, 6, lambda bound: {0: 10, 1: 20}.get(bound, 30))


@dataclass(frozen=True)
class Case:
    trace: str
    bound: int

    @property
    def name(self) -> str:
        return f"{self.trace}-S{self.bound}"


@dataclass(frozen=True)
class Measured:
    """Shares are of the bound's rate, of one core, and of sampled tokens."""

    fraction: float
    staleness_mean: float
    staleness_max: int
    wasted: float
    discarded: int
    batches: int
    seconds: float
    driver_cpu: float
    engines_cpu: float
    driver_us: float  # CPU of a trajectory in the driver
    training_s: float
    publish_s: float
    pause_s: float
    score_s: float
    pace: float  # of the engines' tokens, over the nominal one: below 1 where they got too little CPU
    load: float
    waits: dict[str, float]  # share of the time that the trainer and the rollout side waited, by kind of reason (headrace why --history)


def tokens_of(trace: str) -> list[int]:
    """The trace, scaled to a mean of about MEAN_TOKENS, in whole chunks: its shape, in steps of a twentieth of the mean."""
    raw = [int(line) for line in TRACES[trace].read_text().split()[1:]]
    scale = MEAN_TOKENS / (sum(raw) / len(raw))
    return [max(1, round(count * scale / CHUNK_TOKENS)) * CHUNK_TOKENS for count in raw]


def facts_of(trace: str, scale: Scale) -> Facts:
    """What the model is told of a case, and what the bound is made of: seconds by the engines' nominal pace."""
    tokens = tokens_of(trace)
    token_s = scale.mean_s / (sum(tokens) / len(tokens))
    return Facts(scale.slots, scale.samples, N, tuple(count * token_s for count in tokens))


# ---- one case ----------------------------------------------------------------------------------------------------------------


def longer_base(directory: Path) -> Path:
    model = directory / "model"
    shutil.copytree(BASE, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (model / "config.json").write_text(json.dumps(config))
    return model


def prompts(directory: Path) -> Path:
    path = directory / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number} =", "answer": ""}) + "\n" for number in range(1000)))
    return path


def configuration(case: Case, scale: Scale, directory: Path, store: Path) -> dict[str, Any]:
    """Of the run. The base checkpoint with more positions: nothing computes with it."""
    model = longer_base(directory)
    tokens = tokens_of(case.trace)
    lengths = directory / "lengths.txt"
    lengths.write_text("\n".join(map(str, tokens)))
    at_once = scale.slots // ENGINES
    pace = sum(tokens) / len(tokens) / scale.mean_s
    return {
        "run_id": f"bound-{case.name.lower()}",
        "run_dir": str(directory / "run"),
        "seed": 1,
        "model": {"path": str(model)},
        "data": str(prompts(directory)),
        "rollout": {
            "engines": ENGINES,
            "n": N,
            "context_length": 768,
            "sampling": {"max_new_tokens": 640},
            "max_running_requests": at_once,
            "max_open_requests": at_once * 2,
            "stream_interval": CHUNK_TOKENS,
            "engine_args": ["--paced", f"{pace:.6f}", "--paced-lengths", str(lengths), "--paced-pushes"],
        },
        "batch": {"samples": scale.samples, "micro_batch_tokens": 4096},
        "staleness": {"bound": case.bound},
        "reward": {"scorers": {"*": {"function": f"{ROOT / 'benchmarks/bound_reward.py'}:score"}}},
        "checkpoint": {"every": 20},
        "stop": {"batches": scale.warm + scale.batches(case.bound) + case.bound + 4, "epochs": None},
        "store": {"directory": str(store), "capacity_bytes": 4 << 30},
        "service": {"port": 0},
        "trainer": {"device": "cpu"},
    }


class Service:
    """The service of one case, asked over REST."""

    def __init__(self, directory: Path, tau_s: float, *options: str) -> None:
        self._directory = directory
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-P", "-m", "benchmarks.bound_service", str(directory / "config.yaml"), "--tau", f"{tau_s:.6f}", *options]
        with (directory / "up.log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, cwd=directory)
        path = directory / "run" / "service.json"
        until = time.monotonic() + 120
        while not path.exists():
            self._alive(until)
            time.sleep(0.1)
        facts = json.loads(path.read_text())
        self._http = httpx.Client(base_url=facts["url"], timeout=60.0, trust_env=False)
        self._run = f"/v1/runs/{facts['run_id']}"
        self._until = time.monotonic() + 12 * 3600

    def _alive(self, until: float) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the service has ended: {(self._directory / 'up.log').read_text()[-2000:]}")
        if time.monotonic() > until:
            raise RuntimeError(f"nothing came in time; see {self._directory}")

    def get(self, path: str = "", **params: Any) -> Any:
        self._alive(self._until)
        reply = self._http.get(self._run + path, params=params)
        reply.raise_for_status()
        return reply.json()

    def trained(self) -> int:
        status = self.get()
        if status["state"] == "failed":
            raise RuntimeError(f"the run has failed: {status['failure']}")
        return int(status["trained_version"])

    def gauges(self) -> dict[str, float]:
        lines = [line for line in self._http.get("/metrics").text.splitlines() if not line.startswith("#")]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu_s(self) -> tuple[float, float]:
        """Of the driver, and of its engines."""
        engines = sum(_cpu_s(process["pid"]) for process in self.get("/processes") if process["role"] == "engine")
        return _cpu_s(self._process.pid), engines

    def waited_s(self) -> dict[str, float]:
        sides = self.get("/why/history")["seconds"]
        return {f"{side}: {kind}": seconds for side, kinds in sides.items() for kind, seconds in kinds.items()}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(90)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(case: Case, scale: Scale, console: Console) -> Measured:
    batches, facts = scale.batches(case.bound), facts_of(case.trace, scale)
    store = Path(f"/dev/shm/headrace-bound-{os.getpid()}-{case.name}")
    with tempfile.TemporaryDirectory(prefix="headrace-bound-") as name:
        directory = Path(name)
        (directory / "config.yaml").write_text(yaml.safe_dump(configuration(case, scale, directory, store)))
        service = Service(directory, facts.tau_s)
        try:
            began: tuple[float, tuple[float, float], dict[str, float]] | None = None
            while (trained := service.trained()) < scale.warm + batches:
                if began is None and trained >= scale.warm:
                    began = (time.monotonic(), service.cpu_s(), service.waited_s())
                if console.is_terminal:
                    console.print(f"{case.name}: batch {trained} of {scale.warm + batches}", end="\r", highlight=False)
                time.sleep(min(1.0, facts.tau_s / 2))
            assert began is not None
            span_s = time.monotonic() - began[0]
            driver_s, engines_s = (now - then for now, then in zip(service.cpu_s(), began[1], strict=True))
            waits = {kind: (seconds - began[2].get(kind, 0.0)) / span_s for kind, seconds in service.waited_s().items()}
            history = service.get("/batches", last=1000)
            gauges, counts = service.gauges(), service.get()["trajectories"]
            seconds = service.get("/whatif", s=case.bound)["seconds"]
        finally:
            service.close()
            shutil.rmtree(store, ignore_errors=True)
    seen = [batch for batch in history if scale.warm <= batch["batch_id"] < scale.warm + batches]
    before = next(batch for batch in history if batch["batch_id"] == scale.warm - 1)
    took_s = seen[-1]["time_s"] - before["time_s"]
    per_s = len(seen) * facts.batch_trajectories / took_s
    resampled = gauges["headrace_dispatch_resampled_tokens_total"] / max(1.0, gauges["headrace_dispatch_tokens_total"])
    return Measured(
        fraction=per_s / facts.bound_per_s,
        staleness_mean=sum(batch["staleness_mean"] for batch in seen) / len(seen),
        staleness_max=max(batch["staleness_max"] for batch in seen),
        wasted=resampled + counts["discarded"] / counts["registered"],
        discarded=counts["discarded"],
        batches=len(seen),
        seconds=took_s,
        driver_cpu=driver_s / span_s,
        engines_cpu=engines_s / span_s,
        driver_us=driver_s / span_s / per_s * 1e6,
        training_s=seconds["training"],
        publish_s=seconds["publish"],
        pause_s=seconds["pause"],
        score_s=seconds["score"],
        pace=scale.mean_s / MEAN_TOKENS / seconds["token"],
        load=os.getloadavg()[0],
        waits={kind: round(share, 4) for kind, share in waits.items() if share > 0.001},
    )


# ---- the model beside it -----------------------------------------------------------------------------------------------------


def modelled(facts: Facts, bound: int, batches: int) -> Reached:
    """Over as many batches as were measured, as the median of some seeds."""
    found = [simulate(facts, bound, batches=batches, seed=seed) for seed in range(SEEDS)]
    return replace(found[0], fraction=median([reached.fraction for reached in found]))


def with_lags(facts: Facts, measured: Measured) -> Facts:
    """The measured lag, pause, queue, scoring and training times, in the model. The bound stays that of tau."""
    tau_s = facts.tau_s
    return replace(
        facts,
        training_s=tau_s,
        overhead_s=max(0.0, measured.training_s - tau_s),
        ahead=int(facts.slots * AHEAD),
        publish_s=measured.publish_s,
        pause_s=measured.pause_s,
        score_s=measured.score_s,
    )


def show_policies(scale: Scale, traces: Sequence[str], console: Console) -> dict[str, dict[str, Any]]:
    """Policies of others, and A4 itself, in the model without lags."""
    found: dict[str, dict[str, Any]] = {}
    batches = 300 if scale.slots == FULL.slots else 100
    for trace in traces:
        facts = replace(facts_of(trace, scale), ahead=None)
        outcomes = {
            "sync": policies.sync(facts, batches),
            "one step off": policies.one_step_off(facts, batches),
            "group-held slots, S = 7": policies.group_slots(facts, 7, batches),
            "windowed FIFO of 5 batches": policies.windowed_fifo(facts, 5, batches),
            "dropping at S = 3": policies.dropping(facts, 3, batches),
            "partial (7 of 8), S = 3": policies.partial(facts, 3, batches),
            **{f"A4 with all lengths known, S = {s}": policies.longest_first(facts, s, batches) for s in (1, 3, 5)},
            **{f"A4, S = {s}": policies.Outcome.of(simulate(facts, s, batches=batches)) for s in (1, 2, 3, 5, 7)},
        }
        table = Table(title=f"policies in the model, {trace} trace, B = {facts.batch_trajectories}")
        for column in ("policy", "of the bound", "staleness mean", "max", "wasted"):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name, one in outcomes.items():
            table.add_row(name, f"{one.fraction:.2f}", f"{one.staleness_mean:.2f}", str(one.staleness_max), f"{one.wasted:.0%}")
        console.print(table)
        ceilings = ", ".join(f"S = {s}: {policies.ceiling(facts, s):.2f}" for s in (0, 1, 2, 3, 5, 7))
        console.print(f"{trace}: no policy that drops nothing and knows no lengths exceeds {ceilings}", highlight=False)
        found[trace] = {name: asdict(one) for name, one in outcomes.items()}
    return found


def show(results: dict[Case, Measured], scale: Scale, console: Console) -> list[dict[str, Any]]:
    table = Table(title=f"measured: C = {scale.slots}, B = {scale.samples * N}, E[L] = {scale.mean_s:g} s")
    columns = (
        "case",
        "measured",
        "model",
        "model, with lags",
        "above it",
        "staleness mean",
        "max",
        "wasted",
        "pace",
        "driver CPU",
        "µs a trajectory",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "case" else "right")
    rows = []
    for case, one in results.items():
        facts, batches = facts_of(case.trace, scale), scale.warm + scale.batches(case.bound)
        plain = modelled(facts, case.bound, batches)
        lagged = modelled(with_lags(facts, one), case.bound, batches)
        above = one.fraction - lagged.fraction
        rows.append(asdict(case) | asdict(one) | {"model": plain.fraction, "model_with_lags": lagged.fraction, "met": above >= -AIM})
        table.add_row(
            case.name,
            f"{one.fraction:.3f}",
            f"{plain.fraction:.3f}",
            f"{lagged.fraction:.3f}",
            f"{above:+.3f}",
            f"{one.staleness_mean:.2f}",
            str(one.staleness_max),
            f"{one.wasted:.1%}",
            f"{one.pace:.2f}",
            f"{one.driver_cpu:.0%}",
            f"{one.driver_us:.0f}",
        )
    console.print(table)
    for case, one in results.items():
        shares = ", ".join(f"{kind} {share:.1%}" for kind, share in sorted(one.waits.items(), key=lambda item: -item[1]))
        console.print(f"{case.name} waited: {shares or 'for nothing'}", highlight=False, soft_wrap=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the slots, a second of length, few batches: some minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--results", type=Path, metavar="DIR", help="a case that has its file here is not measured again")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="mild-S3, heavy-S7 …")
    parser.add_argument("--more", action="store_true", help="S = 2 and 5 too")
    parser.add_argument("--mean-s", type=float, metavar="S", help="mean length; the longer, the less the driver's own delays weigh")
    options = parser.parse_args()
    console = Console() if Console().is_terminal else Console(width=140)
    scale = QUICK if options.quick else FULL
    if options.mean_s is not None:
        scale = replace(scale, mean_s=options.mean_s)
    traces = ["mild"] if options.quick else list(TRACES)
    bounds = (0, 1, 2, 3, 5, 7) if options.more else (0, 1, 3, 7)
    cases = [Case(trace, bound) for bound, trace in itertools.product(sorted(bounds, reverse=True), traces)]  # the quick ones first
    if options.only:
        known = {Case(trace, bound).name: Case(trace, bound) for trace in TRACES for bound in range(17)}
        if strange := [name for name in options.only if name not in known]:
            parser.error(f"no case {strange[0]!r}; they are called {', '.join(list(known)[:4])} …")
        cases = [known[name] for name in options.only]
    name = ("bound-quick" if options.quick else "bound") + (f"-{options.mean_s:g}s" if options.mean_s is not None else "")
    directory = options.results or Path("runs") / name
    directory.mkdir(parents=True, exist_ok=True)
    results: dict[Case, Measured] = {}
    for case in cases:
        path = directory / f"{case.name}.json"
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(asdict(measure(case, scale, console))))
            partial.rename(path)
        results[case] = Measured(**json.loads(path.read_text()))
    rows = show(results, scale, console)
    found = show_policies(scale, traces, console)
    console.print(versions(["httpx", "aiohttp", "uvloop", "numpy"]), highlight=False, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"cases": rows, "policies": found, "quick": options.quick}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
