"""Engines of somebody else's: when they are taken, given up and taken again, and which addresses are refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from driver import engine_facts, engine_model, outside
from driver.outside import Outside
from driver.snapshot import PushRefused
from rollout.address import NotAllowed, allowed_host, checked_url, engine_id_of
from rollout.answer import EngineError
from rollout.capabilities import capabilities_of
from rollout.client import EngineClient
from rollout.pool import EnginePool
from rollout.version import Version

CURRENT = capabilities_of({"version": "0.5.23"}, {})


@pytest.fixture
def lab(monkeypatch):
    """One engine at http://far:1 that says `version`, or raises it; what is asked of the rest of the run is scripted."""
    monkeypatch.setattr(outside, "HEARTBEAT_S", 0.01)
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S", "LOOK_S", "CONTESTED_PAUSE_S"):
        monkeypatch.setattr(outside, name, 0.01)
    pool, lives, left = EnginePool(), [], []

    async def next_life():
        return len(lives) + 1

    def enroll(name, client, incarnation, life, capabilities):
        lives.append(incarnation)
        return pool.register(name, client, incarnation, 4, capabilities)

    async def leave(slot):
        await lab.may_leave.wait()
        left.append(slot.incarnation)
        return True

    config = SimpleNamespace(
        run_id="r",
        model=SimpleNamespace(path=Path("/models/ours")),
        rollout=SimpleNamespace(engine_urls=["http://far:1"], engine_api_key=None, engine_admin_key=None),
        service=SimpleNamespace(engine_hosts=[]),
        push=SimpleNamespace(deadline_s=1000.0),
    )
    run = SimpleNamespace(
        state="running",
        pool=pool,
        config=config,
        http=None,
        tokenizer=SimpleNamespace(vocab_size=10),
        model_facts={"architectures": ["A"]},
        core=SimpleNamespace(ring=lambda: None, db=SimpleNamespace(query=lambda *_: [], write=lambda _: None)),
        transports=SimpleNamespace(name_for=lambda *_: "disk"),
        pusher=SimpleNamespace(leave=leave, skipped={}),
        processes=SimpleNamespace(
            enroll=enroll,
            next_life=next_life,
            last_incarnation=lambda _: len(lives),
            note_incarnation=lambda *_: None,
            engine_urls=["", "http://127.0.0.1:7"],
            unused_engines=lambda: [],
        ),
    )
    lab = SimpleNamespace(
        pool=pool,
        lives=lives,
        left=left,
        version="default",
        model={"architectures": ["A"]},
        failed=[],
        may_leave=asyncio.Event(),
        paused=False,
        running=0,
        tokens=itertools.count(),
        run=run,
    )
    lab.may_leave.set()

    async def says_version(_client, *, deadline_s):
        if isinstance(lab.version, Exception):
            raise lab.version
        return lab.version

    async def capabilities(_client):
        return CURRENT

    async def nothing(_client):
        pass

    async def model_info(_client):
        return lab.model

    async def is_paused(_client):
        return lab.paused

    async def loads(_client):
        rank = {
            "num_running_reqs": lab.running,
            "num_waiting_reqs": 0,
            "num_used_tokens": next(lab.tokens),
            "max_total_num_tokens": 9,
            "token_usage": 0.0,
        }
        return {"loads": [rank | {"max_running_requests": 8}]}

    monkeypatch.setattr(EngineClient, "loads", loads)

    monkeypatch.setattr(EngineClient, "is_paused", is_paused)
    monkeypatch.setattr(EngineClient, "says_version", says_version)
    monkeypatch.setattr(EngineClient, "capabilities", capabilities)
    monkeypatch.setattr(EngineClient, "freeze_gc", nothing)
    monkeypatch.setattr(EngineClient, "model_info", model_info)
    lab.outside = run.processes.outside = Outside(run, lab.failed.append)
    return lab


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def slot(lab):
    return lab.pool.slots.get("far:1")


def serve(lab, version: int) -> None:
    label = Version("r", 0, version, slot(lab).life)
    lab.version = str(label)
    lab.pool.open(slot(lab), label)


async def test_E8_one_that_no_longer_says_its_version_is_taken_anew(lab):
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    serve(lab, 3)
    await asyncio.sleep(0.05)
    assert lab.lives == [1], "it says what it should"
    lab.version = "default"
    await until(lambda: lab.lives == [1, 2])
    assert slot(lab).state == "starting" and slot(lab).verified is None, "no request before a whole push"
    assert lab.left == [], "nothing of ours was in progress there"
    await lab.outside.stop()


