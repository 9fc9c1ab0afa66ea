"""What a whole service keeps of its work when its driver, its memory, or the disk of its ledger goes away in the middle of it."""

from __future__ import annotations

import array
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from driver.archive import read_trajectories
from driver.ledger_load import check
from tests.service import ServiceUnderTest, trained_rows

SAMPLES, N = 6, 4
LONG_S = 200.0  # for machines that other work shares
ROWS = "".join(
    json.dumps({"prompt": f"sort {n} =", "answer": "".join(sorted(str(n))), "task_type": "sort"}) + "\n" for n in range(10_000, 10_200)
)
SETTINGS = (f"batch.samples={SAMPLES}", f"rollout.n={N}", "trainer.schedule=constant")
PREFIXES = ("rollout.prefix_log_every_s=0.2", "rollout.stream_interval=1", "rollout.deterministic=true", "stop.batches=1")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceUnderTest]:
    made = ServiceUnderTest(tmp_path / "run", *SETTINGS)
    yield made
    made.close()


def slow_down(service: ServiceUnderTest, seconds: float) -> None:
    service.wait(lambda _: [engine["state"] for engine in service.run("/engines")] == ["open"], "the engine")
    (engine,) = service.run("/engines")
    assert service.http.post(engine["url"] + "/slow_down", json={"forward_sleep_time": seconds}).status_code == 200


def answers(directory: Path) -> dict[str, tuple[list[int], list[float], str | None]]:
    return {row.traj_uid: (row.input_ids, row.rollout_log_probs, row.outcome) for row in read_trajectories(directory / "archive")}


def check_all_trained(service: ServiceUnderTest, status: dict[str, Any], batches: int) -> None:
    counted = status["trajectories"]
    assert counted["trained"] == batches * SAMPLES * N == counted["registered"], counted
    last = {line["batch_id"]: line for line in trained_rows(service.directory)}
    assert max(Counter(row for line in last.values() for row in line["row_ids"]).values()) == 1, "A2: a row in two applied batches"
    found = check(service.directory / "ledger.sqlite")
    assert found.well, found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of a run that nobody interrupted."""
    service = ServiceUnderTest(tmp_path_factory.mktemp("whole") / "run", *SETTINGS)
    try:
        service.up(*PREFIXES)
        assert service.submit(ROWS.encode()).status_code == 201
        service.wait(lambda s: s["state"] == "finished", "the run without a kill", LONG_S)
    finally:
        service.close()
    return answers(service.directory)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_W1_H6_A3_answers_in_flight_go_on_after_the_driver_ends_and_have_the_bits_of_a_run_that_never_was_interrupted(
    service: ServiceUnderTest, whole: dict[str, Any], how: str
) -> None:
    service.up(*PREFIXES)
    slow_down(service, 1.0)
    assert service.submit(ROWS.encode()).status_code == 201

    def some_are_long(_status: dict[str, Any]) -> bool:
        page = service.run("/trajectories", state="running", limit=100)["items"]
        return sum(service.run(f"/trajectories/{t['traj_uid']}").get("tokens_so_far", 0) >= 2 for t in page) >= 2

    service.wait(some_are_long, "answers in flight")
    if how == "SIGKILL":
        service.kill()
    else:
        assert service.terminate() == 0
    service.up(*PREFIXES)
    found = service.run()["found_at_start"]
    assert found["resumed"] >= 2 and found["resumed_tokens"] >= 2, found
    status = service.wait(lambda s: s["state"] == "finished", "the end", LONG_S)
    assert status["restarts"] == 1 and "logged tokens" in service.log()
    check_all_trained(service, status, 1)
    assert answers(service.directory) == whole
    assert not list(service.directory.glob("prefixes.sqlite*")), "removed at the end of the run"


REWARD = """
import random
import time
from pathlib import Path

