"""The plan: every row once, budgets kept, even counts where asked, by sample, the same plan for the same input."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plan import BUDGET, COST, draw
from driver.balance import PlanRow, Terms, deal, mini_batches, plan
from driver.explain import waited
from driver.packing import fewest
from driver.row_cost import RowCost

LONG = RowCost(head=0.2, attention=1 / 40)
rows = st.lists(st.tuples(st.integers(0, 12), st.integers(2, 64), st.integers(0, 64)), min_size=1, max_size=60).map(
    lambda drawn: [PlanRow(f"r{i:03d}", uid, length, min(trained, length - 1)) for i, (uid, length, trained) in enumerate(drawn)]
)
terms = st.builds(
    Terms,
    ranks=st.integers(1, 5),
    budget_tokens=st.integers(64, 200),
    cost=st.sampled_from([RowCost(), LONG]),
    unit=st.sampled_from([1, 2, 4, 8]),
    even=st.booleans(),
)


def same(count: int, length: int) -> list[PlanRow]:
    return [PlanRow(f"r{i:03d}", i, length) for i in range(count)]


def micro_batches(rows, terms):
    """On one rank."""
    (share,) = deal(rows, replace(terms, ranks=1))
    return share


def by_rank(rows, terms):
    """Its rows, whatever micro-batch they are in."""
    return [[row for micro in share for row in micro] for share in deal(rows, terms)]


def work(rows, terms):
    return sum(map(terms.work, rows))


@settings(max_examples=100, deadline=None)
@given(rows, terms, st.integers(1, 4), st.integers(0, 3))
def test_every_row_stands_exactly_once_and_no_budget_is_broken(rows, terms, parts, seed):
    made = plan(rows, terms, mini_batch_count=parts, seed=seed, batch_id=7)
    assert len(made) == parts and all(len(mini) == terms.ranks for mini in made)
    known = {row.row_id: row for row in rows}
    seen = [row_id for mini in made for rank in mini for micro in rank for row_id in micro]
    assert sorted(seen) == sorted(known)
    for micro in (micro for mini in made for rank in mini for micro in rank):
        assert sum(terms.padded(known[row_id]) for row_id in micro) <= terms.budget_tokens
        assert micro == sorted(micro, key=lambda row_id: (-known[row_id].length, row_id)), "an order of their own, whatever the work"
    assert made == plan(list(reversed(rows)), terms, mini_batch_count=parts, seed=seed, batch_id=7)


@settings(max_examples=100, deadline=None)
@given(rows, terms)
def test_ranks_that_meet_in_every_micro_batch_have_as_many_and_others_none_that_is_empty(rows, terms):
    shares = deal(rows, terms)
    counts = {len(share) for share in shares}
    if terms.even:
        assert len(counts) == 1, "as many on every rank"
        used = sum(bool(micro) for share in shares for micro in share)
        assert counts.pop() * terms.ranks < used + terms.ranks, "and no round of empty ones"
    else:
        assert all(micro for share in shares for micro in share)
    for share in shares:
        of_each = [work(micro, terms) for micro in share]
        assert terms.even or of_each == sorted(of_each, reverse=True)


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(1, 4))
def test_a_mini_batch_is_cut_by_sample_whatever_the_lengths(rows, parts):
    cut = mini_batches(rows, parts, seed=1, batch_id=2)
    where = {uid: index for index, part in enumerate(cut) for uid in {row.uid for row in part}}
    assert all(where[row.uid] == index for index, part in enumerate(cut) for row in part)
    others = [replace(row, length=99 - row.length) for row in rows]  # what was long is short
    assert [[r.row_id for r in part] for part in mini_batches(others, parts, 1, 2)] == [[r.row_id for r in part] for part in cut]


@settings(max_examples=100, deadline=None)
@given(rows, terms, terms, st.integers(1, 4))
def test_the_rows_of_a_mini_batch_are_the_same_in_every_layout(rows, one, other, parts):
    def cut(terms):
        made = plan(rows, terms, mini_batch_count=parts, seed=3, batch_id=5)
        return [sorted(row_id for rank in mini for micro in rank for row_id in micro) for mini in made]

    assert cut(one) == cut(other)


@settings(max_examples=100, deadline=None)
@given(rows, terms)
def test_no_rank_waits_for_more_than_the_heaviest_row_beyond_the_mean(rows, terms):
    terms = replace(terms, even=False)
    loads = [work(share, terms) for share in by_rank(rows, terms)]
    assert max(loads) <= sum(loads) / terms.ranks + max(map(terms.work, rows)) + 1e-9


def test_N5_eight_rows_of_seven_with_a_budget_of_eight_make_eight_micro_batches():
    assert [len(micro) for micro in micro_batches(same(8, 7), Terms(1, 8))] == [1] * 8
    dealt = deal(same(8, 7), Terms(4, 8, even=True))
    assert [[len(micro) for micro in share] for share in dealt] == [[1, 1]] * 4


def test_N5_a_row_above_the_budget_is_refused_with_the_remedy_or_alone_in_its_own():
    rows = [PlanRow("long", 0, 9), *same(4, 3)]
    with pytest.raises(
        ValueError, match=r"row long has 9 tokens, above batch.micro_batch_tokens \(8\): raise that, or set batch.long_rows"
    ):
        micro_batches(rows, Terms(1, 8))
    made = micro_batches(rows, Terms(1, 8, long_rows="alone"))
    assert [row.row_id for row in made[0]] == ["long"] and sorted(len(micro) for micro in made) == [1, 2, 2]
    even = deal(rows, Terms(2, 8, long_rows="alone", even=True))
    assert [len(share) for share in even] == [2, 2], "3 micro-batches and one empty"
    assert [[row.row_id for row in micro] for share in even for micro in share if any(row.length > 8 for row in micro)] == [["long"]]


def test_N5_even_rows_above_the_budget_do_not_share_a_micro_batch():
    made = micro_batches(same(3, 9), Terms(1, 8, long_rows="alone"))
    assert [len(micro) for micro in made] == [1, 1, 1]


def test_N5_a_row_that_only_its_padding_lifts_above_the_budget_is_above_it():
    """Four context-parallel ranks take it in 8 pieces."""
    with pytest.raises(ValueError, match="has 72 tokens, above"):
        micro_batches([PlanRow("long", 0, 65)], Terms(1, 70, unit=8))


def test_N5_one_giant_among_255_small_rows_is_balanced_by_work_not_by_count():
    rows = [PlanRow("giant", 0, 4000), *same(255, 16)]
    by_tokens, by_work = Terms(2, 4096), Terms(2, 4096, RowCost(attention=1 / 4096))
    assert sorted(map(len, by_rank(rows, by_tokens))) in ([3, 253], [4, 252]), "4,040 tokens are the half"
    shares = by_rank(rows, by_work)
    assert sorted(map(len, shares)) == [1, 255]
    assert max(work(share, by_work) for share in shares) == by_work.work(rows[0])


def test_N5_the_other_ranks_of_an_even_layout_do_not_wait_for_the_giant_more_than_once():
    rows = [PlanRow("giant", 0, 4000), *same(255, 16)]
    terms = Terms(2, 4096, RowCost(attention=1 / 4096), even=True)
    of_each = [[work(micro, terms) for micro in share] for share in deal(rows, terms)]
    assert [len(share) for share in of_each] == [1, 1] and waited(of_each, even=True) == pytest.approx(terms.work(rows[0]))


def test_N5_ranks_that_meet_in_every_micro_batch_wait_for_little_at_each():
    """Long rows and short ones, in several rounds: within a round the ranks have the same work, whatever the next one has."""
    rows = [PlanRow(f"r{i:03d}", i, 40 + (i * i * 7) % 900) for i in range(200)]
    terms = Terms(4, 8192, RowCost(attention=1 / 500), even=True)
    of_each = [[work(micro, terms) for micro in share] for share in deal(rows, terms)]
    assert len(of_each[0]) >= 3
    assert waited(of_each, even=True) <= 1.0001 * work(rows, terms) / 4


def test_N5_ranks_of_an_even_layout_take_one_micro_batch_more_where_two_leave_no_room_to_be_even():
    """2,048 rows fill 126.9 budgets of 128."""
    rows = [PlanRow(f"{i:05d}", i, length) for i, length in enumerate(draw("lognormal", 2048, 1))]
    terms = Terms(64, BUDGET, COST, even=True)
    dealt = deal(rows, terms)
    assert {len(share) for share in dealt} == {3}
    assert waited([[work(micro, terms) for micro in share] for share in dealt], even=True) < 1.002 * work(rows, terms) / 64


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("even", [False, True])
def test_N5_rows_that_do_not_divide_by_the_ranks_or_are_fewer_work_all_the_same(count, even):
    shares = deal(same(count, 10), Terms(4, 100, even=even))
    assert sorted(row.row_id for share in shares for micro in share for row in micro) == [row.row_id for row in same(count, 10)]
    assert sorted(sum(map(len, share)) for share in shares) == sorted(len(range(rank, count, 4)) for rank in range(4))
    if even:
        assert [len(share) for share in shares] == [1] * 4, "a rank without rows runs an empty micro-batch (M4)"


def test_no_row_at_all_is_a_plan_too():
    """Every advantage is 0: the mini-batch is skipped, and its ranks have nothing."""
    for even in (False, True):
        assert plan([], Terms(3, 64, even=even), mini_batch_count=2, seed=0, batch_id=0) == [[[], [], []]] * 2


def test_the_quadratic_part_of_attention_moves_rows_to_other_ranks():
    """Four rows of 1,000 tokens are as many tokens as one of 4,000, and here half its work."""
    rows = [PlanRow("giant", 0, 4000), *same(8, 1000)]
    by_tokens, by_work = (by_rank(rows, Terms(2, 8192, cost)) for cost in (RowCost(), RowCost(attention=1 / 2000)))
    assert sorted(map(len, by_tokens)) == [3, 6] and sorted(map(len, by_work)) == [1, 8]


def test_lengths_count_as_they_are_padded():
    """Of 1 token each on four context-parallel ranks, each is 8: eight of them fill a budget of 64."""
    assert len(micro_batches(same(16, 1), Terms(1, 64, unit=8))) == 2
    assert len(micro_batches(same(16, 1), Terms(1, 64))) == 1


@settings(max_examples=100, deadline=None)
@given(rows, terms)
def test_micro_batches_are_at_most_one_more_than_no_packing_can_be_below_for_such_rows(rows, terms):
    for share in by_rank(rows, terms):
        assert (
            len(micro_batches(share, replace(terms, even=False))) <= fewest([terms.padded(row) for row in share], terms.budget_tokens) + 1
        )
