"""The example of a user's role, in a whole service: it reads the metrics of every batch once, whatever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.archive import read_metrics
from driver.config import load_config
from tests.service import ROOT, ServiceUnderTest
from tests.test_whole import check_accounts

EXAMPLE = ROOT / "examples/own_role"
BATCHES = 30


def roles() -> str:
    declared = yaml.safe_load((EXAMPLE / "config.yaml").read_text())["roles"]
    declared["summary"]["logic"] = f"{EXAMPLE}/summary.py:Summary"
    declared["summary"]["params"]["last"] = 1000
    return json.dumps(declared)


def summary(service: ServiceUnderTest) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in service.run("/streams") if one["stream"] == "summary")
    return found


def pid_of(service: ServiceUnderTest) -> int:
    return next(int(p["pid"]) for p in service.run("/processes") if p["role"] == "summary")


def test_the_example_is_a_role_in_30_lines_and_its_configuration_is_right() -> None:
    assert len((EXAMPLE / "summary.py").read_text().splitlines()) <= 30
    assert list(load_config(EXAMPLE / "config.yaml").roles) == ["summary"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_A2_L2_every_batch_is_read_once_by_a_role_of_the_users_through_its_death_and_the_drivers(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", f"stop.batches={BATCHES}", "stop.epochs=null", f"roles={roles()}", "checkpoint.every=4")
    try:
        service.up()
        streams = {one["stream"]: one for one in service.run("/streams")}
        assert service.submit().status_code == 201
        service.wait(lambda _: (summary(service).get("value") or {}).get("batches", 0) >= 3, "a summary", 180)
        learner = [p for p in service.run("/processes") if p["role"] in ("trainer", "engine", "reward")]
        first = pid_of(service)
        os.kill(first, signal.SIGKILL)
        service.wait(lambda _: pid_of(service) not in (0, first), "its next life")
        after = summary(service)["value"]["batches"]
        service.wait(lambda _: summary(service)["value"]["batches"] > after, "more batches", 180)
        assert [p for p in service.run("/processes") if p["role"] in ("trainer", "engine", "reward")] == learner, "nothing else was touched"
        printed = subprocess.run(
            [sys.executable, "-P", "-m", "driver.cli", "streams", "--url", service.url], capture_output=True, text=True, timeout=60
        )
        assert printed.returncode == 0 and "metrics" in printed.stdout and "summary" in printed.stdout, printed
        service.kill()
        service.up()
        status = service.wait(lambda s: s["state"] == "finished", "the end", 240)
        check_accounts(service, status)
        streams = {one["stream"]: one for one in service.run("/streams")}
        reader = streams["metrics"]["readers"]["summary"]
        assert (reader["done"], reader["given_up"], reader["waiting"]) == (BATCHES, 0, 0), reader
        assert streams["metrics"]["publisher"] == "trainer" and streams["metrics"]["subscribers"] == ["summary"]
        told = streams["summary"]["value"]
        assert told["batches"] == BATCHES and told["newest"] == BATCHES - 1, "the run's end waited for the last one"
        # A batch that was made again after the kill may be on record with its second rewards; it was read with its first.
        last = {line["batch_id"]: line["reward_mean"] for line in read_metrics(service.directory)}
        assert sorted(last) == list(range(BATCHES)) and 0.0 <= told["reward_mean"] <= 1.0
    finally:
        service.close()
