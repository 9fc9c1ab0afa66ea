"""Engines come and go while a run trains, asked for by number: nothing is lost, nothing is made twice, and the learner does not notice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.service import CONFIG, ServiceUnderTest
from tests.test_whole import check_accounts

BATCHES, SAMPLES, N = 100_000, 6, 4  # more than any of these runs makes: they are drained
SLOW_S = 0.02  # a step of an engine, while requests are to be in the middle of their answers


@pytest.fixture
def service(tmp_path: Path) -> Any:
    found = ServiceUnderTest(
        tmp_path / "run",
        f"stop.batches={BATCHES}",
        "stop.epochs=null",
        f"batch.samples={SAMPLES}",
        f"rollout.n={N}",
        "rollout.stream_interval=2",
        "rollout.sampling.max_new_tokens=32",
        "checkpoint.every=5",
    )
    yield found
    found.close()


def scale(service: ServiceUnderTest, role: str, count: Any, status: int = 202) -> dict[str, Any]:
    reply = service.http.post(f"{service.url}/v1/runs/sort-digits/scale", json={"role": role, "count": count})
    assert reply.status_code == status, reply.text
    body: dict[str, Any] = reply.json()
    return body


def processes(service: ServiceUnderTest, role: str) -> dict[str, dict[str, Any]]:
    return {f"{p['role']}-{p['index']}": p for p in service.run("/processes") if p["role"] == role}


def open_engines(service: ServiceUnderTest) -> list[str]:
    engines = service.run("/engines")
    assert all(engine["version"] for engine in engines if engine["served_requests"] and engine["state"] == "open"), "A5"
    return sorted(engine["engine_id"] for engine in engines if engine["state"] == "open")


def wait_engines(service: ServiceUnderTest, count: int) -> None:
    names = [f"engine-{index}" for index in range(count)]
    service.wait(lambda _: open_engines(service) == names and sorted(processes(service, "engine")) == names, f"{count} engines", 180)


def slow_down(service: ServiceUnderTest, seconds: float) -> None:
    for engine in service.run("/engines"):
        assert service.http.post(engine["url"] + "/slow_down", json={"forward_sleep_time": seconds}).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_A1_A2_E16_engines_1_to_4_to_1_in_mid_run_lose_nothing_and_the_learner_goes_on(service: ServiceUnderTest) -> None:
    service.up()
    assert service.submit().status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2, "two batches")
    learner = processes(service, "trainer")
    refused = scale(service, "trainer", 2, 409)["error"]["message"]
    assert "headrace down" in refused and "trainer.dp" in refused and "a checkpoint is of no layout" in refused
    assert "there are rollout, reward" in scale(service, "rollouts", 2, 409)["error"]["message"]
    assert "1 to 64" in scale(service, "rollout", 0, 409)["error"]["message"]
    assert "1 to 64" in scale(service, "rollout", 65, 409)["error"]["message"]
    assert "count" in scale(service, "rollout", -1, 422)["error"]["message"]
    # up
    said = scale(service, "rollout", 4)
    assert (said["was"], said["count"], said["starting"]) == (1, 4, ["engine-1", "engine-2", "engine-3"])
    assert said["words"].startswith("rollout: 1 → 4; engine-1, engine-2, engine-3 will start")
    again = scale(service, "rollout", 4)
    assert again["words"] == "rollout: 4, as before" and not again["starting"], "the same request twice is one"
    wait_engines(service, 4)
    service.wait(lambda _: all(engine["served_requests"] for engine in service.run("/engines")), "requests on each")
    # down, with requests in the middle of their answers
    slow_down(service, SLOW_S)
    there = processes(service, "engine")
    service.wait(lambda _: all(e["open_requests"] for e in service.run("/engines") if e["engine_id"] != "engine-0"), "open requests")
    command = [sys.executable, "-P", "-m", "driver.cli", "scale", "rollout", "1", "--url", service.url]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert printed.returncode == 0 and "rollout: 4 → 1; engine-1, engine-2, engine-3 will end" in printed.stdout, printed
    service.wait(lambda _: list(processes(service, "engine")) == ["engine-0"], "three engines gone")
    assert not any(psutil.pid_exists(one["pid"]) for name, one in there.items() if name != "engine-0")
    slow_down(service, 0.0)
    assert processes(service, "trainer") == learner, "the learner was touched"
    version = service.run()["trained_version"]
    service.wait(lambda s: s["trained_version"] >= version + 3, "batches with one engine again")
    check_accounts(service, service.run())
    tries = [t["attempts"] for t in service.run("/trajectories", limit=1000)["items"]]
    assert set(tries) == {1}, "an engine that is sent away costs no trajectory a try"
    assert "engine-3 (incarnation" not in service.log().split("rollout: 4 → 1")[1], "it ended, and did not die"
    # in a hurry: what counts is the last word
    for count in (4, 1, 2):
        scale(service, "rollout", count)
    wait_engines(service, 2)
    # the other pool
    assert scale(service, "reward", 3)["words"] == "reward: 1 → 3"
    service.wait(lambda _: len(processes(service, "reward")["reward-0"]["children"]) == 3, "three workers")
    assert scale(service, "reward", 1)["words"] == "reward: 3 → 1"
    service.wait(lambda _: len(processes(service, "reward")["reward-0"]["children"]) == 1, "one worker")
    scale(service, "reward", 2)
    # what was asked for holds over a restart; a configuration that says another number than before is the later word
    assert service.terminate() == 0
    service.up()
    wait_engines(service, 2)
    roles = {role["role"]: role for role in service.run("/roles")}
    assert roles["rollout"]["instances"] == 2 and roles["reward"]["instances"] == 2 and not roles["trainer"]["scalable"]
    assert service.terminate() == 0
    service.up("rollout.engines=3")
    wait_engines(service, 3)
    assert "the configuration now says 3; 2, asked for before, is over" in service.log()
    assert service.http.post(f"{service.url}/v1/runs/sort-digits/drain").status_code == 202
    status = service.wait(lambda s: s["state"] == "finished", "the end", 200)
    check_accounts(service, status)
    counted = status["trajectories"]
    assert counted["trained"] + counted["discarded"] == counted["registered"] > 0
    assert all(reason.startswith("step skipped") for reason in counted["reasons"]), counted  # a last batch of equal rewards
    assert status["epoch"] == 0, "nothing was trained twice"
    assert "it has no processes to scale" in scale(service, "rollout", 2, 409)["error"]["message"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_H1_an_engine_that_died_too_often_is_left_alone_named_and_brought_back_by_scale(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", f"stop.batches={BATCHES}", "stop.epochs=null", "rollout.engines=1")
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 1, "a batch")
        learner = processes(service, "trainer")
        killed: set[int] = set()
        until = time.monotonic() + 120
        while processes(service, "engine")["engine-0"]["state"] != "quarantined":
            assert time.monotonic() < until
            pid = processes(service, "engine")["engine-0"]["pid"]
            if pid not in killed and psutil.pid_exists(pid):
                killed.add(pid)
                psutil.Process(pid).kill()
            time.sleep(0.02)
        status = service.wait(lambda s: "out of use" in s["why"].get("engine-0", {}).get("reason", ""), "it is named")
        reason = status["why"]["engine-0"]["reason"]
        assert "engine-0 is out of use" in reason and "headrace scale rollout 1 starts it again" in reason
        assert "engine-0" in service.wait(lambda s: "rollout" in s["why"], "the other side")["why"]["rollout"]["reason"]
        version = status["trained_version"]
        said = scale(service, "rollout", 1)
        assert said["again"] == ["engine-0"] and "had died too often and will start again" in said["words"]
        service.wait(lambda s: s["trained_version"] >= version + 3, "batches after it came back")
        assert "out of use" not in service.run()["why"].get("engine-0", {}).get("reason", "")
        assert processes(service, "trainer") == learner, "L2: nothing else was started anew"
        check_accounts(service, service.run())
    finally:
        service.close()


def test_a_plan_is_printed_before_anything_starts_and_one_that_can_not_be_is_refused(tmp_path: Path) -> None:
    def plan(*settings: str) -> subprocess.CompletedProcess[str]:
        flags = [part for setting in settings for part in ("--set", setting)]
        argv = [sys.executable, "-P", "-m", "driver.cli", "plan", str(CONFIG), *flags]
        return subprocess.run(
            argv, capture_output=True, text=True, timeout=60, env={"COLUMNS": "200", "PYTHONPATH": str(CONFIG.parents[2])}
        )

    (tmp_path / "a.py").write_text("def a(role, stream, item): ...\n")
    well = plan("rollout.engines=3")
    assert well.returncode == 0, well.stderr
    assert any(line.split()[:2] == ["rollout", "3"] for line in well.stdout.splitlines()), well.stdout
    logic = f"{tmp_path}/a.py:a"
    circle = {
        "one": {"logic": logic, "subscribes": {"there": "queue"}, "publishes": {"back": "queue"}},
        "two": {"logic": logic, "subscribes": {"back": "queue"}, "publishes": {"there": "queue"}},
    }
    refused = plan(f"roles={json.dumps(circle)}")
    assert refused.returncode == 2 and "circular dependency: there → back → there" in refused.stderr, refused.stderr
    settings = (f"roles={json.dumps(circle)}", f"run_dir={tmp_path}/run", "service.port=0")
    flags = [part for setting in settings for part in ("--set", setting)]
    up = subprocess.run([sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), *flags], capture_output=True, text=True, timeout=60)
    assert up.returncode == 1 and "circular dependency: there → back → there" in up.stderr, up.stderr
    assert not (tmp_path / "run/ledger.sqlite").exists() and not (tmp_path / "run/processes").exists(), "nothing was made"
