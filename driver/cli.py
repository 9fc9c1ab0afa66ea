"""The command line: `headrace up`, then everything else over REST, as `curl` would do it.

A command finds its service by `--url`, by HEADRACE_URL, or by the newest service.json under ./runs. Errors are one sentence on
standard error and exit status 1; a bad configuration is 2.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.markup import escape
from rich.table import Table

from driver import (
    commands_bias,
    commands_datasets,
    commands_engines,
    commands_evaluation,
    commands_plan,
    commands_roles,
    commands_runs,
    commands_whatif,
    selfcheck,
)
from driver.commands_ledger import ledger_app
from driver.config import ConfigError, load_config
from driver.doctor import examine
from driver.ended import ended_in
from driver.keys import keys, section_at
from driver.machine import on_disk
from driver.settings import SECRETS, RunConfig
from driver.terminal import RunName, Service, Sets, Url, err, fail, out

ANSWER_S = 120.0  # a start on a crowded machine; a process that ends is noticed at once

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Asynchronous reinforcement learning of language models. A service with a token: put it into HEADRACE_TOKEN.",
)
config_app = typer.Typer(no_args_is_help=True, help="Look at configuration files.")
app.add_typer(config_app, name="config")
selfcheck_app = typer.Typer(no_args_is_help=True, help="Does what is yours keep its contract?")
app.add_typer(selfcheck_app, name="selfcheck")
app.add_typer(ledger_app, name="ledger")


# ---- starting and ending -------------------------------------------------------------------------------------------------


@app.command()
def up(
    config: Annotated[Path, typer.Argument(help="the run's YAML")],
    overrides: Sets = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="return when the service answers")] = False,
    exit_when_done: Annotated[bool, typer.Option(help="end the service when the run has ended")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="log to RUN_DIR/logs/driver.log only")] = False,
) -> None:
    """Start a run on this machine: engines, reward pool, trainer ranks, store and the REST service.

    An interrupted run goes on where it was: same CONFIG, same run_id.
    """
    try:
        checked = load_config(config, overrides)
    except ConfigError as error:
        fail(str(error), 2)
    if detach:
        _detach(config, overrides or [], checked, exit_when_done)
        return
    service = import_service()
    try:
        raise typer.Exit(service.main(checked, exit_when_done=exit_when_done, quiet=quiet))
    except service.CannotStart as error:
        fail(str(error))


def import_service() -> ModuleType:
    """The service's modules. They make some 10^5 objects that never die: not counting them saves a third of the time, now and in
    every later collection."""
    gc.disable()
    try:
        from driver import up as service
    finally:
        gc.freeze()
        gc.enable()
    return service


def _detach(config: Path, overrides: list[str], checked: RunConfig, exit_when_done: bool) -> None:
    directory, run_id = checked.directory, checked.run_id
    before = directory / "service.json"
    ended = ended_in(directory)
    if (running := _serving(before)) is not None:
        fail(f"run {running['run_id']} is up already at {running['url']} (process {running['pid']}); end it first: headrace down")
    before.unlink(missing_ok=True)  # of a service that died
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(config), "--quiet", *(a for o in overrides for a in ("--set", o))]
    if exit_when_done:
        argv.append("--exit-when-done")
    log_path = directory / "logs" / "up.log"
    made = [path for path in (log_path, *log_path.parents) if not path.exists()]
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        start = log.tell()
        child = subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until:
        if before.exists():
            facts = json.loads(before.read_text())
            at = f"at {facts['url']} (process {facts['pid']})"
            if ended is None:
                out.print(f"run {facts['run_id']} is up {at}", highlight=False)
                for finding in on_disk(checked):
                    err.print(f"[yellow]warning[/yellow] {finding.words}", highlight=False, soft_wrap=True)
            else:
                out.print(ended.words(facts["run_id"]), highlight=False, soft_wrap=True)
                out.print(f"it is only shown, {at}; headrace down ends that", highlight=False, soft_wrap=True)
            return
        if child.poll() == 0 and ended is not None:
            out.print(ended.words(run_id), highlight=False, soft_wrap=True)
            return
        if child.poll() is not None:
            text = log_path.read_bytes()[start:].decode(errors="replace").strip()
            _unmake(made)
            fail(text.removeprefix("error ").replace("\n", " ") or f"the service ended with status {child.returncode}")
        time.sleep(0.05)
    fail(
        f"the service (process {child.pid}) has not answered for {ANSWER_S:.0f} s and goes on starting: ask it with headrace status, or "
        f"see {log_path} and end the process"
    )


def _serving(path: Path) -> dict[str, Any] | None:
    """What a service wrote there that still runs; None when it died, also when its process number is another's since."""
    import psutil

    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        began_s = psutil.Process(facts["pid"]).create_time()
        return facts if began_s <= path.stat().st_mtime + 1.0 and _alive(facts["pid"]) else None
    except (FileNotFoundError, ValueError, psutil.NoSuchProcess):  # ValueError: cut short by what ended the service
        return None


