"""What survives the driver of the trajectories in flight: their tokens, their log-probs, their versions, and what it costs."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from driver.config import load_config
from driver.core import Core
from driver.feed import Feed
from driver.ledger_db import LedgerDB
from driver.ledger_state import Trajectory
from driver.prefix_log import PrefixLog
from driver.push import Pusher
from driver.turns import Turns
from rollout.answer import EngineError, Generation, Prefix
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.version import Version
from store import EmbeddedStore
from tests.driver.conftest import register
from tests.rollout.engine.conftest import SOURCES, Served, end, launch, make_checkpoint

CONFIG = SOURCES / "examples/sort_digits/config.yaml"
EOS = 2
PROMPT = [80, 81, 82, 35, 60]
VERSION = Version("run", 0, 0, 1)
V = str(VERSION)


class Life:
    """One life of a driver over a run directory: what is in it may be dropped at any moment, as by SIGKILL."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.config = load_config(CONFIG, ["rollout.infrastructure_retries=3", *settings])
        self.db = LedgerDB(directory / "ledger.sqlite")
        self.ledger = self.db.load()
        if not self.ledger.next_uid:
            self.db.write(self.ledger.apply(register(self.ledger, n=2)))
        store = EmbeddedStore(directory / "store", 1 << 20)
        self.core = Core(self.config, self.ledger, self.db, Feed(self.db, seed=0, shuffle=False, passes=1), store)
        self.pool = EnginePool()

        async def replace(slot: Any, reason: str) -> None: ...

        self.pusher = Pusher(self.pool, deadline_s=1.0, logprob_tolerance=1e-3, replace=replace)
        self.now = 0.0
        rollout = self.config.rollout
        self.log = PrefixLog(
            directory / "prefixes.sqlite",
            self.db,
            every_s=rollout.prefix_log_every_s,
            every_tokens=rollout.prefix_log_every_tokens,
            verified=self.pusher.verified,
            now=lambda: self.now,
        )
        self.turns = Turns(self.core, self.pool, self.pusher, TokenizerView(self.config.model.path), None, self.log)

    @property
    def trajectory(self) -> Trajectory:
        return self.ledger.samples[0].trajectories[0]

    def serve(self, engine: Any, version: Version = VERSION) -> None:
        slot = self.pool.register(f"engine-{len(self.pool.slots)}", engine, version.incarnation, 4)
        self.pool.open(slot, version)
        self.pusher._verified[str(version)] = None

    async def killed(self) -> None:
        """The ledger has what it committed; the log is left as it lies."""
        await self.db.durable()
        self.db.close()


class Streaming:
    """Gives its chunks, one at a time, then waits to be killed, or ends as told."""

    url = "http://scripted"

    def __init__(self, *chunks: list[int], end: Any = None, version: str = V) -> None:
        self.chunks = chunks
        self.end = end
        self.version = version
        self.asked: list[list[int]] = []
        self.given = asyncio.Event()

    async def generate(self, input_ids: list[int], sampling: dict[str, Any], rid: str, **more: Any) -> Generation:
        self.asked.append(list(input_ids))
        ids: list[int] = []
        for chunk in self.chunks:
            ids += chunk
            more["on_tokens"](chunk, [-0.25 * token for token in chunk], self.version)
        self.given.set()
        if self.end is None:
            await asyncio.sleep(3600)
        prefix = Prefix(ids, [-0.25 * token for token in ids], [(self.version, 0, len(ids))] if ids else [])
        if isinstance(self.end, Exception):
            self.end.prefix = prefix  # type: ignore[attr-defined]
            raise self.end
        return Generation(prefix.output_ids, prefix.log_probs, prefix.spans, self.end)


async def interrupted(life: Life, engine: Streaming, turn: int = 0) -> None:
    """A turn until all chunks were given, then gone without a word."""
    life.serve(engine)
    task = asyncio.create_task(life.turns.generate(life.trajectory, turn, PROMPT))
    await engine.given.wait()
    life.now += 2.0
    await life.log.flush()
    task.cancel()
    await asyncio.wait([task])


async def test_W1_a_killed_driver_goes_on_from_the_last_logged_token_with_log_probs_and_versions_as_they_were(tmp_path):
    life = Life(tmp_path)
    await interrupted(life, Streaming([7, 8], [9]))
    await life.killed()
    again = Life(tmp_path)
    assert again.log.keep([again.trajectory.traj_uid]) == {again.trajectory.traj_uid: 3}
    second = Version("run", 0, 0, 2)  # another life of an engine
    engine = Streaming([10, EOS], end="stop", version=str(second))
    again.serve(engine, second)
    made = await again.turns.generate(again.trajectory, 0, PROMPT)
    assert engine.asked == [[*PROMPT, 7, 8, 9]]
    assert made.output_ids == [7, 8, 9, 10, EOS] and made.log_probs == [-0.25 * token for token in made.output_ids]
    assert made.spans == [(V, 0, 3), (str(second), 3, 5)]
    assert (again.log.resumed, again.log.tokens_resumed) == (1, 3)
    await again.killed()


