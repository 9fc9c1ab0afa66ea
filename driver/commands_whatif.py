"""The command line's part for the what-if model, and for why and where time goes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from driver.config import ConfigError, load_config
from driver.settings import RunConfig
from driver.terminal import RunName, Service, Sets, Url, fail, out
from driver.whatif import BOUNDS, Facts, what_if
from driver.whatif_facts import Asked, NothingKnown, answer, bounds_with, of_config, read_lengths


def whatif(
    config: Annotated[Path | None, typer.Argument(help="a run's YAML; without it a run of the service is asked about")] = None,
    url: Url = None,
    run: RunName = None,
    overrides: Sets = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="lengths of answers: CSV with a column output_tokens, JSONL with such a field, or numbers"),
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, max=100_000, help="C: requests that all engines decode at once")] = None,
    samples: Annotated[int | None, typer.Option(min=1, max=10_000, help="P: samples of a batch")] = None,
    n: Annotated[int | None, typer.Option("--n", min=1, max=1_000, help="trajectories of a sample")] = None,
    bounds: Annotated[str, typer.Option("--bounds", help="which S to try")] = ",".join(map(str, BOUNDS)),
    seed: int = 0,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Which fraction of min(C/E[L], B/tau) each S reaches: by a model of the run on lengths seen so far, or on a trace."""
    wanted = _bounds(bounds)
    if config is None and trace is None:
        service = Service(url)
        if slots or samples or n or overrides:
            fail("--slots, --samples, --n and --set are for a configuration or a trace: headrace whatif CONFIG.yaml, or --trace FILE")
        reply = service.call("GET", f"/v1/runs/{service.run(run)}/whatif", params={"s": wanted})
    else:
        try:
            asked, bound = _asked(config, overrides, trace, slots, samples, n)
        except (ConfigError, NothingKnown, ValueError) as error:
            fail(str(error), 2)
        found = what_if(asked.facts, bounds_with(bound, wanted), seed=seed)
        reply = answer(asked, found, bound)
    if as_json:
        out.print_json(json.dumps(reply))
    else:
        show(reply)


def why(
    url: Url = None,
    run: RunName = None,
    history: Annotated[bool, typer.Option("--history", help="the newest waits, and the seconds lost to each kind of reason")] = False,
    last: Annotated[int, typer.Option(min=1, max=300, help="with --history: so many waits")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """The constraint that binds now, in a sentence; then the one of each side that waits."""
    service = Service(url)
    path = f"/v1/runs/{service.run(run)}/why"
    reply = service.call("GET", f"{path}/history", params={"last": last}) if history else service.call("GET", path)
    if as_json:
        out.print_json(json.dumps(reply))
    elif history:
        show_history(reply)
    else:
        out.print(reply["sentence"], highlight=False)
        for side, wait in reply["waits"].items():
            out.print(f"  {side} {wait['seconds']:.1f} s: {wait['reason']}", highlight=False, soft_wrap=True)


def say_whatif(config: RunConfig, where: Console) -> None:
    """One line after `config check`, where lengths are known."""
    try:
        asked = of_config(config)
        found = what_if(asked.facts, bounds_with(config.staleness.bound))
    except ValueError:
        return
    reply = answer(asked, found, config.staleness.bound)
    where.print(f"# {reply['sentence']} (by the model, with {asked.source})", highlight=False, soft_wrap=True)


def show(reply: dict[str, Any]) -> None:
    table = Table(box=None)
    for column in ("S", "of the bound", "staleness: mean", "max", "batch held"):
        table.add_column(column, justify="right")
    for reached in reply["reached"]:
        here = reached["bound"] == reply["bound"]
        row = (
            str(reached["bound"]),
            f"{reached['fraction']:.2f}",
            f"{reached['staleness_mean']:.2f}",
            str(reached["staleness_max"]),
            f"{reached['held']:.0%}",
        )
        table.add_row(*row, style="bold" if here else None)
    out.print(f"{reply['slots']} slots, batches of {reply['batch_trajectories']} trajectories; {reply['source']}", highlight=False)
    out.print(table)
    out.print(reply["sentence"], highlight=False)


def show_history(reply: dict[str, Any]) -> None:
    waits = Table(box=None)
    for column in ("ago", "for", "times", "side", "kind", "why"):
        waits.add_column(column, justify="right" if column in ("ago", "for", "times") else "left")
    newest = max((item["ended_at"] or item["began_at"] + item["seconds"] for item in reply["items"]), default=0.0)
    for item in reply["items"]:
        ago = f"{newest - item['began_at']:.1f} s"
        waits.add_row(ago, f"{item['seconds']:.1f} s", str(item["times"]), item["side"], item["kind"], item["reason"])
    out.print(waits)
    for side, kinds in reply["seconds"].items():
        out.print(f"{side}: " + ", ".join(f"{seconds:.1f} s {kind}" for kind, seconds in kinds.items()), highlight=False, soft_wrap=True)


def _bounds(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        fail(f"--bounds {text!r}: write them as 1,2,3", 2)


def _asked(
    config: Path | None, overrides: list[str] | None, trace: Path | None, slots: int | None, samples: int | None, n: int | None
) -> tuple[Asked, int]:
    """Facts and the bound they are for. Without a configuration: the trace, 256 slots, and batches as large as the slots."""
    if config is not None:
        checked = load_config(config, overrides)
        asked, bound = of_config(checked, trace), checked.staleness.bound
    else:
        assert trace is not None
        tokens = read_lengths(trace)
        per_sample, at_once = n or 8, slots or 256
        asked = Asked(
            Facts(at_once, samples or max(1, at_once // per_sample), per_sample, tuple(tokens)),
            f"{len(tokens)} answers of {trace.name}; training as fast as generation",
        )
        bound = 2
    facts = asked.facts
    return replace(asked, facts=replace(facts, slots=slots or facts.slots, samples=samples or facts.samples, n=n or facts.n)), bound
