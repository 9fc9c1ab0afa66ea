"""L3 and A5 with an engine that fails on command: what was paused is continued or replaced, and no version is shown unverified."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from driver.push import Pusher, Snapshot
from driver.store_gate import StoreGate
from driver.transport import StoreTransport, Transports
from rollout.answer import EngineError, Prefix
from rollout.capabilities import capabilities_of
from rollout.pool import EnginePool
from rollout.version import Version

GOOD = {"a": "1" * 64, "b": "2" * 64}
SNAPSHOT = Snapshot("run", 0, 3, ({"key": "k0"}, {"key": "k1"}), GOOD, (5, 6, 7), (-1.0, -2.0))


class ScriptedEngine:
    """Answers as an engine does, notes every call, and fails where it is told to."""

    url = "http://scripted"
    on_this_host = True

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail: dict[str, list[Exception]] = {}  # before it had an effect
        self.lose: dict[str, list[Exception]] = {}  # after: the answer is lost
        self.held = dict(GOOD)
        self.log_probs = [-1.0, -2.0]
        self.version = "default"
        self.paused = self.released = self.session = False

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.fail.get(name):
            raise self.fail[name].pop(0)

    def _answer(self, name: str) -> None:
        if self.lose.get(name):
            raise self.lose[name].pop(0)

    async def pause(self, mode: str) -> None:
        await self._call(f"pause({mode})")
        self.paused = True
        self._answer(f"pause({mode})")

    async def release(self, tags: list[str]) -> None:
        await self._call("release")
        assert self.paused and not self.session, "a real engine would have died"
        self.released = True
        self._answer("release")

    async def resume(self, tags: list[str]) -> None:
        await self._call("resume")
        assert self.released, "a real engine would have died"
        self.released = False
        self._answer("resume")

    async def begin_update(self) -> None:
        if self.session:
            raise EngineError("infrastructure", "a session is open", status=400)
        await self._call("begin")
        self.session = True
        self._answer("begin")

    async def update_from_tensor(self, tensors: list[str]) -> None:
        await self._call("bucket")
        assert self.session

    async def end_update(self) -> None:
        await self._call("end")
        if not self.session:
            raise EngineError("infrastructure", "no session", status=400)
        self.session = False
        self._answer("end")

    async def checksums(self) -> dict[str, Any]:
        await self._call("checksums")
        return {"ranks": [{"checksums": self.held}], "per_engine_checksum": "f" * 64}

    async def set_version(self, version: str) -> None:
        await self._call("version")
        self.version = version
        self._answer("version")

    async def continue_generation(self) -> None:
        await self._call("continue")
        self.paused = False
        self._answer("continue")

    async def model_info(self) -> dict[str, Any]:
        return {"weight_version": self.version}

    async def score_sequence(self, ids: list[int]) -> list[float]:
        await self._call("canary")
        assert not self.paused
        return self.log_probs


@pytest.fixture
def parts():
    pool, engine, replaced = EnginePool(), ScriptedEngine(), []
    slot = pool.register("engine-0", engine, 7, 4)  # type: ignore[arg-type]

    async def on_replace(slot, reason):
        replaced.append(reason)

    return pool, engine, slot, replaced, Pusher(pool, deadline_s=5.0, logprob_tolerance=1e-3, replace=on_replace)


async def test_L3_the_sequence_in_order(parts):
    pool, engine, slot, _, pusher = parts
    (outcome,) = await pusher.push_all(SNAPSHOT)
    assert outcome.verified and slot.state == "open" and slot.verified == Version("run", 0, 3, 7)
    order = ["pause(retract)", "end", "release", "begin", "bucket", "bucket", "end", "checksums", "version", "resume", "continue", "canary"]
    assert engine.calls == order
    assert pool.serving_version == 3
    assert await pusher.push_all(SNAPSHOT) == [], "pushed already"
    engine.calls.clear()
    await pusher.push_all(replace(SNAPSHOT, version=4))
    assert engine.calls == [order[0], *order[2:]], "whose state is known needs no `end` first"


async def test_L2_B2_while_the_store_is_away_no_engine_is_at_fault_it_stays_shut_and_is_pushed_to_when_it_is_back(parts):
    _, engine, slot, replaced, pusher = parts
    gate = pusher._gate = StoreGate(SimpleNamespace())  # type: ignore[arg-type]
    await pusher.push_all(SNAPSHOT)
    update = engine.update_from_tensor

    async def gone(tensors: list[str]) -> None:
        gate.shut("its owner was killed")
        raise EngineError("infrastructure", "the bucket cannot be read", status=400)

    engine.update_from_tensor = gone
    newer = replace(SNAPSHOT, version=4)
    (outcome,) = await pusher.push_all(newer)
    assert (outcome.verified, outcome.attempts, slot.state, slot.verified, replaced) == (False, 1, "shut", None, [])
    gate.lost()
    gate.open()
    engine.update_from_tensor = update
    (outcome,) = await pusher.push_all(newer)
    assert outcome.verified and slot.state == "open" and not engine.session and replaced == []


CALLS = ["pause(retract)", "release", "begin", "bucket", "end", "checksums", "version", "resume", "continue", "canary"]


@pytest.mark.parametrize("lost_answer", [False, True])
@pytest.mark.parametrize("call", CALLS)
async def test_L3_one_failure_at_any_call_is_retried_with_legal_calls_to_the_same_end(parts, call, lost_answer):
    _, engine, slot, replaced, pusher = parts
    (engine.lose if lost_answer else engine.fail)[call] = [EngineError("infrastructure", "connection reset")]
    (outcome,) = await pusher.push_all(SNAPSHOT)
    assert outcome.verified and slot.state == "open" and replaced == []
    assert (engine.paused, engine.released, engine.session) == (False, False, False)


@pytest.mark.parametrize(
    ("what", "words"),
    [("held", "1 of 2 tensors"), ("extra", "tensors are not the snapshot's"), ("log_probs", "log-probs of the fixed sequence")],
)
async def test_E3_E11_A5_an_engine_whose_own_check_fails_is_quarantined_and_never_shows_the_version(parts, what, words):
    pool, engine, slot, replaced, pusher = parts
    if what == "held":
        engine.held["b"] = "0" * 64
    elif what == "extra":
        engine.held["c"] = "3" * 64
    else:
        engine.log_probs = [-1.0, -2.5]
    (outcome,) = await pusher.push_all(SNAPSHOT)
    assert not outcome.verified and words in outcome.reason and words in replaced[0]
    assert slot.state == "quarantined" and slot.verified is None and pool.serving_version is None


async def test_E4_a_bucket_that_fails_twice_on_one_engine_does_not_hold_the_others(parts):
    pool, engine, slot, replaced, pusher = parts
    engine.fail = {"bucket": [EngineError("infrastructure", "reset"), EngineError("infrastructure", "reset")]}
    other = pool.register("engine-1", ScriptedEngine(), 1, 4)  # type: ignore[arg-type]
    outcomes = {o.engine_id: o.verified for o in await pusher.push_all(SNAPSHOT)}
    assert outcomes == {"engine-0": False, "engine-1": True}
    assert (slot.state, other.state, pool.serving_version) == ("quarantined", "open", 3) and len(replaced) == 1


async def test_E16_a_push_waits_for_no_engine_that_left_in_the_middle_of_it_and_leaves_one_that_came_to_the_next(parts):
    pool, engine, slot, replaced, pusher = parts
    hangs = asyncio.Event()

    async def never() -> None:
        hangs.set()
        await asyncio.sleep(3600)

    engine.begin_update = never  # its connection does not break when it leaves
    stays = pool.register("engine-1", ScriptedEngine(), 1, 4)  # type: ignore[arg-type]
    push = asyncio.create_task(pusher.push_all(SNAPSHOT))
    await hangs.wait()
    came = pool.register("engine-2", ScriptedEngine(), 1, 4)  # type: ignore[arg-type]
    pool.gone(slot, "scaled down")
    async with asyncio.timeout(2.0):  # the push's own deadline is 5 s
        outcomes = {outcome.engine_id: outcome for outcome in await push}
    assert outcomes.keys() == {"engine-0", "engine-1"} and outcomes["engine-1"].verified
    assert "it is gone: scaled down" in outcomes["engine-0"].reason and replaced == [], "there is nothing to replace"
    assert (stays.state, came.state) == ("open", "starting")
    (outcome,) = await pusher.push_all(SNAPSHOT)
    assert (outcome.engine_id, outcome.verified, came.state) == ("engine-2", True, "open")


async def test_E16_an_engine_may_leave_while_its_push_that_ran_out_of_time_tidies_up(parts):
    pool, engine, slot, _, pusher = parts
    pusher._deadline_s = 0.05
    tidying = asyncio.Event()

    async def bucket(tensors):
        try:
            await asyncio.sleep(60)
        finally:
            tidying.set()
            await asyncio.sleep(0.05)

    engine.update_from_tensor = bucket
    push = asyncio.create_task(pusher.push_all(SNAPSHOT))
    await tidying.wait()
    pool.gone(slot, "killed")
    (outcome,) = await push
    assert not outcome.verified and slot.state == "gone"


async def test_E14_an_engine_found_hanging_while_its_push_begins_is_quarantined_once(parts, monkeypatch):
    pool, engine, slot, replaced, pusher = parts
    slot.capabilities = replace(capabilities_of({"version": "0.5.23"}, {}), memory_saver=True)
    slot.pid = 1
    pusher._transports = Transports("auto", {"tensor": StoreTransport})

    async def gpu_bytes(pid):
        return 1

    async def server_info():
        if slot.state == "open":
            pool.quarantine(slot, "it hangs")
        raise EngineError("infrastructure", "no answer")

    monkeypatch.setattr("driver.release.gpu_bytes", gpu_bytes)
    engine.server_info = server_info
    pool.open(slot, Version("run", 0, 2, 7))
    (outcome,) = await pusher.push_all(SNAPSHOT)
    assert not outcome.verified and slot.state == "quarantined" and slot.reason == "it hangs"
    assert replaced == [], "who found it has seen to that"


async def test_E6_a_pause_that_never_returns_is_bounded(parts):
    pool, engine, slot, replaced, _ = parts

    async def never(mode: str) -> None:
        await asyncio.sleep(3600)

    engine.pause = never

    async def on_replace(slot, reason):
        replaced.append(reason)

    pusher = Pusher(pool, deadline_s=0.05, logprob_tolerance=1e-3, replace=on_replace)
    (outcome,) = await asyncio.wait_for(pusher.push_all(SNAPSHOT), 5)
    assert not outcome.verified and slot.state == "quarantined" and "not done within" in replaced[0]


async def test_L3_tokens_of_weights_that_failed_their_check_are_cut_and_verified_ones_kept(parts):
    _, engine, slot, _, pusher = parts
    await pusher.push_all(SNAPSHOT)
    old = str(Version("run", 0, 3, 7))
    new = str(Version("run", 0, 4, 7))
    answer = Prefix([1, 2, 3, 4], [-0.1] * 4, [(old, 0, 2), (new, 2, 4)])
    engine.log_probs = [-9.0, -9.0]
    later = Snapshot("run", 0, 4, SNAPSHOT.buckets, GOOD, SNAPSHOT.canary_ids, SNAPSHOT.canary_log_probs)
    pushing = asyncio.create_task(pusher.push_all(later))
    while slot.state != "shut":  # noqa: ASYNC110 - the scripted engine steps with the loop
        await asyncio.sleep(0)
    trusted = await pusher.trusted(answer)  # waits for the push to be decided
    assert slot.state == "quarantined"
    assert trusted == Prefix([1, 2], [-0.1] * 2, [(old, 0, 2)])
    await pushing
    whole = Prefix([1, 2], [-0.1] * 2, [(old, 0, 2)])
    assert await pusher.trusted(whole) is whole


async def test_L3_E5_an_engine_that_is_left_is_not_paused_and_not_under_a_versions_name(parts):
    pool, engine, slot, _, pusher = parts
    pool.shut(slot, "a push that was cut short")
    engine.paused = engine.session = True
    engine.version = "run/0/3/7"
    await pusher.leave(slot)
    assert (engine.paused, engine.released, engine.session) == (False, False, False)
    assert engine.version == "unfinished"


async def test_E11_A5_weights_that_made_tokens_and_were_refused_give_the_name_away_for_good(parts):
    """What they made says `run/0/3/7`; if a second try were let through, those tokens would count as its own."""
    _, engine, slot, replaced, pusher = parts
    wrong, engine.log_probs = [-1.0, -2.5], [-1.0, -2.5]
    answers = [wrong, [-1.0, -2.0]]

    async def score_sequence(ids: list[int]) -> list[float]:
        return answers.pop(0)

    engine.score_sequence = score_sequence
    (outcome,) = await pusher.push_all(SNAPSHOT)
    assert not outcome.verified and slot.state == "quarantined" and len(replaced) == 1
    made = Prefix([1], [-1.0], [("run/0/3/7", 0, 1)])
    assert (await pusher.trusted(made)).output_ids == []


async def test_a_release_that_frees_nothing_is_told_and_logged_once_and_the_cache_is_resumed_all_the_same(parts, caplog):
    _, engine, slot, _, pusher = parts
    slot.capabilities = capabilities_of({"version": "0.5.23"}, {})  # a real server without the memory saver
    pusher._transports = Transports("auto", {"tensor": StoreTransport})
    said = "release: SGLang was started without --enable-memory-saver, its KV cache stays in memory"
    for version in (3, 4):
        (outcome,) = await pusher.push_all(replace(SNAPSHOT, version=version))
        assert outcome.verified and outcome.skipped == (said,) and pusher.skipped == {"engine-0": (said,)}
    assert engine.calls.count("release") == engine.calls.count("resume") == 2 and not engine.released
    assert [record.message for record in caplog.records if "memory-saver" in record.message] == [f"pushes to engine-0: {said}"]
