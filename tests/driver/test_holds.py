"""The presets where they act: a real ledger, dispatch, pool, store and archive; the engine is scripted, so that a straggler is one."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from driver import observe
from driver.bias_watch import BiasWatch
from driver.config import load_config
from driver.core import Core
from driver.datasets import DataRow
from driver.dispatch import Dispatch
from driver.events import (
    BatchApplied,
    BatchAssembled,
    EvaluationBegan,
    EvaluationEnded,
    TrajectoryDiscarded,
    VersionCommitted,
    VersionServed,
)
from driver.feed import Feed
from driver.holds import Holds
from driver.ledger_db import LedgerDB
from driver.policy import decide
from driver.push import Pusher
from driver.scoring import ScoreFailed, Scoring
from driver.service import create_app
from driver.watermark import Watermark
from reward.wire import Job, Result
from rollout.answer import Generation
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.version import Version
from store import EmbeddedStore

ROOT = Path(__file__).parents[2]
EOS = 2
VERSION = Version("run", 0, 0, 1)


class Engine:
    """Answers at once, but to requests whose number is in `slow`: those make three tokens and then nothing until they are cancelled."""

    url = "http://scripted"

    def __init__(self, slow: set[int]) -> None:
        self.slow = slow
        self.asked = self.aborted = 0

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], rid: str, **more: Any) -> Generation:
        number, self.asked = self.asked, self.asked + 1
        if number in self.slow:
            more["on_tokens"]([7, 8, 9], [-0.5] * 3, str(VERSION))
            try:
                limit = asyncio.timeout(None)  # held by this frame, as by the real client's
                async with limit:
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        return Generation([9, EOS], [-0.5] * 2, [(str(VERSION), 0, 2)], "stop")


class Scorer:
    async def score(self, jobs: list[Job], deadline_s: float) -> list[Result]:
        return [Result(leaf_id=job.leaf_id, ok=True, score=1.0) for job in jobs]


async def failing(jobs: list[Job], deadline_s: float) -> list[Result]:
    return [Result(leaf_id=job.leaf_id, ok=False, error="no such unit") for job in jobs]


class Lab:
    def __init__(self, directory: Path, *settings: str) -> None:
        made = ["batch.samples=1", "rollout.n=4", "staleness.bound=0", "batch.micro_batch_tokens=256", *settings]
        config = load_config(ROOT / "examples/sort_digits/config.yaml", made)
        self.db = LedgerDB(directory / "ledger.sqlite")
        ledger = self.db.load()
        self.store = EmbeddedStore(directory / "store", 1 << 24)
        self.feed = Feed(self.db, seed=0, shuffle=False, passes=1)
        self.core = Core(config, ledger, self.db, self.feed, self.store)
        self.pool = EnginePool()
        pusher = Pusher(self.pool, deadline_s=1.0, logprob_tolerance=1e-3, replace=self._replace)
        scoring = Scoring(self.core, wait_s=0.0, deadline_s=1.0)
        scoring.attach(Scorer())  # type: ignore[arg-type]
        self.scoring = scoring
        self.archived: list[tuple[str, str]] = []
        self.bias = BiasWatch(self.core)
        self.dispatch = Dispatch(
            self.core,
            self.pool,
            pusher,
            scoring,
            TokenizerView(config.model.path),
            Watermark(4),
            on_discarded=lambda s, t: self.archived.append((t.traj_uid, t.reason or "")),
            on_cut=self.bias.cut,
        )
        self.holds = Holds(self.core, cut=self.dispatch.cut, moving=lambda: True)
        self.pusher = pusher
        self.tasks: list[asyncio.Task[None]] = []

    async def _replace(self, slot: Any, reason: str) -> None: ...

    async def start(self, engine: Engine, capacity: int = 8, rows: int = 3) -> None:
        await self.feed.add(None, "rows", iter([self.rows(rows)]), None)
        slot = self.pool.register("engine-0", engine, 1, capacity)  # type: ignore[arg-type]
        self.pool.open(slot, VERSION)
        self.pusher._verified[str(VERSION)] = None
        self.slot = slot
        self.tasks = [asyncio.create_task(self.dispatch.run()), asyncio.create_task(self.scoring.run())]

    @staticmethod
    def rows(count: int) -> list[DataRow]:
        return [DataRow(i, f"sort {i} =", None, "1", "sort", {}) for i in range(count)]

    async def until(self, condition: Any, what: str) -> None:
        until = time.monotonic() + 60
        while not condition():
            for task in self.tasks:
                assert not task.done(), task.exception()
            assert time.monotonic() < until, what
            await asyncio.sleep(0.005)

    def states(self, uid: int = 0) -> list[str]:
        return [t.state for t in self.core.ledger.samples[uid].trajectories] if uid in self.core.ledger.samples else []

    def take(self) -> int:
        """What training does with a batch: assembled, applied, committed."""
        ledger = self.core.ledger
        uids = self.holds.look(short_allowed=False)
        assert uids is not None
        batch_id = ledger.next_batch
        self.core.apply(BatchAssembled(batch_id=batch_id, uids=uids, plan=b"[]", time=1.0))
        self.core.apply(BatchApplied(batch_id=batch_id, epoch=0, skipped=None, report=b"{}", time=1.0))
        self.core.apply(VersionCommitted(version=batch_id + 1, checkpoint="x", time=1.0))
        return batch_id

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.db.close()


@pytest.fixture
async def lab(tmp_path, request):
    made = Lab(tmp_path, *getattr(request, "param", []))
    yield made
    await made.close()


DEADLINE = ["staleness.preset=deadline", "staleness.hold_s=0.05"]
PARTIAL = ["staleness.preset=partial", "staleness.partial_k=3"]


@pytest.mark.parametrize("lab", [DEADLINE, PARTIAL], indirect=True, ids=["deadline", "partial"])
async def test_V3_a_discarded_straggler_stops_its_request_is_aborted_its_slot_free_and_its_reason_kept(lab):
    engine = Engine(slow={1})
    await lab.start(engine, rows=1)
    await lab.until(lambda: lab.states().count("ready") == 3 and lab.dispatch.in_flight == 1, "three of four are ready")
    if lab.holds.preset.name == "deadline":
        assert lab.holds.look(short_allowed=False) is None and lab.holds.hold is not None
        await asyncio.sleep(0.06)
    uids = lab.holds.look(short_allowed=False)
    assert uids == (0,) and sorted(lab.states()) == ["finished", "ready", "ready", "ready"]
    name = {"deadline": "deadline: held too long: batch 0 waited", "partial": "partial: 3 of 4: batch 0 took its sample without it"}
    ((traj_uid, reason),) = lab.archived
    assert traj_uid == "s0000000000000000t0001" and reason.startswith(name[lab.holds.preset.name])
    await lab.until(lambda: lab.dispatch.in_flight == 0, "its task has ended")
    assert engine.aborted == 1 and lab.slot.open_requests == 0 and lab.dispatch.generating == 0
    assert lab.dispatch.cut_tokens == 3
    facts = lab.holds.facts()
    assert list(facts["discarded_by_preset"].values()) == [1] and facts["preset"]["name"] == lab.holds.preset.name
    assert facts["holds"]["ended_by_discards"] == (1 if lab.holds.preset.name == "deadline" else 0)
    lab.take()
    assert lab.core.ledger.counts.by_outcome == {"discarded": 1, "trained": 3} and not lab.core.ledger.samples


async def test_W8_what_a_discarded_straggler_held_goes_with_it_and_is_no_work_for_the_collector(lab):
    gc.collect()
    gc.disable()
    try:
        await lab.start(Engine(slow={1}), rows=1)
        await lab.until(lambda: lab.states().count("ready") == 3, "three of four are ready")
        task = weakref.ref(lab.dispatch._tasks["s0000000000000000t0001"])
        lab.dispatch.cut(lab.core.ledger.samples[0], "deadline: held too long: test")
        await lab.until(lambda: lab.dispatch.in_flight == 0, "its task has ended")
        await lab.until(lambda: task() is None, "and is gone")
    finally:
        gc.enable()


@pytest.mark.parametrize("lab", [["rollout.data_retries=0"]], indirect=True)
async def test_W8_rows_whose_score_fails_go_at_once_and_are_no_work_for_the_collector(lab):
    gc.collect()
    gc.disable()
    try:
        lab.scoring.attach(SimpleNamespace(score=failing))
        await lab.start(Engine(slow=set()), rows=1)
        await lab.until(lambda: len(lab.archived) == 4 and lab.dispatch.in_flight == 0, "no trajectory has a reward")
        assert all("no such unit" in reason for _, reason in lab.archived)
        await lab.until(lambda: not any(type(each) is ScoreFailed for each in gc.get_objects()), "their errors, which hold rows, are gone")
    finally:
        gc.enable()


@pytest.mark.parametrize("lab", [DEADLINE], indirect=True)
async def test_V3_a_straggler_that_was_not_sent_yet_or_had_not_taken_its_first_step_goes_as_well(lab):
    """Discarded between the making of its task and the task's first step: a task cancelled there never comes to its `finally`."""
    await lab.start(Engine(slow={0, 1, 2, 3}), capacity=2, rows=1)
    await lab.until(lambda: lab.dispatch.queued == 2, "two wait for a slot")
    sample = lab.core.ledger.samples[0]
    group = asyncio.TaskGroup()
    async with group:
        lab.slot.capacity = 3
        _, trajectory = lab.dispatch._next()
        lab.dispatch._tasks[trajectory.traj_uid] = group.create_task(lab.dispatch._trajectory(sample, trajectory))
        lab.dispatch.generating += 1
        lab.dispatch.cut(sample, "deadline: held too long: test")
    await lab.until(lambda: lab.dispatch.in_flight == 0, "all three tasks have ended")
    assert lab.dispatch.generating == 0 and lab.slot.open_requests == 0
    assert lab.dispatch._next() is None and lab.dispatch.queued == 0, "the fourth is never sent"
    assert len(lab.archived) == 4 and not lab.core.ledger.samples and lab.core.ledger.counts.by_outcome == {"discarded": 4}


