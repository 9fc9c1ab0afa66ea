"""The demo, as a user would do it: start the service, submit a dataset over REST, watch, and read the result.

    python examples/sort_digits/demo.py [--seed 0] [--batches 110] [--output runs/demo]

A 427,264-parameter Qwen3 that answers with the right digits in a random order learns to sort them. Engine and trainer work at the same
time; no sample that is trained is older than the bound. It ends by itself with demo_summary.json, a picture of the curves, and a
checkpoint that `transformers` loads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from driver.cli import Service
from driver.config import load_config
from driver.live import watch
from driver.report import plot, summarise

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=110)
    help_ = "the run's folder; an earlier run there is removed, and begun anew (default: runs/demo)"
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help=help_)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="override one key of config.yaml")
    arguments = parser.parse_args()
    console = Console()
    try:
        config = load_config(HERE / "config.yaml", settings(arguments))
        make_room(arguments.output)
    except ValueError as error:
        console.print(f"[red]error[/red] {error}", highlight=False, soft_wrap=True)
        return 2
    trainer, engines = config.trainer, config.rollout.engines
    ranks = trainer.tp * trainer.pp * trainer.cp * trainer.dp
    parts = f"{config.rollout.engine} engines: {engines}, trainer ranks: {ranks}, and a reward pool"
    console.print(f"[bold]headrace up[/bold] {HERE.name}/config.yaml ({parts})", highlight=False)
    service_process = start(arguments)
    try:
        service = Service(wait_for_service(service_process, arguments.output))
        with (HERE / "data.jsonl").open("rb") as body:
            params = {"name": "data.jsonl", "close": "true"}
            reply = service.call("POST", "/v1/runs/sort-digits/datasets", params=params, content=body)
        console.print(f"[bold]headrace submit[/bold] data.jsonl: {reply['rows']} rows")
        status = watch(service, "sort-digits", console)
        staleness = service.call("GET", "/v1/runs/sort-digits/staleness")
        service.call("POST", "/v1/shutdown")
        service_process.wait(60)
    except KeyboardInterrupt:
        console.print("ending in order; the same command starts anew, `headrace up` with this run_dir goes on")
        return 130
    finally:
        if service_process.poll() is None:
            service_process.send_signal(signal.SIGTERM)
            service_process.wait(90)
    if status["state"] != "finished":
        console.print(f"[red]the run is {status['state']}[/red]: {status['failure']}; see {arguments.output}/logs", highlight=False)
        return 1
    finish(console, arguments, status, staleness)
    return 0


def make_room(output: Path) -> None:
    """Remove an earlier run. Raises ValueError for a folder that holds anything else."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output} is a file; name a folder")
    if output.is_dir() and any(output.iterdir()) and not any((output / name).exists() for name in ("ledger.sqlite", "ledger.lock")):
        raise ValueError(f"--output {output} is a folder with something else than a run in it; name another")
    shutil.rmtree(output, ignore_errors=True)


def settings(arguments: argparse.Namespace) -> list[str]:
    return [
        f"seed={arguments.seed}",
        f"stop.batches={arguments.batches}",
        f"run_dir={arguments.output}",
        f"store.directory=/dev/shm/headrace-demo-{time.time_ns():x}",
        "service.port=0",
        *arguments.overrides,
    ]


def start(arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(HERE / "config.yaml"), "--quiet"]
    return subprocess.Popen([*argv, *(part for setting in settings(arguments) for part in ("--set", setting))])


def wait_for_service(process: subprocess.Popen[bytes], output: Path) -> str:
    path = output / "service.json"
    for _ in range(600):
        if path.exists():
            return str(json.loads(path.read_text())["url"])
        if process.poll() is not None:
            raise SystemExit(process.returncode)
        time.sleep(0.05)
    raise SystemExit(f"the service did not come up within 30 s; see {output}/logs")


def finish(console: Console, arguments: argparse.Namespace, status: dict, staleness: dict) -> None:
    counted = status["trajectories"]
    summary = summarise(arguments.output, staleness_bound=staleness["bound"], trained=counted["trained"], discarded=counted["discarded"])
    if summary["logprob_gap_max"] is not None:  # of the batches' rows; the pushes' fixed sequence may be worse
        summary["logprob_gap_max"] = max(summary["logprob_gap_max"], status["logprob_gap_max"])
    summary |= {"seed": arguments.seed, "checkpoint": status["checkpoint"]}
    for path in (Path("demo_summary.json"), arguments.output / "demo_summary.json"):
        path.write_text(json.dumps(summary, indent=2) + "\n")
    picture = arguments.output / "curves.png"
    plot(arguments.output, picture, staleness["bound"])
    table = Table(title="what happened", show_header=False)
    for name, value in summary.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    console.print(table)
    console.print(
        f"curves      {picture}\ncheckpoint  {status['checkpoint']}/hf\nsummary     demo_summary.json", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    sys.exit(main())