async def test_W2_five_kills_in_one_answer_and_no_token_is_sampled_twice(tmp_path):
    asked = []
    for number in range(5):
        life = Life(tmp_path)
        life.log.keep([life.trajectory.traj_uid])
        engine = Streaming([20 + number])
        await interrupted(life, engine)
        asked += engine.asked
        await life.killed()
    assert asked == [[*PROMPT, *range(20, 20 + number)] for number in range(5)]


async def test_H6_at_sigterm_everything_sure_is_logged_and_what_is_not_is_counted(tmp_path):
    life = Life(tmp_path)
    engine = Streaming([7, 8])
    life.serve(engine)
    task = asyncio.create_task(life.turns.generate(life.trajectory, 0, PROMPT))
    await engine.given.wait()
    buffer = life.log._turns._turns[life.trajectory.traj_uid][0]
    buffer.got([9], [-0.5], "run/0/1/1")  # of a push: nobody knows yet which weights made it
    task.cancel()
    await asyncio.wait([task])
    life.turns.forget(life.trajectory)
    assert life.log.close() == 1, "nothing was due yet"
    life.turns.count_resampled(1)
    await life.killed()
    again = Life(tmp_path)
    assert again.log.keep([again.trajectory.traj_uid]) == {again.trajectory.traj_uid: 2}
    assert again.turns.tokens_resampled == 1, "over restarts"
    await again.killed()


@pytest.mark.parametrize(("ids", "finish"), [([7, EOS], "stop"), (list(range(20, 36)), "length")])
async def test_E15_a_prefix_that_ends_with_a_stop_or_at_the_budget_is_a_whole_answer_and_nothing_is_asked(tmp_path, ids, finish):
    life = Life(tmp_path)
    await interrupted(life, Streaming(ids))
    await life.killed()
    again = Life(tmp_path)
    again.log.keep([again.trajectory.traj_uid])
    engine = Streaming(end="stop")
    again.serve(engine)
    made = await again.turns.generate(again.trajectory, 0, PROMPT)
    assert (made.output_ids, made.finish_reason, engine.asked) == (ids, finish, [])
    await again.killed()


async def test_E15_a_prefix_longer_than_a_budget_that_was_lowered_is_cut_and_counted(tmp_path):
    life = Life(tmp_path)
    await interrupted(life, Streaming(list(range(20, 30))))
    await life.killed()
    again = Life(tmp_path, "rollout.sampling.max_new_tokens=4")
    again.log.keep([again.trajectory.traj_uid])
    made = await again.turns.generate(again.trajectory, 0, PROMPT)
    assert made.output_ids == [20, 21, 22, 23] and made.finish_reason == "length" and again.turns.tokens_resampled == 6
    await again.killed()


@pytest.mark.parametrize("change", ["prompt", "temperature"])
async def test_M5_a_prefix_of_another_prompt_or_temperature_is_not_continued(tmp_path, change, caplog):
    life = Life(tmp_path)
    await interrupted(life, Streaming([7, 8]))
    await life.killed()
    again = Life(tmp_path, *(["rollout.sampling.temperature=0.7"] if change == "temperature" else []))
    again.log.keep([again.trajectory.traj_uid])
    engine = Streaming([9, EOS], end="stop")
    again.serve(engine)
    prompt = [*PROMPT, 99] if change == "prompt" else PROMPT
    made = await again.turns.generate(again.trajectory, 0, prompt)
    assert made.output_ids == [9, EOS] and engine.asked == [prompt]
    assert "has another prompt or temperature than before: its 2 tokens are sampled again" in caplog.text
    assert again.turns.tokens_resampled == 2
    await again.killed()


async def test_W1_a_prefix_whose_epoch_is_no_more_is_continued_with_its_versions_as_one_in_flight_would_be(tmp_path):
    """The trainer came back at an older version meanwhile: the tokens are still what those weights sampled, and say so."""
    life = Life(tmp_path)
    await interrupted(life, Streaming([7, 8]))
    await life.killed()
    again = Life(tmp_path)
    again.log.keep([again.trajectory.traj_uid])
    newer = Version("run", 1, 0, 2)
    again.serve(Streaming([EOS], end="stop", version=str(newer)), newer)
    made = await again.turns.generate(again.trajectory, 0, PROMPT)
    assert made.spans == [(V, 0, 2), (str(newer), 2, 3)]
    await again.killed()


