"""A rank keeps what it reads until its update is over, and not longer; and a row that rides in the plan is the same row."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import EmbeddedStore, open_ref, put_small
from tests.trainer.conftest import Rows
from tests.trainer.steps import ADAM, dealt
from trainer.spec import TrainerSpec
from trainer.wire import PlanRow, TrainRequest, WireRef

MakeSpec = Callable[..., TrainerSpec]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A store with no rows but this test's."""
    root = Path(f"/dev/shm/headrace-test-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    yield EmbeddedStore(root, 8 << 20)
    shutil.rmtree(root)


def weights_equal(mine: Any, theirs: Any) -> bool:
    names = [name for name in mine.arrays if name.startswith("weights/")]
    return bool(names) and all(np.array_equal(mine.arrays[name], theirs.arrays[name]) for name in names)


@pytest.mark.parametrize("correction", [{}, {"loss": {"old_log_probs": "recomputed"}}], ids=["as they come", "prepared"])
def test_B3_W8_rows_freed_in_the_midst_of_an_update_stay_until_the_optimizer_has_stepped_and_are_gone_behind_it(
    lab: Any, make_spec: MakeSpec, plan: Any, own: EmbeddedStore, correction: dict[str, Any]
) -> None:
    rows = Rows(own).ragged(1, 9)
    spec = make_spec(optimizer=ADAM, store_location=own.location, **correction)
    # The second mini-batch is computed when the store has long forgotten its rows.
    request = plan(0, [dealt(rows[:5], 1, 2), dealt(rows[5:], 1, 2)])
    whole = lab.layout(spec, [request])
    taken = own.stats().used_bytes
    assert taken == sum(row.rollout.size_bytes for row in rows)
    freed = lab.layout(spec, [request], freeing=True)
    assert freed.seen["bytes_in_step"] == taken, "every lease covers the update"
    assert freed.seen["bytes_after"] == 0 and own.keys() == [], "and ends with it"
    assert freed.reports[0]["row_ids"] == whole.reports[0]["row_ids"] and weights_equal(freed, whole)


def test_B1_a_row_that_rides_in_the_plan_is_trained_bit_for_bit_like_a_stored_one(
    lab: Any, make_spec: MakeSpec, plan: Any, own: EmbeddedStore
) -> None:
    rows = Rows(own).ragged(2, 6)
    spec = make_spec(optimizer=ADAM, store_location=own.location, dp=2)
    stored = lab.layout(spec, [plan(0, [dealt(rows, 2, 2)])])

    def riding(row: PlanRow) -> PlanRow:
        ref = row.rollout.ref()
        return row.model_copy(update={"rollout": WireRef.of(put_small(own, ref.key, open_ref(ref), 4096))})

    request: TrainRequest = plan(0, [dealt([riding(row) for row in rows], 2, 2)])
    own.free([row.rollout.ref() for row in rows])
    assert all(row.rollout.inline for mini in request.mini_batches for row in mini.rows()) and not own.keys()
    assert weights_equal(lab.layout(spec, [request]), stored)
