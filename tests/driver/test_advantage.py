"""Advantages: groups by uid, real members only, exact zeros (N3, N4, M6)."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import driver.advantage
from driver.advantage import ADVANTAGES

KINDS = sorted(ADVANTAGES)


def advantages(groups: dict[int, list[float]], kind: str) -> dict[int, list[float]]:
    """With lengths that follow from the rewards, so that a group in another order has the same."""
    return driver.advantage.advantages(groups, kind, lengths_of(groups))


def lengths_of(groups: dict[int, list[float]]) -> dict[int, list[int]]:
    return {uid: [1 + int(abs(r) * 7) % 5 if r == r else 1 for r in rewards] for uid, rewards in groups.items()}


reward = st.floats(-10, 10).map(lambda r: round(r, 6))
batches = st.dictionaries(st.integers(0, 99), st.lists(reward, min_size=1, max_size=9), min_size=1, max_size=8)


def plain(groups: dict[int, list[float]], kind: str) -> dict[int, list[float]]:
    """Each formula once more, from the statistics of the groups."""
    centred = {uid: [r - statistics.fmean(rewards) for r in rewards] for uid, rewards in groups.items()}
    whole = statistics.pstdev([c for group in centred.values() for c in group])
    made = {}
    for uid, rewards in groups.items():
        if kind == "rloo":
            total, others = sum(rewards), len(rewards) - 1
            made[uid] = [r - (total - r) / others if others else 0.0 for r in rewards]
        elif kind == "length_aware":
            sizes = lengths_of(groups)[uid]
            made[uid] = [r - statistics.fmean(rewards, sizes) for r in rewards]
        else:
            scale = {"grpo": statistics.pstdev(rewards) + 1e-6, "reinforce_pp": whole + 1e-6}.get(kind, 1.0)
            made[uid] = [c / scale for c in centred[uid]]
    return made


def test_N3_groups_of_4_3_and_4_each_have_their_own_baseline_and_equal_rewards_give_exactly_0() -> None:
    groups = {7: [1.0, 0.0, 0.0, 1.0], 8: [1.0, 0.5, 0.0], 9: [0.1] * 4}
    made = advantages(groups, "group_mean")
    assert made == {7: [0.5, -0.5, -0.5, 0.5], 8: pytest.approx([0.5, 0.0, -0.5]), 9: [0.0] * 4}
    assert advantages(groups, "rloo")[7] == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])
    assert advantages(groups, "grpo")[7] == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@given(equal=reward, size=st.integers(1, 40))
@example(equal=-3.8, size=3)
def test_N3_equal_rewards_give_exactly_0_though_their_mean_may_be_off_in_the_last_bit(kind: str, equal: float, size: int) -> None:
    assert advantages({1: [equal] * size, 2: [1.0, 0.0]}, kind)[1] == [0.0] * size


@pytest.mark.parametrize("kind", KINDS)
@given(groups=batches)
def test_N3_every_kind_is_its_formula_over_the_real_members_of_each_group(kind: str, groups: dict[int, list[float]]) -> None:
    made, expected = advantages(groups, kind), plain(groups, kind)
    for uid, rewards in groups.items():
        assert made[uid] == pytest.approx(expected[uid], rel=1e-9, abs=1e-8)
        weights = lengths_of(groups)[uid] if kind == "length_aware" else [1] * len(rewards)
        assert sum(w * a for w, a in zip(weights, made[uid], strict=True)) == pytest.approx(0.0, abs=1e-6)
        if max(rewards) == min(rewards):
            assert made[uid] == [0.0] * len(rewards)


@pytest.mark.parametrize("kind", KINDS)
@given(groups=batches, seed=st.integers(0, 99))
def test_M6_groups_go_by_uid_and_no_order_of_groups_or_of_members_changes_a_bit(
    kind: str, groups: dict[int, list[float]], seed: int
) -> None:
    shuffle = random.Random(seed)
    orders = {uid: shuffle.sample(range(len(rewards)), len(rewards)) for uid, rewards in groups.items()}
    uids = shuffle.sample(list(groups), len(groups))
    made, again = advantages(groups, kind), advantages({uid: [groups[uid][i] for i in orders[uid]] for uid in uids}, kind)
    assert again == {uid: [made[uid][i] for i in orders[uid]] for uid in groups}


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"reinforce_pp"}))
@given(groups=batches, other=st.lists(reward, min_size=1, max_size=5))
def test_M6_only_the_batch_wide_kind_looks_beyond_the_group(kind: str, groups: dict[int, list[float]], other: list[float]) -> None:
    made = advantages({**groups, 100: other}, kind)
    assert {uid: made[uid] for uid in groups} == advantages(groups, kind)


@given(groups=batches)
def test_reinforce_pp_has_deviation_1_over_the_batch_however_the_groups_are_spread(groups: dict[int, list[float]]) -> None:
    every = [a for group in advantages(groups, "reinforce_pp").values() for a in group]
    spread = statistics.pstdev([a for group in advantages(groups, "group_mean").values() for a in group])
    if spread > 0.01:
        assert statistics.pstdev(every) == pytest.approx(1.0, rel=1e-3)


@given(groups=batches)
def test_dr_grpo_is_group_mean(groups: dict[int, list[float]]) -> None:
    assert advantages(groups, "dr_grpo") == advantages(groups, "group_mean")


@pytest.mark.parametrize("kind", KINDS)
def test_N4_a_score_that_is_not_a_number_never_reaches_the_baseline(kind: str) -> None:
    with pytest.raises(AssertionError, match="failed score"):
        advantages({7: [1.0, float("nan")]}, kind)


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="group_mean, dr_grpo, grpo, rloo, reinforce_pp"):
        advantages({7: [1.0, 2.0]}, "median")