async def test_L2_a_silent_one_is_gone_after_some_misses_and_taken_again_when_it_speaks(lab):
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    serve(lab, 3)
    lab.version = EngineError("infrastructure", "no answer")
    await until(lambda: slot(lab) is None or slot(lab).incarnation > 1)
    assert "no answer, 4 times in a row" in lab.pool.why() or lab.lives == [1, 2]
    await lab.outside.stop()


async def test_E3_one_that_failed_its_push_is_left_whole_and_taken_again(lab):
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    lab.pool.quarantine(slot(lab), "checksums")
    lab.outside.give_up("far:1", "checksums")
    await until(lambda: lab.lives == [1, 2])
    assert lab.left == [1]
    await lab.outside.stop()


@pytest.mark.parametrize("how", ["stop", "remove"])
async def test_L3_one_that_is_being_left_is_not_left_halfway_when_the_run_ends_or_lets_it_go(lab, how):
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    lab.may_leave.clear()
    lab.pool.quarantine(slot(lab), "checksums")
    lab.outside.give_up("far:1", "checksums")
    await until(lambda: slot(lab) is None)
    if how == "remove":
        assert lab.outside.remove("far:1")
    asyncio.get_running_loop().call_later(0.05, lab.may_leave.set)
    await lab.outside.stop()
    assert lab.left == [1], "half of it leaves the engine paused"


@pytest.mark.parametrize("how", ["stop", "remove"])
@pytest.mark.parametrize("paused", [True, False])
async def test_L3_one_that_a_killed_driver_left_paused_is_not_left_so_before_its_first_push(lab, how, paused):
    lab.paused = paused
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    if how == "remove":
        lab.outside.remove("far:1")
    await lab.outside.stop()
    assert lab.left == ([1] if paused else [])


async def test_E16_one_that_is_added_again_is_not_asked_before_it_was_left(lab):
    lab.outside._run.config.service.engine_hosts = ["far"]
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    lab.may_leave.clear()
    lab.pool.shut(slot(lab), "a push")
    lab.outside.remove("far:1")
    lab.outside.add("http://far:1")
    await asyncio.sleep(0.05)
    assert lab.lives == [1], "a push now and the calls of the one before would be two hands on one engine"
    lab.may_leave.set()
    await until(lambda: lab.lives == [1, 2])
    assert lab.left == [1]
    await lab.outside.stop()


async def test_an_engine_that_the_run_started_is_not_added_a_second_time(lab):
    lab.outside._run.config.service.engine_hosts = ["localhost"]
    with pytest.raises(NotAllowed, match="was started by this run"):
        lab.outside.add("http://localhost:7")
    assert lab.outside.engines == {}


def shown(lab):
    (one,) = engine_facts.engines(lab.run)
    return one


async def test_L1_one_that_never_answered_is_shown_with_its_state_the_reason_and_since_when(lab):
    lab.version = EngineError("infrastructure", "connection refused: nothing listens at http://far:1")
    assert engine_facts.engines(lab.run) == []
    lab.outside.start()
    assert (shown(lab)["state"], shown(lab)["reason"], shown(lab)["elsewhere"]) == ("starting", "it was not asked yet", True)
    assert await lab.outside.heard("far:1", 10) == ("away", "connection refused: nothing listens at http://far:1")
    since = lab.outside.engines["far:1"].since
    await asyncio.sleep(0.05)
    assert lab.outside.engines["far:1"].since == since, "asked again and again, it is away since the first time"
    other = lab.pool.register("far:2", EngineClient("http://far:2", None), 1, 4)
    lab.pool.open(other, Version("r", 0, 1, 1))
    assert {one["engine_id"]: one["state"] for one in engine_facts.engines(lab.run)} == {"far:1": "away", "far:2": "open"}
    assert engine_facts.out_of_use(lab.run) == ["engine far:1 is away 0 s: connection refused: nothing listens at http://far:1"]
    assert engine_facts.alarms(lab.run) == [], "it may come by itself"
    await lab.outside.stop()


def test_L1_engines_in_the_same_state_for_the_same_reason_are_one_sentence():
    starting = [engine_facts.Unused(f"engine-{i}", "", 1, "starting", "", 140.0 + i, 300.0) for i in (0, 1)]
    pool, outside = EnginePool(), SimpleNamespace(engines={}, unused=lambda: [])
    run = SimpleNamespace(pool=pool, state="running", processes=SimpleNamespace(outside=outside, unused_engines=lambda: starting))
    assert engine_facts.out_of_use(run) == ["engine-0, engine-1 are starting (141 s of 300)"]
    run.state = "finished"
    assert engine_facts.out_of_use(run) == []


