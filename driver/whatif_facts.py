"""From a run, a configuration or a trace to the facts of the what-if model, and the model's answer from a process of its own.

The model computes for a second or so, in Python: in the driver's process the event loop would stand still for as long. It is asked by
`python -P -m driver.whatif`, which ends with its answer.
"""

from __future__ import annotations

import asyncio
import csv
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driver.measured import Measured
from driver.settings import RunConfig
from driver.watermark import AHEAD
from driver.whatif import BOUNDS, Facts, Reached, advice, answers, clipped, question

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.whatif")
DEADLINE_S = 60.0
FEWEST_LENGTHS = 100  # fewer say nothing of a tail
KEPT = "measured.json"


@dataclass(frozen=True)
class Asked:
    """Facts and where they come from, in words."""

    facts: Facts
    source: str
    token_s: float | None = None  # between two tokens of a request; None where only their number is known


class NothingKnown(ValueError):
    """There are no lengths to draw from. A sentence with the remedy."""


def read_lengths(path: Path) -> list[float]:
    """Tokens of answers: a CSV with the column `output_tokens` (or one column of numbers), or JSONL with that field. ValueError."""
    if not path.is_file():
        raise ValueError(f"there is no trace {path}")
    with path.open(newline="", encoding="utf-8") as file:
        if path.suffix in (".jsonl", ".json"):
            values: list[Any] = [json.loads(line).get("output_tokens") for line in file if line.strip()]
        else:
            head = (file.readline().strip()).split(",")
            names = None if len(head) == 1 and _is_number(head[0]) else head
            if names is not None and "output_tokens" not in names:
                raise ValueError(f"{path} has no column output_tokens; its columns are {', '.join(names)}")
            if names is None:
                file.seek(0)
            column = 0 if names is None else names.index("output_tokens")
            values = [row[column] for row in csv.reader(file) if row]
    try:
        lengths = [float(value) for value in values]
    except (TypeError, ValueError):
        raise ValueError(f"{path}: not every row has a number as output_tokens") from None
    lengths = [length for length in lengths if length > 0]
    if len(lengths) < FEWEST_LENGTHS:
        raise ValueError(f"{path} has {len(lengths)} answers; a tail needs at least {FEWEST_LENGTHS}")
    return lengths


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def of_config(config: RunConfig, trace: Path | None = None) -> Asked:
    """With a trace's lengths, or with those that this run has seen in an earlier life. NothingKnown, ValueError."""
    slots = config.rollout.max_running_requests * max(1, config.rollout.engines + len(config.rollout.engine_urls))
    if trace is None and config.rollout.lengths_trace is None:
        kept = read_kept(config.directory)
        if kept is None:
            raise NothingKnown("no lengths are known yet: give a trace (--trace, or rollout.lengths_trace), or let the run train a while")
        return _of_measured(config, kept, slots, f"{len(kept.lengths)} answers that this run has seen")
    path = trace or config.rollout.lengths_trace
    assert path is not None
    tokens = read_lengths(path)
    return Asked(_of_tokens(config, tokens, slots), f"{len(tokens)} answers of {path.name}; training as fast as generation")


def of_run(run: Run, trace: Path | None = None) -> Asked:
    """With what the run has measured; before that as `of_config`. NothingKnown, ValueError."""
    measured = run.core.measured
    slots = run.dispatch.kv_room.slots if run.dispatch.kv_room is not None else 0
    enough = len(measured.lengths) >= max(FEWEST_LENGTHS, run.config.batch.samples * run.config.rollout.n)
    if trace is not None or not slots or not enough or measured.token_s.value is None:
        asked = of_config(run.config, trace)
    else:
        asked = _of_measured(run.config, measured, slots, f"the run's last {len(measured.lengths)} answers")
    return replace(asked, facts=replace(asked.facts, samples=run.core.limits.samples))  # they may have been changed since the start


