"""What may change between two starts of a run: the trainer's layout, and all that goes with it."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from driver.archive import read_metrics
from tests.service import ServiceUnderTest, trained_rows
from trainer.checkpoints import newest

BATCHES, SAMPLES, N = 14, 4, 4
ROWS = "".join(
    json.dumps({"prompt": f"sort {n} =", "answer": "".join(sorted(str(n))), "task_type": "sort"}) + "\n" for n in range(1000, 1200)
)


@pytest.mark.slow
def test_A1_A2_a_run_goes_on_in_another_layout_after_every_restart_and_accounts_for_all(tmp_path: Path) -> None:
    """One rank, saved at SIGTERM; then two tensor-parallel ranks, killed with batches to replay; then two data-parallel ranks, for which
    the pending plan is made anew, to the end."""
    service = ServiceUnderTest(
        tmp_path / "run", f"stop.batches={BATCHES}", f"batch.samples={SAMPLES}", f"rollout.n={N}", "checkpoint.every=3"
    )
    try:
        service.up()
        assert service.submit(ROWS.encode()).status_code == 201
        service.wait(lambda s: s["trained_version"] >= 2, "two batches on one rank")
        assert service.terminate() == 0
        held = newest(service.directory / "checkpoints")
        assert held is not None and held.meta.layout["tp"] == 1

        service.up("trainer.tp=2", "trainer.sequence_parallel=true")
        status = service.wait(lambda s: s["trained_version"] >= held.trained_version + 4, "four batches on two tensor-parallel ranks")
        assert status["epoch"] == 0, "the checkpoint of the other layout was resumed, not made again"
        service.kill()
        other = newest(service.directory / "checkpoints")
        assert other is not None and other.meta.layout["tp"] == 2 and other.trained_version > held.trained_version

        service.up("trainer.dp=2", "trainer.distributed_optimizer=true")
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        assert status["trained_version"] == status["committed_version"] == BATCHES
        counted = status["trajectories"]
        assert counted["trained"] == counted["registered"] == BATCHES * SAMPLES * N, counted
        assert counted["running"] == counted["ready"] == counted["consumed"] == 0
    finally:
        service.close()
    last = {line["batch_id"]: line for line in trained_rows(service.directory)}  # a replay writes its batch again
    assert sorted(last) == list(range(BATCHES))
    assert max(Counter(row for line in last.values() for row in line["row_ids"]).values()) == 1, "A2: a row in two applied batches"
    end = newest(service.directory / "checkpoints")
    assert end is not None and end.meta.layout["dp"] == 2 and end.meta.optimizer_steps == {"policy": BATCHES}
    batches = read_metrics(service.directory)
    gaps = [batch["logprob_gap_max"] for batch in batches if batch["logprob_gap_rows"]]
    assert gaps and max(gaps) < 1e-4, "M5: what the engines sampled with is what every layout computes"
    assert all(batch["memory_bytes"][batch["memory_phase"]] == max(batch["memory_bytes"].values()) for batch in batches)


@pytest.mark.slow
def test_A2_a_run_with_a_critic_a_reference_and_a_correction_goes_on_after_its_trainer_is_killed(tmp_path: Path) -> None:
    """All that a loss can ask for at once: what is beside the policy comes back with it, and every row is trained, equal rewards or not."""
    loss = (
        "trainer.loss={old_log_probs: recomputed, correction: {weight: token}, kl: {coefficient: 0.01}, entropy_bonus: 0.001}",
        "trainer.critic={lam: 0.95}",
    )
    service = ServiceUnderTest(
        tmp_path / "run",
        "stop.batches=9",
        f"batch.samples={SAMPLES}",
        f"rollout.n={N}",
        "batch.mini_batches=2",
        "checkpoint.every=3",
        *loss,
    )
    try:
        service.up("trainer.pp=2")
        assert service.submit(ROWS.encode()).status_code == 201
        service.wait(lambda s: s["committed_version"] >= 3 and s["trained_version"] >= 4, "a checkpoint and a batch after it")
        pids = {p["role"]: p["pid"] for p in service.run("/processes")}
        os.kill(psutil.Process(pids["trainer"]).children()[-1].pid, signal.SIGKILL)
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        assert status["trained_version"] == status["committed_version"] == 9
        counted = status["trajectories"]
        assert counted["trained"] == counted["registered"] == 9 * SAMPLES * N, counted
    finally:
        service.close()
    last = {line["batch_id"]: line for line in trained_rows(service.directory)}
    assert all(len(line["row_ids"]) == SAMPLES * N for line in last.values()), "with a critic rows of equal rewards are trained too"
    end = newest(service.directory / "checkpoints")
    assert end is not None and end.meta.optimizer_steps == {"policy": 18, "critic": 18}
    for batch in read_metrics(service.directory):
        told = [batch[name] for name in ("reference_kl", "off_policy_kl", "effective_sample_size", "value_loss", "critic_grad_norm")]
        assert None not in told and 0.0 < batch["effective_sample_size"] <= 1.0
