"""A held-out set scored beside the training: on engines of its own, on those of the run, through a restart and an engine's death."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver.archive import read_trajectories
from tests.service import ROOT, ServiceUnderTest
from tests.test_whole import check_accounts

HELD_OUT = ROOT / "examples/sort_digits/heldout.jsonl"
SETTINGS = (
    f"evaluation.data={HELD_OUT}",
    "evaluation.samples=24",
    "evaluation.n=2",
    "evaluation.every=4",
    "batch.samples=4",
    "rollout.n=4",
    "stop.batches=14",
    "stop.epochs=null",
    "checkpoint.every=4",
    "trainer.schedule=constant",
)


def results(service: ServiceUnderTest) -> list[dict[str, Any]]:
    return service.run("/evaluations")["results"]


def check_evaluated(service: ServiceUnderTest, status: dict[str, Any]) -> None:
    """Every answer is accounted for, in no batch and in no bound, and archived with what made it."""
    check_accounts(service, status)
    counted, found = status["trajectories"], results(service)
    assert counted["evaluated"] == sum(result["answers"] for result in found)
    assert counted["trained"] + counted["discarded"] + counted["evaluated"] == counted["registered"]
    rows = [row for row in read_trajectories(service.directory / "archive") if row.outcome == "evaluated"]
    assert len(rows) == counted["evaluated"] and {row.version_tag for row in rows} == {result["version"] for result in found}
    for result in found:
        rewards = [row.reward for row in rows if row.version_tag == result["version"]]
        assert np.mean(rewards) == pytest.approx(result["reward_mean"])  # type: ignore[arg-type]
    for row in rows:
        assert row.batch_id is None and sum(row.response_mask) == row.version_spans[-1][3] - row.version_spans[0][2] > 0
        assert len(row.response_mask) == len(row.input_ids) - 1 == len(row.rollout_log_probs)


@pytest.mark.slow
def test_H11_A5_on_engines_of_its_own_each_result_is_of_one_version_and_the_last_version_has_one(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", *SETTINGS, "evaluation.engines=1", "rollout.infrastructure_retries=100", "stop.batches=90")
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 3, "three batches")
        evaluator = next(p for p in service.run("/processes") if p["role"] == "evaluator")
        os.kill(evaluator["pid"], signal.SIGKILL)  # it comes back, and gets the version that is evaluated again
        status = service.wait(lambda s: s["state"] == "finished", "the end", 180)
        check_evaluated(service, status)
        found = results(service)
        assert found[0]["version"] == 0 and found[-1]["version"] == 90 and len(found) >= 3
        for result in found:
            assert result["one_version"] and result["versions"] == {f"0/{result['version']}": 1.0}
            assert result["answers"] == 48 and not result["failed"]
        assert status["staleness_max"] <= 2 and status["trajectories"]["discarded"] % 4 == 0, "training knows nothing of it"
        assert found[-1]["reward_mean"] != found[0]["reward_mean"], "other weights answer otherwise"
    finally:
        service.close()


@pytest.mark.slow
def test_H11_A1_on_the_runs_own_engine_the_result_says_of_which_versions_it_is_and_a_restart_discards_what_ran(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", *SETTINGS, "evaluation.max_open=1", "rollout.max_open_requests=8")
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(
            lambda s: s["evaluation"]["running"] is not None and s["trained_version"] >= 1, "an evaluation, while batches are trained"
        )
        service.kill()
        service.up("evaluation.max_open=64")
        status = service.wait(lambda s: s["state"] == "finished", "the end", 180)
        check_evaluated(service, status)
        reasons = status["trajectories"]["reasons"]
        assert reasons["evaluation: the driver was restarted"] == 48
        found = results(service)
        assert found[-1]["version"] == 14 and all(sum(result["versions"].values()) == pytest.approx(1.0) for result in found)
        for result in found:
            assert result["one_version"] == (list(result["versions"]) == [f"{result['epoch']}/{result['version']}"])
        refused = service.http.post(f"{service.url}/v1/runs/sort-digits/evaluate")
        assert refused.status_code == 409 and "has ended" in refused.json()["error"]["message"]
    finally:
        service.close()


@pytest.mark.slow
def test_a_run_ends_when_an_evaluation_reaches_its_target(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", *SETTINGS, "evaluation.stop_reward=0.0", "stop.batches=1000")
    try:
        service.up()
        assert service.submit().status_code == 201
        status = service.wait(lambda s: s["state"] == "finished", "the end", 120)
        check_evaluated(service, status)
        assert status["trained_version"] < 100 and "an evaluation's mean reward reached 0" in service.run("/why")["sentence"]
    finally:
        service.close()
