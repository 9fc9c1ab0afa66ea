"""When a version is evaluated, and when results end a run: the evaluator without engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from driver.archive import Archive, read_trajectories
from driver.core import Bell
from driver.evaluation import Evaluator, Result
from driver.events import EvaluationBegan
from driver.finished import Finished
from driver.ledger import Ledger
from driver.run import Run
from driver.settings_evaluation import EvaluationConfig
from tests.service import ROOT


def result(version: int, reward: float | None) -> Result:
    return Result(
        version=version,
        epoch=0,
        rows=1,
        answers=0 if reward is None else 1,
        reward_mean=reward,
        correct_mean=None,
        by_task_type={},
        response_tokens_mean=None,
        versions={},
        one_version=True,
        failed={},
        tokens_resampled=0,
        seconds=1.0,
        time=1.0,
    )


def evaluator(kept: list[Result], **settings: Any) -> Any:
    config = EvaluationConfig(data=ROOT / "examples/sort_digits/heldout.jsonl", **settings)
    rows = [(msgspec.json.encode(one),) for one in kept]
    core = SimpleNamespace(
        bell=Bell,
        ring=lambda: None,
        db=SimpleNamespace(query=lambda sql: rows),
        config=SimpleNamespace(reward=SimpleNamespace(scorers={"*": None})),
        ending=None,
        draining=None,
    )
    none: Any = SimpleNamespace(hold=lambda *snapshots: None, newest=None)
    return Evaluator(core, config, none, none, none, none, none, none, none), core  # type: ignore[arg-type]


def snapshot(version: int) -> Any:
    return SimpleNamespace(version=version, epoch=0)


def test_version_0_and_then_every_kth_is_due_and_after_a_restart_the_first_that_comes_after_one_was_missed():
    fresh, _ = evaluator([], every=5)
    fresh.offer(snapshot(0))
    assert fresh._due.version == 0
    again, _ = evaluator([result(0, 0.5), result(5, 0.5)], every=5)
    for version in (6, 9):
        again.offer(snapshot(version))
        assert again._due is None
    again.offer(snapshot(12))
    assert again._due.version == 12, "version 10 came while the driver was away"


def test_while_one_runs_only_versions_that_are_due_wait_and_the_newest_of_them_counts():
    busy, _ = evaluator([result(0, 0.5)], every=5)
    busy._running = 5
    for version, waits in ((5, None), (6, None), (10, 10), (11, 10), (15, 15)):
        busy.offer(snapshot(version))
        assert (busy._due and busy._due.version) == waits, version


@pytest.mark.parametrize(
    ("rewards", "ends"),
    [
        ([0.1, 0.2, 0.3, 0.3], False),
        ([0.1, 0.3, 0.2, 0.3], True),
        ([0.3, 0.2], False),
        ([0.3, 0.2, None, 0.1], True),
        ([0.3, 0.1, 0.31], False),
    ],
)
def test_patience_counts_results_without_a_new_best(rewards, ends):
    one, core = evaluator([result(i, reward) for i, reward in enumerate(rewards)], patience=2)
    one._stop_rule()
    assert (core.ending is not None) == ends == (core.draining is not None)


async def test_a_run_whose_driver_died_after_the_last_result_and_before_its_end_ends_at_the_next_start():
    one, core = evaluator([result(0, 0.3), result(5, 0.9)], stop_reward=0.8)
    looping = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    assert core.ending is not None and core.draining == core.ending
    looping.cancel()


def test_A2_an_evaluation_that_was_cut_short_after_its_answers_were_archived_is_discarded_there_too(tmp_path):
    one, core = evaluator([])
    core.ledger, core.run_id = Ledger(), "sort-digits"
    core.apply = core.ledger.apply
    core.apply(EvaluationBegan(first_uid=0, rows=1, n=2, version=7, time=1.0))
    finished = Finished(core, SimpleNamespace(decode=lambda ids: ""), Archive(tmp_path))  # type: ignore[arg-type]
    facts = {"uid": 0, "version": 7, "prompt_ids": (), "made": None, "reason": None, "attempts": 1, "began": 1.0}
    for index in range(2):
        finished.evaluated(one.rows[0], index=index, reward=1.0, is_correct=True, **facts)
    finished.archive.flush()  # and the driver dies
    Run._cut_evaluation(SimpleNamespace(core=core, evaluator=one, finished=finished), "evaluation: the driver was restarted")  # type: ignore[arg-type]
    assert core.ledger.counts.by_outcome == {"discarded": 2} and not core.ledger.samples
    assert [(row.outcome, row.reason, row.reward) for row in read_trajectories(tmp_path)] == [
        ("discarded", "evaluation: the driver was restarted", None)
    ] * 2


def test_what_is_asked_for_before_there_is_a_version_is_refused():
    one, _ = evaluator([])
    with pytest.raises(LookupError, match="no version"):
        one.demand()
