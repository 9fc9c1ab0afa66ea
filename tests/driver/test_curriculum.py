"""A user's function that sets the weights: asked in time, in a process of its own, and whatever it does, the run goes on as it was."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from driver import submits
from driver.curriculum import Curriculum
from driver.events import BatchApplied, BatchAssembled
from driver.settings_data import CurriculumConfig
from tests.driver.feeding import ROOT, Lab

FUNCTIONS = """
import os, sys, time
def harder(state):
    print("seen", sorted(state["datasets"]))
    datasets = state["datasets"]
    return {name: 1.0 + state["params"]["more"] * (facts["recent"]["pass_rate"] or 0) for name, facts in datasets.items()}
def by_name(state): return {"d": 4}
def leaves_it(state): return {}
def raises(state): raise KeyError("no such stage")
def loops(state):
    while True: time.sleep(0.01)
def dies(state): os._exit(3)
def nothing(state): return None
def zero(state): return {"d000000": 0.0}
def nan(state): return {"d000000": float("nan")}
def negative(state): return {"d000000": -1}
def stranger(state): return {"d9": 1}
def text(state): return {"d000000": "much"}
def no_json(state): return {"d000000": object()}
def prints(state):
    sys.stdout.write('{"ok": {"d000000": 77}}')
    return {"d000000": 2}
"""


class Taught:
    def __init__(self, directory: Path, function: str, **more: Any) -> None:
        self.lab = Lab(directory)
        self.directory = directory
        (directory / "curriculum.py").write_text(FUNCTIONS)
        self.config = CurriculumConfig(function=f"{directory}/curriculum.py:{function}", every_batches=2, **more)
        self.run: Any = SimpleNamespace(core=self.lab.core, config=self.lab.config, dispatch=self.lab.dispatch, log_directory=directory)
        self.curriculum = Curriculum(self.run, self.config)

    @property
    def weight(self) -> float:
        return self.lab.core.ledger.cursor["d000000"].weight if self.lab.core.ledger.cursor else 1.0

    def train(self) -> None:
        core = self.lab.core
        uid = self.lab.sample(1.0, 0.0)
        batch_id = core.ledger.next_batch
        core.apply(BatchAssembled(batch_id=batch_id, uids=(uid,), plan=b"[]", time=1.0))
        core.apply(BatchApplied(batch_id=batch_id, epoch=0, skipped=None, report=b"{}", time=1.0))


@pytest.fixture
def taught(tmp_path):
    made: list[Taught] = []

    async def make(function: str, **more: Any) -> Taught:
        made.append(Taught(tmp_path, function, **more))
        await made[-1].lab.with_data()
        return made[-1]

    yield make
    for each in made:
        each.lab.close()


async def test_it_is_given_pass_rates_and_its_weights_hold_and_are_shown_with_their_version(taught):
    its = await taught("harder", params={"more": 2.0})
    its.train()
    its.train()
    assert its.curriculum._due()
    await its.curriculum.ask()
    assert its.weight == 1.0 + 2.0 * 0.5 and not its.curriculum._due() and not its.lab.core.alarms
    (change,) = submits.changes(its.lab.core)
    assert (change["by"], change["trained_version"], change["from_uid"]) == ("curriculum", 2, 2)
    assert change["changes"] == {"d000000": {"weight": 2.0}} and change["why"] == "after batch 1"
    assert "seen ['d000000']" in (its.directory / "curriculum.log").read_text(), "what it prints is kept"
    assert not Curriculum(its.run, its.config)._due(), "a restart does not ask again for the same batches"
    its.train()
    assert not its.curriculum._due(), "every two batches"
    its.train()
    assert its.curriculum._due() and Curriculum(its.run, its.config)._due()


@pytest.mark.parametrize(("function", "weight"), [("by_name", 4.0), ("leaves_it", 1.0), ("prints", 2.0)])
async def test_a_dataset_may_be_named_by_its_name_left_out_and_prints_are_no_answer(taught, function, weight):
    its = await taught(function)
    await its.curriculum.ask()
    assert its.weight == weight and not its.lab.core.alarms


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", "KeyError: 'no such stage'"),
        ("dies", "its process ended with status 3 and no answer; see"),
        ("nothing", "it returned nothing (None); it must return weights by dataset"),
        ("zero", "the weight of d000000 is 0.0; it must be a number above 0"),
        ("nan", "the weight of d000000 is None"),
        ("negative", "the weight of d000000 is -1;"),
        ("stranger", "no dataset is called 'd9'; known: d000000"),
        ("text", "the weight of d000000 is 'much'"),
        ("no_json", "raised TypeError"),
        ("absent", "has no 'absent'"),
    ],
)
async def test_H8_a_function_that_fails_is_an_alarm_with_its_reason_and_changes_nothing(taught, function, words):
    its = await taught(function)
    await its.curriculum.ask()
    assert words in its.lab.core.alarms["curriculum"] and "they stay as they are" in its.lab.core.alarms["curriculum"]
    assert its.weight == 1.0 and submits.changes(its.lab.core) == []


async def test_H5_a_function_that_never_returns_is_killed_at_its_deadline_and_the_next_answer_ends_the_alarm(taught):
    its = await taught("loops", deadline_s=0.5)
    await its.curriculum.ask()
    assert "no answer within 0.5 s; its process was killed" in its.lab.core.alarms["curriculum"]
    assert not [child for child in psutil.Process().children() if "reward.call" in child.cmdline()]
    its.curriculum._config = its.config.model_copy(update={"function": f"{its.directory}/curriculum.py:by_name", "deadline_s": 30.0})
    await its.curriculum.ask()
    assert its.weight == 4.0 and not its.lab.core.alarms


async def test_the_example_gives_most_weight_where_half_of_the_answers_are_right(taught):
    its = await taught("by_name", params={"least": 0.1})
    its.curriculum._config = its.config.model_copy(update={"function": f"{ROOT}/examples/curriculum/curriculum.py:weights"})
    for rewards, weight in (((), 1.0), ((1.0, 0.0), 1.0), ((0.0, 0.0), 0.75)):
        if rewards:
            its.lab.sample(*rewards)
        await its.curriculum.ask()
        assert its.weight == pytest.approx(weight) and not its.lab.core.alarms


async def test_H8_a_process_that_can_not_be_started_is_an_alarm_too(taught):
    its = await taught("by_name")
    its.run.log_directory = its.directory / "nowhere"
    await its.curriculum.ask()
    assert "its process could not be started" in its.lab.core.alarms["curriculum"] and its.weight == 1.0
