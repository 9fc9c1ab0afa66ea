"""The driver's own plans, run by the ranks: whatever they balance and pack, it is the step of one micro-batch on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from driver.balance import PlanRow, Terms, deal
from driver.row_cost import RowCost
from tests.trainer.steps import ADAM, assert_equal_steps, in_one
from tests.trainer.test_moe import routed
from trainer.layout import even_micro_batches, sequence_unit
from trainer.spec import TrainerSpec

MakeSpec = Callable[..., TrainerSpec]


def planned(rows: list[Any], spec: TrainerSpec, budget_tokens: int) -> list[list[list[Any]]]:
    """One mini-batch; a row above the budget is alone."""
    by_id = {row.row_id: row for row in rows}
    unit, even = sequence_unit(spec.tp, spec.cp), even_micro_batches(spec.ep)
    terms = Terms(spec.dp, budget_tokens, RowCost(attention=1 / 64), unit, even, "alone")
    shares = deal([PlanRow(row.row_id, index, row.length) for index, row in enumerate(rows)], terms)
    return [[[by_id[row.row_id] for row in micro] for micro in share] for share in shares]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("qwen3", {"dp": 2}),
        ("qwen3", {"dp": 2, "cp": 2}),
        ("qwen3", {"dp": 2, "pp": 2}),
        ("qwen3_moe", {"dp": 2, "ep": 2}),
        ("qwen3_moe", {"dp": 2, "cp": 2, "ep": 2}),
    ],
)
def test_M1_M2_M4_N5_a_plan_of_the_driver_is_the_step_of_one_micro_batch(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, model: str, layout: dict[str, int]
) -> None:
    """Nine ragged rows, two of them above the budget; then three, of which a rank that shares experts runs an empty micro-batch."""
    many, few = (routed(rows, seed, count) if model == "qwen3_moe" else rows.ragged(seed, count) for seed, count in ((71, 9), (72, 3)))
    spec = make_spec(model, **layout, optimizer=ADAM)
    budget = sorted(row.length for row in many)[-3]
    shares = [planned(many, spec, budget), planned(few, spec, max(row.length for row in few))]
    assert all(len(share) > 1 for share in shares[0]) and max(len(rank) for rank in shares[0]) > 1
    if spec.ep > 1:
        assert len({len(rank) for rank in shares[1]}) == 1 and any(not micro for rank in shares[1] for micro in rank)
    found = lab.layout(spec, [plan(number, [share], 1e-3) for number, share in enumerate(shares)])
    one = lab.layout(make_spec(model, optimizer=ADAM), [plan(number, [in_one(some)], 1e-3) for number, some in enumerate((many, few))])
    assert_equal_steps(found, one)
