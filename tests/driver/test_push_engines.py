"""L3 over two real engines, one of which fails by script: it never serves what it did not verify, and the other never waits for it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from driver.push import Outcome, Pusher, Snapshot
from rollout.answer import EngineError, Prefix
from rollout.client import EngineClient, PauseMode, make_http
from rollout.pool import EnginePool, EngineSlot
from rollout.version import Version
from store import EmbeddedStore
from tests.rollout.engine.conftest import SOURCES, Served, end, launch

safetensors = pytest.importorskip("safetensors.numpy")

BASE = SOURCES / "examples" / "sort_digits" / "base"
PROMPT = [80, 81, 82, 35, 60]
CANARY = (80, 81, 82, 35, 60, 61, 62)
BUCKETS = 5
BUCKET = "/update_weights_from_tensor"
SAMPLING = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def go(port: int = 0, *flags: str) -> Served:
        log_path = tmp_path_factory.mktemp("engine") / "engine.log"
        started.append(launch(BASE, log_path, "--allow-faults", "--port", str(port), *flags))
        return started[-1]

    yield go
    for served in started:
        if served.process.poll() is None:
            end(served)


@pytest.fixture(scope="module")
def sound(start: Callable[..., Served]) -> Served:
    return start()


@pytest.fixture(scope="module")
def snapshot(sound: Served, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """Version 3, in five buckets: not what the engines start with. Its log-probs are those of an engine that read it from disk."""
    directory = tmp_path_factory.mktemp("new")
    random = np.random.default_rng(3)
    tensors = {
        name: (tensor + random.normal(0.0, 0.02, tensor.shape)).astype(np.float32)
        for name, tensor in safetensors.load_file(BASE / "model.safetensors").items()
    }
    for file in BASE.glob("*.json"):
        (directory / file.name).symlink_to(file)
    safetensors.save_file(tensors, str(directory / "model.safetensors"))
    sound.post("/update_weights_from_disk", {"model_path": str(directory)})
    scores = sound.generate(list(CANARY), max_new_tokens=0, top={"logprob_start_len": 0})["meta_info"]["input_token_logprobs"]
    sound.post("/update_weights_from_disk", {"model_path": str(BASE)})
    store = EmbeddedStore(tmp_path_factory.mktemp("shm") / "store", 2**26)
    names = sorted(tensors)
    refs = [store.put(f"run/weights/0/3/{i}", {name: tensors[name] for name in names[i::BUCKETS]}).to_wire() for i in range(BUCKETS)]
    sums = {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()}
    return Snapshot("run", 0, 3, tuple(refs), sums, CANARY, tuple(pair[0] for pair in scores[1:]))


class Lab:
    """A pool of two engines: engine-0 fails as it is told, engine-1 does not. Both hold what they started with, and serve nothing yet."""

    def __init__(self, faulty: Served, sound: Served, http: httpx.AsyncClient) -> None:
        self.faulty = faulty
        self.pool = EnginePool()
        self.replaced: list[str] = []
        self.pusher = self.pusher_of()
        self._http = http
        self.first = self.register("engine-0", faulty, 1)
        self.second = self.register("engine-1", sound, 2)

    def pusher_of(self, deadline_s: float = 60.0) -> Pusher:
        return Pusher(self.pool, deadline_s=deadline_s, logprob_tolerance=1e-3, replace=self._replace)

    async def _replace(self, slot: EngineSlot, reason: str) -> None:
        self.replaced.append(f"{slot.engine_id}: {reason}")

    def register(self, engine_id: str, served: Served, incarnation: int) -> EngineSlot:
        return self.pool.register(engine_id, EngineClient(served.url, self._http, vocab_size=259), incarnation, 8)

    def script(self, *faults: dict[str, Any]) -> None:
        self.faulty.post("/faults", list(faults))

    async def push(self, snapshot: Snapshot) -> dict[str, Outcome]:
        return {outcome.engine_id: outcome for outcome in await self.pusher.push_all(snapshot)}

    def assert_only_the_second_serves(self, words: str) -> None:
        assert (self.first.state, self.first.verified) == ("quarantined", None)
        assert len(self.replaced) == 1 and words in self.replaced[0] and self.replaced[0].startswith("engine-0")
        assert (self.second.state, self.second.verified) == ("open", Version("run", 0, 3, 2))
        assert self.pool.serving_version == 3


@pytest.fixture(scope="module")
def faulty_process(start: Callable[..., Served]) -> list[Served]:
    """In a list of one, for tests that it does not survive."""
    return [start()]


@pytest.fixture
async def lab(start: Callable[..., Served], faulty_process: list[Served], sound: Served) -> AsyncIterator[Lab]:
    if faulty_process[0].process.poll() is not None:
        faulty_process[0] = start()
    async with make_http() as http:
        yield Lab(faulty_process[0], sound, http)
    for served in (faulty_process[0], sound):
        if served.process.poll() is None:
            restore(served)


def restore(served: Served) -> None:
    served.post("/faults", [])
    served.post("/continue_generation", {})
    served.request("POST", "/end_weight_update", {})
    served.request("POST", "/resume_memory_occupation", {"tags": ["kv_cache"]})
    served.post("/update_weights_from_disk", {"model_path": str(BASE), "weight_version": "default"})


async def test_E4_E8_an_engine_that_dies_at_a_bucket_serves_nothing_until_its_next_life_was_pushed_to(lab: Lab, snapshot, start) -> None:
    lab.script({"fault": "die", "call": BUCKET, "after": 2})
    outcomes = await lab.push(snapshot)
    assert {name: outcome.verified for name, outcome in outcomes.items()} == {"engine-0": False, "engine-1": True}
    lab.assert_only_the_second_serves("connection refused")
    assert lab.faulty.process.wait(10) == -9
    async with lab.pool.acquire(5, "test", avoid=["engine-1"]) as lease:
        assert lease.slot is lab.second, "the dead one is never given, even to who would rather not have the other"
    again = start(lab.faulty.port)
    slot = lab.register("engine-0", again, 3)
    assert lab.first.state == "gone" and slot.state == "starting" and lab.pool.serving_version == 3
    assert (await slot.client.model_info())["weight_version"] == "default"
    with pytest.raises(EngineError, match="is gone"):
        lab.pool.open(lab.first, Version("run", 0, 3, 1))
    assert (await lab.push(snapshot))["engine-0"].verified
    assert (slot.state, slot.verified) == ("open", Version("run", 0, 3, 3))
    assert again.get("/weights_checker").json()["ranks"][0]["checksums"] == snapshot.checksums


async def test_E8_an_engine_that_comes_back_in_mid_push_serves_nothing_but_what_was_verified(lab: Lab, snapshot, start) -> None:
    """The driver may learn of the death after the push: its second attempt then talks to the next life, and nobody has said so."""
    lab.script({"fault": "die", "call": BUCKET, "after": 1})
    dead, lives = lab.faulty, []
    client = lab.first.client
    pause = client.pause

    async def pause_of_whoever_lives(mode: PauseMode) -> None:
        if dead.process.poll() is not None:
            lives.append(await asyncio.to_thread(start, dead.port))
        await pause(mode)

    client.pause = pause_of_whoever_lives  # type: ignore[method-assign]
    assert (await lab.push(snapshot))["engine-0"].verified
    assert len(lives) == 1 and "a real SGLang 0.5.23 dies of" not in lives[0].log()
    assert lives[0].get("/weights_checker").json()["ranks"][0]["checksums"] == snapshot.checksums
    async with lab.pool.acquire(5, "test", avoid=["engine-1"]) as lease:
        slot = lab.register("engine-0", lives[0], 3)  # and now it has said so
        answer = await lease.client.generate(PROMPT, SAMPLING, "before", stall_s=20.0)
        assert not lease.is_current() and answer.spans == [(str(Version("run", 0, 3, 1)), 0, 12)]
    assert slot.state == "starting"
    async with lab.pool.acquire(5, "test", avoid=["engine-1"]) as lease:
        assert lease.slot is lab.second
    assert (await lab.push(snapshot))["engine-0"].verified and slot.verified == Version("run", 0, 3, 3)


async def test_E3_an_engine_that_drops_a_bucket_and_says_success_never_shows_the_version(lab: Lab, snapshot) -> None:
    lab.script({"fault": "drop", "call": BUCKET, "after": 3, "times": None})
    outcomes = await lab.push(snapshot)
    assert not outcomes["engine-0"].verified and "tensors are not the snapshot's" in str(outcomes["engine-0"].reason)
    lab.assert_only_the_second_serves("tensors are not the snapshot's")
    assert lab.faulty.get("/model_info").json()["weight_version"] == "default"


async def test_A5_an_engine_that_lies_about_its_version_is_not_believed_and_its_tokens_are_not_kept(lab: Lab, snapshot) -> None:
    lab.script({"fault": "lie_version", "call": "/model_info", "version": "run/0/9/1", "times": None})
    outcome = (await lab.push(snapshot))["engine-0"]
    assert not outcome.verified
    lab.assert_only_the_second_serves("the engine says its weights are 'run/0/9/1'")
    lab.script({"fault": "lie_version", "call": "/generate", "version": "run/0/9/1", "times": None})
    answer = await lab.first.client.generate(PROMPT, SAMPLING, "lied", stall_s=20.0)
    assert await lab.pusher.trusted(answer) == Prefix()
    other = await lab.second.client.generate(PROMPT, SAMPLING, "true", stall_s=20.0)
    assert await lab.pusher.trusted(other) is other


async def test_E6_an_engine_that_never_answers_a_pause_is_given_up_while_the_other_serves(lab: Lab, snapshot) -> None:
    lab.script({"fault": "hang", "call": "/pause_generation", "times": None})
    lab.pusher = lab.pusher_of(deadline_s=8.0)
    pushing = asyncio.create_task(lab.push(snapshot))
    async with lab.pool.acquire(30, "test") as lease:
        assert lease.slot is lab.second and not pushing.done(), "dispatch to the others goes on"
        assert len((await lease.client.generate(PROMPT, SAMPLING, "other", stall_s=20.0)).output_ids) == 12
    async with asyncio.timeout(40):
        assert not (await pushing)["engine-0"].verified
    lab.assert_only_the_second_serves("not done within 8 s")


CALLS = [
    "/pause_generation",
    "/release_memory_occupation",
    "/begin_weight_update",
    BUCKET,
    "/end_weight_update",
    "/update_weight_version",
    "/resume_memory_occupation",
    "/continue_generation",
    "/generate",
]


@pytest.mark.parametrize("fault", [{"fault": "status"}, {"fault": "reset", "done": True}], ids=["refused", "answer lost"])
async def test_L3_one_failure_at_any_call_is_retried_with_calls_that_are_legal(lab: Lab, snapshot, fault) -> None:
    """One push a call. The engine refuses what would kill a real one with words that its log keeps."""
    before = len(lab.faulty.log())
    for call in CALLS:
        lab.script(fault | {"call": call})
        outcome = (await lab.push(snapshot))["engine-0"]
        assert outcome.verified and lab.first.state == "open", f"{call}: {outcome.reason}"
        assert [entry["struck"] for entry in lab.faulty.get("/faults").json()] == [1]
        assert len((await lab.first.client.generate(PROMPT, SAMPLING, call, stall_s=20.0)).output_ids) == 12
        lab.pool.shut(lab.first, "test")
        lab.first.verified = None
    assert lab.replaced == []
    assert "a real SGLang 0.5.23 dies of" not in lab.faulty.log()[before:]


async def test_A5_a_push_to_an_engine_that_computes_nothing_fails_and_says_so(lab: Lab, snapshot, start) -> None:
    lab.first = lab.register("engine-0", start(0, "--paced", "1000"), 3)
    assert not (await lab.push(snapshot))["engine-0"].verified
    lab.assert_only_the_second_serves("computes nothing")