@pytest.mark.parametrize("ready", [2, 1])
async def test_V8_half_a_group_that_goes_in_mid_dispatch_leaves_what_it_has_or_is_discarded_whole(lab, ready):
    await lab.start(Engine(slow=set(range(ready, 4))), capacity=8, rows=1)
    await lab.until(lambda: lab.states().count("ready") == ready and lab.dispatch.in_flight == 4 - ready, "some are ready")
    lab.dispatch.cut(lab.core.ledger.samples[0], "deadline: held too long: test")
    assert len(lab.core.ledger.samples) == ready - 1, "a group that is too small can be taken by no batch, from this moment on"
    await lab.until(lambda: lab.dispatch.in_flight == 0, "tasks have ended")
    if ready == 2:
        assert lab.states().count("ready") == 2 and lab.core.ledger.live_by_deadline == {0: 1}
        assert lab.take() == 0
    else:
        assert not lab.core.ledger.samples and not lab.core.ledger.live_by_deadline
        assert lab.core.ledger.counts.by_reason["group too small: deadline"] == 1
        assert lab.store.stats().objects == 0, "its rows are freed"
    assert lab.core.ledger.counts.balanced()


@pytest.mark.parametrize("lab", [["staleness.alarm_s=0.02"]], indirect=True)
async def test_L1_V3_in_strict_a_long_hold_raises_an_alarm_and_discards_nothing(lab):
    await lab.start(Engine(slow={1}), rows=1)
    await lab.until(lambda: lab.states().count("ready") == 3, "three of four are ready")
    assert lab.holds.look(short_allowed=False) is None and lab.holds.alarms() == []
    await asyncio.sleep(0.03)
    assert lab.holds.look(short_allowed=False) is None
    (alarm,) = lab.holds.alarms()
    assert "batch 0 is held for" in alarm and "1 of 4 trajectories run" in alarm and "s0000000000000000t0001" in alarm
    assert not lab.core.ledger.counts.by_reason and lab.states().count("running") == 1
    assert lab.holds.facts()["hold"]["uid"] == 0 and lab.holds.gauges()["headrace_hold_now_seconds"] > 0.02


