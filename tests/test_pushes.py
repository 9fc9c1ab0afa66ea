"""What may happen while a version is on its way to the engines: the trainer dies (E5), another run pushes too (E12)."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from tests.fleet import Engine, fleet
from tests.service import ServiceUnderTest
from tests.test_whole import check_accounts


def test_E5_the_trainer_dies_between_two_buckets_and_no_engine_stays_paused(tmp_path: Path) -> None:
    """The snapshot lies outside the trainer's processes: the push ends at the version it began."""
    with fleet(tmp_path, 1, None, slow_s=0.0) as (engine,):
        service = ServiceUnderTest(
            tmp_path / "run",
            "rollout.engines=0",
            f"rollout.engine_urls={json.dumps([engine.proxy.url])}",
            "batch.samples=4",
            "rollout.n=4",
            "push.bucket_bytes=8192",
            "checkpoint.every=2",
            "stop.batches=400",
        )
        try:
            engine.wait(60)
            service.up()
            service.submit()
            service.wait(lambda s: s["trained_version"] >= 3, "three batches")
            (trainer,) = [p for p in service.run("/processes") if p["role"] == "trainer"]
            dead = threading.Event()

            def kill_the_trainer() -> None:
                for pid in (trainer["pid"], *trainer["children"]):
                    os.kill(pid, signal.SIGKILL)
                dead.set()

            engine.proxy.arm("/update_weights_from_tensor", 3, kill_the_trainer)
            assert dead.wait(60)
            # The next trainer's pushes may begin at any moment: open, not paused and under one name has to be seen together, once.
            service.wait(lambda _: serves(service, engine), "the engine serves, and is not paused", 60)
            (shown,) = service.run("/engines")
            assert shown["incarnation"] == 1, "the engine was not replaced: the push did not need the trainer"
            (now,) = [p for p in service.run("/processes") if p["role"] == "trainer"]
            assert now["state"] != "ready" or now["incarnation"] > trainer["incarnation"], "all that while it had no trainer, or a new one"
            version = service.run()["trained_version"]
            service.wait(lambda s: s["trained_version"] >= version + 3, "three batches of the next trainer")
            service.http.post(f"{service.url}/v1/runs/sort-digits/drain")
            check_accounts(service, service.wait(lambda s: s["state"] == "finished", "the end"))
        finally:
            service.close()


def test_E12_two_runs_on_one_host_push_at_the_same_time_and_share_nothing(tmp_path: Path) -> None:
    """The same run_id even, in two directories. Only the store's directory would be the same, and then the second refuses to start."""
    services = [
        ServiceUnderTest(tmp_path / name, "batch.samples=4", "rollout.n=4", "push.bucket_bytes=8192", "stop.batches=6", transport)
        for name, transport in (("a", "push.transport=auto"), ("b", "push.transport=disk"))
    ]
    try:
        for service in services:
            service.up()
        for service in services:
            service.submit()
        ports = [
            {c.laddr.port for p in [service.process.pid, *(q["pid"] for q in service.run("/processes"))] for c in listening(p)}
            for service in services
        ]
        assert ports[0] and ports[1] and not ports[0] & ports[1]
        for service in services:
            status = service.wait(lambda s: s["state"] == "finished", "the end")
            assert status["trained_version"] == 6 and status["trajectories"]["trained"] == 6 * 16, status["trajectories"]
            check_accounts(service, status)
    finally:
        for service in services:
            service.close()


def serves(service: ServiceUnderTest, engine: Engine) -> bool:
    (before,) = service.run("/engines")
    ready, said = engine.ask("/ready").status_code == 200, engine.ask("/model_info").json()["weight_version"]
    (after,) = service.run("/engines")
    return ready and before["state"] == after["state"] == "open" and before["version"] == said == after["version"]


def listening(pid: int) -> list[psutil._common.pconn]:
    try:
        return [c for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return []


def test_E12_a_second_run_in_the_same_store_is_refused_before_it_touches_a_thing(tmp_path: Path) -> None:
    first, second = (ServiceUnderTest(tmp_path / name) for name in "ab")
    try:
        first.up(f"store.directory=/dev/shm/headrace-test-{os.getpid()}-shared")
        with pytest.raises(AssertionError, match=r"another run .* has its store in .*give this run another run_id"):
            second.up(f"store.directory=/dev/shm/headrace-test-{os.getpid()}-shared")
        assert first.run()["state"] == "running"
    finally:
        for service in (first, second):
            service.close()