async def test_L3_tokens_of_weights_that_did_not_pass_are_never_logged(tmp_path):
    life = Life(tmp_path)
    engine = Streaming([7, 8])
    life.serve(engine)
    del life.pusher._verified[V]
    task = asyncio.create_task(life.turns.generate(life.trajectory, 0, PROMPT))
    await engine.given.wait()
    await life.log.flush(everything=True)
    task.cancel()
    await asyncio.wait([task])
    await life.killed()
    again = Life(tmp_path)
    assert again.log.keep([again.trajectory.traj_uid]) == {}
    await again.killed()


async def test_W1_what_an_engine_gave_before_it_died_is_in_the_log_with_what_the_next_one_gave(tmp_path):
    life = Life(tmp_path)
    life.serve(Streaming([7, 8], end=EngineError("infrastructure", "connection reset")))
    last = Streaming([9])
    life.serve(last)
    task = asyncio.create_task(life.turns.generate(life.trajectory, 0, PROMPT))
    await last.given.wait()
    await life.log.flush(everything=True)
    task.cancel()
    await asyncio.wait([task])
    assert life.log._read(life.trajectory.traj_uid)[0].prefix == Prefix([7, 8, 9], [-1.75, -2.0, -2.25], [(V, 0, 3)])
    await life.killed()


async def test_W1_V5_in_parts_what_was_sampled_through_a_push_is_logged_when_its_part_has_ended(tmp_path):
    newer = "run/0/1/1"

    class Pushed(Streaming):
        """Its first part lives through a push: the second chunk holds a token of either version, and only the end says so."""

        async def generate(self, input_ids: list[int], sampling: dict[str, Any], rid: str, **more: Any) -> Generation:
            self.asked.append(list(input_ids))
            if len(self.asked) > 1:
                self.given.set()
                await asyncio.sleep(3600)
            more["on_tokens"]([7], [-0.5], V)
            more["on_tokens"]([8, 9, 10], [-0.5] * 3, newer)
            return Generation([7, 8, 9, 10], [-0.5] * 4, [(V, 0, 2), (newer, 2, 4)], "length")

    life = Life(tmp_path, "rollout.part_tokens=4")
    life.pusher._verified[newer] = None
    engine = Pushed()
    await interrupted(life, engine)
    assert engine.asked == [PROMPT, [*PROMPT, 7, 8, 9, 10]]
    await life.killed()
    again = Life(tmp_path)
    assert again.log.keep([again.trajectory.traj_uid]) == {again.trajectory.traj_uid: 4}
    assert again.log._read(again.trajectory.traj_uid)[0].prefix.spans == [(V, 0, 2), (newer, 2, 4)]
    await again.killed()


async def test_a_whole_earlier_turn_is_given_back_without_asking_and_the_next_goes_on(tmp_path):
    life = Life(tmp_path)
    life.serve(Streaming([7, 8], end="stop"))  # no stop token: the engine said so
    assert (await life.turns.generate(life.trajectory, 0, PROMPT)).output_ids == [7, 8]
    await interrupted_turn_1(life)
    await life.killed()
    again = Life(tmp_path)
    again.log.keep([again.trajectory.traj_uid])
    engine = Streaming([EOS], end="stop")
    again.serve(engine)
    first = await again.turns.generate(again.trajectory, 0, PROMPT)
    assert (first.output_ids, first.finish_reason, engine.asked) == ([7, 8], "stop", [])
    second = await again.turns.generate(again.trajectory, 1, [*PROMPT, 7, 8, 50])
    assert second.output_ids == [9, EOS] and engine.asked == [[*PROMPT, 7, 8, 50, 9]]
    await again.killed()


async def interrupted_turn_1(life: Life) -> None:
    engine = Streaming([9])
    life.pool.slots["engine-0"].client = engine  # type: ignore[assignment]
    task = asyncio.create_task(life.turns.generate(life.trajectory, 1, [*PROMPT, 7, 8, 50]))
    await engine.given.wait()
    await life.log.flush(everything=True)
    task.cancel()
    await asyncio.wait([task])


# ---- its end, its cost, its faults -----------------------------------------------------------------------------------------


