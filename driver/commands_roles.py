"""`headrace scale`, `headrace plan`, `headrace streams`: roles from the command line."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from driver.config import ConfigError, load_config
from driver.terminal import RunName, Service, Sets, Url, fail, out

if TYPE_CHECKING:
    from driver.planner import Plan


def scale(
    role: Annotated[str, typer.Argument(help="rollout, reward, or a role of your own")],
    count: Annotated[int, typer.Argument(min=0, help="how many from now on")],
    url: Url = None,
    run: RunName = None,
) -> None:
    """More or fewer instances of a role while the run goes on; nothing in flight is lost. It holds over restarts."""
    client = Service(url)
    reply = client.call("POST", f"/v1/runs/{client.run(run)}/scale", json={"role": role, "count": count})
    out.print(reply["words"], highlight=False, soft_wrap=True)


def streams(url: Url = None, run: RunName = None) -> None:
    """The streams of a run: who writes, who reads, what waits."""
    client = Service(url)
    table = Table("stream", "kind", "from", "to", "waiting", "newest", box=None)
    for one in client.call("GET", f"/v1/runs/{client.run(run)}/streams"):
        readers = one.get("readers", {})
        waiting = " ".join(f"{name} {reader['waiting']}" for name, reader in readers.items())
        newest = json.dumps(one["value"]) if one.get("value") is not None else ""
        table.add_row(one["stream"], one["kind"], one["publisher"], " ".join(one["subscribers"]), waiting, newest)
    out.print(table, highlight=False)


def plan(config: Annotated[Path, typer.Argument(help="the run's YAML")], overrides: Sets = None) -> None:
    """What a configuration would start and where: roles, streams, placement, warnings. Nothing is started. Status 2: it can not be."""
    from driver.machine import on_disk
    from driver.planned import plan_of
    from driver.planner import PlanError

    try:
        checked = load_config(config, overrides)
        made = plan_of(checked)
    except (ConfigError, PlanError) as error:
        fail(str(error), 2)
    show(made, out)
    for finding in on_disk(checked):
        out.print(f"[yellow]warning[/yellow] {finding.words}", highlight=False, soft_wrap=True)


def show(plan: "Plan", out: Console) -> None:
    roles = Table("role", "instances", "reads", "writes", "memory each", "GPUs each", "where", box=None)
    for role in plan.roles:
        placed = sorted({placement.host for placement in plan.placements if placement.role.name == role.name})
        mark = role.resources.host_memory_bytes
        roles.add_row(
            role.name,
            str(role.instances) if role.process is not None else "",
            " ".join(each.stream for each in role.subscribes),
            " ".join(each.name for each in role.publishes if any(each.name == route.stream.name for route in plan.routes)),
            "" if role.process is None else "no mark" if mark is None else f"{mark / 2**20:,.0f} MiB",
            str(role.resources.devices or ""),
            " ".join(placed) or ("the driver" if role.process is None else ""),
        )
    out.print(roles, highlight=False)
    streams = Table("stream", "kind", "from", "to", "way", box=None)
    for route in plan.routes:
        streams.add_row(route.stream.name, route.stream.kind, route.publisher, " ".join(route.subscribers), route.way)
    out.print()
    out.print(streams, highlight=False)
    for warning in plan.warnings:
        out.print(f"[yellow]warning[/yellow] {warning}", highlight=False, soft_wrap=True)
