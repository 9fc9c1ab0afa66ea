"""Where time went: what each side waited for, one after another, and the seconds of each kind."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.lost_time import AGAIN_S, ENTRIES, LostTime


def test_L1_a_wait_has_its_reason_its_beginning_and_its_seconds():
    lost = LostTime()
    lost.waits("trainer", "samples", "7 of 8 are ready", 10.0)
    lost.waits("trainer", "held", "held for sample 3", 12.0)
    lost.over("trainer", 15.0)
    lost.over("trainer", 16.0)
    lost.waits("reward", "slow", "5 answers wait", 16.0)
    assert [(e.kind, e.began, e.ended, e.seconds(20.0)) for e in lost.newest(9)] == [
        ("samples", 10.0, 12.0, 2.0),
        ("held", 12.0, 15.0, 3.0),
        ("slow", 16.0, None, 4.0),
    ]
    assert lost.seconds(20.0) == {"reward": {"slow": 4.0}, "trainer": {"held": 3.0, "samples": 2.0}}


def test_a_gate_that_closes_with_every_request_is_one_line():
    lost = LostTime()
    for number in range(1000):
        lost.waits("rollout", "staleness", f"{number} live samples", number * 0.1)
        lost.over("rollout", number * 0.1 + 0.02)
    (entry,) = lost.newest(300)
    assert entry.times == 1000 and entry.waited_s == pytest.approx(20.0) and entry.reason == "999 live samples"
    lost.waits("rollout", "staleness", "again", 200.0)
    assert len(lost.newest(300)) == 2, "after a pause it is another"


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["trainer", "rollout"]), st.sampled_from(["a", "b", None]), st.floats(0.01, 3.0)), max_size=1200
    )
)
def test_the_seconds_are_those_that_the_sides_waited_and_memory_is_bounded(steps):
    lost, expected, now = LostTime(), Counter[tuple[str, str]](), 0.0
    state: dict[str, str | None] = {"trainer": None, "rollout": None}
    for side, kind, seconds in steps:
        if kind is None:
            lost.over(side, now)
        else:
            lost.waits(side, kind, f"{side} {kind}", now)
        state[side] = kind
        now += seconds
        for waiting, why in state.items():
            if why is not None:
                expected[waiting, why] += seconds  # type: ignore[assignment]
    found = {(side, kind): seconds for side, kinds in lost.seconds(now).items() for kind, seconds in kinds.items()}
    assert found == pytest.approx({key: value for key, value in expected.items()}, abs=0.01)
    assert len(lost.newest(10**6)) <= ENTRIES
    for earlier, later in zip(lost.newest(300), lost.newest(300)[1:], strict=False):
        assert earlier.began <= later.began or later.began <= earlier.began + AGAIN_S


def test_a_thousand_waits_are_remembered_as_the_newest_of_them_and_their_seconds():
    lost = LostTime()
    for number in range(1000):
        lost.waits("trainer", "samples", f"batch {number}", number * 10.0)
        lost.over("trainer", number * 10.0 + 1.0)
    assert len(lost.newest(10**6)) == ENTRIES and lost.newest(1)[0].reason == "batch 999"
    assert lost.seconds(10_000.0) == {"trainer": {"samples": pytest.approx(1000.0)}}
