"""One turn over however many engines it takes: nothing received is sampled again, no budget is exceeded, every failure has a reason."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from driver.config import load_config
from driver.core import Core
from driver.datasets import DataRow
from driver.dispatch import Dispatch
from driver.extras import Extras
from driver.feed import Feed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.lost_time import FULL
from driver.push import Pusher
from driver.scoring import ScoreFailed, Scoring
from driver.turns import GivenUp, Pace
from driver.watermark import Watermark
from rollout.answer import EngineError, Generation, Prefix, refusal
from rollout.extras import Place, put
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.tree import Trajectory as Tree
from rollout.version import Version
from rollout.workflow import Task, WorkflowFailed
from store import EmbeddedStore, Ref, open_ref
from store.rows import row_of
from store.schema import validate
from tests.driver.conftest import ready, register

ROOT = Path(__file__).parents[2]
EOS = 2
VERSION = "run/0/0/1"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedEngine:
    """Gives what it was told to, in order, and notes what it was asked."""

    url = "http://scripted"

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked: list[tuple[list[int], int, str]] = []

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], rid: str, **more: Any) -> Generation:
        self.asked.append((list(input_ids), sampling["max_new_tokens"], rid))
        step = self.script.pop(0)
        if callable(step):
            step = step()
        if isinstance(step, Exception):
            raise step
        return step


def answer(*ids: int, finish: Any = "stop", version: str = VERSION) -> Generation:
    return Generation(list(ids), [-0.5] * len(ids), [(version, 0, len(ids))] if ids else [], finish)


def lost(*ids: int, kind: Any = "infrastructure", version: str = VERSION) -> EngineError:
    return EngineError(kind, "connection reset", prefix=Prefix(list(ids), [-0.5] * len(ids), [(version, 0, len(ids))] if ids else []))


@pytest.fixture
def parts(tmp_path):
    config = load_config(ROOT / "examples/sort_digits/config.yaml", ["rollout.infrastructure_retries=3"])
    db = LedgerDB(tmp_path / "ledger.sqlite")
    ledger = Ledger()
    ledger.apply(register(ledger, n=2))
    store = EmbeddedStore(tmp_path / "store", 1 << 20)
    core = Core(config, ledger, db, Feed(db, seed=0, shuffle=False, passes=1), store)

    async def replaced(slot, reason): ...

    pool = EnginePool(Clock())
    pusher = Pusher(pool, deadline_s=1.0, logprob_tolerance=1e-3, replace=replaced)
    scoring = Scoring(core, wait_s=0.0, deadline_s=1.0)
    watermark = Watermark(128)
    dispatch = Dispatch(core, pool, pusher, scoring, TokenizerView(config.model.path), watermark, on_discarded=lambda s, t: None)

    def engines(*made: ScriptedEngine) -> None:
        for number, engine in enumerate(made):
            slot = pool.register(f"engine-{number}", engine, 1, 4)  # type: ignore[arg-type]
            pool.open(slot, Version("run", 0, 0, 1))
            pusher._verified[VERSION] = None

    yield dispatch, ledger.samples[0].trajectories[0], engines
    db.close()


async def test_a_whole_answer_is_taken_as_it_is(parts):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(answer(9, EOS))
    engines(engine)
    made = await dispatch.turns.generate(trajectory, 0, [5, 6])
    assert made.output_ids == [9, EOS] and made.finish_reason == "stop"
    assert engine.asked[0][:2] == ([5, 6], 16)


@pytest.mark.parametrize(
    "breaks",
    [answer(finish="abort"), answer(7, finish="abort"), lost(), lost(7)],
    ids=["aborted in the queue", "aborted", "cut off in the queue", "cut off"],
)
async def test_E16_a_request_of_an_engine_that_is_sent_away_goes_on_elsewhere_and_costs_no_try(parts, breaks):
    """However little it had received: with no budget at all nothing is given up."""
    dispatch, trajectory, engines = parts
    trajectory.infrastructure_attempts = 3  # all that may be used
    pool = dispatch._pool

    def sent_away():
        slot = pool.slots["engine-0"]
        slot.released = True
        pool.gone(slot, "scaled down")
        return breaks

    first, second = ScriptedEngine(sent_away), ScriptedEngine(answer(9, EOS))
    engines(first, second)
    made = await dispatch.turns.generate(trajectory, 0, [5])
    kept = breaks.prefix.output_ids if isinstance(breaks, EngineError) else breaks.output_ids
    assert made.output_ids == [*kept, 9, EOS] and trajectory.infrastructure_attempts == 3
    assert first.asked[0][2] != second.asked[0][2], "another request, with a name of its own"


async def test_W1_E13_a_request_lost_with_its_engine_goes_on_elsewhere_from_its_last_token(parts):
    dispatch, trajectory, engines = parts
    first, second = ScriptedEngine(lost(7, 8)), ScriptedEngine(answer(9, EOS))
    engines(first, second)
    made = await dispatch.turns.generate(trajectory, 0, [5])
    assert made.output_ids == [7, 8, 9, EOS] and made.spans == [(VERSION, 0, 4)]
    assert second.asked[0][:2] == ([5, 7, 8], 14), "the budget is what is left"
    assert trajectory.infrastructure_attempts == 1
    assert first.asked[0][2] != second.asked[0][2], "request ids are unique"


async def test_E15_an_abort_is_continued_and_never_exceeds_the_budget(parts):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(answer(7, 8, finish="abort"), answer(*range(20, 34), finish="length"))
    engines(engine)
    made = await dispatch.turns.generate(trajectory, 0, [5])
    assert len(made.output_ids) == 16 and made.output_ids[:2] == [7, 8] and made.finish_reason == "length"
    assert engine.asked[1][:2] == ([5, 7, 8], 14)


async def test_E15_an_answer_in_parts_is_one_answer_within_one_budget_and_costs_no_try(parts):
    dispatch, trajectory, engines = parts
    rollout = dispatch._core.config.rollout.model_copy(update={"part_tokens": 6})
    dispatch._core.config = dispatch._core.config.model_copy(update={"rollout": rollout})
    first, second = (
        ScriptedEngine(*[answer(*range(20, 26), finish="length")] * 2, answer(*range(30, 34), finish="length")),
        ScriptedEngine(),
    )
    engines(first, second)
    made = await dispatch.turns.generate(trajectory, 0, [5])
    assert len(made.output_ids) == 16 and made.finish_reason == "length" and made.spans == [(VERSION, 0, 16)]
    assert [asked[1] for asked in first.asked] == [6, 6, 4] and first.asked[1][0] == [5, *range(20, 26)] and second.asked == []
    assert trajectory.infrastructure_attempts == 0 and len({rid for _, _, rid in first.asked}) == 3
    first.script = [answer(7, 8, EOS)]
    assert (await dispatch.turns.generate(trajectory, 1, [5])).output_ids == [7, 8, EOS]


@pytest.mark.parametrize(("ids", "finish"), [((7, EOS), "stop"), (tuple(range(20, 36)), "length")])
async def test_E15_an_answer_lost_after_its_last_token_is_whole(parts, ids, finish):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(lost(*ids))
    engines(engine)
    made = await dispatch.turns.generate(trajectory, 0, [5])
    assert made.output_ids == list(ids) and made.finish_reason == finish and len(engine.asked) == 1


async def test_L3_tokens_of_weights_that_were_never_verified_are_not_kept(parts):
    dispatch, trajectory, engines = parts
    mixed = Generation([7, 8, EOS], [-0.5] * 3, [(VERSION, 0, 1), ("run/0/1/1", 1, 3)], "stop")
    engine = ScriptedEngine(mixed, answer(9, EOS))
    engines(engine)
    made = await dispatch.turns.generate(trajectory, 0, [5])
    assert made.output_ids == [7, 9, EOS] and dispatch.turns.tokens_resampled == 2


async def test_H3_a_prompt_that_always_fails_is_given_up_with_its_reason(parts):
    dispatch, trajectory, engines = parts
    engines(ScriptedEngine(lost(kind="data")))
    with pytest.raises(GivenUp, match="data: connection reset"):
        await dispatch.turns.generate(trajectory, 0, [5])


@pytest.mark.parametrize("status", [401, 404])
async def test_E8_another_server_behind_an_engines_address_costs_no_trajectory(parts, status):
    dispatch, trajectory, engines = parts
    first, second = ScriptedEngine(refusal(status, "not here")), ScriptedEngine(answer(9, EOS))
    engines(first, second)
    assert (await dispatch.turns.generate(trajectory, 0, [5])).output_ids == [9, EOS]
    assert trajectory.infrastructure_attempts == 1


async def test_E8_tries_without_a_token_come_later_each_time_but_for_the_first_elsewhere(parts, monkeypatch):
    dispatch, trajectory, engines = parts
    engines(ScriptedEngine(lost(), lost(), lost(), answer(9, EOS)))
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    monkeypatch.setattr("driver.turns.asyncio.sleep", sleep)
    assert (await dispatch.turns.generate(trajectory, 0, [5])).output_ids == [9, EOS]
    assert len(pauses) == 2 and 0 < pauses[0] < pauses[1]


async def test_an_infrastructure_that_always_fails_is_given_up_after_its_budget(parts):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(*[lost() for _ in range(9)])
    engines(engine)
    with pytest.raises(GivenUp, match="infrastructure: connection reset"):
        await dispatch.turns.generate(trajectory, 0, [5])
    assert len(engine.asked) == 1 + 3


def after(pool: EnginePool, seconds: float, step: Any) -> Any:
    """A step that takes this long."""

    def wait() -> Any:
        pool._monotonic.now += seconds  # type: ignore[attr-defined]
        return step

    return wait


async def test_siblings_and_later_turns_go_where_their_prefix_is(parts):
    dispatch, trajectory, engines = parts
    sibling = dispatch._core.ledger.samples[0].trajectories[1]
    first, second = ScriptedEngine(*[answer(9, EOS)] * 4), ScriptedEngine()
    engines(first, second)
    for who, turn in ((trajectory, 0), (sibling, 0), (trajectory, 1), (sibling, 1)):
        await dispatch.turns.generate(who, turn, [5, 6])
    assert len(first.asked) == 4 and not second.asked, "idle engines would take turns"


async def test_E13_a_part_goes_to_another_engine_than_failed_and_the_next_turn_follows_it_there(parts):
    dispatch, trajectory, engines = parts
    first, second = ScriptedEngine(lost(7)), ScriptedEngine(*[answer(9, EOS)] * 2)
    engines(first, second)
    for turn in (0, 1):
        await dispatch.turns.generate(trajectory, turn, [5])
    assert (len(first.asked), len(second.asked)) == (1, 2)


async def test_E8_where_a_sample_went_is_forgotten_when_that_engine_dies(parts):
    dispatch, trajectory, engines = parts
    sibling = dispatch._core.ledger.samples[0].trajectories[1]
    first, second = ScriptedEngine(answer(9, EOS)), ScriptedEngine(*[answer(9, EOS)] * 2)
    engines(first, second)
    await dispatch.turns.generate(trajectory, 0, [5])
    dispatch._pool.gone(dispatch._pool.slots["engine-0"], "killed")
    await dispatch.turns.generate(trajectory, 1, [5])
    third = dispatch._pool.register("engine-2", ScriptedEngine(), 1, 4)  # type: ignore[arg-type]
    dispatch._pool.open(third, Version("run", 0, 0, 1))
    await dispatch.turns.generate(sibling, 0, [5])
    assert len(second.asked) == 2, "its sample's prompt lies there now"


async def test_what_was_remembered_of_a_sample_goes_with_it(parts):
    dispatch, _, engines = parts
    engines(ScriptedEngine(*[answer(9, EOS)] * 2))
    sample = dispatch._core.ledger.samples[0]
    for one in sample.trajectories:
        await dispatch.turns.generate(one, 0, [5])
        dispatch._core.ledger.apply(ready(0, one.index))
    dispatch.settle(sample)
    assert not dispatch.turns._first


@pytest.mark.parametrize(
    ("said", "silent_s"),
    [
        (answer(9, EOS), 0),
        (EngineError("data", "too long", status=400), 0),
        (lost(7), 5),
        (EngineError("infrastructure", "no new token"), 5),
    ],
)
async def test_E14_an_answer_or_a_refusal_is_a_sign_of_life_and_a_lost_request_is_none(parts, said, silent_s):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(answer(9, EOS))
    engines(engine)
    engine.script = [after(dispatch._pool, 5, said), answer(EOS)]
    slot = dispatch._pool.slots["engine-0"]
    other = dispatch._pool.register("engine-1", ScriptedEngine(answer(EOS)), 1, 4)  # type: ignore[arg-type]
    if silent_s:
        dispatch._pool.open(other, Version("run", 0, 0, 1))
        dispatch.turns._pusher._verified["engine-1", VERSION] = None
    with suppress(GivenUp):
        await dispatch.turns.generate(trajectory, 0, [5])
    assert slot.silent_s() == silent_s


async def test_E14_each_token_is_a_sign_of_life(parts):
    dispatch, trajectory, engines = parts
    engines(ScriptedEngine())
    slot = dispatch._pool.slots["engine-0"]
    async with dispatch._pool.acquire(1.0, "test"):
        dispatch._pool._monotonic.now += 5
        assert slot.silent_s() == 5
        buffer = dispatch.turns.prefixes.turn(trajectory.traj_uid, 0, [5], 1.0)[0]
        dispatch.turns._count(trajectory, 0, slot, buffer, Pace(slot.clock))([7], [-0.5], VERSION)
        assert slot.silent_s() == 0


async def test_a_trajectory_that_ended_leaves_no_prefix_and_one_that_was_cancelled_does(parts, monkeypatch):
    dispatch, trajectory, _ = parts
    ended: list[str] = []
    monkeypatch.setattr(dispatch.turns.prefixes, "ended", ended.append)
    dispatch.turns.forget(trajectory)
    assert ended == [], "the driver ends, and the trajectory goes on in its next life"
    dispatch._core.ledger.apply(ready(0, 0))
    dispatch.turns.forget(trajectory)
    assert ended == [trajectory.traj_uid]


async def test_L1_who_waits_for_the_kv_cap_is_told_which_bound_it_was(parts):
    dispatch, _, engines = parts
    engines(ScriptedEngine())
    dispatch._core.feed = SimpleNamespace(next_place=lambda _: object())
    dispatch._store_free_bytes = lambda _: 1 << 40
    dispatch._queue.extend([None] * 100)  # in flight
    told = "reached with 100 in flight; kv binds:"
    words = f"watermark 8 {told} 4 requests at once on 1 engine by rollout.max_open_requests"
    assert dispatch._closed_gate() == (FULL, words), "engines that are full lose nothing"
    load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 96}
    slot = dispatch._pool.slots["engine-0"]
    slot.capacity = 64
    slot.reported({"loads": [load | {"max_running_requests": 32, "token_usage": 0.0}]}, 3.0)
    assert dispatch._closed_gate()[1] == f"watermark 40 {told} 32 requests at once on 1 engine by the engine's own limit"
    dispatch._request_tokens.observe(8.0)
    assert dispatch._closed_gate()[1] == f"watermark 15 {told} 12 requests at once on 1 engine by KV memory of 96 tokens at a mean of 8"


async def test_in_deterministic_mode_a_retry_keeps_its_seed(parts):
    dispatch, trajectory, _ = parts
    rollout = dispatch._core.config.rollout.model_copy(update={"deterministic": True})
    dispatch._core.config = dispatch._core.config.model_copy(update={"rollout": rollout})
    seeds = {dispatch.turns._sampling(trajectory, 0, 5)["sampling_seed"] for _ in range(2)}
    other = dispatch.turns._sampling(trajectory, 1, 5)["sampling_seed"]
    assert len(seeds) == 1 and other not in seeds and 0 <= other < 2**63


async def test_W5_a_workflow_whose_environment_breaks_in_turn_3_is_tried_again_from_its_prompt_and_then_given_up_with_its_reason(parts):
    dispatch, trajectory, engines = parts
    asked: list[list[int]] = []

    async def three_turns(task: Task, generate: Any) -> Any:
        ids = list(task.prompt_ids)
        for turn in range(3):
            asked.append(ids)
            if turn == 2:
                raise WorkflowFailed("the sandbox is gone")
            ids = [*ids, *(await generate(ids)).output_ids]

    dispatch._workflow = three_turns
    engine = ScriptedEngine(*[answer(9, EOS)] * 4)
    engines(engine)
    sample = dispatch._core.ledger.samples[0]
    dispatch._rows[sample.uid] = DataRow(0, "sort 12 =", None, "12", "sort", {})
    with pytest.raises(GivenUp, match="data: workflow: the sandbox is gone"):
        await dispatch._to_ready(sample, trajectory, lambda: None)
    assert [len(ids) - len(asked[0]) for ids in asked] == [0, 2, 4] * 2, "the second try began at the prompt"
    assert trajectory.data_attempts == 1 and trajectory.state == "running" and not trajectory.leaves, "nothing of it is a row"
    assert len({rid for _, _, rid in engine.asked}) == 4, "request ids are unique"


async def test_a_trajectory_that_lost_a_request_says_nothing_of_how_long_one_takes(parts):
    """A minute of failing engines would otherwise be the time in flight by which the watermark plans the next."""
    dispatch, trajectory, engines = parts
    clean, torn = trajectory, dispatch._core.ledger.samples[0].trajectories[1]
    engines(ScriptedEngine(answer(9, EOS), lost(7), answer(9, EOS)))
    measured = dispatch._core.measured
    for number, (one, lengths) in enumerate([(clean, [2]), (torn, [2])]):
        made = await dispatch.turns.generate(one, 0, [5])
        tree = SimpleNamespace(
            turns=[SimpleNamespace(log_probs=(), token_ids=(5,)), SimpleNamespace(log_probs=(-0.5,), token_ids=(9, EOS))]
        )
        dispatch._measure(one, tree, 1.5)
        assert list(measured.lengths) == lengths, number
        assert made.output_ids[-1] == EOS
    assert measured.engine_s.count == 1 and measured.aside_s.value == pytest.approx(1.5, abs=0.4), "all the rest was between its requests"
    for one in (clean, torn):
        dispatch._core.ledger.apply(ready(0, one.index))
    dispatch.settle(dispatch._core.ledger.samples[0])
    assert measured.sample_s.value is None, "one of its trajectories is not known"


async def test_a_trajectory_that_is_with_its_tools_leaves_its_place_at_the_engines_to_another(parts):
    dispatch, trajectory, engines = parts
    seen = []

    class Watched(ScriptedEngine):
        async def generate(self, *asked: Any, **more: Any) -> Generation:
            seen.append((dispatch.turns.asking, dispatch._room(), dispatch.turns.asks(trajectory.traj_uid)))
            return await super().generate(*asked, **more)

    engines(Watched(answer(9, EOS), answer(9, EOS)))
    dispatch.generating = 3  # this one, and two whose workflows wait for something else
    dispatch.turns.due(trajectory.traj_uid)
    assert (dispatch.turns.asking, dispatch._room()) == (1, 3)
    await dispatch.turns.generate(trajectory, 0, [5])
    assert (dispatch.turns.asking, dispatch._room()) == (0, 4), "between two turns"
    await dispatch.turns.generate(trajectory, 1, [5])
    assert seen == [(1, 3, True)] * 2
    dispatch.turns.forget(trajectory)
    assert dispatch.turns.asking == 0


@pytest.mark.parametrize(
    ("sent", "asks", "scores", "words"),
    [
        (False, False, False, "not sent yet"),
        (True, False, True, "at its scorer"),
        (True, False, False, "about to be sent"),
        (True, True, False, "waiting for an engine"),
    ],
)
async def test_L1_where_a_trajectory_is_can_be_said(parts, sent, asks, scores, words):
    dispatch, trajectory, engines = parts
    engines(ScriptedEngine())
    if sent:
        dispatch._tasks[trajectory.traj_uid] = None
    if scores:
        dispatch._scoring._since[f"{trajectory.traj_uid}a0000l0000"] = 0.0
    with dispatch.turns._asks(trajectory.traj_uid) if asks else nullcontext():
        assert dispatch.place(trajectory.traj_uid) == words
    if sent and asks:
        dispatch.turns._took(trajectory, dispatch._pool.slots["engine-0"])
        assert dispatch.place(trajectory.traj_uid) == "between two turns"
        with dispatch.turns._asks(trajectory.traj_uid):
            assert dispatch.place(trajectory.traj_uid) == "on engine-0"


def test_how_fast_tokens_come_is_measured_from_the_first_chunk_to_the_last():
    clock = Clock()
    pace = Pace(clock)
    assert pace.decoded == (0, 0.0)
    for seconds, tokens in ((9.0, 16), (2.0, 16), (1.0, 8)):  # nine seconds in the engine's queue
        clock.now += seconds
        pace.came(tokens)
    assert pace.decoded == (24, 3.0)


async def test_B1_of_all_requests_of_a_turn_only_the_last_ones_extras_stay(parts):
    """In parts, cut off and asked again: each was told a key of its own, and each may have put something."""
    dispatch, trajectory, engines = parts
    core = dispatch._core
    dispatch.turns.extras = Extras(core, wanted=True)
    keys = []

    class Engine(ScriptedEngine):
        on_this_host = True

        async def generate(self, input_ids: list[int], *more: Any, extras: Any = None, **others: Any) -> Generation:
            keys.append(extras["key"])
            step = self.script[0]
            sampled = step.prefix.output_ids if isinstance(step, EngineError) else step.output_ids
            said = put(Place(**extras), np.zeros((len(input_ids) + len(sampled) - 1, 2, 2), np.int32))
            made = await super().generate(input_ids, *more, **others)
            return replace(made, meta={"routed_experts": orjson.loads(orjson.dumps(said))})

    engines(Engine(lost(7)), Engine(answer(8, finish="abort"), answer(9, EOS)))
    made = await dispatch.turns.generate(trajectory, 0, [5, 6])
    assert made.output_ids == [7, 8, 9, EOS] and len(set(keys)) == 3 and core.store.keys() == keys[2:]
    dispatch.turns.forget(trajectory)
    assert core.store.keys() == []


def two_leaves() -> Tree:
    """The second answer follows a history that was rewritten."""
    tree = Tree()
    root = tree.add("user", [5, 6, 7])
    sampled: dict[str, Any] = {"spans": [(VERSION, 0, 2)], "policy": "policy", "finish_reason": "stop"}
    tree.add("assistant", [9, EOS], parent=root, log_probs=[-0.5, -0.25], **sampled)
    other = tree.add("user", [8], parent=root)
    tree.add("assistant", [10, EOS], parent=other, log_probs=[-1.0, -2.0], **sampled)
    return tree


@pytest.mark.parametrize(("inline_bytes", "objects"), [(0, 2), (1 << 14, 0), (1024, 1)], ids=["stored", "in the ledger", "one of each"])
async def test_the_leaves_of_a_trajectory_are_rows_of_one_object_and_a_failed_score_leaves_none(parts, inline_bytes, objects):
    dispatch, trajectory, _ = parts
    core = dispatch._core
    core.config = core.config.model_copy(update={"store": core.config.store.model_copy(update={"inline_bytes": inline_bytes})})
    row = DataRow(0, "sort 1 =", None, "1", "sort", {})

    async def score(job: Any) -> Any:
        return SimpleNamespace(score=float(job.leaf_id[-1]) + 0.5, is_correct=None if job.leaf_id.endswith("1") else True)

    dispatch._scoring.score = score
    leaves = await dispatch._score(row, trajectory, two_leaves())
    assert core.store.stats().objects == objects and [leaf.refs for leaf in leaves] == [leaves[0].refs] * 2
    assert [(leaf.row, leaf.length, leaf.response_tokens, leaf.score, leaf.is_correct) for leaf in leaves] == [
        (0, 5, 2, 0.5, True),
        (1, 6, 2, 1.5, None),
    ]
    rollout, reward = (open_ref(Ref.from_wire(ref), store=core.store) for ref in leaves[0].refs)
    validate("rollout", rollout)
    validate("reward", reward)
    assert [row_of(rollout, leaf.row)["input_ids"].tolist() for leaf in leaves] == [[5, 6, 7, 9, EOS], [5, 6, 7, 8, 10, EOS]]
    assert reward["score"].tolist() == [0.5, 1.5] and reward["is_correct"].tolist() == [1, 255]
    core.store.free(ref for leaf in leaves for ref in leaf.stored)
    assert core.store.stats().objects == 0

    async def fail(job: Any) -> Any:
        raise ScoreFailed("reward: no", data=True)

    dispatch._scoring.score = fail
    with pytest.raises(ScoreFailed):
        await dispatch._score(row, trajectory, two_leaves())
    assert core.store.stats().objects == 0


async def test_W4_an_engine_that_only_answers_500_makes_no_row_and_no_reward(parts):
    dispatch, trajectory, engines = parts
    core = dispatch._core
    engine = ScriptedEngine(*[refusal(500, "internal error")] * 4)
    engines(engine)
    dispatch._rows[0] = DataRow(0, "sort 1 =", None, "1", "sort", {})
    dispatch._tasks[trajectory.traj_uid] = asyncio.current_task()
    await dispatch._trajectory(core.ledger.samples[0], trajectory)
    assert not engine.script and trajectory.infrastructure_attempts == 3, "asked again, within its budget"
    assert trajectory.outcome == "discarded" and trajectory.reason.startswith("infrastructure: ") and "500" in trajectory.reason
    assert trajectory.reward is None and trajectory.leaves == () and core.store.stats().objects == 0
