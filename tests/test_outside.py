"""Engines that somebody else starts: killed, started anew behind their address, stopped, added, removed, and left whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from driver.life import CHILD, free_port
from tests.service import ServiceUnderTest
from tests.test_whole import check_accounts

BASE = Path(__file__).parents[1] / "examples/sort_digits/base"


class Engine:
    """An embedded engine of somebody else's, always at the same address."""

    def __init__(self, directory: Path, model: Path = BASE) -> None:
        self.model = model
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.id = f"127.0.0.1:{self.port}"
        self.log = directory / f"engine-{self.port}.log"
        self.start()

    def start(self) -> None:
        flags = ["--model-path", self.model, "--port", self.port, "--context-length", "256", "--stream-interval", "4"]
        argv = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), sys.executable, "-P", "-m", "rollout.engine", *map(str, flags)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)

    def ask(self, path: str) -> Any:
        return httpx.get(self.url + path, trust_env=False, timeout=5).json()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture
def engines(tmp_path) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []

    def start(model: Path = BASE) -> Engine:
        started.append(Engine(tmp_path, model))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


@pytest.fixture
def service(tmp_path) -> Iterator[ServiceUnderTest]:
    settings = ("rollout.engines=0", "batch.samples=6", "rollout.n=4", "checkpoint.every=4", "push.bucket_bytes=4096")
    found = ServiceUnderTest(tmp_path / "run", *settings)
    yield found
    found.close()


def shown(service: ServiceUnderTest, engine: Engine) -> dict[str, Any]:
    return next((one for one in service.run("/engines") if one["engine_id"] == engine.id), {"state": "absent"})


def state(service: ServiceUnderTest, engine: Engine) -> str:
    return str(shown(service, engine)["state"])


def unpaused(engine: Engine) -> bool:
    return httpx.get(engine.url + "/ready", trust_env=False, timeout=5).status_code == 200


def test_E8_E16_engines_of_somebody_else_are_used_added_removed_and_known_by_their_version(service, engines):
    first = engines()
    service.up(f"rollout.engine_urls=[{first.url}]", "stop.batches=400", "service.engine_hosts=[127.0.0.1]")
    assert service.submit().status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2, "two batches")

    second = engines()
    reply = service.http.post(f"{service.url}/v1/runs/sort-digits/engines", json={"url": second.url})
    assert (reply.status_code, reply.json()["engine_id"]) == (201, second.id), reply.text
    service.wait(lambda _: state(service, second) == "open", "the second engine")
    version = service.run()["trained_version"]

    # Killed and back at the same address: no request before a whole push.
    first.kill()
    service.wait(lambda _: state(service, first) == "away", "it is noticed")
    first.start()
    service.wait(lambda s: state(service, first) == "open" and s["trained_version"] >= version + 2, "it is back")
    (found,) = [one for one in service.run("/engines") if one["engine_id"] == first.id]
    assert found["incarnation"] >= 2 and first.ask("/model_info")["weight_version"] == found["version"]

    # One that leaves is not waited for, and what it goes on with is whole.
    reply = service.http.delete(f"{service.url}/v1/runs/sort-digits/engines/{second.id}")
    assert reply.status_code == 202
    version = service.run()["trained_version"]
    service.wait(lambda s: s["trained_version"] >= version + 2, "two batches without it")
    service.http.post(f"{service.url}/v1/runs/sort-digits/drain")
    status = service.wait(lambda s: s["state"] == "finished", "the end")
    check_accounts(service, status)
    assert status["trajectories"]["discarded"] == 0
    assert unpaused(first) and unpaused(second)


def test_E8_no_trajectory_is_discarded_with_the_only_engine(service, engines):
    only = engines()
    service.up(f"rollout.engine_urls=[{only.url}]", "stop.batches=400")
    assert service.submit().status_code == 201
    service.wait(lambda s: s["trained_version"] >= 2, "two batches")
    until, rng = time.monotonic() + 90, random.Random(0)
    while True:  # it dies with requests in flight
        time.sleep(rng.uniform(0.02, 0.5))  # long enough to get on, and never in step with the pushes
        only.process.send_signal(signal.SIGSTOP)
        time.sleep(0.01)  # soon: the trainer ends its batch meanwhile, and the push that follows shuts the gate
        if service.run()["in_flight"] >= 8 and state(service, only) == "open":
            break
        assert time.monotonic() < until
        only.process.send_signal(signal.SIGCONT)
    only.kill()
    service.wait(lambda _: state(service, only) == "away", "it is noticed")
    only.start()
    version = service.run()["trained_version"]
    service.wait(lambda s: s["trained_version"] >= version + 2, "it is back")
    service.http.post(f"{service.url}/v1/runs/sort-digits/drain")
    status = service.wait(lambda s: s["state"] == "finished", "the end")
    assert status["trajectories"]["discarded"] == 0, status["trajectories"]["reasons"]