async def test_O3_an_answer_that_finishes_no_sample_is_no_reason_to_look_through_all_that_live(lab, monkeypatch):
    looks, began = [], time.monotonic()
    monkeypatch.setattr("driver.holds.decide", lambda *facts, **more: looks.append(1) or decide(*facts, **more))
    await lab.start(Engine(slow={3}), rows=1)
    await lab.until(lambda: lab.core.ledger.samples, "it is registered")
    for _ in range(10):
        assert lab.holds.look(short_allowed=False) is None
    await lab.until(lambda: lab.states().count("ready") == 3, "three of four are ready")
    for _ in range(10):
        assert lab.holds.look(short_allowed=False) is None
    assert len(looks) <= 3 + time.monotonic() - began, "once, and once more for each second that went by"
    lab.core.apply(TrajectoryDiscarded(traj_uid="s0000000000000000t0003", reason="test", time=1.0))
    await lab.until(lambda: lab.holds.look(short_allowed=False) == (0,), "it is taken, after the rest that a long look is followed by")


async def test_O3_a_look_that_takes_long_is_followed_by_a_rest_and_the_loop_is_told_when_it_ends(lab, monkeypatch):
    looks = []

    def slow(*facts, **more):
        looks.append(1)
        time.sleep(0.005)
        return decide(*facts, **more)

    monkeypatch.setattr("driver.holds.decide", slow)
    await lab.start(Engine(slow={3}), rows=1)
    await lab.until(lambda: lab.states().count("ready") == 3, "three of four are ready")
    assert lab.holds.look(short_allowed=True) is None
    lab.core.ledger.settlings += 1
    assert lab.holds.look(short_allowed=True) is None and len(looks) == 1
    assert 0.0 < lab.holds.again_s <= 1.0
    await asyncio.sleep(lab.holds.again_s + 0.001)
    assert lab.holds.look(short_allowed=True) is None and len(looks) == 2


