"""The whole service on a real SGLang: killed in the middle of a push, and with its driver, it comes back and every row is accounted for."""

from __future__ import annotations

import json
import os
import signal
import time

import psutil
import pytest

from tests.service import ServiceUnderTest
from tests.sglang_server import START_S, sglang_here
from tests.test_whole import check_accounts

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]
BATCHES = 12


@pytest.fixture
def service(tmp_path):
    found = ServiceUnderTest(
        tmp_path / "run",
        f"stop.batches={BATCHES}",
        "checkpoint.every=4",
        "batch.samples=6",
        "rollout.n=4",
        "rollout.engine=sglang",
        f"rollout.sglang.python={sglang_here().python}",
        "rollout.sglang.device=cpu",
        "push.bucket_bytes=4096",  # so many calls to a push that a kill falls between them
    )
    found.up()
    yield found
    found.close()


def engine(service: ServiceUnderTest) -> dict:
    (found,) = [process for process in service.run("/processes") if process["role"] == "engine"]
    return found


def family_of(service: ServiceUnderTest) -> list[psutil.Process]:
    """The server and all that it has started."""
    main = psutil.Process(engine(service)["pid"])
    family = [main, *main.children(recursive=True)]
    assert any("scheduler" in process.name() for process in family) and any("detokenizer" in process.name() for process in family)
    return family


def state(service: ServiceUnderTest) -> str:
    return "".join(one["state"] for one in service.run("/engines"))


def test_E4_V6_killed_in_a_push_and_with_its_driver_it_comes_back_and_nothing_is_lost(service):
    assert service.submit().status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2, "two batches", START_S)

    service.wait(lambda _: state(service) == "shut", "a push")
    first, old_family = engine(service), family_of(service)
    os.kill(first["pid"], signal.SIGKILL)
    assert not psutil.wait_procs(old_family, timeout=60)[1], "a child outlived its server"
    service.wait(lambda _: engine(service)["incarnation"] > first["incarnation"] and state(service) == "open", "the next life", START_S)
    version = service.run()["trained_version"]
    service.wait(lambda s: s["trained_version"] >= version + 2, "two batches after the engine's death")

    family = family_of(service)
    service.kill()
    assert not psutil.wait_procs(family, timeout=60)[1], "a server outlived its driver"

    service.up()
    status = service.wait(lambda s: s["state"] == "finished", "the end", START_S)
    assert status["trained_version"] == status["committed_version"] == BATCHES
    check_accounts(service, status)
    counted = status["trajectories"]
    assert counted["trained"] == BATCHES * 6 * 4 == counted["registered"], counted
    lines = [json.loads(line) for line in (service.directory / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["logprob_gap_max"] for line in lines if line["logprob_gap_rows"]]
    assert gaps and max(gaps) <= 1e-4, "M5"
    assert not service.store.exists()


def test_H6_it_ends_without_a_wait_for_the_engine(service):
    service.wait(lambda _: state(service) == "open", "the engine", START_S)
    family = family_of(service)
    began = time.monotonic()
    assert service.terminate() == 0
    assert time.monotonic() - began < 15
    assert not psutil.wait_procs(family, timeout=10)[1]
