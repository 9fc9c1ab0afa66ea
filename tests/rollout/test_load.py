"""The score of an engine: monotone in every kind of load, in terms of what it can run, and its own counts alone once its report is old."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.answer import EngineError
from rollout.load import Load, load_of, scale

RANK = {
    "num_running_reqs": 6,
    "num_waiting_reqs": 2,
    "num_used_tokens": 1000,
    "max_total_num_tokens": 4096,
    "max_running_requests": 8,
    "token_usage": 0.25,
    "gen_throughput": 0.0,  # and more that nobody reads
}


def load(**changes) -> Load:
    fresh = Load(running=0, waiting=0, used_tokens=0, max_total_tokens=4096, max_running=8, kv_use=0.0, foreign=0, at_s=100.0, trust_s=3.0)
    return replace(fresh, **changes)


def score(own: int, capacity: int, load: Load | None, now_s: float) -> float:
    return scale(capacity, load, now_s).score(own)


@given(
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(1, 300),
    st.floats(0, 1),
    st.integers(1, 300),
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 0.5), st.integers(0, 50)),
    st.floats(0, 10),
)
def test_an_engine_more_loaded_in_every_respect_never_scores_lower(own, foreign, running, kv_use, max_running, more, age_s):
    """More requests of ours and of others, more memory held by as many requests, fewer slots; both reports of the same age."""
    less = load(foreign=foreign, running=running, kv_use=kv_use, max_running=max_running + more[3])
    loaded = load(foreign=foreign + more[1], running=running, kv_use=kv_use + more[2], max_running=max_running)
    assert score(own + more[0], 256, loaded, 100 + age_s) >= score(own, 256, less, 100 + age_s)


def test_others_requests_count_like_ours():
    assert score(2, 16, load(foreign=4), 100.0) == score(6, 16, load(), 100.0) == 6 / 8


def test_what_runs_at_once_is_the_engines_own_limit_or_what_its_memory_holds():
    assert score(4, 16, None, 100.0) == 4 / 16, "nothing is known but what we would send"
    assert score(4, 16, load(), 100.0) == 4 / 8
    assert score(4, 16, load(running=2, kv_use=0.1), 100.0) == 4 / 8, "memory for 20 of them is no bound"
    assert score(4, 16, load(running=2, kv_use=0.5), 100.0) == pytest.approx(4 / 4), "memory for 4 of them is"


def test_a_report_fades_to_our_own_counts():
    report = load(foreign=4, running=2, kv_use=1.0)
    by_age = [score(2, 16, report, 100.0 + age_s) for age_s in (0, 3, 4.5, 6, 1000)]
    assert by_age[0] == by_age[1] == 3.0, "believed whole at first"
    assert by_age[2] == pytest.approx((2 + 2) * 0.25)
    assert by_age[3] == by_age[4] == 2 / 8, "then our own requests over its slots, which do not change"


def test_a_scale_says_until_when_it_is_good():
    report = load(foreign=4)
    for now_s in (100.0, 101.0, 103.0, 104.0, 106.0, 200.0):
        made = scale(8, report, now_s)
        later = min(made.until_s, 1000.0)
        assert later >= now_s and scale(8, report, later).score(2) == made.score(2)


def test_ranks_add_up_and_what_we_sent_is_not_others():
    both = load_of({"loads": [RANK, RANK | {"token_usage": 0.5}]}, own=10, at_s=7.0, trust_s=3.0)
    assert (both.running, both.waiting, both.used_tokens, both.max_total_tokens, both.max_running) == (12, 4, 2000, 8192, 16)
    assert (both.kv_use, both.foreign, both.at_s) == (0.5, 6, 7.0)
    assert load_of({"loads": [RANK]}, own=10, at_s=7.0, trust_s=3.0).foreign == 0


@pytest.mark.parametrize(
    "reply", [None, {}, {"loads": []}, {"loads": [{}]}, {"loads": [RANK | {"max_running_requests": "many"}]}, {"loads": None}]
)
def test_a_report_that_makes_no_sense_is_the_engines_failure(reply):
    with pytest.raises(EngineError) as caught:
        load_of(reply, own=0, at_s=0.0, trust_s=3.0)
    assert caught.value.kind == "infrastructure"