@pytest.mark.parametrize("lab", [DEADLINE], indirect=True)
async def test_the_account_of_holds_survives_a_restart(lab, tmp_path):
    await lab.start(Engine(slow={1}), rows=1)
    await lab.until(lambda: lab.states().count("ready") == 3, "three of four are ready")
    lab.holds.look(short_allowed=False)
    await asyncio.sleep(0.06)
    lab.take()
    lab.bias.save()
    await lab.db.durable()
    again = Holds(lab.core, cut=lab.dispatch.cut, moving=lambda: True)
    assert again.counts == lab.holds.counts and again.counts.count == 1 and again.counts.longest_s >= 0.05
    assert BiasWatch(lab.core).meter.windows == lab.bias.meter.windows


@pytest.mark.parametrize("lab", [PARTIAL], indirect=True)
async def test_V4_the_meter_hears_of_every_end_with_its_length_and_shows_it_over_rest(lab):
    await lab.start(Engine(slow={1}), rows=1)
    await lab.until(lambda: lab.states().count("ready") == 3, "three of four are ready")
    lab.take()
    window = lab.bias.meter.windows[0]
    assert (window.whole.sampled, window.whole.trained) == (4, 3) and window.reasons == {"partial: 3 of 4": 1}
    assert {key: (c.sampled, c.trained) for key, c in window.cells["length"].items()} == {"2": (3, 3), "3": (1, 0)}
    assert window.cells["task_type"].keys() == {"sort"} and window.cells["dataset"].keys() == {"d000000"}
    app = create_app(
        SimpleNamespace(runs={"sort-digits": SimpleNamespace(bias=lab.bias)}, waiting={}), token=None, loopback=True, shutdown=lambda: None
    )
    rest = TestClient(app)
    facts = rest.get("/v1/runs/sort-digits/bias").json()
    assert rest.get("/v1/runs/sort-digits/bias", params={"version": 3}).json()["window"]["sampled"] == 4
    missing = rest.get("/v1/runs/sort-digits/bias", params={"version": 33})
    assert missing.status_code == 404 and "windows begin at 0" in missing.json()["error"]["message"]
    assert facts["total"]["sampled"] == 4 and facts["window"] is None and facts["windows"][0]["closed"] is False
    assert [row["name"] for row in facts["total"]["length"]] == ["2 to 2 tokens", "3 to 3 tokens"]


async def test_an_evaluation_is_no_part_of_what_the_meter_compares(lab):
    lab.core.apply(EvaluationBegan(first_uid=0, rows=1, n=1, version=0, time=1.0))
    assert lab.bias.oldest_version == 0 and lab.core.ledger.settled_samples == 0
    lab.core.apply(EvaluationEnded(first_uid=0, epoch=0, report=b"{}", rewards=((0, 0, 1.0),), failed=(), time=2.0))
    assert not lab.bias.meter.windows and not lab.core.ledger.samples


