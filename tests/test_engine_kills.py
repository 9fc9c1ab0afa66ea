"""Engines killed, stopped and cut off at random moments of pushes and of generation, while a run goes on (`make kills N=180`).

Afterwards: every token is of the version it names (its row is scored again with those weights), every trajectory is accounted for, no
engine is left paused, and the learner was never started anew.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from rollout.sglang.spec import SglangSpec
from tests.fleet import BASE, Engine, fleet
from tests.rescore import rescore
from tests.service import ServiceUnderTest
from tests.sglang_server import sglang_here
from tests.test_whole import check_accounts

N = int(os.environ.get("N", "0"))
SEED = int(os.environ.get("SEED", "0"))
CONTROL = (
    "/pause_generation",
    "/release_memory_occupation",
    "/begin_weight_update",
    "/update_weights_from_tensor",
    "/end_weight_update",
    "/weights_checker",
    "/update_weight_version",
    "/resume_memory_occupation",
    "/continue_generation",
)
BY_CHANCE = """import random

def by_chance(response, row):
    return random.random()
"""  # so that every batch trains, and no version is like the one before
FAULTS = ("kill", "stop", "stop for good", "cut")
STALL_S = 12.0


class Attack:
    """One engine, one fault, at one moment."""

    def __init__(self, engine: Engine, fault: str, lasts_s: float) -> None:
        self.engine = engine
        self.fault = fault
        self.lasts_s = lasts_s
        self.fired = threading.Event()

    def fire(self) -> None:
        """At once, and from the proxy's own thread when a call passes."""
        if self.fault == "kill":
            self.engine.signal(signal.SIGKILL)
        elif self.fault == "cut":
            self.engine.proxy.cut(self.lasts_s)
        else:
            self.engine.signal(signal.SIGSTOP)
        self.fired.set()

    def repair(self, start_s: float) -> None:
        time.sleep(self.lasts_s)
        if self.fault == "stop":
            self.engine.signal(signal.SIGCONT)
        elif self.fault in ("kill", "stop for good"):
            self.engine.kill()
            self.engine.start()
            self.engine.wait(start_s)


def states(service: ServiceUnderTest) -> dict[str, str]:
    return {one["engine_id"]: one["state"] for one in service.run("/engines")}


def attack(service: ServiceUnderTest, engines: list[Engine], kills: int, rng: random.Random, start_s: float) -> Counter[str]:
    """`kills` faults, one after the other; each begins when all engines serve, so that the run lives through all of them."""
    done: Counter[str] = Counter()
    for number in range(kills):
        all_open(service, engines, start_s)
        engine, fault = rng.choice(engines), rng.choice(FAULTS)
        lasts_s = rng.choice((0.0, 0.3, 1.0, 3.0, 8.0 if fault == "stop" else 1.0))
        one = Attack(engine, fault, lasts_s)
        moment = "generation"
        if rng.random() < 0.6:
            path = rng.choice(CONTROL)
            engine.proxy.arm(path, rng.randint(1, 8) if path == "/update_weights_from_tensor" else 1, one.fire)
            if one.fired.wait(60):
                moment = path
            elif engine.proxy.disarm():
                one.fire()
        else:
            time.sleep(rng.uniform(0.0, 1.5))
            one.fire()
        done[f"{fault} at {moment}"] += 1
        print(f"{number + 1}/{kills}: {fault} ({lasts_s:g} s) at {moment}, version {service.run()['trained_version']}", flush=True)
        one.repair(start_s)
    all_open(service, engines, start_s)
    return done


def all_open(service: ServiceUnderTest, engines: list[Engine], deadline_s: float) -> None:
    def ready(status: dict) -> bool:
        assert status["state"] == "running", status
        found = states(service)
        return all(found.get(engine.proxy.engine_id) == "open" for engine in engines)

    version = service.run()["trained_version"]
    service.wait(ready, f"all engines serve; now {states(service)}", deadline_s + 120)
    service.wait(lambda s: s["trained_version"] > version, "another batch", 120)


def check(tmp_path: Path, spec: SglangSpec | None, kills: int, start_s: float, slow_s: float) -> None:
    rng = random.Random(SEED)
    scorer = tmp_path / "scorer.py"
    scorer.write_text(BY_CHANCE)
    with fleet(tmp_path, 2, spec, slow_s) as engines:
        service = ServiceUnderTest(
            tmp_path / "run",
            "rollout.engines=0",
            f"rollout.engine_urls={json.dumps([engine.proxy.url for engine in engines])}",
            "batch.samples=4",
            "rollout.n=4",
            "rollout.stream_interval=2",
            f"rollout.stall_s={STALL_S}",
            "rollout.infrastructure_retries=1000",
            "push.bucket_bytes=8192",
            "push.deadline_s=20",
            "stop.batches=100000",
            "stop.epochs=null",
            "trainer.learning_rate=0.003",
            "trainer.loss.entropy_bonus=0.05",  # after hundreds of batches of chance there would be one answer, and versions alike
            f"reward.scorers={{'*': {{function: '{scorer}:by_chance'}}}}",
            "checkpoint.every=1",
            "checkpoint.keep_last=100000",
        )
        try:
            for engine in engines:
                engine.wait(start_s)
            service.up()
            assert service.submit().status_code == 201
            service.wait(lambda s: s["trained_version"] >= 1, "a batch", start_s)
            learner = [p for p in service.run("/processes") if p["role"] == "trainer"]
            done = attack(service, engines, kills, rng, start_s)
            assert [p for p in service.run("/processes") if p["role"] == "trainer"] == learner, "the learner was started anew"
            service.http.post(f"{service.url}/v1/runs/sort-digits/drain")
            status = service.wait(lambda s: s["state"] == "finished", "the end", 300)
            check_accounts(service, status)
            counted = status["trajectories"]
            assert status["epoch"] == 0 and counted["trained"] == counted["registered"] and counted["discarded"] == 0, counted
            for engine in engines:
                assert engine.ask("/ready").status_code == 200, "an engine was left paused"
        finally:
            service.close()
    found = rescore(service.directory, BASE)
    print(dict(done))
    print(
        f"{found.rows} rows, {found.tokens} tokens, {found.spans} spans, {found.rows_of_several_versions} rows of several versions; "
        f"largest gap {found.gap_max:.1e}; {found.told_apart} spans where the neighbouring version would have been noticed"
    )
    assert found.wrong == [], found.wrong[:10]
    assert found.not_kept == 0, "the learner was never restarted"
    assert found.told_apart > found.spans // 4, "the versions are too alike for this to mean something"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_A1_A5_E4_engines_killed_stopped_and_cut_at_random_moments(tmp_path):
    check(tmp_path, None, N or 12, start_s=60.0, slow_s=0.01)


@pytest.mark.slow
@pytest.mark.sglang
@pytest.mark.timeout(7200)
def test_A1_A5_E4_a_real_sglang_killed_stopped_and_cut_at_random_moments(tmp_path):
    check(tmp_path, sglang_here(), N or 3, start_s=300.0, slow_s=0.01)