async def test_W1_the_rows_of_a_trajectory_go_only_when_the_ledger_has_on_disk_that_it_ended(tmp_path):
    db: Any = SimpleNamespace(written=7, committed=6)
    log = PrefixLog(tmp_path / "prefixes.sqlite", db, every_s=2.0, every_tokens=1, verified=lambda _: True)
    for name in ("s0t0", "s0t1"):
        buffer, *_ = log.turn(name, 0, PROMPT, 1.0)
        buffer.asks(V, None)
        buffer.got([7], [-0.5], V)
    await log.flush()
    log.ended("s0t0")
    await log.flush()
    rows = "SELECT traj_uid FROM prefixes ORDER BY seq"
    with sqlite3.connect(tmp_path / "prefixes.sqlite") as connection:
        assert connection.execute(rows).fetchall() == [("s0t0",), ("s0t1",)], "a crash now finds it running, and needs them"
        db.committed = 7
        await log.flush()
        assert connection.execute(rows).fetchall() == [("s0t1",)]
        buffer, *_ = log.turn("s0t0", 0, PROMPT, 1.0)  # its rows were lost, and it runs again
        buffer.asks(V, None)
        buffer.got([8], [-0.5], V)
        await log.flush()
        assert connection.execute(rows).fetchall() == [("s0t1",), ("s0t0",)]
    log.close()
    again = PrefixLog(tmp_path / "prefixes.sqlite", db, every_s=2.0, every_tokens=1, verified=lambda _: True)
    assert again.keep(["s0t1", "s9t0"]) == {"s0t1": 1}, "what does not run any more has no prefix"
    assert again.keep(["s0t1", "s0t0"]) == {"s0t1": 1}
    again.close(remove=True)
    assert list(tmp_path.iterdir()) == []


async def test_nothing_is_written_for_a_token_and_one_transaction_for_all_that_is_due(tmp_path):
    db: Any = SimpleNamespace(written=0, committed=0)
    now = [0.0]
    log = PrefixLog(tmp_path / "p.sqlite", db, every_s=2.0, every_tokens=256, verified=lambda _: True, now=lambda: now[0])
    statements: list[str] = []
    assert log._connection is not None
    log._connection.set_trace_callback(statements.append)
    made = [log.turn(f"s{i}t0", 0, PROMPT, 1.0)[0] for i in range(50)]
    for buffer in made:
        buffer.asks(V, None)
    for step in range(100):
        now[0] = step * 0.01
        for buffer in made:
            buffer.got([step], [-0.5], V)
        await log.flush()
    assert statements == []
    now[0] = 2.0
    await log.flush()
    assert [s for s in statements if not s.startswith("INSERT")] == ["BEGIN IMMEDIATE", "COMMIT"]
    assert len(statements) == 50 + 2
    log.close()


def logged(path: Path, *tokens: int) -> None:
    db: Any = SimpleNamespace(written=0, committed=0)
    log = PrefixLog(path, db, every_s=2.0, every_tokens=1, verified=lambda _: True)
    buffer, *_ = log.turn("s0t0", 0, PROMPT, 1.0)
    buffer.asks(V, None)
    for token in tokens:
        buffer.got([token], [-0.5], V)
        log._write(*log._work(True))
    log.close()


def reopened(path: Path) -> PrefixLog:
    db: Any = SimpleNamespace(written=0, committed=0)
    return PrefixLog(path, db, every_s=2.0, every_tokens=1, verified=lambda _: True)


def test_N4_a_damaged_row_ends_the_prefix_before_it(tmp_path, caplog):
    path = tmp_path / "prefixes.sqlite"
    logged(path, 7, 8, 9)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE prefixes SET ids = x'0a000000' WHERE seq = 2")  # another token
    connection.close()
    log = reopened(path)
    log.keep(["s0t0"])
    _, found, _ = log.turn("s0t0", 0, PROMPT, 1.0)
    assert found is not None and found.prefix.output_ids == [7] and "is damaged" in caplog.text
    log.close()


@pytest.mark.parametrize("damage", [b"no database" * 500, b""])
def test_a_file_that_is_no_log_is_begun_anew_and_that_is_said(tmp_path, caplog, damage):
    path = tmp_path / "prefixes.sqlite"
    logged(path, 7)
    path.write_bytes(damage)
    log = reopened(path)
    assert log.keep(["s0t0"]) == {} and log.failure is None
    assert not damage or "begun anew" in caplog.text
    log.close()
    logged(path, 7)
    log = reopened(path)
    assert log.keep(["s0t0"]) == {"s0t0": 1}
    log.close()


