"""One turn over however many engines it takes: nothing received is sampled again, no budget is exceeded, every failure has a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from driver.config import load_config
from driver.core import Core
from driver.dispatch import Dispatch, GivenUp
from driver.feed import Feed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.push import Pusher
from driver.scoring import Scoring
from driver.watermark import Watermark
from rollout.answer import EngineError, Generation, Prefix
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.version import Version
from store import EmbeddedStore
from tests.driver.conftest import register

ROOT = Path(__file__).parents[2]
EOS = 2
VERSION = "run/0/0/1"


class ScriptedEngine:
    """Gives what it was told to, in order, and notes what it was asked."""

    url = "http://scripted"

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked: list[tuple[list[int], int, str]] = []

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], rid: str, **more: Any) -> Generation:
        self.asked.append((list(input_ids), sampling["max_new_tokens"], rid))
        step = self.script.pop(0)
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

    async def replace(slot, reason): ...

    pool = EnginePool()
    pusher = Pusher(pool, deadline_s=1.0, logprob_tolerance=1e-3, replace=replace)
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
    made = await dispatch._generate(trajectory, 0, [5, 6])
    assert made.output_ids == [9, EOS] and made.finish_reason == "stop"
    assert engine.asked[0][:2] == ([5, 6], 16)


async def test_W1_E13_a_request_lost_with_its_engine_goes_on_elsewhere_from_its_last_token(parts):
    dispatch, trajectory, engines = parts
    first, second = ScriptedEngine(lost(7, 8)), ScriptedEngine(answer(9, EOS))
    engines(first, second)
    made = await dispatch._generate(trajectory, 0, [5])
    assert made.output_ids == [7, 8, 9, EOS] and made.spans == [(VERSION, 0, 4)]
    assert second.asked[0][:2] == ([5, 7, 8], 14), "the budget is what is left"
    assert trajectory.infrastructure_attempts == 1
    assert first.asked[0][2] != second.asked[0][2], "request ids are unique"


async def test_E15_an_abort_is_continued_and_never_exceeds_the_budget(parts):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(answer(7, 8, finish="abort"), answer(*range(20, 34), finish="length"))
    engines(engine)
    made = await dispatch._generate(trajectory, 0, [5])
    assert len(made.output_ids) == 16 and made.output_ids[:2] == [7, 8] and made.finish_reason == "length"
    assert engine.asked[1][:2] == ([5, 7, 8], 14)


@pytest.mark.parametrize(("ids", "finish"), [((7, EOS), "stop"), (tuple(range(20, 36)), "length")])
async def test_E15_an_answer_lost_after_its_last_token_is_whole(parts, ids, finish):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(lost(*ids))
    engines(engine)
    made = await dispatch._generate(trajectory, 0, [5])
    assert made.output_ids == list(ids) and made.finish_reason == finish and len(engine.asked) == 1


async def test_L3_tokens_of_weights_that_were_never_verified_are_not_kept(parts):
    dispatch, trajectory, engines = parts
    mixed = Generation([7, 8, EOS], [-0.5] * 3, [(VERSION, 0, 1), ("run/0/1/1", 1, 3)], "stop")
    engine = ScriptedEngine(mixed, answer(9, EOS))
    engines(engine)
    made = await dispatch._generate(trajectory, 0, [5])
    assert made.output_ids == [7, 9, EOS] and dispatch.tokens_resampled == 2


async def test_H3_a_prompt_that_always_fails_is_given_up_with_its_reason(parts):
    dispatch, trajectory, engines = parts
    engines(ScriptedEngine(lost(kind="data")))
    with pytest.raises(GivenUp, match="data: connection reset"):
        await dispatch._generate(trajectory, 0, [5])


async def test_an_infrastructure_that_always_fails_is_given_up_after_its_budget(parts):
    dispatch, trajectory, engines = parts
    engine = ScriptedEngine(*[lost() for _ in range(9)])
    engines(engine)
    with pytest.raises(GivenUp, match="infrastructure: connection reset"):
        await dispatch._generate(trajectory, 0, [5])
    assert len(engine.asked) == 1 + 3


async def test_in_deterministic_mode_a_retry_keeps_its_seed(parts):
    dispatch, trajectory, _ = parts
    rollout = dispatch._core.config.rollout.model_copy(update={"deterministic": True})
    dispatch._core.config = dispatch._core.config.model_copy(update={"rollout": rollout})
    seeds = {dispatch._sampling(trajectory, 0, 5)["sampling_seed"] for _ in range(2)}
    other = dispatch._sampling(trajectory, 1, 5)["sampling_seed"]
    assert len(seeds) == 1 and other not in seeds and 0 <= other < 2**63
