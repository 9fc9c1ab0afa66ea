"""`headrace selfcheck loss`: is a policy loss the same step however rows are split, ordered and laid out?

First in float64 without a model (trainer/selfcheck_splits.py), then, if that holds, through Megatron on real ranks
(trainer/selfcheck_layouts.py). Exit status 0: it is; 1: it is not; 2: it cannot be used at all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trainer.loss_spec import LossSpec

if TYPE_CHECKING:
    from trainer.selfcheck_splits import Finding

INVARIANT, DIFFERS, UNUSABLE = 0, 1, 2


def check_loss(spec: LossSpec, count: int, seed: int, layouts: bool, out: Console) -> int:
    """Prints what was measured, and returns the exit status."""
    from trainer.own_loss import resolve
    from trainer.selfcheck_splits import check

    try:
        policy = resolve(spec)
        _say("in float64, without a model")
        findings = _in_a_fork(check, policy, spec, count, seed)
        sound = all(finding.ok for finding in findings)
        if sound and layouts:
            _say("importing Megatron")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is not installed, and not needed here
                from trainer import selfcheck_layouts

            findings += selfcheck_layouts.check(spec, count, seed, _say)
    except ValueError as error:
        _say("")
        print(f"error {error}", file=sys.stderr)
        return UNUSABLE
    _say("")
    out.print(_table(findings))
    broken = [finding for finding in findings if not finding.ok]
    if not broken:
        out.print(
            f"{spec.policy} is invariant" + ("" if layouts else " in float64; the layouts were not asked for"),
            highlight=False,
            soft_wrap=True,
        )
        return INVARIANT
    if not sound and layouts:
        out.print("the layouts were not tried: what fails without a model fails with one")
    first = broken[0]
    out.print(f"{spec.policy} is not invariant: {first.what} changes the numbers by {first.error:.1e}", highlight=False, soft_wrap=True)
    out.print(f"likely cause: {first.cause}", highlight=False, soft_wrap=True)
    return DIFFERS


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None)
    for name, justify in (("check", "left"), ("largest error", "right"), ("limit", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for finding in findings:
        table.add_row(finding.what, f"{finding.error:.1e}", f"{finding.limit:.0e}", "ok" if finding.ok else "[red]differs[/red]")
    return table


def _in_a_fork(check: Callable[..., list[Finding]], *arguments: Any) -> list[Finding]:
    """The answer of `check`, or its ValueError: a process that has run autograd must not fork ranks."""
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)

    def run() -> None:
        try:
            writing.send(check(*arguments))
        except ValueError as error:
            writing.send(str(error))

    process = fork.Process(target=run)
    process.start()
    writing.close()
    try:
        answer: list[Finding] | str = reading.recv()
    except EOFError:
        answer = "the check itself died of the error above"
    process.join()
    if isinstance(answer, str):
        raise ValueError(answer)
    return answer


def _say(text: str) -> None:
    """One line of progress that the next one overwrites, for a person who waits."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Is a policy loss the same for every split and layout?")
    parser.add_argument("what", choices=["loss"])
    parser.add_argument("--loss", type=LossSpec.model_validate_json, required=True, help="a LossSpec as JSON")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", action=argparse.BooleanOptionalAction, default=True)
    asked = parser.parse_args(arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    return check_loss(asked.loss, asked.rows, asked.seed, asked.layouts, Console())


if __name__ == "__main__":
    sys.exit(main())
