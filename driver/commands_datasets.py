"""The command line's part for datasets: what each gives, more rows, no more rows, another share. All over REST, as `curl` would do it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from driver.terminal import RunName, Service, Url, fail, out

Mapping = Annotated[list[str] | None, typer.Option("--map", help="field mapping: prompt=question,answer=label")]


def datasets(
    url: Url = None,
    run: RunName = None,
    changes: Annotated[bool, typer.Option("--changes", help="who changed the shares, and from which sample on")] = False,
) -> None:
    """The datasets of a run: rows, where each walk is, planned and real shares, what the filter took."""
    service = Service(url)
    base = f"/v1/runs/{service.run(run)}"
    if changes:
        out.print(changes_table(service.call("GET", f"{base}/mixes")))
    else:
        out.print(datasets_table(service.call("GET", f"{base}/datasets")))


def append(
    file: Annotated[Path, typer.Argument(help="JSONL or Parquet")],
    dataset_id: Annotated[str, typer.Argument(help="an open dataset: headrace datasets lists them")],
    url: Url = None,
    run: RunName = None,
    mapping: Mapping = None,
    key: Annotated[str | None, typer.Option(help="idempotency key: the same key again adds nothing")] = None,
) -> None:
    """Append rows to an open dataset, while the run goes on."""
    if not file.is_file():
        fail(f"there is no file {file}")
    service = Service(url)
    headers = {"content-type": "application/octet-stream"} | ({"idempotency-key": key} if key else {})
    given = mapping_json(mapping)
    params = {} if given is None else {"mapping": given}
    path = f"/v1/runs/{service.run(run)}/datasets/{dataset_id}/rows"
    with file.open("rb") as body:
        reply = service.call("POST", path, params=params, headers=headers, content=body)
    out.print(f"dataset {dataset_id}: {reply['rows_added']} rows added, {reply['rows']} in all", highlight=False)


def close(dataset_id: str, url: Url = None, run: RunName = None) -> None:
    """No more rows for a dataset: its next pass may begin, and the run may end."""
    service = Service(url)
    service.call("POST", f"/v1/runs/{service.run(run)}/datasets/{dataset_id}/close")
    out.print(f"dataset {dataset_id} is closed", highlight=False)


def mix(
    dataset_id: str,
    url: Url = None,
    run: RunName = None,
    weight: Annotated[float | None, typer.Option(help="share of the samples against the other datasets' weights; 0: none")] = None,
    priority: Annotated[int | None, typer.Option(help="while a dataset of higher priority has rows, it gives all samples")] = None,
    epochs: Annotated[str | None, typer.Option(help="passes over it, or forever")] = None,
) -> None:
    """Give a dataset another share of the samples, from the next one on."""
    body: dict[str, Any] = {}
    if weight is not None:
        body["weight"] = str(weight)  # the service reads it as a number, and says what is wrong with inf and nan
    if priority is not None:
        body["priority"] = priority
    if epochs is not None:
        if epochs != "forever" and not epochs.isdecimal():
            fail(f"--epochs {epochs}: write a number of passes, or forever")
        body["epochs"] = None if epochs == "forever" else int(epochs)
    service = Service(url)
    reply = service.call("PATCH", f"/v1/runs/{service.run(run)}/datasets/{dataset_id}", json=body)
    out.print(datasets_table([reply]))


def mapping_json(options: list[str] | None) -> str | None:
    """`prompt=question,answer=label`, in one option or several, as the service takes it."""
    mapping: dict[str, str] = {}
    for pair in (pair for option in options or () for pair in option.split(",")):
        target, field = (part.strip() for part in (pair.partition("=")[0], pair.partition("=")[2]))
        if not target or not field:
            fail(f"--map {pair!r}: write it as TARGET=FIELD, such as prompt=question", 2)
        if target in mapping:
            fail(f"--map names {target} twice, as {mapping[target]!r} and as {field!r}: leave one", 2)
        mapping[target] = field
    return json.dumps(mapping) if mapping else None


def datasets_table(datasets: list[dict[str, Any]]) -> Table:
    table = Table("dataset", "name", box=None, pad_edge=False)
    for title in ("rows", "walked", "pass", "weight", "priority", "planned", "real", "samples", "filtered", "skipped", "left out", "right"):
        table.add_column(title, justify="right")
    for each in datasets:
        table.add_row(
            each["dataset_id"],
            escape(each["name"]) + ("" if each["closed"] else " (open)"),
            f"{each['rows']:,}",
            f"{each['rows_walked']:,}",
            f"{each['pass']} of {each['epochs'] or 'ever'}",
            f"{each['weight']:.4g}",
            str(each["priority"]),
            _share(each["share_planned"]),
            _share(each["share_real"]),
            f"{each['samples']:,}",
            f"{each['filtered_samples']:,}",
            f"{each['skipped_rows']:,}",
            f"{each['left_out_rows']:,}",
            _share(each["recent"]["pass_rate"]),
        )
    return table


def changes_table(changes: list[dict[str, Any]]) -> Table:
    table = Table("when", "by", "from sample", "version", "what", "why", box=None, pad_edge=False)
    for each in changes:
        what = "; ".join(f"{dataset_id} {_words(change) or 'arrived'}" for dataset_id, change in each["changes"].items())
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["time"]))
        table.add_row(when, each["by"], str(each["from_uid"]), str(each["trained_version"]), what, escape(each["why"]))
    return table


def _words(change: dict[str, Any]) -> str:
    return ", ".join(f"{name} {'forever' if value is None else f'{value:.4g}'}" for name, value in change.items())


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