FOREIGN = "nc-far/0/12/3"


@pytest.mark.parametrize(
    ("version", "running", "taken"), [(FOREIGN, 1, False), (FOREIGN, 0, True), ("r/0/12/3", 1, True), ("default", 1, True)]
)
async def test_E8_an_engine_that_another_run_uses_is_not_taken_but_one_whose_run_has_ended_is(lab, version, running, taken):
    lab.version, lab.running = version, running
    lab.outside.start()
    state, reason = await lab.outside.heard("far:1", 10)
    assert (state == "starting", lab.lives == [1]) == (taken, taken)
    if not taken:
        assert state == "quarantined" and reason.startswith("it serves run nc-far, and an engine serves one run")
        assert "engine far:1: it serves run nc-far" in engine_facts.alarms(lab.run)[0]
        lab.running = 0
        await until(lambda: lab.lives == [1])
        assert engine_facts.alarms(lab.run) == []
    await lab.outside.stop()


async def test_E8_one_whose_name_another_run_goes_on_changing_is_not_taken_though_no_request_is_seen(lab):
    lab.version, lab.paused = FOREIGN, True
    lab.outside.start()
    await lab.outside.heard("far:1", 10)
    lab.version, lab.paused = "nc-far/0/13/3", False
    await until(lambda: "it serves run nc-far" in shown(lab)["reason"])
    assert lab.lives == []
    await until(lambda: lab.lives == [1])  # and no more
    await lab.outside.stop()


async def test_E8_one_that_says_what_it_last_counted_before_its_run_was_killed_is_taken(lab):
    lab.version, lab.running, lab.tokens = FOREIGN, 6, itertools.repeat(5)
    lab.outside.start()
    await until(lambda: lab.lives == [1])
    await lab.outside.stop()


async def test_E8_L3_one_that_another_run_has_paused_is_taken_when_that_can_be_no_push_any_more(lab):
    lab.version, lab.paused, lab.running = FOREIGN, True, 6
    lab.outside.start()
    assert "run nc-far is pushing to it, or has left it paused" in (await lab.outside.heard("far:1", 10))[1]
    await asyncio.sleep(0.1)
    assert lab.lives == [] and engine_facts.alarms(lab.run) == []
    lab.outside._run.config.push.deadline_s = 0.0
    await until(lambda: lab.lives == [1])
    lab.paused = False
    await lab.outside.stop()


async def test_E8_one_that_another_run_pushes_to_twice_is_left_to_it_with_no_call_and_taken_when_that_run_has_ended(lab, monkeypatch):
    monkeypatch.setattr(outside, "CONTESTED_PAUSE_S", 1000.0)
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    serve(lab, 3)
    lab.version = FOREIGN
    await until(lambda: lab.lives == [1, 2])
    lab.pool.shut(slot(lab), "version 4 is being pushed")
    lab.version = "nc-far/0/13/3"
    await until(lambda: shown(lab)["state"] == "quarantined")
    await until(lambda: lab.outside.engines["far:1"].wait_s >= 1000.0)
    assert "engine far:1: it serves run nc-far" in engine_facts.alarms(lab.run)[0]
    assert lab.lives == [1, 2] and lab.left == [], "calls between those of the other run's push may be illegal"
    lab.outside.add("http://far:1")  # somebody has ended the other run, and says so
    await until(lambda: lab.lives == [1, 2, 3])
    await lab.outside.stop()


async def test_E10_a_first_push_that_is_refused_names_the_model_and_is_tried_less_and_less_often(lab):
    lab.outside.start()
    lab.model = {"architectures": ["A"], "model_path": "/models/theirs"}
    waits = []
    for life in (1, 2, 3, 4):
        await until(lambda life=life: lab.lives == list(range(1, life + 1)) and slot(lab) is not None)
        slot(lab).weights_sent, slot(lab).push_error = True, PushRefused("log-probs differ")
        lab.pool.quarantine(slot(lab), "log-probs differ")
        lab.outside.give_up("far:1", "log-probs differ")
        await until(lambda: slot(lab) is None)
        await until(lambda: shown(lab)["reason"].startswith("log-probs differ; this server seems to have another model than model.path"))
        assert "(its /model_info says '/models/theirs'); start it with --model-path /models/ours" in shown(lab)["reason"]
        waits.append(lab.outside.engines["far:1"].wait_s)
    assert waits == [0.01, 0.02, 0.04, 0.08], waits
    await lab.outside.stop()


