"""`headrace bias`: the shares of what was sampled and of what was trained, as tables."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from driver.bias import DIMENSIONS
from driver.terminal import RunName, Service, Url, out

HEADINGS = {"length": "answer of", "task_type": "task type", "dataset": "dataset"}


def bias(
    url: Url = None,
    run: RunName = None,
    version: Annotated[int | None, typer.Option(min=0, help="the window of this version_tag; default: the newest closed one")] = None,
    total: Annotated[bool, typer.Option("--total", help="all versions together, not the newest window")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Is what is trained what was sampled? By length, task type and dataset."""
    service = Service(url)
    params = {} if version is None else {"version": version}
    facts = service.call("GET", f"/v1/runs/{service.run(run)}/bias", params=params)
    if as_json:
        out.print_json(json.dumps(facts))
    else:
        show(facts, total)


def show(facts: dict[str, Any], total: bool) -> None:
    """The tables of one window, and what it alarms about."""
    window = facts["total"] if total else facts["window"]
    if window is None:
        versions = facts["window_versions"]
        more = "" if total else "; --total shows those that are still open"
        out.print(f"no window of {versions} versions is closed yet: a sample of the first still lives, or none was registered{more}")
        return
    first, last = window["versions"]
    lost = ", ".join(f"{count} × {reason}" for reason, count in window["lost_to"].items()) or "nothing"
    out.print(
        f"versions {first} to {last}: {window['sampled']} trajectories sampled, {window['trained']} trained; lost to {lost}; "
        f"apart from these {window['filtered']} filtered and {window['cut_by_the_end']} cut off by the end of the run",
        highlight=False,
        markup=False,
    )
    for dimension in DIMENSIONS:
        table = Table(HEADINGS[dimension], "sampled", "trained", "gap", "chance", "reward", box=None)
        for row in window[dimension]:
            shares = (f"{row['share_sampled']:.1%}", f"{row['share_trained']:.1%}", f"{row['gap']:+.1%}")
            reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
            table.add_row(escape(row["name"]), *shares, f"{row['z']:+.1f} σ", reward)
        out.print(table)
    for alarm in facts["alarms"]:
        out.print(f"[red]alarm[/red] {escape(alarm)}", highlight=False)
