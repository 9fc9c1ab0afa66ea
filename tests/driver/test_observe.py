import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

from driver.config import load_config
from driver.core import Busy, Core
from driver.engine_facts import Unused, absent, engines
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.lost_time import LostTime
from driver.observe import _training, alarms, why_history
from driver.why import Facts, Training, Waiting, sentence
from rollout.pool import EnginePool
from rollout.version import Version

NOTHING_ELSE = SimpleNamespace(outside=SimpleNamespace(engines={}, unused=lambda: []), unused_engines=lambda: [])


def test_L1_the_sentence_names_an_engine_that_is_away_while_others_serve_and_does_not_say_the_same_twice():
    away = Unused("10.0.0.5:1", "http://10.0.0.5:1", 0, "away", "connection refused", 12.2)
    processes = SimpleNamespace(outside=SimpleNamespace(engines={}, unused=lambda: [away]), unused_engines=lambda: [])
    facts = Facts(absent=absent(SimpleNamespace(pool=EnginePool(), processes=processes)))
    assert sentence(facts) == "10.0.0.5:1 is away 12 s: connection refused"
    wait = Waiting("rollout", "engines", "no engine is registered; 10.0.0.5:1: connection refused", 1.0, 1.0)
    assert sentence(Facts(waits=(wait,), absent=facts.absent)).count("connection refused") == 1


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


def test_L1_what_the_trainer_is_at_is_gathered_while_rollout_waits_for_the_bound():
    ledger = SimpleNamespace(trained_version=6, next_batch=7, live=lambda: iter([True, False, True]))
    core = SimpleNamespace(ledger=ledger, samples_per_batch=2, waits={"rollout": SimpleNamespace(kind="staleness")})
    run = SimpleNamespace(core=core, training=SimpleNamespace(busy=Busy()), holds=SimpleNamespace(is_ready=bool))
    assert _training(run) is None, "it does not work"
    with run.training.busy.working():
        found = _training(run)
        assert found == Training("batch 6", found.seconds, 2, 2) and 0.0 <= found.seconds < 10.0
        ledger.trained_version = 7
        assert _training(run).what == "storing version 7"
        core.waits["trainer"] = SimpleNamespace(kind="replay")
        assert _training(run) is None, "it has a reason of its own"
        core.waits = {"rollout": SimpleNamespace(kind="kv")}
        assert _training(run) is None, "rollout waits for something else"


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


def test_L1_where_the_time_of_a_run_went_is_told_with_its_newest_waits():
    core = SimpleNamespace(run_id="run", lost_time=LostTime())
    core.lost_time.waits("trainer", "samples", "7 of 8 samples are ready", time.monotonic() - 2.0)
    shown = why_history(SimpleNamespace(core=core))
    (entry,) = shown["items"]
    assert (entry["side"], entry["kind"], entry["times"], entry["ended_at"]) == ("trainer", "samples", 1, None)
    assert entry["seconds"] >= 2.0 and abs(entry["began_at"] - (time.time() - entry["seconds"])) < 0.5
    assert shown["seconds"]["trainer"]["samples"] >= 2.0


def test_L1_a_side_waits_since_it_began_whatever_its_reasons_since(tmp_path):
    db = LedgerDB(tmp_path / "ledger.sqlite")
    config = load_config(Path(__file__).parents[2] / "examples/sort_digits/config.yaml")
    core = Core(config, Ledger(), db, None, None)  # type: ignore[arg-type]
    core.waiting("trainer", "7 of 8 samples are ready", "samples")
    began = core.waits["trainer"].began
    core.waiting("trainer", "batch 3 is held for sample 9", "held")
    held = core.waits["trainer"]
    assert held.began == began and held.since > began and held.kind == "held"
    core.waiting("trainer", "batch 3 is held for sample 11", "held")
    assert core.waits["trainer"].since == held.since, "the same kind, in other words"
    core.waiting("trainer", None)
    assert core.waits == {} and {e.kind for e in core.lost_time.newest(9)} == {"samples", "held"}
    db.close()
