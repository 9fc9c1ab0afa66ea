"""A whole service over an engine that fails by script: every trajectory is trained all the same."""

from __future__ import annotations

import json

import pytest

from driver.archive import read_metrics, read_trajectories
from tests.test_endings import run_to_the_end

GENERATE = {"call": "/generate"}
FAULTS = [
    {"fault": "status", "after": 5} | GENERATE,
    {"fault": "reset", "after": 15, "times": 2} | GENERATE,
    {"fault": "reset", "after": 25, "times": 3, "chunks": 1} | GENERATE,
    {"fault": "truncate", "after": 35, "times": 2, "chunks": 1} | GENERATE,
    {"fault": "log_prob_missing", "after": 45, "times": 2, "chunks": 1} | GENERATE,
    {"fault": "hang", "after": 55, "times": 2, "chunks": 1} | GENERATE,
    {"fault": "hang", "after": 65} | GENERATE,
    {"fault": "status", "call": "/update_weights_from_tensor", "after": 1},
    {"fault": "reset", "call": "/continue_generation", "after": 2, "done": True},
]


@pytest.mark.slow
def test_E13_E14_H4_W4_a_run_over_an_engine_with_a_fault_script_loses_no_trajectory(tmp_path):
    rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 140)]
    script = tmp_path / "faults.json"
    script.write_text(json.dumps(FAULTS))
    arguments = json.dumps(["--faults", str(script)])
    settings = [f"rollout.engine_args={arguments}", "rollout.stall_s=4", "rollout.stream_interval=4", "stop.batches=8", "trainer.critic={}"]
    # With a critic: without one, a batch of groups with equal rewards is skipped, and so discarded.
    run = run_to_the_end(tmp_path, rows, *settings)
    assert len(read_metrics(run)) == 8
    ends = list(read_trajectories(run / "archive"))
    assert {end.outcome for end in ends} == {"trained"} and len(ends) == 8 * 4 * 4
    log = (run / "logs/engine-0.log").read_text()
    for fault in FAULTS:
        kind = "".join(word.title() for word in fault["fault"].split("_"))
        assert f"scripted fault: {kind}(call='{fault['call']}', after={fault['after']}" in log
    gaps = [batch["logprob_gap_max"] for batch in read_metrics(run) if batch["logprob_gap_rows"]]
    assert gaps and max(gaps) < 1e-4, "M5: what was kept of broken answers is what these weights sampled"