def _of_tokens(config: RunConfig, tokens: Sequence[float], slots: int) -> Facts:
    """Lengths alone: a token takes one unit of time, and the trainer as long as generation."""
    lengths = clipped(tokens, config.rollout.sampling.max_new_tokens)
    return Facts(slots, config.batch.samples, config.rollout.n, lengths, ahead=int(slots * AHEAD))


def _of_measured(config: RunConfig, measured: Measured, slots: int, source: str) -> Asked:
    facts = _of_tokens(config, [max(1.0, float(count)) for count in measured.lengths], slots)
    token_s = measured.token_s.value
    if token_s is None:
        return Asked(facts, f"{source}; training as fast as generation")
    facts = replace(
        facts,
        lengths_s=tuple(length * token_s for length in facts.lengths_s),
        training_s=measured.training_s.value,
        publish_s=measured.publish_s.or_else(0.0),
        pause_s=measured.pause_s.or_else(0.0),
        score_s=measured.score_s.or_else(0.0),
    )
    trained = "training as fast as generation" if facts.training_s is None else f"{facts.training_s:.3g} s of training a batch"
    lag = f"{facts.publish_s + facts.pause_s:.2g} s for a push, {facts.pause_s:.2g} of them a pause"
    return Asked(facts, f"{source}, {1 / token_s:.3g} tokens a second each; {trained}, {facts.score_s:.2g} s to score, {lag}", token_s)


# ---- the answer --------------------------------------------------------------------------------------------------------------


async def ask(facts: Facts, bounds: Sequence[int] = BOUNDS) -> list[Reached]:
    """From a process of its own. RuntimeError with its last words when it does not answer within a minute."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "driver.whatif"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            reply, words = await child.communicate(question(facts, bounds))
    except TimeoutError:
        raise RuntimeError(f"the model did not answer within {DEADLINE_S:g} s") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise RuntimeError(f"the model ended with status {child.returncode}: {words.decode(errors='replace').strip()[-300:]}")
    return answers(reply)


def bounds_with(bound: int, bounds: Sequence[int] = BOUNDS) -> list[int]:
    """Those, and the one that is set."""
    return sorted({*bounds, bound})


def answer(asked: Asked, found: Sequence[Reached], bound: int) -> dict[str, Any]:
    """As REST and `--json` give it."""
    facts = asked.facts
    return {
        "bound": bound,
        "sentence": advice(found, bound),
        "source": asked.source,
        "slots": facts.slots,
        "batch_trajectories": facts.batch_trajectories,
        "bound_trajectories_per_s": None if facts.training_s is None else facts.bound_per_s,
        "generation_per_s": None if facts.training_s is None else facts.slots / facts.mean_s,
        "training_per_s": None if facts.training_s is None else facts.batch_trajectories / facts.tau_s,
        "seconds": {
            "training": facts.training_s,
            "publish": facts.publish_s,
            "pause": facts.pause_s,
            "score": facts.score_s,
            "token": asked.token_s,
        },
        "reached": [vars(reached) for reached in found],
    }


# ---- what is kept between two starts ----------------------------------------------------------------------------------------


def keep(measured: Measured, directory: Path) -> None:
    """For the next start, and for `headrace config check`. Blocks for a millisecond."""
    if len(measured.lengths) < FEWEST_LENGTHS:
        return
    partial = directory / f".{KEPT}.tmp"
    partial.write_text(json.dumps(measured.kept()))
    os.replace(partial, directory / KEPT)


def read_kept(directory: Path) -> Measured | None:
    """None when nothing usable is there."""
    try:
        return Measured.of_kept(json.loads((directory / KEPT).read_text()))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


async def say(run: Run) -> None:
    """One line in the log at a run's start, where lengths are known. Nothing waits for it, and nothing fails with it."""
    bound = run.core.limits.bound
    try:
        asked = await asyncio.to_thread(of_run, run)
        found = await ask(asked.facts, bounds_with(bound))
    except (ValueError, RuntimeError, OSError) as error:
        log.info("what each S would reach is not known: %s", error)
        return
    log.info("%s (by the model, with %s)", advice(found, bound), asked.source)