def test_a_run_waits_for_its_engines_in_words_and_refuses_other_addresses(service, engines):
    url = f"http://127.0.0.1:{free_port()}"
    service.up(f"rollout.engine_urls=[{url}]", "stop.batches=2", "service.engine_hosts=[127.0.0.1]")
    service.submit()
    service.wait(lambda s: f"connection refused: nothing listens at {url}" in s["why"].get("rollout", {}).get("reason", ""), "the reason")
    for other, words in (
        ("http://10.0.0.1:1", "service.engine_hosts allows 127.0.0.1"),
        ("file:///etc/passwd", "not the address of an engine"),
        ("http://u:p@127.0.0.1:1", "carries a password"),
        ("http://127.0.0.1:1/v1", "has a path"),
    ):
        reply = service.http.post(f"{service.url}/v1/runs/sort-digits/engines", json={"url": other})
        assert reply.status_code == 400 and words in reply.json()["error"]["message"], reply.text
    # Added ones are remembered over a restart of the driver.
    engine = engines()
    reply = service.http.post(f"{service.url}/v1/runs/sort-digits/engines", json={"url": engine.url})
    assert reply.status_code == 201 and reply.json()["state"] in ("starting", "shut", "open", "away"), reply.text
    service.kill()
    service.up(f"rollout.engine_urls=[{url}]", "stop.batches=2")
    status = service.wait(lambda s: s["state"] == "finished", "the end")
    assert status["trained_version"] == 2


def test_L3_a_driver_that_ends_in_a_push_leaves_no_engine_paused(service, engines):
    engine = engines()
    service.up(f"rollout.engine_urls=[{engine.url}]", "stop.batches=200")
    service.submit()
    service.wait(lambda s: s["trained_version"] >= 1, "a batch")
    until = time.monotonic() + 60
    while state(service, engine) != "shut":
        assert time.monotonic() < until
        time.sleep(0.002)
    engine.process.send_signal(signal.SIGSTOP)  # so that the end falls into the push
    assert service.process is not None
    service.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    engine.process.send_signal(signal.SIGCONT)
    assert service.process.wait(60) == 0
    assert unpaused(engine)
    said = engine.ask("/model_info")["weight_version"]
    assert said == "unfinished" or said.startswith("sort-digits/0/"), said


def test_L3_a_driver_that_is_told_to_end_at_once_leaves_no_engine_paused(service, engines):
    engine = engines()
    service.up(f"rollout.engine_urls=[{engine.url}]", "stop.batches=200", "push.deadline_s=30")
    service.submit()
    service.wait(lambda s: s["trained_version"] >= 1, "a batch")
    until = time.monotonic() + 60
    while state(service, engine) != "shut":
        assert time.monotonic() < until
        time.sleep(0.002)
    engine.process.send_signal(signal.SIGSTOP)  # so that the end falls into the push
    assert service.process is not None
    service.process.send_signal(signal.SIGTERM)
    while "once more (Ctrl-C) ends at once" not in service.log():
        assert time.monotonic() < until
        time.sleep(0.02)
    service.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    engine.process.send_signal(signal.SIGCONT)
    assert service.process.wait(60) == 130
    assert "may be left paused" in service.log() or unpaused(engine)
    assert "may be left paused" not in service.log(), "it answered within the two seconds"


def test_E10_a_model_of_other_sizes_is_named_before_anything_is_sent_and_the_other_engine_serves(service, engines, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(BASE, other)
    facts = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": facts["num_hidden_layers"] - 1}))
    sound, wrong = engines(), engines(other)
    service.up(f"rollout.engine_urls=[{sound.url},{wrong.url}]", "stop.batches=3")
    service.submit()
    status = service.wait(lambda s: s["alarms"] and s["trained_version"] >= 1, "the alarm")
    assert "another model than model.path" in status["alarms"][0] and f"start it with --model-path {BASE}" in status["alarms"][0]
    assert any(wrong.id in words for words in status["engines_out_of_use"])
    assert wrong.ask("/model_info")["weight_version"] == "default", "no call of a push has reached it"


def test_E8_an_engine_serves_one_run_and_the_other_says_whose_it_is(service, engines, tmp_path):
    engine, own = engines(), engines()
    service.up(f"rollout.engine_urls=[{engine.url}]", "stop.batches=400")
    service.submit()
    service.wait(lambda s: s["trained_version"] >= 2, "two batches")
    (tmp_path / "b").mkdir()
    second = ServiceUnderTest(tmp_path / "b" / "run", *service.settings, "run_id=other")
    try:
        second.up(f"rollout.engine_urls=[{engine.url},{own.url}]", "stop.batches=400")
        until = time.monotonic() + 60
        words = f"{engine.id}: it serves run sort-digits, and an engine serves one run"
        while not any(words in alarm for alarm in second.get("/v1/runs/other")["alarms"]):
            assert time.monotonic() < until, second.log()
            time.sleep(0.1)
        version = service.run()["trained_version"]
        service.wait(lambda s: s["trained_version"] >= version + 2, "the first run goes on")
        assert service.terminate() == 0
        while next(one["state"] for one in second.get("/v1/runs/other/engines") if one["engine_id"] == engine.id) != "open":
            assert time.monotonic() < until + 120, second.log()
            time.sleep(0.1)
        assert "pushes to it" not in service.log() and "serves run other" not in service.log()
    finally:
        second.close()
