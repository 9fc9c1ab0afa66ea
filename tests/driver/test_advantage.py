import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.advantage import advantages


def test_N3_groups_of_4_3_and_4_each_have_their_own_baseline_and_equal_rewards_give_exactly_0():
    assert advantages([1.0, 0.0, 0.0, 1.0], "group_mean") == [0.5, -0.5, -0.5, 0.5]
    assert advantages([1.0, 0.5, 0.0], "group_mean") == pytest.approx([0.5, 0.0, -0.5])
    assert advantages([0.1, 0.1, 0.1, 0.1], "group_mean") == [0.0] * 4
    assert advantages([0.1, 0.1, 0.1], "grpo") == [0.0] * 3


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_the_baseline_is_over_the_real_members(rewards):
    made = advantages(rewards, "group_mean")
    assert sum(made) == pytest.approx(0.0, abs=1e-9)
    if max(rewards) != min(rewards):
        assert made == [r - statistics.fmean(rewards) for r in rewards]


def test_N4_a_score_that_is_not_a_number_never_reaches_the_baseline():
    with pytest.raises(AssertionError, match="failed score"):
        advantages([1.0, float("nan")], "group_mean")


def test_an_unknown_kind_names_the_known_ones():
    with pytest.raises(ValueError, match="group_mean, grpo"):
        advantages([1.0, 2.0], "median")
