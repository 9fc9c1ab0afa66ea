"""The curriculum: a function of the user's that is asked for new weights of the datasets every `every_batches` batches.

Promise: no code of the user's runs in the driver, and whatever it does (raises, hangs, answers nonsense) is an alarm with its reason and
changes nothing. A decision goes the way of every change of shares (`driver/submits.py`): it is in the ledger before any sample that it
chose, so a restart goes on with it and does not ask again for the same batches.

Mechanism: each question is a process of its own (`reward.call`), killed with its group at `deadline_s`. The function is `f(state)`:

    state = {"trained_version": 40, "serving_version": 39, "params": {…}, "datasets": {"d000000": {"name": "easy.jsonl", "weight": 1.0,
             "priority": 0, "rows": 2500, "pass": 1, "rows_walked": 700, "recent": {"samples": 256, "pass_rate": 0.91, "reward_mean": 0.93,
             "version_tag_min": 33, "version_tag_max": 39, "by_task_type": {"sort": {…}}}, …}}}

and returns new weights by dataset id or name, `{"d000000": 0.5}`; datasets that it leaves out keep theirs. A weight of 0 is refused from a
function, because a run whose last rows have no weight would stand still and never ask again; give little instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from driver import observe_data, submits
from driver.mix import LIGHTEST, Change, FeedError
from driver.settings_data import CurriculumConfig

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.curriculum")
SHOWN_ERROR = 1000


class CurriculumFailed(RuntimeError):
    """No weights came, and why."""


class Curriculum:
    def __init__(self, run: Run, config: CurriculumConfig) -> None:
        self._run = run
        self._config = config
        self._bell = run.core.bell()
        asked = run.core.db.query("SELECT max(trained_version) FROM mixes WHERE decided_by = ?", (submits.CURRICULUM,))[0][0]
        self._asked_at: int = asked or 0

    async def run(self) -> None:
        """Consumes nothing; waits for batches; unblocked by any change of the ledger. Ends never: its owner cancels it."""
        while True:
            self._bell.clear()
            if self._due():
                await self.ask()
            await self._bell.wait(60.0)

    def _due(self) -> bool:
        every = self._config.every_batches
        return self._run.core.ledger.trained_version // every > self._asked_at // every and bool(self._run.core.feed.datasets())

    async def ask(self) -> None:
        """Once. A failure is kept as an alarm until the next answer."""
        version = self._asked_at = self._run.core.ledger.trained_version
        try:
            answer = await call(self._config.function, self._state(), self._config.deadline_s, self._run.log_directory / "curriculum.log")
            weights = self._weights(answer)
            changed = {dataset_id: Change(weight) for dataset_id, weight in weights.items()}
            if changed:
                await submits.change(self._run.core, changed, by=submits.CURRICULUM, why=f"after batch {version - 1}")
            log.info("curriculum after batch %d: %s", version - 1, ", ".join(f"{name} {weight:g}" for name, weight in weights.items()))
            self._run.core.alarm("curriculum", None)
        except (CurriculumFailed, FeedError) as error:
            words = f"the curriculum's function gave no weights after batch {version - 1}, and they stay as they are: {error}"
            self._run.core.alarm("curriculum", words)

    def _state(self) -> dict[str, Any]:
        ledger = self._run.core.ledger
        shown = {dataset["dataset_id"]: dataset for dataset in observe_data.datasets(self._run)}
        versions = {"trained_version": ledger.trained_version, "serving_version": ledger.serving_version}
        return {**versions, "datasets": shown, "params": self._config.params}

    def _weights(self, answer: Any) -> dict[str, float]:
        """By dataset id. Raises CurriculumFailed for what are no weights."""
        if not isinstance(answer, dict):
            raise CurriculumFailed(f"it returned {_kind(answer)}; it must return weights by dataset, as {{'d000000': 0.5}}")
        known = self._run.core.feed.datasets()
        weights: dict[str, float] = {}
        for name, weight in answer.items():
            found = [d.dataset_id for d in known if name in (d.dataset_id, d.name)]
            if len(found) != 1:
                what = "no dataset is" if not found else f"{len(found)} datasets are"
                raise CurriculumFailed(f"{what} called {name!r}; known: {', '.join(d.dataset_id for d in known)}")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight) or weight < LIGHTEST:
                raise CurriculumFailed(f"the weight of {name} is {weight!r}; it must be a number above 0 (for next to nothing, 0.001)")
            weights[found[0]] = float(weight)
        return weights


async def call(function: str, argument: Any, deadline_s: float, log_path: Path) -> Any:
    """What the user's function returns, in a process that is killed at the deadline; what it prints goes to the log. CurriculumFailed."""
    argv = [sys.executable, "-P", "-m", "reward.call", function, os.getcwd(), str(os.getpid())]
    pipe = asyncio.subprocess.PIPE
    try:
        with log_path.open("ab") as log_file:
            process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, stderr=log_file, start_new_session=True)
    except OSError as error:  # no process to be had, or no file: neither is a reason for the run to end
        raise CurriculumFailed(f"its process could not be started: {error}") from error
    try:
        async with asyncio.timeout(deadline_s):
            out, _ = await process.communicate(msgspec.json.encode(argument))
    except TimeoutError:
        raise CurriculumFailed(f"no answer within {deadline_s:g} s; its process was killed") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started goes too
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    try:
        answer = msgspec.json.decode(out, type=dict[str, Any])
    except msgspec.MsgspecError:
        raise CurriculumFailed(f"its process ended with status {process.returncode} and no answer; see {log_path}") from None
    if "error" in answer:
        raise CurriculumFailed(str(answer["error"])[:SHOWN_ERROR])
    return answer["ok"]


def _kind(value: Any) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
