"""The experts that the engine chose, from its side through either store to the trainer, which sends the same tokens to them again."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
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
from driver.events import Leaf, TrajectoryReady
from driver.feed import Feed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.push import Pusher
from driver.scoring import Scoring
from driver.watermark import Watermark
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.tree import Trajectory as Tree
from rollout.version import Version
from store import EmbeddedStore, MooncakeStore, Ref, Store, default_root
from store.rows import row_of
from store.schema import validate
from tests.driver.conftest import register
from tests.rollout.engine.conftest import end, launch
from tests.rollout.engine.test_experts import routed_by
from tests.store.conftest import MooncakeHost, why_no_mooncake
from tests.trainer.steps import dealt
from trainer.wire import PlanRow, WireRef

ROOT = Path(__file__).parents[2]
ROW = DataRow(0, "sort 1 =", None, "1", "sort", {})
MOST_BYTES = 1024


@pytest.fixture(scope="module", params=["embedded", "mooncake"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """In place of the one that the trainer's other tests share."""
    if request.param == "embedded":
        made: Store = EmbeddedStore(default_root(f"test-{uuid.uuid4().hex[:12]}"), 64 << 20)
        yield made
        made.remove()
        return
    if reason := why_no_mooncake():
        pytest.skip(reason)
    host = MooncakeHost()
    try:
        host.start(64 << 20, master=True)
        made = MooncakeStore(host.location("extras"))
        yield made
        made.remove()
    finally:
        host.stop()


class Rollout:
    """One engine, and the driver's side of it."""

    def __init__(self, dispatch: Dispatch, client: EngineClient, core: Core) -> None:
        self.dispatch, self.client, self.core = dispatch, client, core

    async def serve(self, version: int) -> None:
        now = Version("run", 0, version, 1)
        slot = self.dispatch._pool.slots["engine-0"]
        await self.client.set_version(str(now))
        if slot.state == "open":
            self.dispatch._pool.shut(slot, "a push")
        self.dispatch._pool.open(slot, now)
        self.dispatch.turns._pusher._verified[str(now)] = None

    async def turn(self, tree: Tree, number: int, parent: int, index: int = 0) -> int:
        """The answer to everything up to `parent`."""
        ids: list[int] = []
        at: int | None = parent
        while at is not None:
            ids[:0] = tree.turns[at].token_ids
            at = tree.turns[at].parent
        made = await self.dispatch.turns.generate(self.core.ledger.samples[0].trajectories[index], number, ids)
        sampled = {"log_probs": made.log_probs, "spans": made.spans, "policy": "policy", "finish_reason": made.finish_reason}
        return tree.add("assistant", made.output_ids, parent=parent, **sampled)

    async def ready(self, tree: Tree, index: int = 0) -> list[Leaf]:
        """Scored, and in the ledger."""
        trajectory = self.core.ledger.samples[0].trajectories[index]
        leaves = await self.dispatch._score(ROW, trajectory, tree)
        self.core.apply(TrajectoryReady(traj_uid=trajectory.traj_uid, leaves=tuple(leaves), reward=1.0, finish_reason="stop", time=1.0))
        self.dispatch.turns.forget(trajectory)
        return leaves


@pytest.fixture
async def rollout(models: dict[str, str], store: Store, tmp_path: Path) -> AsyncIterator[Rollout]:
    flags = ("--enable-return-routed-experts", "--skip-tokenizer-init", "--max-running-requests", "4", "--context-length", "128")
    engine = launch(Path(models["qwen3_moe"]), tmp_path / "engine.log", *flags)
    config = load_config(ROOT / "examples/sort_digits/config.yaml", ["rollout.sampling.temperature=0.9", "store.inline_bytes=0"])
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"routing_replay": True})})
    db = LedgerDB(tmp_path / "ledger.sqlite")
    ledger = Ledger()
    ledger.apply(register(ledger, n=2))
    core = Core(config, ledger, db, Feed(db, seed=0, shuffle=False, passes=1), store)

    async def replace(slot: Any, reason: str) -> None: ...

    pool = EnginePool()
    scoring: Any = Scoring(core, wait_s=0.0, deadline_s=1.0)
    scoring.score = _one
    pusher = Pusher(pool, deadline_s=1.0, logprob_tolerance=1e-3, replace=replace)
    discarded: Callable[..., None] = lambda sample, trajectory: None  # noqa: E731
    dispatch = Dispatch(core, pool, pusher, scoring, TokenizerView(config.model.path), Watermark(8), on_discarded=discarded)
    async with make_http() as http:
        client = EngineClient(engine.url, http, vocab_size=96)
        pool.register("engine-0", client, 1, 4, await client.capabilities())
        made = Rollout(dispatch, client, core)
        await made.serve(0)
        yield made
    end(engine)
    db.close()


