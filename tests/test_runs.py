"""Several runs on one service: beside each other, and one after the other on the same engines, through a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.service import ServiceUnderTest, trained_rows

SETTINGS = ("batch.samples=4", "rollout.n=4", "stop.batches=100000", "stop.epochs=null", "checkpoint.every=5", "trainer.schedule=constant")


def pids(service: ServiceUnderTest, run: str, role: str) -> list[int]:
    return [p["pid"] for p in service.get(f"/v1/runs/{run}/processes") if p["role"] == role and p["state"] == "ready"]


def states(service: ServiceUnderTest) -> dict[str, str]:
    return {run["run_id"]: run["state"] for run in service.get("/v1/runs")}


def wait(service: ServiceUnderTest, run: str, condition: Any, what: str) -> dict[str, Any]:
    """As ServiceUnderTest.wait, of any run."""
    found: dict[str, Any] = {}

    def look(_: dict[str, Any]) -> bool:
        found.update(next((one for one in service.get("/v1/runs") if one["run_id"] == run), {"state": "unknown"}))
        assert found["state"] != "failed", found
        return bool(condition(found))

    service.wait(look, what)
    return found


def begin(service: ServiceUnderTest, **body: Any) -> Any:
    return service.http.post(f"{service.url}/v1/runs", json=body)


@pytest.mark.slow
def test_A1_A2_E12_a_run_takes_over_the_engines_and_datasets_of_another_and_a_third_goes_on_beside_it(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", *SETTINGS)
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 3, "three batches of the first run")
        engine, reward, trainer = (pids(service, "sort-digits", role) for role in ("engine", "reward", "trainer"))
        rows = [(one["dataset_id"], one["name"], one["rows"], one["closed"]) for one in service.run("/datasets")]

        refused = begin(service, **{"run_id": "b", "from": "sort-digits", "engines": "take_over", "set": {"rollout.stream_interval": 3}})
        assert refused.status_code == 400 and "rollout.stream_interval differs" in refused.json()["error"]["message"]
        assert "without --take-over" in refused.json()["error"]["message"]
        assert begin(service, **{"run_id": "b", "from": "nobody"}).status_code == 400
        assert begin(service, **{"run_id": "sort-digits", "from": "sort-digits"}).status_code == 409
        assert states(service) == {"sort-digits": "running"}, "nothing was changed"

        change = {"trainer.learning_rate": 0.0001, "batch.samples": 8}
        reply = begin(service, **{"run_id": "b", "from": "sort-digits", "engines": "take_over", "set": change})
        assert reply.status_code == 202 and "begins when run sort-digits has ended" in reply.json()["state"]
        waits = service.http.get(f"{service.url}/v1/runs/b")
        assert waits.status_code in (200, 409)
        found = wait(service, "b", lambda s: s.get("trained_version", 0) >= 2, "two batches of the second run")
        taken = [(one["dataset_id"], one["name"], one["rows"], one["closed"]) for one in found["datasets"]]
        assert taken == rows, "the same datasets, with the same names"
        assert pids(service, "b", "engine") == engine and pids(service, "b", "reward") == reward
        assert pids(service, "b", "trainer") != trainer and not pids(service, "sort-digits", "trainer")
        first = service.run()
        assert first["state"] == "finished" and first["committed_version"] == first["trained_version"]
        assert "run ended: cancelled" in "".join(first["trajectories"]["reasons"]) or not first["trajectories"]["discarded"]
        assert first["ended"] == "cancelled", "a finished run says how it ended"

        assert begin(service, **{"run_id": "c", "from": "b", "set": {"stop.batches": 3}}).status_code == 202
        third = wait(service, "c", lambda s: s["state"] == "finished", "the end of the third run, on engines of its own")
        assert third["trained_version"] == 3
        assert pids(service, "b", "engine") == engine, "the second run's engines are its own"
        version = wait(service, "b", lambda s: s["state"] == "running", "the second run")["trained_version"]

        assert service.terminate() == 0
        service.up()
        found = wait(service, "b", lambda s: s.get("trained_version", 0) >= version + 2, "the second run after a restart")
        assert states(service) == {"sort-digits": "finished", "b": "running", "c": "finished"}
        assert service.http.post(f"{service.url}/v1/runs/b/cancel").status_code == 202
        found = wait(service, "b", lambda s: s["state"] == "finished", "the end")
    finally:
        service.close()
    for name in ("run", "b", "c"):
        lines = {line["batch_id"]: line for line in trained_rows(tmp_path / name)}
        rows_trained = [row for line in lines.values() for row in line["row_ids"]]
        assert sorted(lines) == list(range(len(lines))) and len(set(rows_trained)) == len(rows_trained), "A2"
    counted = found["trajectories"]
    assert counted["registered"] == counted["finished"] == counted["trained"] + counted["discarded"], json.dumps(counted)


@pytest.mark.slow
def test_A1_a_service_killed_while_one_run_gives_way_to_another_goes_on_with_it(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", *SETTINGS)
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 2, "two batches of the first run")
        assert begin(service, **{"run_id": "b", "from": "sort-digits", "engines": "take_over"}).status_code == 202
        service.kill()  # it was accepted
        service.up()
        wait(service, "b", lambda s: s.get("trained_version", 0) >= 1, "a batch of the second run")
        first = service.run()
        assert first["state"] == "finished" and first["trajectories"]["registered"] == first["trajectories"]["finished"]
    finally:
        service.close()