def _unmake(made: list[Path]) -> None:
    """What a refused start made, the innermost first; a directory in which there is something by now stays."""
    for path in made:
        try:
            path.rmdir() if path.is_dir() else path.unlink()
        except OSError:
            return


@app.command()
def down(url: Url = None, wait_s: Annotated[float, typer.Option(help="how long to wait for its end")] = 90.0) -> None:
    """End the service in order. What is applied is saved and what is ready is kept: `headrace up` goes on from there."""
    service = Service(url)
    pid = service.call("GET", "/health")["pid"]
    service.call("POST", "/v1/shutdown")
    here = urlsplit(service.url).hostname in ("127.0.0.1", "localhost", "::1")
    until = time.monotonic() + wait_s
    while here and _alive(pid):
        if time.monotonic() > until:
            fail(f"process {pid} has not ended after {wait_s:.0f} s; see its logs")
        time.sleep(0.1)
    out.print("down")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")


# ---- asking ----------------------------------------------------------------------------------------------------------------


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="JSONL or Parquet")],
    url: Url = None,
    run: RunName = None,
    keep_open: Annotated[bool, typer.Option(help="more rows will follow: the run does not end when these are walked")] = False,
    mapping: commands_datasets.Mapping = None,
    key: Annotated[str | None, typer.Option(help="idempotency key: the same key again adds nothing")] = None,
    weight: Annotated[float | None, typer.Option(help="share of the samples against the other datasets' weights; default 1")] = None,
    priority: Annotated[int | None, typer.Option(help="while a dataset of higher priority has rows, it gives all; default 0")] = None,
    epochs: Annotated[str | None, typer.Option(help="passes over it, or forever; default: stop.epochs")] = None,
) -> None:
    """Submit a dataset to a run."""
    if not file.is_file():
        fail(f"there is no file {file}")
    service = Service(url)
    name = service.run(run)
    given = {"mapping": commands_datasets.mapping_json(mapping), "weight": weight, "priority": priority, "epochs": epochs}
    params = {"name": file.name, "close": str(not keep_open).lower()} | {key: value for key, value in given.items() if value is not None}
    headers = {"content-type": "application/octet-stream"} | ({"idempotency-key": key} if key else {})
    with file.open("rb") as body:
        reply = service.call("POST", f"/v1/runs/{name}/datasets", params=params, headers=headers, content=body)
    out.print(
        f"dataset {reply['dataset_id']}: {reply['rows_added']} rows added, {reply['rows']} in all" + (", closed" if reply["closed"] else "")
    )