async def _one(job: Any) -> Any:
    return SimpleNamespace(score=1.0, is_correct=True)


def planned(leaf: Leaf, advantage: float) -> PlanRow:
    return PlanRow(
        row_id=leaf.row_id,
        rollout=WireRef.model_validate(leaf.rollout),
        row=leaf.row,
        extras=None if leaf.extras is None else WireRef.model_validate(leaf.extras),
        advantage=advantage,
        length=leaf.length,
    )


async def test_B1_the_engines_choice_of_experts_is_the_trainers_and_the_driver_sees_keys_only(
    rollout: Rollout, lab: Any, make_spec: Any, plan: Any, store: Store, models: dict[str, str]
) -> None:
    """Two leaves: one of two turns, whose second answer speaks of the first one's tokens too, and one of a history that was rewritten."""
    before = set(store.keys())
    tree = Tree()
    root = tree.add("user", [5, 6, 7, 8])
    first = await rollout.turn(tree, 0, root)
    tool = tree.add("tool", [11, 12], parent=first)
    await rollout.turn(tree, 1, tool)
    other = tree.add("user", [9], parent=root)
    await rollout.turn(tree, 2, other)
    leaves = await rollout.ready(tree)
    mine = set(store.keys()) - before
    assert len(leaves) == 2 and mine == {ref["key"] for leaf in leaves for ref in leaf.refs} and len(mine) == 4
    with store.open(Ref.from_wire(leaves[0].rollout)) as lease:
        validate("rollout", lease)
        rows = [row_of(lease, leaf.row) for leaf in leaves]
    routed, routes = routed_by(Path(models["qwen3_moe"])), []
    for leaf, row in zip(leaves, rows, strict=True):
        assert leaf.extras is not None
        with store.open(Ref.from_wire(leaf.extras)) as lease:
            validate("extras", lease)
            assert lease["routed_experts"].shape == (leaf.length - 1, 2, 2) and lease["routed_experts"].dtype == np.uint8
            routes.append(lease["routed_experts"])
        assert np.array_equal(np.sort(routes[-1], axis=-1), routed(row["input_ids"].tolist())), "as transformers sends them"
    first_row = planned(leaves[0], 1.0)
    said = orjson.dumps(leaves[0].extras) + b',"shape":[12345,48,8]'  # in the answer
    plan_bytes, without = (len(row.model_dump_json()) for row in (first_row, first_row.model_copy(update={"extras": None})))
    routing_bytes = len(said) + plan_bytes - without
    print(f"\nthrough the driver for a row's routing: {routing_bytes} bytes, beside a line of {without} bytes in the plan")
    assert routing_bytes <= MOST_BYTES
    spec = make_spec("qwen3_moe", routing_replay=True)
    request = plan(0, [dealt([planned(leaf, 1.0 - 2 * leaf.row) for leaf in leaves], 1, 2)])
    outcome = lab.layout(spec, [request])
    assert (outcome.reports[0]["replayed_rows"], outcome.reports[0]["unreplayed_rows"]) == (2, 0)
    for leaf, row, sampled in zip(leaves, rows, routes, strict=True):
        read = outcome.arrays[f"routes/{leaf.row_id}"]
        assert read.dtype == sampled.dtype and np.array_equal(read, sampled), "bit for bit, on the rank"
        trained = row["response_mask"] == 1
        ours = outcome.arrays[f"log_probs/{leaf.row_id}"][trained]
        assert np.abs(ours - row["rollout_log_probs"][trained]).max() < 1e-4
    store.free(Ref.from_wire(ref) for leaf in leaves for ref in leaf.refs)


async def test_A5_a_trajectory_of_two_versions_trains_without_the_engines_choice_and_leaves_nothing(
    rollout: Rollout, lab: Any, make_spec: Any, plan: Any, store: Store
) -> None:
    before = set(store.keys())
    tree = Tree()
    first = await rollout.turn(tree, 0, tree.add("user", [5, 6, 7, 8]))
    await rollout.serve(1)
    await rollout.turn(tree, 1, tree.add("tool", [11, 12], parent=first))
    (leaf,) = await rollout.ready(tree)
    assert leaf.extras is None and set(store.keys()) - before == {ref["key"] for ref in leaf.refs}
    assert rollout.dispatch.turns.extras.gauges()["headrace_extras_rows_without_count"] == 1
    outcome = lab.layout(make_spec("qwen3_moe", routing_replay=True), [plan(0, [dealt([planned(leaf, 1.0)], 1, 1)])])
    assert (outcome.reports[0]["replayed_rows"], outcome.reports[0]["unreplayed_rows"]) == (0, 1)
    store.free(Ref.from_wire(ref) for ref in leaf.refs)
