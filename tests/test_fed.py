"""Runs over several datasets, for real: mixed, filtered, steered and killed, and every row is walked as often as it should be."""

from __future__ import annotations

import json
import re
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from driver.archive import read_metrics, read_trajectories
from tests.service import ServiceUnderTest
from tests.test_endings import run_to_the_end

REWARD = """
def score(response, row):
    return 1.0 if row["answer"] == "easy" or (response and int(response[0], 36) % 2) else 0.0
"""
CURRICULUM = """
def weights(state):
    return {name: 1.0 + facts["samples"] % 5 for name, facts in state["datasets"].items()}
"""


def prompts(first: int, count: int) -> bytes:
    return "".join(json.dumps({"prompt": f"sort {first + n} =", "answer": "", "task_type": "sort"}) + "\n" for n in range(count)).encode()


def walked(directory: Path) -> dict[str, Counter[tuple[int, int, int]]]:
    """By the dataset's name, how often each (segment, row, pass) was registered."""
    found: dict[str, Counter[tuple[int, int, int]]] = {}
    with sqlite3.connect(directory / "ledger.sqlite") as ledger:
        for name, *row in ledger.execute(
            "SELECT name, segment, row_index, pass_index FROM samples JOIN segments USING (segment) JOIN datasets USING (dataset_id)"
        ):
            found.setdefault(name, Counter())[tuple(row)] += 1  # type: ignore[index]
    return found


def test_H2_W2_two_datasets_with_their_own_passes_end_with_status_0_and_the_filter_leaves_only_full_batches(tmp_path):
    for name, first, count in (("many", 100, 30), ("few", 500, 7)):
        (tmp_path / f"{name}.jsonl").write_bytes(prompts(first, count))
    data = [{"path": f"{tmp_path}/many.jsonl", "weight": 3}, {"path": f"{tmp_path}/few.jsonl", "epochs": 2}]
    settings = [f"data={json.dumps(data)}", "filter={min_pass_rate: 0, max_pass_rate: 1}", "stop.batches=null", "stop.epochs=1"]
    run = run_to_the_end(tmp_path, [{"prompt": "unused", "answer": ""}], *settings)
    assert {name: (len(rows), set(rows.values())) for name, rows in walked(run).items()} == {
        "many.jsonl": (30, {1}),
        "few.jsonl": (2 * 7, {1}),
    }
    ends = list(read_trajectories(run / "archive"))
    kinds = Counter((end.outcome, (end.reason or "").rpartition(": ")[0]) for end in ends)
    assert kinds.total() == (30 + 14) * 4, "each trajectory has one end"
    assert kinds.keys() <= {("trained", ""), ("discarded", "filtered: always right"), ("discarded", "filtered: always wrong")}
    sizes = [batch["samples"] for batch in read_metrics(run)]
    assert all(size == 4 for size in sizes[:-1]) and sum(sizes) * 4 == kinds["trained", ""]


@pytest.mark.slow
def test_H2_a_run_of_which_the_filter_takes_every_sample_ends_with_status_0_and_every_end_has_its_reason(tmp_path):
    rows = [{"prompt": f"sort {n} =", "answer": "raise" if n == 35 else "x"} for n in range(31, 41)]
    settings = ["filter={max_pass_rate: 1, min_pass_rate: 0.99}", "stop.batches=null", "stop.epochs=1"]
    run = run_to_the_end(tmp_path, rows, *settings)
    assert read_metrics(run) == []
    kinds = Counter((end.reason or "").partition(":")[0] for end in read_trajectories(run / "archive"))
    assert kinds == {"filtered": 9 * 4, "data": 4}


