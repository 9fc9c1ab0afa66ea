"""What the trainer says it did is what the ledger takes over after a crash between the two."""

from __future__ import annotations

import json

from driver.training import skipped_reason


def test_A2_a_step_that_the_trainer_skipped_is_not_taken_over_as_trained(tmp_path):
    path = tmp_path / "trained_rows.jsonl"
    lines = [
        {"batch_id": 0, "epoch": 0, "row_ids": ["a"], "skipped": None},
        {"batch_id": 1, "epoch": 0, "row_ids": ["b"], "skipped": None},
        {"batch_id": 1, "epoch": 1, "row_ids": [], "skipped": "loss is not finite"},  # the replay is what the checkpoint holds
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"batch_id": 1, "ep')
    assert skipped_reason(path, 0) is None
    assert skipped_reason(path, 1) == "loss is not finite"
