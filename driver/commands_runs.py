"""The command line: several runs on one service."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from driver.config import ConfigError, read_override
from driver.terminal import Service, Sets, Url, fail, out

COLUMNS = ("run_id", "state", "batches", "trained_version", "reward_mean", "in_flight")


def runs(url: Url = None) -> None:
    """The runs of a service."""
    table = Table(*COLUMNS, "", box=None)
    for run in Service(url).call("GET", "/v1/runs"):
        cells = ("" if run.get(column) is None else run[column] for column in COLUMNS)
        words = run.get("reason") or run.get("failure") or run.get("ended") or ""
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells), words)
    out.print(table)


def begin(
    run_id: Annotated[str, typer.Argument(help="the new run's name")],
    origin: Annotated[str | None, typer.Option("--from", help="the run to begin from; default: the only one")] = None,
    overrides: Sets = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="cancel the other run, and go on with its engines and reward service")
    ] = False,
    datasets: Annotated[bool, typer.Option(help="copy the other run's datasets")] = True,
    url: Url = None,
) -> None:
    """Begin a run from another one of this service, with some keys changed."""
    service = Service(url)
    changes: dict[str, Any] = {}
    for override in overrides or []:
        try:
            key, value = read_override(override)
        except ConfigError as error:
            fail(str(error), 2)
        changes[key] = value
    body = {
        "run_id": run_id,
        "from": service.run(origin),
        "set": changes,
        "engines": "take_over" if take_over else "own",
        "datasets": datasets,
    }
    reply = service.call("POST", "/v1/runs", json=body)
    out.print(f"run {reply['run_id']}: {reply['state']}", highlight=False)