@app.command()
def status(
    url: Url = None,
    run: RunName = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="a live view until the run ends")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Where a run is: versions, staleness, queues, and why the slower side waits."""
    service = Service(url)
    name = service.run(run)
    if watch:
        from driver.live import watch as live_watch

        live_watch(service, name)
        return
    facts = service.call("GET", f"/v1/runs/{name}")
    if as_json:
        out.print_json(json.dumps(facts))
        return
    table = Table(show_header=False, box=None)
    for key in (
        "run_id",
        "state",
        "failure",
        "ended",
        "batches",
        "trained_version",
        "serving_version",
        "committed_version",
        "reward_mean",
        "in_flight",
    ):
        table.add_row(key, str(facts[key]))
    if facts["watermark"] is not None:
        table.add_row("watermark", f"{facts['watermark']} ({facts['watermark_binding']} binds)")
    table.add_row("staleness", f"max {facts['staleness_max']}, bound {facts['staleness_bound']}, preset {facts['staleness_preset']}")
    table.add_row("trajectories", ", ".join(f"{k} {v}" for k, v in facts["trajectories"].items() if isinstance(v, int)))
    for reason, count in facts["trajectories"]["reasons"].items():
        table.add_row("discarded", f"{count} × {reason}")
    if facts["trajectories"]["last_discard"]:
        table.add_row("last discard", facts["trajectories"]["last_discard"]["reason"])
    if facts["left_out_rows"]:
        table.add_row("rows left out", f"{facts['left_out_rows']} can never be sampled: GET /v1/runs/{name}/datasets/ID/left_out says why")
    if facts["found_at_start"]:
        table.add_row("found at start", ", ".join(f"{name} {count}" for name, count in facts["found_at_start"].items() if count))
    for alarm in facts["alarms"]:
        table.add_row("[red]alarm[/red]", alarm)
    for words in facts["engines_out_of_use"]:
        if not any(alarm.partition(": ")[2] in words for alarm in facts["alarms"]):  # said already
            table.add_row("[yellow]engines[/yellow]", escape(words))
    for side, wait in facts["why"].items():
        table.add_row(f"{side} waits", f"{wait['seconds']:.1f} s: {wait['reason']}")
    out.print(table)


@app.command()
def show(traj_uid: str, url: Url = None, run: RunName = None) -> None:
    """One trajectory with its lineage, text and rewards."""
    service = Service(url)
    out.print_json(json.dumps(service.call("GET", f"/v1/runs/{service.run(run)}/trajectories/{traj_uid}")))


@app.command("list")
def list_trajectories(
    url: Url = None,
    run: RunName = None,
    state: Annotated[str | None, typer.Option(help="running, ready, consumed or finished")] = None,
    outcome: Annotated[str | None, typer.Option(help="trained, evaluated or discarded")] = None,
    after: Annotated[str | None, typer.Option(help="go on after this one")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 20,
) -> None:
    """Trajectories in order of registration."""
    service = Service(url)
    filters = {"state": state, "outcome": outcome, "after": after, "limit": limit}
    params = {name: value for name, value in filters.items() if value is not None}
    page = service.call("GET", f"/v1/runs/{service.run(run)}/trajectories", params=params)
    table = Table(box=None)
    for column in ("traj_uid", "state", "outcome", "reward", "version_tag", "batch_id", "attempts", "reason"):
        table.add_column(column, no_wrap=column == "traj_uid", min_width=len("s0000000000000012t0003") if column == "traj_uid" else None)
    for item in page["items"]:
        table.add_row(*("" if item[c.header] is None else str(item[c.header]) for c in table.columns))
    out.print(table)
    if page["next"]:
        out.print(f"more: --after {page['next']}", highlight=False)


@app.command()
def ps(url: Url = None, run: RunName = None) -> None:
    """The processes of a run."""
    service = Service(url)
    name = service.run(run)
    table = Table(box=None)
    columns = ("role", "index", "state", "incarnation", "pid", "children", "url")
    for column in columns:
        table.add_column(column)
    for process in service.call("GET", f"/v1/runs/{name}/processes"):
        table.add_row(*(" ".join(map(str, v)) if isinstance(v := process[c], list) else str(v) for c in columns))
    out.print(table)
    for words in service.call("GET", f"/v1/runs/{name}")["engines_out_of_use"]:
        out.print(words, highlight=False, markup=False, soft_wrap=True)


@app.command()
def logs(
    role: Annotated[str, typer.Argument(help="driver, engine-0, trainer-0, reward-0 …")] = "driver",
    url: Url = None,
    run: RunName = None,
    lines: Annotated[int, typer.Option("--lines", "-n")] = 50,
) -> None:
    """The last lines of one role's log."""
    service = Service(url)
    sys.stdout.write(service.call("GET", f"/v1/runs/{service.run(run)}/logs/{role}", params={"lines": lines}))