async def test_a_log_that_can_not_be_written_costs_the_log_and_nothing_else(tmp_path, caplog):
    path = tmp_path / "prefixes.sqlite"
    logged(path, 7)
    log = reopened(path)
    log.keep(["s0t0"])
    assert log._connection is not None
    pages = log._connection.execute("PRAGMA page_count").fetchone()[0]
    log._connection.execute(f"PRAGMA max_page_count = {pages}")
    buffer, found, _ = log.turn("s0t0", 0, PROMPT, 1.0)
    assert found is not None
    buffer.asks(V, None)
    buffer.got(list(range(100)) * 50, [-0.5] * 5000, V)
    await log.flush()
    assert log.failure is not None and "is off: database or disk is full" in log.failure and log.failure in caplog.text
    buffer.got([1], [-0.5], V)
    await log.flush()
    log.ended("s0t0")
    assert log.turn("s1t0", 0, PROMPT, 1.0)[1] is None
    log.close()
    again = reopened(path)
    assert again.keep(["s0t0"]) == {"s0t0": 1}, "what it held is still true"
    again.close()


def test_a_log_that_is_off_writes_no_file(tmp_path):
    db: Any = SimpleNamespace(written=0, committed=0)
    log = PrefixLog(tmp_path / "p.sqlite", db, every_s=None, every_tokens=1, verified=lambda _: True)
    buffer, found, _ = log.turn("s0t0", 0, PROMPT, 1.0)
    buffer.asks(V, None)
    buffer.got([1], [-0.5], V)
    assert found is None and log.keep(["s0t0"]) == {} and log.close() == 1
    assert list(tmp_path.iterdir()) == []


# ---- over a real engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_checkpoint("Llama", tmp_path_factory.mktemp("model"))  # random: its answers seldom stop
    served = launch(model, tmp_path_factory.mktemp("engine") / "engine.log", "--deterministic", "--context-length", "64")
    yield served
    end(served)


@pytest.fixture
async def real(engine: Served, tmp_path: Path) -> Any:
    async with make_http() as http:
        client = EngineClient(engine.url, http)
        await client.set_version(V)

        def life(name: str, *settings: str) -> Life:
            (tmp_path / name).mkdir(exist_ok=True)
            made = Life(
                tmp_path / name,
                "rollout.deterministic=true",
                "rollout.sampling.max_new_tokens=40",
                "rollout.stream_interval=2",
                "rollout.prefix_log_every_tokens=4",
                *settings,
            )
            made.serve(client)
            return made

        yield life, http


async def test_W1_A3_a_resumed_trajectory_of_a_deterministic_engine_has_the_bits_of_one_never_interrupted(
    real: tuple[Callable[..., Life], httpx.AsyncClient], engine: Served
) -> None:
    life, http = real
    whole = life("whole")
    for prompt in (PROMPT, [80, 81], [90]):  # one that is long enough to be interrupted
        expected = await whole.turns.generate(whole.trajectory, 0, prompt)
        if len(expected.output_ids) >= 12:
            break
    assert len(expected.output_ids) >= 12
    await whole.killed()
    await http.post(engine.url + "/slow_down", json={"forward_sleep_time": 0.02})
    try:
        first = life("killed")
        task = asyncio.create_task(first.turns.generate(first.trajectory, 0, prompt))
        tokens = 0
        while tokens < 6:
            assert not task.done()
            await asyncio.sleep(0.01)
            await first.log.flush()
            tokens = len(first.log._read(first.trajectory.traj_uid).get(0, SimpleNamespace(prefix=Prefix())).prefix.output_ids)
        task.cancel()
        await asyncio.wait([task])
        await first.killed()
    finally:
        await http.post(engine.url + "/slow_down", json={"forward_sleep_time": None})
    second = life("killed")
    assert second.log.keep([second.trajectory.traj_uid]) == {second.trajectory.traj_uid: tokens}
    made = await second.turns.generate(second.trajectory, 0, prompt)
    assert (made.output_ids, made.log_probs, made.spans) == (expected.output_ids, expected.log_probs, expected.spans)
    assert made.finish_reason == expected.finish_reason and second.log.tokens_resumed == tokens >= 6
    await second.killed()


async def test_A3_an_answer_asked_for_in_parts_has_the_bits_of_one_asked_for_at_once(
    real: tuple[Callable[..., Life], httpx.AsyncClient],
) -> None:
    life, _ = real
    made = []
    for settings in ([], ["rollout.part_tokens=7"]):
        one = life(f"parts{len(settings)}", *settings)
        made.append(await one.turns.generate(one.trajectory, 0, PROMPT))
        await one.killed()
    assert len(made[0].output_ids) > 7
    assert (made[0].output_ids, made[0].log_probs, made[0].spans) == (made[1].output_ids, made[1].log_probs, made[1].spans)
