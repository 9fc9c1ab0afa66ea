"""A row that breaks the schema is refused where it is written, with the column's name, and nothing of it stays."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from driver import dispatch as dispatching
from driver.row_writer import RowWriter
from driver.turns import GivenUp
from rollout.version import Version
from store import in_store, open_ref
from store.rows import packed, row_of
from store.schema import check_form, padded, reward_columns
from tests.driver.feeding import Lab
from tests.driver.test_dispatch import ScriptedEngine, two_leaves
from tests.store.test_schema import PICTURES, REWARD, rollout, row


@pytest.fixture(params=[0, 1 << 20], ids=["stored", "riding"])
def lab(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    made = Lab(tmp_path, f"store.inline_bytes={request.param}")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("hop", "columns", "said"),
    [
        ("rollout", rollout(input_ids=np.arange(5, dtype=np.int64)), "'input_ids' of hop 'rollout' is int64; it must be int32"),
        ("rollout", rollout(response_mask=np.ones(5, np.uint8)), r"'response_mask' .* shape \[5\]; it must be \[U\] with U = 4"),
        ("rollout", rollout(temperature=np.float32(1.0)), r"'temperature' .* shape \[\]"),
        ("rollout", rollout(span_offsets=np.array([0, 2])), "span_offsets does not fit column version_spans"),
        ("rollout", rollout(answer=np.zeros(1)), "has the unknown answer"),
        ("rollout", rollout(image_grid=PICTURES["image_grid"]), "no column grid_offsets, so image_grid cannot be cut"),
        ("rollout", rollout(pixel_values=PICTURES["pixel_values"]), "no column grid_offsets, so pixel_values cannot be cut"),
        ("reward", REWARD | {"score": np.array([0.5])}, "'score' of hop 'reward' is float64; it must be float32"),
        ("reward", {"score": REWARD["score"]}, "lacks is_correct"),
    ],
)
async def test_what_is_not_of_its_hops_form_is_refused_by_name_and_not_put(lab: Lab, hop: str, columns: Any, said: str) -> None:
    writer = RowWriter(lab.core)
    with pytest.raises(GivenUp, match=f"data: the row cannot be stored: .*{said}"):
        await writer.put("a", hop, columns)
    assert lab.store.keys() == []


async def test_what_is_of_its_form_is_put(lab: Lab) -> None:
    writer = RowWriter(lab.core)
    refs = [
        await writer.put("a", "rollout", packed([row(5), row(9)]), 2),
        await writer.put("a", "reward", reward_columns([(0.5, True), (0.0, None)]), 2),
        await writer.put("b", "rollout", rollout(**PICTURES)),
    ]
    assert [ref.key.removeprefix(lab.core.run_id) for ref in refs] == ["/a/rollout", "/a/reward", "/b/rollout"]
    assert sorted(lab.store.keys()) == sorted(ref.key for ref in in_store(refs))


async def test_three_positions_a_token_come_from_the_writer_to_the_table_beside_a_row_of_text(lab: Lab) -> None:
    """[B, 3, S], from what lies under the keys alone: the rollout's object and the reward's of each trajectory."""
    writer = RowWriter(lab.core)
    seen = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [3, 3, 3]], np.int32)
    rows = []
    for name, rollout_columns in (("a", rollout(**PICTURES | {"position_ids": seen})), ("b", rollout(length=3))):
        refs = [await writer.put(name, "rollout", rollout_columns), await writer.put(name, "reward", reward_columns([(0.5, None)]))]
        rows.append({k: v for ref in refs for k, v in row_of(open_ref(ref), 0).items()})
    table = padded(rows)
    assert table["position_ids"].shape == (2, 3, 5) and table["position_ids"][0].T.tolist() == seen.tolist()
    assert table["position_ids"][1].tolist() == [[0, 1, 2, 0, 0]] * 3
    assert table["token_level_scores"].max(1).tolist() == [0.5, 0.5] and table["is_correct"].tolist() == [255, 255]
    assert rows[0]["image_grid"].tolist() == PICTURES["image_grid"].tolist() and rows[0]["pixel_values"].shape == (7, 5)


async def test_a_trajectory_with_such_a_row_is_discarded_with_the_reason_and_leaves_nothing(lab: Lab, monkeypatch: Any) -> None:
    await lab.with_data(1)
    lab.dispatch._weights_bytes = 0
    slot = lab.dispatch._pool.register("engine-0", ScriptedEngine(), 1, 4)  # type: ignore[arg-type]
    lab.dispatch._pool.open(slot, Version("run", 0, 0, 1))

    async def workflow(task: Any, generate: Any) -> Any:
        return two_leaves()

    real = dispatching.row_columns
    monkeypatch.setattr(dispatching, "row_columns", lambda *of: real(*of) | {"response_mask": np.ones(9, np.uint8)})
    monkeypatch.setattr(lab.dispatch, "_workflow", workflow)
    following = lab.dispatch._register()
    assert following is not None
    sample = following[0]
    for trajectory in sample.trajectories:
        lab.dispatch._tasks[trajectory.traj_uid] = asyncio.current_task()  # type: ignore[assignment]
        await lab.dispatch._trajectory(sample, trajectory)
        assert "data: the row cannot be stored: column 'response_mask'" in (trajectory.reason or "")
    assert lab.store.keys() == [] and lab.core.ledger.counts.by_outcome["discarded"] == 2


def test_the_check_of_a_form_does_not_grow_with_the_row() -> None:
    def took_s(columns: Any) -> float:
        def once() -> float:
            began = time.perf_counter()
            check_form("rollout", columns)
            return time.perf_counter() - began

        return min(once() for _ in range(50))

    short_s, long_s = took_s(rollout()), took_s(packed([row(1_000_000)]))
    print(f"\n{1e6 * short_s:.1f} us, {1e6 * long_s:.1f} us")
    assert long_s < 3 * short_s
