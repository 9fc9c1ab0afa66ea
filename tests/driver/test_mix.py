"""Shares hold over short windows, priorities come first, and what is no share is refused."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.mix import Change, FeedError, Walk, check, check_weight, choose, planned

WEIGHTS = st.lists(st.floats(0.01, 100, allow_nan=False), min_size=1, max_size=6)


def take(walks: dict[str, Walk], count: int, *, waiting: set[str] | None = None) -> list[str]:
    taken = []
    for _ in range(count):
        chosen = choose({name: walk for name, walk in walks.items() if waiting is None or name in waiting})
        assert chosen is not None
        name, credits = chosen
        for each, credit in credits.items():
            walks[each].credit = credit
        taken.append(name)
    return taken


def test_two_datasets_of_3_to_1_take_turns_and_come_in_no_bursts():
    walks = {"a": Walk(weight=3), "b": Walk(weight=1)}
    assert "".join(take(walks, 12)) == "aabaaabaaaba"


@given(WEIGHTS, st.integers(1, 300))
def test_W2_a_dataset_is_never_a_sample_ahead_of_its_share_at_any_moment(weights, count):
    walks = {str(number): Walk(weight=weight) for number, weight in enumerate(weights)}
    total, given_so_far = math.fsum(weights), Counter()
    for number, name in enumerate(take(walks, count), 1):
        given_so_far[name] += 1
        for each, weight in zip(walks, weights, strict=True):
            ahead = given_so_far[each] - number * weight / total
            assert ahead < 1 + 1e-9 and ahead > -(len(weights) - 1) - 1e-9


@given(WEIGHTS, st.floats(1e-3, 1e3))
def test_only_the_ratio_of_weights_counts(weights, factor):
    one = {str(number): Walk(weight=weight) for number, weight in enumerate(weights)}
    shares = planned(one)
    other = planned({name: Walk(weight=walk.weight * factor) for name, walk in one.items()})
    assert all(other[name] == pytest.approx(share) for name, share in shares.items())


def test_a_higher_priority_gives_all_while_it_has_rows_and_leaves_no_debt():
    walks = {"low": Walk(weight=1), "also low": Walk(weight=1), "high": Walk(weight=0.001, priority=1)}
    assert set(take(walks, 50)) == {"high"}
    assert Counter(take(walks, 10, waiting={"low", "also low"})) == {"low": 5, "also low": 5}
    assert all(abs(walk.credit) <= 1 for walk in walks.values())


def test_a_dataset_that_had_no_rows_does_not_catch_up_on_what_it_missed():
    walks = {"a": Walk(), "b": Walk()}
    take(walks, 100, waiting={"a"})
    assert Counter(take(walks, 10)) == {"a": 5, "b": 5}


def test_a_weight_of_0_gives_nothing_and_alone_there_is_no_choice():
    walks = {"a": Walk(weight=0), "b": Walk()}
    assert set(take(walks, 10)) == {"b"}
    assert choose({"a": Walk(weight=0)}) is None and choose({}) is None


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, -math.inf, 1e-10, 1e10])
def test_O4_what_is_no_weight_is_refused_in_a_sentence(weight):
    with pytest.raises(FeedError, match=f"weight {weight} is no share: give a number"):
        check_weight(weight)


def test_O4_changes_that_can_not_be_are_refused_and_named():
    cursor = {"d0": Walk(), "d1": Walk(weight=0)}
    with pytest.raises(FeedError, match="there is no dataset d2; known: d0, d1"):
        check(cursor, ["d0", "d1"], {"d2": Change(1.0)})
    with pytest.raises(FeedError, match="all weights would be 0"):
        check(cursor, ["d0", "d1"], {"d0": Change(0.0)})
    with pytest.raises(FeedError, match="epochs 0 for d0"):
        check(cursor, ["d0", "d1"], {"d0": Change(own_passes=True, passes=0)})
    with pytest.raises(FeedError, match="priority 1000001 for d1"):
        check(cursor, ["d0", "d1"], {"d1": Change(priority=1_000_001)})
    check(cursor, ["d0", "d1"], {"d0": Change(0.0), "d1": Change(2.0)})
