"""`headrace ledger`: a run's ledger looked at without its service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from driver.ledger_load import check
from driver.ledger_schema import LedgerError
from driver.terminal import fail, out
from trainer.checkpoints import newest

ledger_app = typer.Typer(no_args_is_help=True, help="Look at a run's ledger.")


@ledger_app.callback()
def ledger() -> None:
    """Look at a run's ledger."""


def _origin_of(run_dir: Path) -> str:
    """What a new run can begin from."""
    checkpoint = newest(run_dir.absolute() / "checkpoints")
    if checkpoint is None:
        return "its own model.path: it has no whole checkpoint"
    return f"its newest checkpoint: headrace up CONFIG --set run_id=NAME --set model.path={checkpoint.path}/hf"


@ledger_app.command("check")
def ledger_check(run_dir: Annotated[Path, typer.Argument(help="the run's directory, or its ledger.sqlite")]) -> None:
    """Read all of it and count again what it counts. Changes nothing; the run may go on. Status 1: something is wrong."""
    path = run_dir if run_dir.is_file() else run_dir / "ledger.sqlite"
    try:
        found = check(path)
    except LedgerError as error:
        fail(str(error))
    origin = _origin_of(path.parent)
    troubles = (*found.damage, *found.wrong)
    for trouble in troubles:
        out.print(f"[red]wrong[/red]  {escape(trouble.words)}", highlight=False, soft_wrap=True)
    for remedy in dict.fromkeys(trouble.remedy.replace("{origin}", origin) for trouble in troubles):
        out.print(f"[yellow]remedy[/yellow] {escape(remedy)}", highlight=False, soft_wrap=True)
    state = "is well" if found.well else "is not well"
    out.print(
        f"{path} (schema {found.schema}: {found.samples} samples, {found.trajectories} trajectories) {state}",
        highlight=False,
        soft_wrap=True,
    )
    raise typer.Exit(0 if found.well else 1)
