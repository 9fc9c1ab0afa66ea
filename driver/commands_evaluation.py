"""The command line: what the held-out set says of each version."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from driver.terminal import RunName, Service, Url, out

COLUMNS = ("version", "epoch", "answers", "reward_mean", "correct_mean", "response_tokens_mean", "one_version", "seconds")


def evaluations(url: Url = None, run: RunName = None, as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False) -> None:
    """The held-out set's reward at each evaluated version."""
    service = Service(url)
    facts = service.call("GET", f"/v1/runs/{service.run(run)}/evaluations")
    if as_json:
        out.print_json(json.dumps(facts))
        return
    table = Table(*(column.replace("_", " ") for column in COLUMNS), "failed", box=None)
    for result in facts["results"]:
        failed = sum(result["failed"].values())
        table.add_row(*(_cell(result[column]) for column in COLUMNS), str(failed) if failed else "")
    out.print(table)
    if facts["running"]:
        out.print(f"version {facts['running']['version']}: {facts['running']['done']} of {facts['running']['of']} answers", highlight=False)
    if facts["alarm"]:
        out.print(f"[red]alarm[/red] {facts['alarm']}", highlight=False)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def evaluate(url: Url = None, run: RunName = None) -> None:
    """Evaluate the newest version now, due or not."""
    service = Service(url)
    reply = service.call("POST", f"/v1/runs/{service.run(run)}/evaluate")
    out.print(
        f"version {reply['version']} of run {reply['run_id']} is evaluated next; headrace evaluations shows the result", highlight=False
    )
