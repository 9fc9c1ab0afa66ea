"""Processes that somebody stops (SIGSTOP) in a whole service: they answer nothing, or another answers for them and nothing moves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.service import ServiceUnderTest
from tests.test_whole import check_accounts

REWARD = """
import time

def score(response, row):
    time.sleep(0.05)
    return float(len(response) % 2)
"""


def children(service: ServiceUnderTest, role: str) -> list[psutil.Process]:
    (pid,) = (p["pid"] for p in service.run("/processes") if p["role"] == role)
    return sorted(psutil.Process(pid).children(), key=lambda child: (child.create_time(), child.pid))


def others(service: ServiceUnderTest, role: str) -> list[tuple[str, int, int]]:
    return [(p["role"], p["pid"], p["incarnation"]) for p in service.run("/processes") if p["role"] not in (role, "driver")]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("rank", [1, 0])
def test_H9_L2_a_rank_that_is_stopped_is_named_and_its_group_goes_on_from_the_last_checkpoint(tmp_path: Path, rank: int) -> None:
    """Rank 0's health is answered by a thread of its own, while its work waits for rank 1."""
    service = ServiceUnderTest(
        tmp_path / "run", "stop.batches=200", "stop.epochs=null", "trainer.dp=2", "trainer.stall_s=3", "checkpoint.every=2"
    )
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 3, "three batches")
        before = others(service, "trainer")
        victim = children(service, "trainer")[rank]
        os.kill(victim.pid, signal.SIGSTOP)
        version = service.run()["trained_version"]
        service.wait(lambda s: s["trained_version"] >= version + 3, "batches after it")
        log = service.log()
        assert f"rank {rank} (process {victim.pid}) was stopped from outside and is replaced" in log, log[-2000:]
        assert ("its work has stood still" if rank else "without a healthy answer") in log
        assert not psutil.pid_exists(victim.pid)
        assert others(service, "trainer") == before, "nothing else was started anew"
        check_accounts(service, service.run())
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_H5_L4_a_reward_worker_that_is_stopped_is_replaced_and_its_job_is_scored_by_another(tmp_path: Path) -> None:
    """Its silence is nobody's mistake: with no second try for data, every trajectory is trained all the same."""
    (tmp_path / "reward.py").write_text(REWARD)
    service = ServiceUnderTest(
        tmp_path / "run",
        "stop.batches=200",
        "stop.epochs=null",
        "batch.samples=4",
        "rollout.n=4",
        "rollout.data_retries=0",
        "reward.workers=2",
        f"reward.scorers={{'*': {{function: '{tmp_path}/reward.py:score', time_limit_s: 2}}}}",
    )
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 2, "two batches")
        before = others(service, "reward")
        for victim in children(service, "reward"):
            os.kill(victim.pid, signal.SIGSTOP)
            until = time.monotonic() + 30
            while psutil.pid_exists(victim.pid):
                assert time.monotonic() < until, "it was not noticed"
                time.sleep(0.05)
        version = service.run()["trained_version"]
        status = service.wait(lambda s: s["trained_version"] >= version + 2, "batches after it")
        assert status["trajectories"]["discarded"] == 0, status["trajectories"]
        assert "was stopped from outside" in service.log("reward-0")
        assert others(service, "reward") == before
        check_accounts(service, status)
    finally:
        service.close()