def test_H7_a_filter_that_takes_everything_pauses_the_run_with_the_cause_and_it_goes_on_when_that_is_mended(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    service = ServiceUnderTest(
        tmp_path / "run",
        f"reward.scorers={json.dumps({'*': {'function': f'{tmp_path}/reward.py:score'}})}",
        "batch.samples=3",
        "rollout.n=4",
        "trainer.schedule=constant",
        "stop={batches: 2, epochs: null}",
        "filter={max_pass_rate: 1, right_from: 1, alarm_batches: 1, pause_batches: 4}",
    )
    try:
        service.up()
        easy = b"".join(json.dumps({"prompt": f"sort {n} =", "answer": "easy"}).encode() + b"\n" for n in range(100, 110))
        assert service.submit(easy, name="easy").status_code == 201
        status = service.wait(lambda s: s["state"] == "paused" and s["in_flight"] == 0, "the pause, and the end of what was in flight")
        (alarm,) = [words for words in status["alarms"] if "the filter took" in words]
        assert "always right" in alarm and "of d000000" in alarm and "headrace resume" in alarm
        assert alarm in service.run("/why")["sentence"]
        assert re.sub(r"\d+", "N", alarm) in re.sub(r"\d+", "N", service.log()), "there with the numbers of the moment of the pause"
        assert status["filtered_samples"] >= 12 and status["trained_version"] == 0
        hard = easy.replace(b'"easy"', b'"hard"')
        assert service.submit(hard, name="hard", priority=1, epochs="forever").status_code == 201
        assert service.http.post(f"{service.url}/v1/runs/sort-digits/resume").status_code == 202
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        assert status["trained_version"] == 2 and not [words for words in status["alarms"] if "filter" in words]
        counted = status["trajectories"]
        assert counted["trained"] == 2 * 3 * 4 and counted["registered"] == counted["trained"] + counted["discarded"]
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_W2_O4_kills_appends_changed_shares_and_a_curriculum_give_each_row_exactly_once_a_pass(tmp_path):
    """Three kills of the driver in two passes over three datasets, of which one grows meanwhile."""
    (tmp_path / "curriculum.py").write_text(CURRICULUM)
    (tmp_path / "reward.py").write_text(REWARD)
    service = ServiceUnderTest(
        tmp_path / "run",
        "batch.samples=4",
        "rollout.n=2",
        "checkpoint.every=2",
        "trainer.schedule=constant",
        "stop={batches: null, epochs: 2}",
        f"reward.scorers={json.dumps({'*': {'function': f'{tmp_path}/reward.py:score'}})}",
        "filter={equal_rewards: true}",
        f"curriculum={{function: {tmp_path}/curriculum.py:weights, every_batches: 2}}",
    )
    try:
        service.up()
        for name, first, count in (("a", 100, 60), ("b", 300, 40), ("c", 500, 20)):
            assert service.submit(prompts(first, count), name=name, close="false").status_code == 201
        base = "/v1/runs/sort-digits/datasets"
        for number in range(3):
            seen = service.run()["trajectories"]["registered"]
            service.wait(lambda s, seen=seen: s["trajectories"]["registered"] >= seen + 24, "a dozen samples")
            if number == 1:
                reply = service.http.post(f"{service.url}{base}/d000001/rows", content=prompts(400, 10))
                assert reply.status_code == 201, reply.text
            elif number == 2:
                assert service.http.patch(f"{service.url}{base}/d000002", json={"weight": 5, "priority": 1}).status_code == 200
            service.kill()
            service.up()
        for name in ("d000000", "d000001", "d000002"):
            assert service.http.post(f"{service.url}{base}/{name}/close").status_code == 200
        status = service.wait(lambda s: s["state"] == "finished", "the end", deadline_s=200.0)
        found = walked(service.directory)
        assert {name: (len(rows), set(rows.values())) for name, rows in found.items()} == {
            "a": (120, {1}),
            "b": (100, {1}),
            "c": (40, {1}),
        }
        counted = status["trajectories"]
        assert counted["registered"] == 260 * 2 == counted["trained"] + counted["discarded"], counted
        mixes = service.run("/mixes")
        assert {"submit", "request", "curriculum"} == {each["by"] for each in mixes}
        assert [each["from_uid"] for each in mixes] == sorted(each["from_uid"] for each in mixes)
    finally:
        service.close()


def test_H3_a_run_for_ever_of_which_no_prompt_fits_ends_with_status_0_and_says_that_none_can_be_used(tmp_path):
    data = [{"prompt": "sort " + "1" * 300, "answer": ""} for _ in range(3)]
    run = run_to_the_end(tmp_path, data, "stop.batches=null", "stop.epochs=null")
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        assert ledger.execute("SELECT count(*) FROM samples").fetchone() == (0,)
        assert ledger.execute("SELECT count(*) FROM left_out_rows").fetchone() == (3,)
        (ended,) = ledger.execute("SELECT value FROM meta WHERE name = 'ended'").fetchone()
    assert b"none of the 3 rows can be used: all are left out, the last because the prompt is too long" in ended
    assert (run / "logs" / "driver.log").read_text().count("is left out of every pass") == 3