async def test_V1_at_S_0_nobody_is_registered_for_a_version_that_no_engine_has_and_the_reason_is_told(lab):
    await lab.start(Engine(slow=set()), rows=3)
    await lab.until(lambda: 0 in lab.core.ledger.samples and lab.states().count("ready") == 4, "the first is ready")
    assert lab.take() == 0
    lab.core.ring()
    await lab.until(lambda: "too old" in getattr(lab.core.waits.get("rollout"), "reason", ""), "the reason")
    assert "the engines serve version 0, too old for batch 1 with bound 0" in lab.core.waits["rollout"].reason
    assert not lab.core.ledger.samples and not lab.core.ledger.counts.by_reason
    lab.core.apply(VersionServed(version=1))
    await lab.until(lambda: 1 in lab.core.ledger.samples, "the push is done, and the next is registered")


async def test_V6_after_a_restart_staleness_counters_and_the_first_tag_say_the_version_that_was_reached(tmp_path):
    before = Lab(tmp_path)
    await before.start(Engine(slow=set()), rows=5)
    for version in (1, 2):
        await before.until(lambda: any(not s.waiting for s in before.core.ledger.live()), "one is ready")
        before.take()
        before.core.paused = version == 2
        before.core.apply(VersionServed(version=version))
    await before.close()
    after = Lab(tmp_path)
    try:
        ledger = after.core.ledger
        assert (ledger.serving_version, ledger.trained_version, ledger.next_batch) == (2, 2, 2)
        assert ledger.staleness == before.core.ledger.staleness == {0: 2}
        await after.start(Engine(slow=set()), rows=1)
        await after.until(lambda: ledger.live_by_deadline, "the next is registered")
        assert [(s.uid, s.version_tag, s.deadline_batch) for s in ledger.live()] == [(2, 2, 2)]
    finally:
        await after.close()


@pytest.mark.parametrize("lab", [["staleness.bound=2"]], indirect=True)
async def test_V7_engines_that_are_always_ahead_of_the_trainer_make_what_is_kept_no_larger(lab):
    await lab.start(Engine(slow=set()), rows=60)
    ledger, dispatch = lab.core.ledger, lab.dispatch
    for version in range(40):
        await lab.until(lambda: len(ledger.samples) == 3 and not any(s.waiting for s in ledger.live()), "all that S = 2 lets in")
        lab.take()
        lab.core.apply(VersionServed(version=version + 1))
    await lab.until(lambda: len(ledger.samples) == 3 and not any(s.waiting for s in ledger.live()) and not dispatch.in_flight, "rest")
    turns = dispatch.turns
    kept = (ledger.samples, ledger.batches, dispatch._rows, dispatch._tasks, dispatch._queue, turns._first, turns._last, turns.progress)
    assert [len(each) for each in kept] == [3, 0, 0, 0, 0, 0, 0, 0]
    assert ledger.counts.by_outcome == {"trained": 160} and max(ledger.staleness) == 2


@pytest.mark.parametrize("lab", [["staleness.bound=3"]], indirect=True)
async def test_V9_a_sample_is_tagged_with_what_the_engines_have_and_not_with_what_was_trained(lab):
    await lab.start(Engine(slow=set()), rows=2)
    for _ in range(2):
        await lab.until(lambda: any(not s.waiting for s in lab.core.ledger.live()), "one is ready")
        lab.take()
    ledger = lab.core.ledger
    assert (ledger.trained_version, ledger.serving_version) == (2, 0), "the trainer is two steps ahead"
    await lab.feed.add("d000000", "rows", iter([lab.rows(3)]), None)
    lab.core.ring()
    await lab.until(lambda: ledger.next_uid == 4, "all that the bound lets in are registered")
    assert {(s.version_tag, s.deadline_batch) for s in ledger.samples.values()} == {(0, 3)}
    shown = SimpleNamespace(core=lab.core, holds=lab.holds, dispatch=lab.dispatch)
    assert observe.staleness(shown)["publish_lag"] == 2
