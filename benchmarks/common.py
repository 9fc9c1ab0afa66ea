"""What every benchmark shares: its flags, its versions, its aims, and how it prints and writes figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OPERATORS = {">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b}
Aim = tuple[str, float]


def flags(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has; it may add its own."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="ends within 50 s; rougher figures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures, the aims and which were met")
    return parser


def arguments(description: str | None) -> argparse.Namespace:
    return flags(description).parse_args()


def report(title: str, figures: dict[str, float], aims: dict[str, Aim], options: argparse.Namespace, packages: Sequence[str]) -> int:
    """Print a table; write the JSON. Aims are reported, never enforced: a noisy machine must not fail a build."""
    met = {name: bool(OPERATORS[operator](figures[name], value)) for name, (operator, value) in aims.items()}
    console = Console()
    table = Table(title=title + (" (quick)" if options.quick else ""))
    for column in ("figure", "value", "aim", "met"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, value in figures.items():
        aim = f"{aims[name][0]} {aims[name][1]:g}" if name in aims else ""
        table.add_row(name, f"{value:.4g}", aim, "" if name not in met else "yes" if met[name] else "no")
    console.print(table)
    console.print(versions(packages), highlight=False, soft_wrap=True)
    if options.json is not None:
        text = json.dumps({"figures": figures, "aims": {n: list(a) for n, a in aims.items()}, "met": met, "quick": options.quick}, indent=1)
        options.json.write_text(text + "\n")
    return 0


def versions(packages: Sequence[str]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} absent")
    return f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; " + ", ".join(found)


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self._began


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())
