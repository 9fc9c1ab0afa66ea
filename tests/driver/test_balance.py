"""The plan: every row once, budgets kept, by sample, the same plan for the same input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.balance import PlanRow, micro_batches, mini_batches, plan, split_ranks, work

rows = st.lists(st.tuples(st.integers(0, 12), st.integers(2, 64)), min_size=1, max_size=60).map(
    lambda pairs: [PlanRow(f"r{i:03d}", uid, length) for i, (uid, length) in enumerate(pairs)]
)


@given(rows, st.integers(1, 4), st.integers(1, 5), st.integers(0, 3))
def test_every_row_stands_exactly_once_and_no_budget_is_broken(rows, parts, ranks, seed):
    made = plan(rows, mini_batch_count=parts, ranks=ranks, budget_tokens=64, seed=seed, batch_id=7)
    assert len(made) == parts and all(len(mini) == ranks for mini in made)
    length = {row.row_id: row.length for row in rows}
    seen = [row_id for mini in made for rank in mini for micro in rank for row_id in micro]
    assert sorted(seen) == sorted(length)
    assert all(sum(length[r] for r in micro) <= 64 for mini in made for rank in mini for micro in rank)
    assert made == plan(list(reversed(rows)), mini_batch_count=parts, ranks=ranks, budget_tokens=64, seed=seed, batch_id=7)


@given(rows, st.integers(1, 4))
def test_a_mini_batch_is_cut_by_sample_whatever_the_lengths(rows, parts):
    cut = mini_batches(rows, parts, seed=1, batch_id=2)
    where = {uid: index for index, part in enumerate(cut) for uid in {row.uid for row in part}}
    assert all(where[row.uid] == index for index, part in enumerate(cut) for row in part)
    longer = [PlanRow(row.row_id, row.uid, row.length + 1) for row in rows]
    assert [[r.row_id for r in part] for part in mini_batches(longer, parts, 1, 2)] == [[r.row_id for r in part] for part in cut]


def test_N5_one_giant_among_255_small_rows_is_balanced_by_work_not_by_count():
    rows = [PlanRow("giant", 0, 4000), *[PlanRow(f"r{i:03d}", i, 16) for i in range(255)]]
    loads = [sum(work(row.length) for row in rank) for rank in split_ranks(rows, 2)]
    assert max(loads) - min(loads) <= work(4000) - 254 * work(16) + work(16)
    assert min(len(rank) for rank in split_ranks(rows, 2)) == 1


def test_N5_fewer_rows_than_ranks_leaves_ranks_empty():
    assert [len(rank) for rank in split_ranks([PlanRow("a", 0, 5)], 4)] == [1, 0, 0, 0]


def test_N5_eight_sevens_with_budget_eight_make_eight_bins_and_a_row_above_the_budget_is_refused():
    assert len(micro_batches([PlanRow(f"r{i}", i, 7) for i in range(8)], 8)) == 8
    with pytest.raises(ValueError, match="9 tokens, above"):
        micro_batches([PlanRow("long", 0, 9)], 8)
