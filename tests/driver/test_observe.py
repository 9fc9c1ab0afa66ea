from collections import deque
from types import SimpleNamespace

from driver.core import Wait
from driver.engine_facts import Unused, engines
from driver.observe import alarms, sentence
from rollout.pool import EnginePool
from rollout.version import Version

NOTHING_ELSE = SimpleNamespace(outside=SimpleNamespace(engines={}, unused=lambda: []), unused_engines=lambda: [])


def test_L1_the_sentence_names_an_engine_that_is_away_while_others_serve_and_does_not_say_the_same_twice():
    away = Unused("10.0.0.5:1", "http://10.0.0.5:1", 0, "away", "connection refused", 12.2)
    processes = SimpleNamespace(outside=SimpleNamespace(engines={}, unused=lambda: [away]), unused_engines=lambda: [])
    core = SimpleNamespace(waits={})
    run = SimpleNamespace(core=core, failure=None, state="running", pool=EnginePool(), processes=processes)
    assert sentence(run) == "engine 10.0.0.5:1 is away 12 s: connection refused"
    core.waits["rollout"] = Wait("no engine is registered; 10.0.0.5:1: connection refused", 0.0)
    assert sentence(run).count("connection refused") == 1


def test_H7_batches_that_train_nothing_raise_an_alarm_that_names_the_cause():
    batch = {"skipped": "every advantage is 0", "batch_id": 1}
    well = SimpleNamespace(failure=None)

    def run(batches: int, **other: object) -> SimpleNamespace:
        history = SimpleNamespace(recent=deque([{"skipped": None}, *[batch] * batches]))
        others = {"holds": SimpleNamespace(alarms=list), "bias": SimpleNamespace(alarms=[])}
        parts = others | {"prefixes": well, "snapshot": well, "evaluator": None, "core": SimpleNamespace(alarms={}), "history": history}
        return SimpleNamespace(**(parts | other))

    assert alarms(run(4)) == []
    full = SimpleNamespace(failure="the snapshot of ready rows is behind: disk full")
    assert alarms(run(4, snapshot=full)) == [full.failure]
    assert "last 5 batches trained nothing (every advantage is 0)" in alarms(run(5))[0]
    assert alarms(run(4, core=SimpleNamespace(alarms={"filter": "everything is filtered"}))) == ["everything is filtered"]


async def test_engines_show_our_requests_their_own_reports_with_their_age_and_how_many_got_what_they_preferred():
    clock = SimpleNamespace(now=100.0)
    pool = EnginePool(lambda: clock.now)
    client = SimpleNamespace(url="http://engine")
    slot, unheard = (pool.register(name, client, 1, 4) for name in ("engine-0", "engine-1"))
    for one in (slot, unheard):
        pool.open(one, Version("run", 0, 0, 1))
    rank = {"num_running_reqs": 6, "num_waiting_reqs": 2, "num_used_tokens": 1024, "max_total_num_tokens": 4096}
    slot.reported({"loads": [rank | {"max_running_requests": 8, "token_usage": 0.25}]}, 3.0)
    async with pool.acquire(1.0, "test", prefer=slot), pool.acquire(1.0, "test", prefer=slot):
        clock.now += 2.5
        shown, other = engines(SimpleNamespace(pool=pool, pusher=SimpleNamespace(skipped={}), processes=NOTHING_ELSE))
    assert shown["load"] == {
        "running": 6,
        "waiting": 2,
        "foreign": 8,
        "kv_use": 0.25,
        "max_running": 8,
        "max_total_tokens": 4096,
        "age_s": 2.5,
    }
    assert (shown["open_requests"], shown["preferred_share"], shown["silent_s"]) == (0, 0.0, 0.0), "eight others were there before"
    assert (other["open_requests"], other["preferred_share"], other["load"], other["silent_s"]) == (2, None, None, 2.5)


def test_L1_the_sentence_names_an_engine_that_is_being_replaced_whoever_waits_for_it():
    core = SimpleNamespace(waits={"engine engine-0": Wait("engine-0 is out of use: it hangs", 0.0)})
    run = SimpleNamespace(core=core, failure=None, state="running", pool=EnginePool(), processes=NOTHING_ELSE)
    assert "engine-0 is out of use: it hangs" in sentence(run)
    core.waits["trainer"] = Wait("3 of 4 samples are ready", 0.0)
    core.waits["rollout"] = Wait("all rows were sent", 0.0)
    assert sentence(run).endswith("s: 3 of 4 samples are ready; rollout: all rows were sent; engine-0 is out of use: it hangs")


def test_H7_the_sentence_names_a_filter_that_takes_everything_whoever_waits_for_it():
    core = SimpleNamespace(waits={"filter": Wait("the filter took the last 80 samples one after another", 0.0)})
    run = SimpleNamespace(core=core, failure=None, state="running", pool=EnginePool(), processes=NOTHING_ELSE)
    assert "the filter took the last 80 samples" in sentence(run)
    core.waits["trainer"] = Wait("3 of 4 samples are ready", 0.0)
    assert sentence(run).endswith("s: 3 of 4 samples are ready; the filter took the last 80 samples one after another")
