"""Whole runs whose rows and weights lie in Mooncake: real master, owner, engine and trainer; they die, hang and come back, and nothing is
lost that the accounts speak of (A1, A2)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from driver.ledger_load import check
from driver.mooncake import absent
from tests.service import ServiceUnderTest
from tests.test_whole import check_accounts

BATCHES, SAMPLES, N = 10, 6, 4
LONG_S = 400.0  # for machines that other work shares
SETTINGS = (
    "store.kind=mooncake",
    "store.inline_bytes=0",  # rows as small as the demo's would be in the ledger, and lost with no store
    f"store.capacity_bytes={64 << 20}",
    f"stop.batches={BATCHES}",
    f"batch.samples={SAMPLES}",
    f"rollout.n={N}",
    "checkpoint.every=4",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(absent()), reason="; ".join(absent()))]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceUnderTest]:
    made = ServiceUnderTest(tmp_path / "run", *SETTINGS)
    yield made
    made.close()


def process(service: ServiceUnderTest) -> dict[str, Any]:
    (found,) = [p for p in service.run("/processes") if p["role"] == "store"]
    return found


def begun(service: ServiceUnderTest, *settings: str) -> None:
    service.up(*settings)
    assert service.submit().status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2, "two batches", LONG_S)


def check_end(service: ServiceUnderTest) -> dict[str, Any]:
    status = service.wait(lambda s: s["state"] == "finished", "the end", LONG_S)
    check_accounts(service, status)
    found = check(service.directory / "ledger.sqlite")
    assert found.well, found
    counted = status["trajectories"]
    assert counted["trained"] == BATCHES * SAMPLES * N and counted["discarded"] == 0, counted
    assert counted["running"] == counted["ready"] == counted["consumed"] == 0
    return status


def test_A1_A2_a_whole_run_by_mooncake_and_what_holds_it_is_a_process_of_the_run(service: ServiceUnderTest) -> None:
    begun(service)
    owner = process(service)
    (master,) = owner["children"]
    assert (owner["state"], owner["incarnation"]) == ("ready", 1) and psutil.Process(master).name() == "mooncake_master"
    queues = service.run("/queues")["store"]
    assert queues["capacity_bytes"] >= 64 << 20 and queues["used_bytes"] > 0
    status = check_end(service)
    assert status["store"] == status["store"] | {"kind": "mooncake", "away": None, "losses": 0}
    assert not psutil.pid_exists(master) and not psutil.pid_exists(owner["pid"]), "nothing outlives the run"


@pytest.mark.parametrize(("who", "number"), [("owner", signal.SIGKILL), ("master", signal.SIGKILL), ("owner", signal.SIGSTOP)])
def test_A1_A2_B2_L2_its_owner_or_its_master_dies_in_mid_run(service: ServiceUnderTest, who: str, number: signal.Signals) -> None:
    begun(service)
    before = process(service)
    others = [(p["role"], p["pid"]) for p in service.run("/processes") if p["role"] != "store"]
    os.kill(before["pid"] if who == "owner" else before["children"][0], number)
    named: list[str] = []

    def is_back(status: dict[str, Any]) -> bool:
        if (wait := status["why"].get("store")) is not None:
            named.append(wait["reason"])
        return status["store"]["losses"] > 0 and status["store"]["away"] is None

    status = service.wait(is_back, "the store is back", LONG_S)
    assert process(service)["incarnation"] == 2
    assert status["store"]["last_loss"]["consumed_without_rows"] + status["store"]["last_loss"]["again"] > 0
    assert not named or "store-0" in " ".join(named) or "does not answer" in " ".join(named) or "has not answered" in " ".join(named)
    check_end(service)
    assert [(p["role"], p["pid"]) for p in service.run("/processes") if p["role"] != "store"] == others, "nothing else was started anew"
    assert "the store was lost" in service.log() and "ready ones are made again" in service.log()


def test_A1_A2_with_a_snapshot_rows_come_back_and_the_same_rows_are_trained(service: ServiceUnderTest) -> None:
    begun(service, "store.snapshot_every_s=0.2", "checkpoint.every=20")
    service.wait(lambda s: (s["snapshot"] or {}).get("objects", 0) >= 2 * SAMPLES * N, "a copy of their rows", LONG_S)
    os.kill(process(service)["pid"], signal.SIGKILL)
    status = service.wait(lambda s: s["store"]["losses"] > 0 and s["store"]["away"] is None, "the store is back", LONG_S)
    assert status["store"]["last_loss"]["snapshot"] > 0
    check_end(service)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_A1_A2_W1_the_driver_ends_and_starts_again(service: ServiceUnderTest, how: str) -> None:
    begun(service)
    owner = process(service)
    if how == "SIGKILL":
        service.kill()
    else:
        assert service.terminate() == 0
    psutil.wait_procs([psutil.Process(owner["pid"])] if psutil.pid_exists(owner["pid"]) else [], timeout=60)
    assert not psutil.pid_exists(owner["pid"]), "it dies with the driver"
    service.up()
    found = service.wait(lambda s: s["found_at_start"] is not None, "the start", LONG_S)["found_at_start"]
    assert found["memory"] == 0 and (found["parked"] == 0) == (how == "SIGKILL"), found
    check_end(service)


def test_A1_a_run_moves_from_shared_memory_to_mooncake_between_two_starts(service: ServiceUnderTest) -> None:
    begun(service, "store.kind=embedded")
    assert service.terminate() == 0
    service.up()
    found = service.wait(lambda s: s["found_at_start"] is not None, "the start", LONG_S)["found_at_start"]
    assert found["parked"] > 0 and found["again"] == 0, found
    assert check_end(service)["store"]["kind"] == "mooncake"
