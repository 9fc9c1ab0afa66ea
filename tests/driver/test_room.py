"""B2: a sample is registered only if its rows will find room, and a store that is full all the same loses none of them."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from driver.events import EvaluationBegan, Leaf, TrajectoryReady
from driver.ledger_state import Trajectory
from driver.row_bytes import SPANS
from driver.row_writer import FULL_ALARM
from rollout.version import Version
from store.rows import packed
from store.schema import reward_columns, validate
from tests.driver.feeding import Lab
from tests.driver.test_dispatch import ScriptedEngine

TOKENS = 256
WORST, SHORT = (TOKENS, SPANS), (8, 1)


@pytest.fixture
async def lab(tmp_path):
    made = Lab(tmp_path, "store.inline_bytes=0", "staleness.bound=100", f"rollout.context_length={TOKENS}")
    made.dispatch._weights_bytes = 0
    slot = made.dispatch._pool.register("engine-0", ScriptedEngine(), 1, 1000)  # type: ignore[arg-type]
    made.dispatch._pool.open(slot, Version("run", 0, 0, 1))
    yield await made.with_data(200)
    made.close()


def columns(tokens: int, spans: int) -> dict[str, Any]:
    made = {
        "input_ids": np.arange(tokens, dtype=np.int32),
        "response_mask": np.ones(tokens - 1, np.uint8),
        "rollout_log_probs": np.full(tokens - 1, -0.5, np.float32),
        "version_spans": np.array([[0, i, i, i + 1 if i + 1 < spans else tokens - 1] for i in range(spans)], np.int64),
        "temperature": np.float32(1.0),
    }
    rows = packed([made])
    validate("rollout", rows)
    return rows


def registered(lab: Lab) -> list[Trajectory]:
    """Those of every sample that may be registered now."""
    made: list[Trajectory] = []
    while True:
        lab.core.gate._room_at = None  # what it knows of the store is of now
        if (following := lab.dispatch._register()) is None:
            return made
        made += following[0].trajectories


def why(lab: Lab) -> tuple[str, str]:
    wait = lab.core.waits["rollout"]
    return wait.kind, wait.reason


async def land(lab: Lab, trajectories: list[Trajectory], tokens: int, spans: int) -> None:
    for trajectory in trajectories:
        refs = [
            await asyncio.wait_for(lab.dispatch.writer.put(trajectory.traj_uid, hop, made), 30)
            for hop, made in (("rollout", columns(tokens, spans)), ("reward", reward_columns([(1.0, True)])))
        ]
        leaf = Leaf(f"{trajectory.traj_uid}a0000l0000", refs[0].to_wire(), refs[1].to_wire(), tokens, tokens - 1, 1.0)
        lab.core.apply(TrajectoryReady(traj_uid=trajectory.traj_uid, leaves=(leaf,), reward=1.0, finish_reason="stop", time=2.0))


async def test_B2_registration_reserves_the_worst_case_and_what_lands_shorter_gives_the_rest_back(lab: Lab) -> None:
    first = registered(lab)
    samples = len(first) // 2
    assert samples == (1 << 20) // lab.config.sample_bytes and why(lab)[0] == "store" and "store binds" in why(lab)[1]
    await land(lab, first[: samples // 2 * 2], *SHORT)
    more = registered(lab)
    assert 0 < len(more) < samples and why(lab)[0] == "store", "the room of those that landed, less what they take"
    await land(lab, [*first[samples // 2 * 2 :], *more], *WORST)
    assert not lab.dispatch.writer.full and lab.store.stats().used_bytes <= 1 << 20, "no put of a registered sample met Full"
    assert registered(lab) == [] and why(lab)[0] == "store"


async def test_B2_what_landed_since_the_last_look_at_the_store_is_no_room(lab: Lab) -> None:
    first = [trajectory for following in iter(lab.dispatch._register, None) for trajectory in following[0].trajectories]
    lab.core.gate._room_at = math.inf  # it does not look again
    await land(lab, first[: len(first) // 4 * 2], *WORST)
    more = [trajectory for following in iter(lab.dispatch._register, None) for trajectory in following[0].trajectories]
    assert len(more) <= 2, "what landed takes nearly all of what was kept for it"


async def test_B2_an_evaluation_which_stores_no_row_keeps_no_room(lab: Lab) -> None:
    ledger = lab.core.ledger
    lab.core.apply(EvaluationBegan(first_uid=0, rows=1000, n=4, version=0, time=1.0))
    assert ledger.evaluating == 4000
    assert len(registered(lab)) // 2 == (1 << 20) // lab.config.sample_bytes
    await lab.db.durable()
    assert lab.db.load().evaluating == 4000, "after a restart too"


async def test_B2_L1_a_store_that_others_filled_keeps_rows_waiting_and_samples_out_and_says_so_until_there_is_room(lab: Lab) -> None:
    first = registered(lab)[:2]
    foreign = lab.store.put("foreign", {"x": np.zeros((1 << 20) - 3 * 4096, np.uint8)})
    bell = lab.core.bell()
    landing = asyncio.create_task(land(lab, first, *WORST))
    async with asyncio.timeout(30):
        while not lab.dispatch.writer.full:
            bell.clear()
            await bell.wait(1.0)
    assert registered(lab) == [] and why(lab)[0] == "store"
    assert "rows wait for room in the store" in why(lab)[1] and "are in use" in why(lab)[1], "what the store said reaches the gate"
    assert lab.core.alarms["store"] == FULL_ALARM and first[0].state == "running"
    lab.store.free([foreign])
    async with asyncio.timeout(30):
        await landing
    assert [t.state for t in first] == ["ready"] * 2 and not lab.dispatch.writer.full and "store" not in lab.core.alarms
