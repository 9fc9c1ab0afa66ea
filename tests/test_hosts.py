"""Three hosts on one machine: a real driver and its store on one, a trainer's reader on another, which shares nothing but the network.

The reader is `trainer.rows.open_row`, as a rank calls it, in a process of its own network and its own /dev/shm. That the launcher starts a
rank there comes with a launcher for many machines.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.ledger_load import check
from driver.mooncake import absent
from tests.netns import Network, hosts
from tests.service import ServiceUnderTest
from tests.test_whole import check_accounts

SAMPLES, N = 6, 4
LONG_S = 400.0
TOKEN = "three-hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(bool(absent()), reason="; ".join(absent()))]

READER = """
import json, sys, time
import numpy as np
from trainer.rows import Unreadable, open_row
from trainer.wire import PlanRow

for line in sys.stdin:
    asked = json.loads(line)
    began = time.monotonic()
    try:
        row = open_row(PlanRow.model_validate(asked["row"]), asked["vocab_size"])
        found = {"ids": row.input_ids.tolist(), "log_probs": row.tokens["behaviour"].tolist()}
    except Unreadable as error:
        found = {"unreadable": str(error)}
    print(json.dumps({**found, "seconds": time.monotonic() - began}), flush=True)
"""


class Reader:
    """A trainer's process on another host. One line asks for a row, one answers."""

    def __init__(self, network: Network, host: int) -> None:
        argv = network.on(host, [sys.executable, "-P", "-c", READER])
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"row": row, "vocab_size": 1 << 20}) + "\n")
        self._process.stdin.flush()
        return dict(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def network() -> Iterator[Network]:
    with hosts(3) as made:
        yield made


def settings(network: Network, *more: str) -> tuple[str, ...]:
    return (
        f"hosts=[{network.address(2)}, {network.address(3)}]",  # and so the store is Mooncake's
        f"store.capacity_bytes={64 << 20}",
        "store.inline_bytes=0",  # so short a row would ride in its reference
        "stop.batches=150",
        f"batch.samples={SAMPLES}",
        f"rollout.n={N}",
        "checkpoint.every=150",  # rows stay until then
        f"service.host={network.address(1)}",
        f"service.token={TOKEN}",
        *more,
    )


def planned(service: ServiceUnderTest) -> list[dict[str, Any]]:
    """The rows of a batch as the trainer got them, of one whose rows are still there."""
    with sqlite3.connect(f"file:{service.directory}/ledger.sqlite?mode=ro", uri=True) as ledger:
        plans = [json.loads(plan) for (plan,) in ledger.execute("SELECT plan FROM batches WHERE state != 'committed' ORDER BY batch_id")]
    return [row for mini in plans[0] for rank in mini["ranks"] for micro_batch in rank for row in micro_batch]


def begun(service: ServiceUnderTest) -> None:
    service.http.headers["authorization"] = f"Bearer {TOKEN}"
    service.up()
    assert service.submit().status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2, "two batches", LONG_S)


def check_end(service: ServiceUnderTest) -> None:
    service.http.post(f"{service.url}/v1/runs/sort-digits/drain").raise_for_status()
    status = service.wait(lambda s: s["state"] == "finished", "the end", LONG_S)
    check_accounts(service, status)
    found = check(service.directory / "ledger.sqlite")
    assert found.well, found
    counted = status["trajectories"]
    assert counted["trained"] == counted["registered"] > 2 * SAMPLES * N and counted["discarded"] == 0, counted


def test_A1_B2_L1_a_trainer_on_a_second_host_reads_its_rows_and_a_host_that_is_cut_off_is_named_and_comes_back(
    network: Network, tmp_path: Path
) -> None:
    service = ServiceUnderTest(tmp_path / "run", *settings(network), on=lambda argv: network.on(1, argv))
    reader = Reader(network, 2)
    try:
        begun(service)
        assert service.run()["store"]["location"].startswith(f"mooncake:{network.address(1)}:")
        rows = planned(service)
        assert len(rows) >= SAMPLES, "rows without an advantage are left out"
        read = {row["row_id"]: reader.read(row) for row in rows}
        for row_id, found in read.items():
            assert "unreadable" not in found, found
            shown = service.run(f"/trajectories/{row_id[:22]}")
            assert len(found["ids"]) > len(found["log_probs"]) > 0
            assert shown["state"] in ("consumed", "finished")

        network.cut(2)
        version = service.run()["trained_version"]
        lost = reader.read(rows[0])
        assert network.address(1) in lost["unreadable"], "the reader names the host that it can not reach"
        service.wait(lambda s: s["trained_version"] > version, "the others go on", LONG_S)
        network.mend(2)
        until = time.monotonic() + 120
        while "unreadable" in (again := reader.read(rows[0])):
            assert time.monotonic() < until, again
        assert again["ids"] == read[rows[0]["row_id"]]["ids"], "and reads it again when it is back"
        check_end(service)
    finally:
        reader.close()
        service.close()


def test_A1_A2_B2_L1_the_host_that_holds_the_store_is_cut_off_for_a_while_and_nothing_is_lost(network: Network, tmp_path: Path) -> None:
    """Master and memory are on host 3; the driver on host 1 is a client alone."""
    location = f"mooncake:{network.address(3)}:50051/sort-digits?http=9003"
    flags = ["--location", location, "--host", network.address(3), "--capacity-bytes", str(64 << 20), "--port", "9100", "--master"]
    with (tmp_path / "owner.log").open("wb") as log:
        owner = subprocess.Popen(network.on(3, [sys.executable, "-P", "-m", "store.mooncake_owner", *flags]), stdout=log, stderr=log)
    elsewhere = (f"store.mooncake.master={network.address(3)}:50051", "store.mooncake.segment_bytes=0")
    service = ServiceUnderTest(tmp_path / "run", *settings(network, *elsewhere), on=lambda argv: network.on(1, argv))
    try:
        healthy = network.on(3, ["curl", "-sf", "http://127.0.0.1:9100/health"])
        until = time.monotonic() + 120
        while subprocess.run(healthy, capture_output=True, check=False).returncode != 0:
            assert owner.poll() is None and time.monotonic() < until, (tmp_path / "owner.log").read_text()
        begun(service)
        assert not [p for p in service.run("/processes") if p["role"] == "store"], "nothing of the store runs here"
        network.cut(3)
        status = service.wait(lambda s: s["store"]["away"] is not None and "store" in s["why"], "it is named", LONG_S)
        assert network.address(3) in status["why"]["store"]["reason"], status["why"]
        registered = status["trajectories"]["registered"]
        for _ in range(5):
            time.sleep(0.5)  # cut off for a while: less than the master takes to give an owner up
            status = service.run()
        assert status["trajectories"]["registered"] == registered and status["store"]["away"], "back-pressure"
        network.mend(3)
        status = service.wait(lambda s: s["store"]["away"] is None, "it is back", LONG_S)
        assert status["store"]["losses"] == 0, "what lay there lies there still"
        check_end(service)
    finally:
        service.close()
        owner.terminate()
        owner.wait(60)
