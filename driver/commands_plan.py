"""The command line's part for a batch's plan."""

import collections
import json
from typing import Annotated, Any

import typer
from rich.table import Table

from driver.terminal import RunName, Service, Url, out

MOST_SAMPLES = 12  # named in a line of the table


def explain(
    batch_id: Annotated[int, typer.Argument(min=0, help="a batch that no checkpoint holds yet: the last ones")],
    url: Url = None,
    run: RunName = None,
    rows: Annotated[bool, typer.Option("--rows", help="a line for every row")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """The plan of a batch: which rank has what in which micro-batch, how even the work is, and what bounds it."""
    service = Service(url)
    reply = service.call("GET", f"/v1/runs/{service.run(run)}/batches/{batch_id}/plan")
    if as_json:
        out.print_json(json.dumps(reply))
        return
    terms = reply["terms"]
    out.print(
        f"batch {reply['batch_id']} ({reply['state']}): {reply['samples']} samples, {reply['rows']} rows, "
        f"{reply['rows_without_advantage']} of them without an advantage and left out; up to {terms['budget_tokens']} tokens a micro-batch",
        highlight=False,
        soft_wrap=True,
    )
    for number, mini in enumerate(reply["mini_batches"]):
        out.print(
            f"mini-batch {number}: {mini['rows']} rows, {mini['tokens']} tokens; ranks wait for {mini['imbalance']:.4f} of their mean work",
            highlight=False,
        )
        out.print(_rows(mini) if rows else _micro_batches(mini))
        for sentence in mini["binds"]:
            out.print(f"  {sentence}", highlight=False, markup=False, soft_wrap=True)


def _micro_batches(mini: dict[str, Any]) -> Table:
    """A line for each micro-batch, and one for each rank. Samples are named by uid, with how many of their rows are there."""
    table = Table(box=None)
    for column in ("rank", "micro-batch", "rows", "tokens", "of budget", "work", "of mean", "samples"):
        table.add_column(column, justify="left" if column == "samples" else "right")
    for rank in mini["ranks"]:
        facts = (rank["rows"], rank["tokens"], "", f"{rank['work']:.1f}", f"{rank['of_mean']:.4f}", "")
        table.add_row(str(rank["rank"]), "all", *map(str, facts), style="bold")
        for number, micro in enumerate(rank["micro_batches"]):
            facts = (len(micro["rows"]), micro["tokens"], f"{micro['of_budget']:.0%}", f"{micro['work']:.1f}", "", _samples(micro["rows"]))
            table.add_row("", str(number), *map(str, facts))
    return table


def _rows(mini: dict[str, Any]) -> Table:
    table = Table(box=None)
    for column in ("rank", "micro-batch", "row", "sample", "tokens", "work"):
        table.add_column(column, justify="left" if column == "row" else "right")
    for rank in mini["ranks"]:
        for number, micro in enumerate(rank["micro_batches"]):
            for row in micro["rows"]:
                table.add_row(str(rank["rank"]), str(number), row["row_id"], str(row["uid"]), str(row["tokens"]), f"{row['work']:.1f}")
    return table


def _samples(rows: list[dict[str, Any]]) -> str:
    counted = sorted(collections.Counter(row["uid"] for row in rows).items())
    named = [f"{uid}×{count}" if count > 1 else str(uid) for uid, count in counted[:MOST_SAMPLES]]
    return ", ".join(named) + (f" and {len(counted) - MOST_SAMPLES} more" if len(counted) > MOST_SAMPLES else "")