def _act(action: str, url: str | None, run: str | None) -> None:
    service = Service(url)
    reply = service.call("POST", f"/v1/runs/{service.run(run)}/{action}")
    out.print(f"run {reply['run_id']} is {reply['state']}")


@app.command()
def pause(url: Url = None, run: RunName = None) -> None:
    """Send nothing new; what is in flight ends."""
    _act("pause", url, run)


@app.command()
def resume(url: Url = None, run: RunName = None) -> None:
    """Go on after a pause."""
    _act("resume", url, run)


@app.command()
def drain(url: Url = None, run: RunName = None) -> None:
    """No new samples; train what is there, then end the run."""
    _act("drain", url, run)


@app.command()
def cancel(url: Url = None, run: RunName = None) -> None:
    """End the run after the batch in training; the rest is discarded, with that reason."""
    _act("cancel", url, run)


@config_app.command("keys")
def config_keys(section: Annotated[str, typer.Argument(help="only those below, e.g. trainer.loss")] = "") -> None:
    """Every key a configuration may have: its default, its choices, what it is for."""
    if section and section_at(section) is None:
        fail(f"there is no section {section!r}; `headrace config keys` lists all", 2)
    table = Table("key", "default", "choices", "what for", box=None, pad_edge=False)
    for key in keys(f"{section}." if section else "", section_at(section) or RunConfig):
        table.add_row(key.name, key.default, key.choices, key.meaning)
    out.print(table, highlight=False)


@config_app.command("check")
def config_check(config: Path, overrides: Sets = None) -> None:
    """Check a configuration and print it with all defaults."""
    import yaml

    try:
        checked = load_config(config, overrides)
    except ConfigError as error:
        fail(str(error), 2)
    dumped = checked.model_dump(mode="json")
    for section, names in SECRETS.items():
        dumped[section] |= {name: "(set)" for name in names if dumped[section][name]}
    out.print(yaml.safe_dump(dumped, sort_keys=False), highlight=False, end="")
    commands_whatif.say_whatif(checked, err)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="the run's YAML: what it needs is looked for")] = None, overrides: Sets = None
) -> None:
    """What this machine can do. Status 1: something that the configuration needs is missing."""
    marks = {"ok": "[green]ok[/green]", "absent": "-", "missing": "[red]missing[/red]"}
    table = Table(show_header=False, box=None)
    findings = examine(config, overrides or [])
    for finding in findings:
        table.add_row(finding.what, marks[finding.state], escape(finding.words))
    out.print(table)
    raise typer.Exit(1 if any(finding.state == "missing" for finding in findings) else 0)


@selfcheck_app.command("loss")
def selfcheck_loss(
    target: Annotated[str | None, typer.Argument(help="path/file.py:name, module:name, or ppo_clip, gspo …; default: the config's")] = None,
    config: Annotated[Path | None, typer.Option(help="the run's YAML, of which trainer.loss is taken")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="one key of the loss: --set clip_low=3e-4")] = None,
    rows: Annotated[int, typer.Option(min=4, max=1000, help="made-up rows a step")] = 24,
    seed: int = 0,
    layouts: Annotated[bool, typer.Option(help="through Megatron on real ranks too, some 20 s more")] = True,
) -> None:
    """Is a policy loss the same however rows are split, ordered and laid out? Status 0: it is; 1: it is not; 2: it cannot be used."""
    try:
        argv = selfcheck.command(target, config, overrides or [], rows, seed, layouts)
    except ConfigError as error:
        fail(str(error), 2)
    raise typer.Exit(subprocess.run(argv).returncode)


for command in (
    commands_runs.runs,
    commands_runs.begin,
    commands_roles.plan,
    commands_roles.scale,
    commands_roles.streams,
    commands_datasets.datasets,
    commands_datasets.append,
    commands_datasets.close,
    commands_datasets.mix,
    commands_evaluation.evaluations,
    commands_evaluation.evaluate,
    commands_plan.explain,
    commands_bias.bias,
    commands_engines.engines,
    commands_engines.engine,
    commands_whatif.whatif,
    commands_whatif.why,
):
    app.command()(command)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
