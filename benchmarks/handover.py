"""A batch of 512 MB from one writer to four reading ranks: by Headrace's store, and by what others use.

Each way runs in processes of its own (`handover_arm.py`), in an environment that has it, one way at a time and in turn: a first hand-over
warms up, the following ones are measured, from the writer's first call until the last rank has summed every byte of its rows, a quarter.
The lower bound is one copy into memory that all have mapped, and a word. Beside each hand-over the same process copies the same bytes
from memory to memory, which is what `memcpy` means here. Figures are medians.

    python -m benchmarks.handover --peers DIR      # makes DIR/ray, DIR/transferqueue, DIR/mooncake where they are missing, and uses them
    python -m benchmarks.handover --quick          # 64 MB, without peers unless DIR is given and has them
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import Aim, flags, median, report

ROOT = Path(__file__).parents[1]
ARM = Path(__file__).with_name("handover_arm.py")
OURS = ("embedded", "embedded-rows", "over-mooncake")
PEERS = ("pickle", "ray", "transferqueue", "mooncake")
PACKAGES = {
    "ray": ("ray", "numpy", "psutil"),
    "transferqueue": ("transferqueue==0.1.11", "numpy", "psutil"),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy", "psutil"),  # and Debian's libibverbs1
}
LIMIT_S = 900.0
Facts = dict[str, float]

AIMS: dict[str, Aim] = {
    "embedded: put over memcpy": (">=", 0.6),
    "embedded: open, ms": ("<=", 1.0),
    "embedded: end to end, times the best peer": (">=", 5.0),
}


def made(peers: Path | None) -> dict[str, Path]:
    """The interpreter of each way that can run here; environments that are missing in `peers` are made."""
    found = dict.fromkeys(("memory", *OURS, "pickle"), Path(sys.executable))
    if importlib.util.find_spec("mooncake") is None:
        del found["over-mooncake"]
        print("over-mooncake is absent: `make mooncake` installs it", flush=True)
    for name, packages in PACKAGES.items() if peers is not None else ():
        assert peers is not None
        python = peers.absolute() / name / "bin" / "python"
        if not python.exists():
            print(f"making {python.parents[1]} with {', '.join(packages)}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
        found[name] = python
    return found


def handed_over(name: str, python: Path, megabytes: int, times: int, directory: Path) -> list[Facts] | str:
    """What one start of this way measured, or why it did not."""
    argv = [str(python), "-P", str(ARM), name, str(megabytes), str(times), str(directory)]
    env = {**os.environ, "PYTHONPATH": str(ROOT) if name in OURS else "", "OMP_NUM_THREADS": "1", "MC_LOG_LEVEL": "ERROR"}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    try:
        said, complained = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.communicate()
        return f"did not end within {LIMIT_S:g} s"
    facts = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    if process.returncode != 0 and len(facts) < times:
        return (complained.strip().splitlines() or [f"ended with status {process.returncode}"])[-1][:200]
    return facts


def shown(measured: dict[str, list[Facts]], size_bytes: float) -> Table:
    table = Table(title=f"{size_bytes / 1e6:.0f} MB from one writer to 4 ranks")
    for column in ("way", "memcpy, s", "put, s", "put over memcpy", "open, ms", "in hand, s", "read, s", "GB/s", "CPU s/GB", "hand-overs"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, facts in measured.items():
        of = {key: median([fact[key] for fact in facts]) for key in facts[0]}
        ratio = median([fact["copy_s"] / fact["put_s"] for fact in facts])
        table.add_row(
            name + (" (lower bound)" if name == "memory" else ""),
            f"{of['copy_s']:.3f}",
            f"{of['put_s']:.3f}",
            f"{ratio:.2f}",
            f"{of['open_s'] * 1e3:.3g}",
            f"{of['ready_s']:.3f}",
            f"{of['read_s']:.3f}",
            f"{size_bytes / of['read_s'] / 1e9:.2f}",
            f"{of['cpu_s'] / size_bytes * 1e9:.2f}",
            str(len(facts)),
        )
    return table


def figures_of(measured: dict[str, list[Facts]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, facts in measured.items():
        figures[f"{name}: put over memcpy"] = median([fact["copy_s"] / fact["put_s"] for fact in facts])
        figures[f"{name}: open, ms"] = median([fact["open_s"] * 1e3 for fact in facts])
        figures[f"{name}: end to end, GB/s"] = median([fact["bytes"] / fact["read_s"] / 1e9 for fact in facts])
        figures[f"{name}: CPU s/GB"] = median([fact["cpu_s"] / fact["bytes"] * 1e9 for fact in facts])
    rates = [figures[f"{name}: end to end, GB/s"] for name in PEERS if name in measured]
    figures["embedded: end to end, times the best peer"] = figures["embedded: end to end, GB/s"] / max(rates) if rates else float("nan")
    return figures


def main() -> int:
    flagged = flags(__doc__)
    flagged.add_argument("--peers", type=Path, metavar="DIR", help="environments of the peers; those that are missing are made")
    flagged.add_argument("--directory", type=Path, default=Path("/dev/shm"), help="where the embedded store lies")
    flagged.add_argument("--rounds", type=int, default=None, help="starts of each way (default 5; quick: 2)")
    flagged.add_argument("--only", nargs="+", metavar="WAY", help="these ways alone, and the embedded one")
    options = flagged.parse_args()
    megabytes, rounds, times = (64, 2, 2) if options.quick else (512, 5, 2)
    ways = {name: python for name, python in made(options.peers).items() if not options.only or name in (*options.only, "embedded")}
    for name in PACKAGES:
        if name not in ways and not options.only:
            print(f"{name} is absent: `python -m benchmarks.handover --peers DIR` makes its environment", flush=True)
    measured: dict[str, list[Facts]] = defaultdict(list)
    for turn in range(options.rounds or rounds):
        for name, python in list(ways.items()):
            began = time.monotonic()
            found = handed_over(name, python, megabytes, times, options.directory)
            if isinstance(found, str):
                print(f"{name} did not run: {found}", flush=True)
                if not measured[name]:
                    del ways[name], measured[name]
                continue
            measured[name] += found
            seconds, load = time.monotonic() - began, os.getloadavg()[0]
            print(f"round {turn + 1}: {name} in {seconds:.0f} s, load {load:.1f}", file=sys.stderr, flush=True)
    Console(width=140).print(shown(measured, measured["embedded"][0]["bytes"]))
    figures = figures_of(measured)
    return report("handover", figures, {name: aim for name, aim in AIMS.items() if name in figures}, options, ["numpy", "psutil"])


if __name__ == "__main__":
    raise SystemExit(main())
