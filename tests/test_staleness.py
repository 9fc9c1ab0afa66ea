"""The presets in a whole service: real engines with a straggler by script, a real trainer, and what REST, archive and command line say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from driver.archive import read_metrics, read_trajectories
from tests.service import ServiceUnderTest
from tests.test_endings import run_to_the_end

ROWS = [{"prompt": f"sort {n} =", "answer": str(n), "task_type": "two" if n % 2 else "one"} for n in range(100, 132)]


def engine_with(tmp_path: Path, *faults: dict) -> str:
    script = tmp_path / "faults.json"
    script.write_text(json.dumps(faults))
    return f"rollout.engine_args={json.dumps(['--faults', str(script)])}"


STRAGGLER = {"fault": "slow", "call": "/generate", "seconds": 10.0, "chunks": 0, "after": 10, "times": 1}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["strict", "deadline", "partial"])
def test_V3_V4_a_straggler_in_a_whole_run_is_waited_for_or_discarded_with_its_reason(tmp_path, preset):
    keys = {"strict": [], "deadline": ["staleness.hold_s=1"], "partial": ["staleness.partial_k=3"]}[preset]
    settings = ["stop.batches=4", "staleness.bound=0", "rollout.stream_interval=4", f"staleness.preset={preset}", *keys]
    settings.append("trainer.critic={}")  # without one, a batch of equal rewards is skipped, and so discarded
    run = run_to_the_end(tmp_path, ROWS, *settings, engine_with(tmp_path, STRAGGLER))
    ends = list(read_trajectories(run / "archive"))
    assert len(ends) == 4 * 4 * 4 and len(read_metrics(run)) == 4
    assert {batch["staleness_max"] for batch in read_metrics(run)} == {0}
    discarded = [end for end in ends if end.outcome == "discarded"]
    if preset == "strict":
        assert not discarded
    elif preset == "deadline":
        assert [end.reason.partition(" waited ")[0] for end in discarded] == ["deadline: held too long: batch 0"]
    else:
        assert discarded and all(end.reason.startswith("partial: 3 of 4: batch") for end in discarded)
    assert len([end for end in ends if end.outcome == "trained"]) == len(ends) - len(discarded)


@pytest.mark.slow
def test_V1_V9_with_S_0_and_pushes_that_take_seconds_nothing_is_evicted_and_the_lag_is_shown(tmp_path):
    slow = {"fault": "slow", "call": "/update_weights_from_tensor", "seconds": 3.0, "times": None, "after": 1}
    settings = ["batch.samples=4", "rollout.n=4", "stop.batches=4", "staleness.bound=0", "staleness.bias_window_versions=1"]
    service = ServiceUnderTest(tmp_path / "run", *settings, engine_with(tmp_path, slow))
    try:
        service.up()
        service.submit("".join(json.dumps(row | {"task_type": "sort"}) + "\n" for row in ROWS).encode())
        service.wait(lambda s: s["publish_lag"] == 1, "the trainer is a step ahead of the engines")
        waits = service.wait(lambda s: "too old for batch" in s["why"].get("rollout", {}).get("reason", ""), "the reason")
        assert waits["trajectories"]["discarded"] == 0
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        assert status["trained_version"] == 4 and status["staleness_max"] == 0 and status["alarms"] == []
        assert status["trajectories"]["trained"] == 64 == status["trajectories"]["registered"]
        staleness = service.run("/staleness")
        assert staleness["preset"]["name"] == "strict" and staleness["discarded_by_preset"] == {} and staleness["tokens_cut"] == 0
        bias = service.run("/bias")
        assert [(w["sampled"], w["trained"], w["closed"]) for w in bias["windows"]] == [(16, 16, True)] * 4
        assert bias["total"]["task_type"][0]["name"] == "sort" and not bias["alarms"]
        assert "headrace_bias_length_gap_ratio" in service.http.get(f"{service.url}/metrics").text
    finally:
        service.close()


SLOW_LOSS = """
import time
import torch

def slow(tokens, spec):
    time.sleep(1.0)
    return -tokens.advantage * torch.exp(tokens.log_probs - tokens.old)
"""


@pytest.mark.slow
def test_L1_where_training_is_the_slower_side_the_wait_for_the_bound_says_so(tmp_path):
    (tmp_path / "loss.py").write_text(SLOW_LOSS)
    settings = ["batch.samples=4", "rollout.n=4", "stop.batches=20", f"trainer.loss.policy={tmp_path}/loss.py:slow"]
    service = ServiceUnderTest(tmp_path / "run", *settings)
    try:
        service.up()
        assert service.submit().status_code == 201
        words = re.compile(r"can take; trainer busy \d+\.\d s: batch \d+; the next has its 4 samples, so training is the slower side$")
        service.wait(lambda s: words.search(s["why"].get("rollout", {}).get("reason", "")), "it is told")
        service.wait(lambda s: "so training is the slower side" in service.run("/why")["sentence"], "in the sentence too")
    finally:
        service.close()