async def test_E10_sizes_of_a_checkpoint_on_this_machine_are_compared_before_anything_is_sent(tmp_path):
    class Local:
        on_this_host, url = True, "http://127.0.0.1:1"

        async def model_info(self):
            return {"model_path": str(tmp_path)}

    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    await engine_model.same_model(Local(), {"hidden_size": 64}, Path("/m"))
    with pytest.raises(EngineError, match="hidden_size 64, and the run trains one with 128; start it with --model-path /m"):
        await engine_model.same_model(Local(), {"hidden_size": 128}, Path("/m"))


@pytest.mark.parametrize("answers", [True, False])
async def test_L3_a_service_that_ends_at_once_leaves_engines_in_a_push_and_names_those_that_did_not_answer(lab, answers):
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    lab.pool.shut(slot(lab), "version 4 is being pushed")
    if not answers:
        lab.may_leave.clear()
    assert await lab.outside.leave_at_once(0.2) == ([] if answers else ["far:1"])
    assert lab.left == ([1] if answers else [])
    lab.may_leave.set()
    await lab.outside.stop()


async def test_one_of_the_configuration_that_was_removed_can_be_added_again_whatever_engine_hosts_says(lab):
    lab.outside.start()
    await until(lambda: slot(lab) is not None)
    assert lab.outside.remove("far:1")
    assert engine_facts.engines(lab.run) == []
    lab.outside.add("http://far:1")
    await until(lambda: slot(lab) is not None)
    with pytest.raises(NotAllowed, match="add other there"):
        lab.outside.add("http://other:1")
    await lab.outside.stop()


async def test_E10_another_model_is_not_taken_and_the_reason_is_shown(lab):
    lab.model = {"architectures": ["B"]}
    lab.outside.start()
    await until(lambda: "with architectures ['B'], and the run trains one with ['A']" in lab.pool.why())
    assert slot(lab) is None and lab.lives == []
    await lab.outside.stop()
    assert lab.failed == []


@pytest.mark.parametrize(
    ("url", "hosts", "allowed"),
    [
        ("http://a:1", ["a"], True),
        ("http://A:1/", ["a:1"], True),
        ("http://a:2", ["a:1"], False),
        ("http://a:80", ["a:80"], True),
        ("http://a", ["a:80"], True),
        ("http://x.gpu.local:1", ["*.gpu.local"], True),
        ("http://gpu.local:1", ["*.gpu.local"], False),
        ("http://evilgpu.local:1", ["*.gpu.local"], False),
        ("http://[::1]:1", ["::1"], True),
        ("http://[::1]:1", ["[::1]:1"], True),
        ("http://[::1]:2", ["[::1]:1"], False),
        ("http://a:1", [], False),
        ("http://127.0.0.1:1", ["localhost"], True),
        ("http://localhost:1", ["127.0.0.1:1"], True),
        ("http://localhost:2", ["127.0.0.1:1"], False),
    ],
)
def test_engines_may_be_added_where_the_configuration_allows(url, hosts, allowed):
    if allowed:
        allowed_host(url, hosts)
    else:
        with pytest.raises(NotAllowed, match=r"service\.engine_hosts allows"):
            allowed_host(url, hosts)


@pytest.mark.parametrize(
    "url",
    [
        *["a:1", "ftp://a:1", "http://", "http://a:99999", "http://u:p@a:1", "http://a:1/x", "http://a:1?q", "http://a:1#f"],
        # Such a name is an error of the client's or the resolver's own, and neither may end a run.
        *["http://a..b:1", f"http://{'a' * 64}.b:1", "http://a b:1", "http://a\x01.b:1", "http://xn--.b"],
        *["http://999.1.1.1:1", "http://127.1:1", "http://a:0"],
    ],
)
def test_what_is_not_an_engines_address_is_refused_in_words(url):
    with pytest.raises(NotAllowed):
        checked_url(url)


def test_an_address_has_one_name():
    assert engine_id_of("http://Host:30000/") == engine_id_of("http://host:30000") == "host:30000"
    assert engine_id_of("http://[::1]:1") == "[::1]:1"
    assert engine_id_of("http://host:80") == engine_id_of("http://host")
    assert engine_id_of("http://localhost:30000") == engine_id_of("http://127.0.0.1:30000"), "two pushes to one engine would kill it"
