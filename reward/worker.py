"""One process that runs scorers: `python -P -m reward.worker PARENT_PID`, spoken to over its standard input and output.

The user's code runs here and nowhere else, so whatever it does (loops, crashes, a lock held for ever) the service can kill. Each job is
answered as soon as it is done: when the worker is killed, the first job without an answer is the one that hung. What a scorer prints
goes to the log, not into the answers.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from reward.frames import LENGTH, Ready, ScorerFacts, ScorerSetup, Setup, Task, decode_setup, decode_task, frame
from reward.lifeline import die_with
from reward.outcome import Outcome, judged, raised
from reward.plugin import add_to_path, load, version_of
from reward.rules import make_rule
from reward.wire import Job

RULES_VERSION = "1"


class Scorer:
    """A loaded scorer: answers each job of a task, in order, with a number judged or a reason."""

    def __init__(self, setup: ScorerSetup, plugin_dir: Path) -> None:
        self.label = setup.label
        self._function: Callable[..., Any]
        if setup.rule is not None:
            self._function = make_rule(setup.rule, setup.params)
            self.facts = ScorerFacts(f"{setup.rule}@{RULES_VERSION}", batched=False)
        else:
            assert setup.function is not None
            self._function = load(setup.function, plugin_dir)
            self.facts = ScorerFacts(f"{setup.function}@{version_of(self._function)}", bool(getattr(self._function, "batched", False)))

    def run(self, jobs: list[Job]) -> Iterator[Outcome]:
        if self.facts.batched:
            yield from self._run_batch(jobs)
            return
        for index, job in enumerate(jobs):
            start = time.perf_counter()
            try:
                returned = self._function(job.response, job.row())
            except (Exception, SystemExit, KeyboardInterrupt) as error:
                yield raised(index, self.label, error, time.perf_counter() - start)
            else:
                yield judged(index, self.label, returned, time.perf_counter() - start)

    def _run_batch(self, jobs: list[Job]) -> Iterator[Outcome]:
        start = time.perf_counter()
        try:
            returned = self._function([(job.response, job.row()) for job in jobs])
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            for index in range(len(jobs)):
                yield raised(index, self.label, error, time.perf_counter() - start)
            return
        seconds = (time.perf_counter() - start) / len(jobs)
        if not isinstance(returned, list | tuple) or len(returned) != len(jobs):
            got = f"{len(returned)} results" if isinstance(returned, list | tuple) else f"a {type(returned).__name__}"
            for index in range(len(jobs)):
                yield Outcome(index, seconds=seconds, error=f"{self.label} is batched and returned {got} for {len(jobs)} jobs")
            return
        for index, value in enumerate(returned):
            yield judged(index, self.label, value, seconds)


def loaded(setup: Setup) -> dict[str, Scorer]:
    """Raises ValueError (a PluginError among them) saying which scorer cannot be had."""
    plugin_dir = Path(setup.plugin_dir)
    add_to_path(plugin_dir)
    scorers = {}
    for name, scorer in setup.scorers.items():
        try:
            scorers[name] = Scorer(scorer, plugin_dir)
        except ValueError as error:
            raise ValueError(f"the scorer of task type {name!r}: {error}") from error
    return scorers


def read_frame(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else None


def main() -> None:
    die_with(int(sys.argv[1]))
    source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)

    def answer(message: Outcome | Ready) -> None:
        data = memoryview(frame(message))
        while data:
            data = data[os.write(sink, data) :]

    first = read_frame(source)
    if first is None:
        return
    try:
        scorers = loaded(decode_setup(first))
    except ValueError as error:
        return answer(Ready({}, str(error)))
    answer(Ready({name: scorer.facts for name, scorer in scorers.items()}))
    while (data := read_frame(source)) is not None:
        task: Task = decode_task(data)
        for outcome in scorers[task.scorer].run(task.jobs):
            answer(outcome)


if __name__ == "__main__":
    main()
