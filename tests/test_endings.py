"""Runs that end by themselves, with input that is short, partly bad, or good enough: exit status 0, and a reason for every loss."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from driver.archive import read_metrics, read_trajectories
from tests.service import CONFIG, trained_rows
from trainer.checkpoints import newest

REWARD = """
def score(response, row):
    if row["answer"] == "raise":
        raise KeyError("no such unit")
    if row["answer"] == "nan":
        return float("nan")
    return 1.0 if response and int(response[0], 36) % 2 else 0.0
"""


def run_to_the_end(tmp_path: Path, rows: list[dict[str, Any]], *settings: str) -> Path:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    scorers = json.dumps({"*": {"function": f"{tmp_path}/reward.py:score"}})
    store = Path(f"/dev/shm/headrace-test-{tmp_path.name}-{zlib.crc32(str(tmp_path).encode()):08x}")  # another checkout may run this
    all_settings = [
        f"run_dir={tmp_path}/run",
        f"store.directory={store}",
        "service.port=0",
        f"data={tmp_path}/data.jsonl",
        f"reward.scorers={scorers}",
        "batch.samples=4",
        "rollout.n=4",
        "trainer.schedule=constant",
        *settings,
    ]
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), "--quiet", "--exit-when-done"]
    flags = [part for setting in all_settings for part in ("--set", setting)]
    done = subprocess.run([*argv, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr + (tmp_path / "run/logs/driver.log").read_text()[-3000:]
    assert not store.exists(), "A1: the store holds nothing at rest"
    return tmp_path / "run"


def test_H2_W4_L4_a_short_dataset_with_bad_rows_is_trained_to_its_last_row_and_every_loss_has_its_reason(tmp_path):
    good = [{"prompt": f"sort {n} =", "answer": str(n)} for n in (31, 52, 74, 98, 45, 12)]
    bad = [
        {"prompt": "sort 1 =", "answer": "raise"},
        {"prompt": "sort 2 =", "answer": "nan"},
        {"prompt": "sort " + "7" * 90 + " =", "answer": "long"},
    ]
    # With a critic: without one, two groups whose rewards happen to be equal make a last batch that is skipped, and so discarded.
    run = run_to_the_end(tmp_path, good[:3] + bad + good[3:], "stop.batches=null", "stop.epochs=1", "trainer.critic={}")
    batches = read_metrics(run)
    assert [batch["samples"] for batch in batches] == [4, 2], "the last batch is short"
    ends = list(read_trajectories(run / "archive"))
    trained = [end for end in ends if end.outcome == "trained"]
    discarded = [end for end in ends if end.outcome == "discarded"]
    assert len(trained) == 6 * 4 and len(discarded) == 2 * 4
    reasons = {end.prompt: end.reason for end in discarded}
    assert "KeyError" in reasons["sort 1 ="] and "no such unit" in reasons["sort 1 ="]
    assert "nan" in reasons["sort 2 ="].lower()
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        ((row_index, reason),) = ledger.execute("SELECT row_index, reason FROM left_out_rows").fetchall()
    assert row_index == 5 and "rollout.context_length" in reason, "H3: it was not even registered"
    assert all(end.reward is None for end in discarded), "L4: a failed reward is no number"
    assert {end.reward for end in trained} <= {0.0, 1.0}
    lines = trained_rows(run)
    assert [line["batch_id"] for line in lines] == [0, 1]


@pytest.mark.slow
def test_A3_with_bound_0_and_the_deterministic_engine_two_runs_are_equal_bit_for_bit(tmp_path):
    """However many engines share the work, and whatever order answers come in."""
    rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 140)]
    weights = []
    for name, engines in (("one", 1), ("two", 2)):
        directory = tmp_path / name
        directory.mkdir()
        settings = [f"rollout.engines={engines}", "rollout.deterministic=true", "staleness.bound=0", "stop.batches=4"]
        run = run_to_the_end(directory, rows, *settings)
        assert max(batch["staleness_max"] for batch in read_metrics(run)) == 0
        weights.append((run / "checkpoints/step_00000004/hf/model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_ranks_two_mini_batches_and_a_target_reward_that_ends_the_run(tmp_path):
    rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 160)]
    settings = ["trainer.dp=2", "batch.mini_batches=2", "stop.batches=null", "stop.epochs=null", "stop.reward=0.01", "stop.reward_window=2"]
    run = run_to_the_end(tmp_path, rows, *settings)
    batches = read_metrics(run)
    assert 2 <= len(batches) <= 4
    assert all(batch["rows"] > 0 for batch in batches)
    ends = list(read_trajectories(run / "archive"))
    over = {end.reason for end in ends if end.outcome == "discarded"}
    assert over == {"run ended: mean reward reached 0.01"}, "what was in flight is accounted for"
    assert any(end.response for end in ends if end.outcome == "discarded"), "with its text, where it had one"


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"tp": 2}, {"pp": 2}, {"cp": 2, "dp": 2}], ids=str)
def test_the_demo_in_another_layout_of_the_trainer_runs_to_its_end_and_its_checkpoint_loads(tmp_path, settings):
    """Its vocabulary of 259 and its one key-value head divide by no tp; its engines compare every push with the trainer's log-probs."""
    from transformers import AutoModelForCausalLM

    rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 140)]
    wanted = [f"trainer.{name}={size}" for name, size in settings.items()]
    run = run_to_the_end(tmp_path, rows, *wanted, "stop.batches=3", "checkpoint.every=2")
    batches = read_metrics(run)
    assert len(batches) == 3
    gaps = [batch["logprob_gap_max"] for batch in batches if batch["logprob_gap_rows"]]
    assert gaps and max(gaps) < 1e-4, "M5: what the engines sampled with is what this layout computes"
    checkpoint = newest(run / "checkpoints")
    assert checkpoint is not None and checkpoint.trained_version == 3
    assert checkpoint.meta.layout == {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "ep": 1} | settings
    model, facts = AutoModelForCausalLM.from_pretrained(checkpoint.hf_path, output_loading_info=True)
    assert not any(facts.values()), facts
    assert model.get_input_embeddings().weight.shape == (259, 128)


@pytest.mark.slow
def test_the_demo_in_bf16_pushes_bf16_to_engines_that_hold_it_and_runs_to_its_end(tmp_path):
    rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 140)]
    run = run_to_the_end(tmp_path, rows, "trainer.dtype=bfloat16", "trainer.tp=2", "stop.batches=3", "checkpoint.every=2")
    batches = read_metrics(run)
    assert len(batches) == 3
    gaps = [batch["logprob_gap_max"] for batch in batches if batch["logprob_gap_rows"]]
    assert gaps and 1e-4 < max(gaps) < 0.5, "M5: two programs in bf16, some hundredths apart"
    checkpoint = newest(run / "checkpoints")
    assert checkpoint is not None and checkpoint.trained_version == 3
    assert json.loads((checkpoint.hf_path / "config.json").read_text())["dtype"] == "bfloat16"