def score(response, row):
    while Path(__file__).with_name("hold").exists():
        time.sleep(0.05)
    return random.random()  # equal rewards would train nothing
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_H6_W1_sigterm_in_the_middle_of_rewards_ends_in_time_and_what_was_sampled_is_scored_then_and_not_sampled_again(
    service: ServiceUnderTest, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "hold").touch()
    scorers = json.dumps({"*": {"function": f"{tmp_path}/reward.py:score", "time_limit_s": 200}})
    settings = (f"reward.scorers={scorers}", "reward.deadline_s=200", "rollout.prefix_log_every_s=0.2", "stop.batches=1")
    service.up(*settings)
    assert service.submit(ROWS.encode()).status_code == 201
    service.wait(lambda s: service.run("/queues")["scoring"] == SAMPLES * N, "all answers wait for their score")
    assert service.terminate() == 0
    with sqlite3.connect(service.directory / "prefixes.sqlite") as log:
        sampled = {
            uid: array.array("i", ids).tolist() for uid, ids in log.execute("SELECT traj_uid, ids FROM prefixes WHERE finish NOTNULL")
        }
    log.close()
    assert len(sampled) == SAMPLES * N, "whole answers, each in one row"
    (tmp_path / "hold").unlink()
    service.up(*settings)
    assert service.run()["found_at_start"]["resumed"] == SAMPLES * N
    check_all_trained(service, service.wait(lambda s: s["state"] == "finished", "the end", LONG_S), 1)
    assert all(ids[-len(sampled[uid]) :] == sampled[uid] for uid, (ids, _, _) in answers(service.directory).items())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_A1_A2_W1_after_the_host_lost_its_memory_ready_and_consumed_rows_come_from_the_snapshot(service: ServiceUnderTest) -> None:
    settings = ("stop.batches=6", "checkpoint.every=6", "store.snapshot_every_s=0.2", "store.inline_bytes=0")
    service.up(*settings)
    assert service.submit(ROWS.encode()).status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2 and s["trajectories"]["consumed"] >= 2 * SAMPLES * N, "two batches, none committed")
    service.wait(lambda s: (s["snapshot"] or {}).get("objects", 0) >= 2 * 2 * SAMPLES * N, "a copy of their rows")
    service.kill()
    shutil.rmtree(service.store)  # as after a restart of the host
    service.up(*settings)
    found = service.run()["found_at_start"]
    assert found["snapshot"] >= 2 * SAMPLES * N and found["memory"] == found["parked"] == 0, found
    status = service.wait(lambda s: s["state"] == "finished", "the end", LONG_S)
    check_all_trained(service, status, 6)
    assert "from the snapshot" in service.log()
    first = [line["row_ids"] for line in trained_rows(service.directory) if line["batch_id"] == 0]
    assert len(first) == 2 and sorted(first[0]) == sorted(first[1]), "the first batch was replayed from the same rows, not made again"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB of its own, where a ledger lies."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_W1_A1_a_full_disk_under_the_ledger_stops_the_run_answers_503_and_the_run_goes_on_when_there_is_room(
    service: ServiceUnderTest, small_disk: Path
) -> None:
    service.directory.mkdir()
    (service.directory / "ledger.sqlite").symlink_to(small_disk / "ledger.sqlite")
    settings = ("stop.batches=4", "checkpoint.every=2")
    service.up(*settings)
    assert service.submit(ROWS.encode(), close="false").status_code == 201
    before = service.wait(lambda s: s["trained_version"] >= 1, "one batch")
    refused = service.submit((ROWS * 300).encode(), close="false")
    assert refused.status_code == 503 and "disk is full; free space" in refused.json()["error"]["message"], refused.text
    for _ in range(100):  # not `wait`, which takes a failure for one of the test
        status = service.run()
        if status["state"] == "failed":
            break
        time.sleep(0.1)
    assert status["state"] == "failed" and "ledger" in status["failure"] and "free space on its disk" in status["failure"]
    paused = service.http.post(f"{service.url}/v1/runs/sort-digits/pause")
    assert paused.status_code == 503 and "free space" in paused.json()["error"]["message"]
    assert service.run("/trajectories")["items"], "what is there can be read"
    assert service.get("/health")["ok"] is False and service.run("/why")["sentence"].startswith("The run has stopped:")
    assert service.terminate() == 1
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True, capture_output=True)
    service.up(*settings)
    assert len(service.run("/datasets")) == 1, "the one that was refused is not there"
    status = service.wait(lambda s: s["state"] == "finished", "the end", LONG_S)
    assert status["trajectories"]["registered"] >= before["trajectories"]["registered"]
    check_all_trained(service, status, 4)
