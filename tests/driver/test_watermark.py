"""The smallest cap binds and is named; caps gate new samples only. On simulated runs (`plant.py`) it feeds the slowest stage, steadily.

Steady means: of the watermark's mean in each batch's time, after a warm-up, the standard deviation is at most a tenth of the mean.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.measured import Measured
from driver.watermark import Watermark, kv_room
from driver.whatif import Facts, simulate
from rollout.load import Load
from tests.driver.plant import Plant

ROOT = Path(__file__).parents[2]
TRACES = ("mild", "heavy")
MEAN_S = 4.0
SLOTS, SAMPLES, N = 64, 8, 8
BALANCED_S = SAMPLES * N * MEAN_S / SLOTS  # training as fast as generation


def decide(watermark: Watermark, **more):
    given = {
        "kv_slots": 128,
        "in_flight": 64,
        "aside": 0,
        "ready": 0,
        "admissible_samples": 100,
        "n": 8,
        "store_free_bytes": 1 << 30,
        "sample_bytes": 1 << 16,
    }
    return watermark.decide(**(given | more))


@pytest.mark.parametrize(
    ("more", "binding", "target"),
    [
        ({}, "kv", 160),
        ({"admissible_samples": 2}, "staleness", 64 + 16),
        ({"admissible_samples": 0}, "staleness", 64),
        ({"store_free_bytes": 3 << 16}, "store", 64 + 24),
    ],
)
def test_the_smallest_cap_binds_and_is_named(more, binding, target):
    decision = decide(Watermark(128), **more)
    assert (decision.binding, decision.watermark) == (binding, target)


def working(watermark: Watermark, *, training_s: float, sample_s: float, scorer_s: float = 0.0) -> None:
    for _ in range(50):
        watermark.measured.training_s.observe(training_s)
        watermark.measured.sample_s.observe(sample_s)
        watermark.measured.scored(10 * scorer_s, scorer_s)


def test_V7_ready_piling_up_lowers_demand_and_a_waiting_trainer_raises_it():
    watermark = Watermark(32)
    working(watermark, training_s=4.0, sample_s=2.0)  # 8 trajectories a second, 16 in work by Little's law
    starved, flooded, drowned = decide(watermark, ready=0), decide(watermark, ready=64), decide(watermark, ready=200)
    assert starved.caps.demand_cap == 16 + 64
    assert flooded.caps.demand_cap == 16 and flooded.binding == "demand"
    assert drowned.caps.demand_cap == 8, "a sample may always be in flight"


def test_demand_is_that_of_the_slowest_stage_and_of_what_its_work_takes_not_of_what_waits_before_it():
    watermark = Watermark(32)
    working(watermark, training_s=4.0, sample_s=2.0, scorer_s=1.0)
    assert decide(watermark).caps.demand_cap == 8 * 3 + 64, "the scorer works for 1 s, and was waited for ten"
    watermark.measured.reward.look(1.0, 4, 50, 1.0)
    assert decide(watermark).caps.demand_cap == 4 * 3 + 64
    assert watermark.wanted().startswith("the reward service takes 4 trajectories a second, a sample is in work for 3 s")
    for _ in range(2):
        watermark.measured.leaves.observe(2)
    assert decide(watermark).caps.demand_cap == 2 * 3 + 64, "two leaves a trajectory"


def test_in_flight_is_not_decoding_what_waits_for_a_tool_or_a_scorer_takes_no_slot():
    plain, aside = decide(Watermark(10_000)), decide(Watermark(10_000), in_flight=600, aside=500)
    assert plain.binding == aside.binding == "kv"
    assert aside.watermark == plain.watermark + 500


def test_V7_what_the_filter_takes_is_under_way_beside_what_the_trainer_does():
    watermark = Watermark(32)
    working(watermark, training_s=4.0, sample_s=2.0)
    assert decide(watermark, kept_share=0.5).caps.demand_cap == 2 * (16 + 64)
    assert decide(watermark, kept_share=0.0).caps.demand_cap == 20 * (16 + 64), "and no more than so much"


def test_L0_a_sample_larger_than_the_engines_slots_still_goes():
    assert decide(Watermark(128), kv_slots=4, in_flight=0).caps.kv_cap >= 8


def test_demand_does_not_bind_before_anything_was_measured():
    assert decide(Watermark(32)).caps.demand_cap >= decide(Watermark(32)).caps.kv_cap


def load(max_running: int, max_total_tokens: int) -> Load:
    return Load(
        running=0,
        waiting=0,
        used_tokens=0,
        max_total_tokens=max_total_tokens,
        max_running=max_running,
        kv_use=0.0,
        foreign=0,
        at_s=0.0,
        trust_s=1.0,
    )


@pytest.mark.parametrize(
    ("engines", "mean_tokens", "slots", "bound"),
    [
        ([(None, 192), (None, 192)], 100.0, 256, "256 requests at once on 2 engines by rollout.max_running_requests"),
        ([(None, 64)], None, 64, "64 requests at once on 1 engine by rollout.max_open_requests"),
        ([(load(48, 10_000), 192)], None, 48, "48 requests at once on 1 engine by the engine's own limit"),
        ([(load(48, 10_000), 192)], 100.0, 48, "48 requests at once on 1 engine by the engine's own limit"),
        ([(load(48, 3_000), 192)], 100.0, 30, "30 requests at once on 1 engine by KV memory of 3000 tokens at a mean of 100"),
        ([(load(48, 50), 192)], 100.0, 1, "1 requests at once on 1 engine by KV memory of 50 tokens at a mean of 100"),
        ([(load(400, 90_000), 192)], 100.0, 192, "192 requests at once on 1 engine by rollout.max_open_requests"),
        ([], None, 0, "no engine is open"),
    ],
)
def test_what_engines_run_at_once_is_what_they_report_and_the_configuration_stands_in_for_a_report(engines, mean_tokens, slots, bound):
    room = kv_room(engines, max_running=128, mean_tokens=mean_tokens)
    assert (room.slots, room.bound) == (slots, bound)


def test_engines_with_different_bounds_are_told_apart():
    room = kv_room([(load(48, 10_000), 192), (load(48, 3_000), 192), (None, 192)], max_running=128, mean_tokens=100.0)
    assert room.slots == 48 + 30 + 128 and room.bound.count(" requests at once on 1 engine by ") == 3


# ---- on simulated runs ---------------------------------------------------------------------------------------------------------


@cache
def lengths_s(trace: str) -> tuple[float, ...]:
    raw = [int(line) for line in (ROOT / f"benchmarks/data/lengths_{trace}.csv").read_text().split()[1:]]
    return tuple(MEAN_S * count / statistics.fmean(raw) for count in raw)


def unsteadiness(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.fmean(values)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("bound", [1, 3, 7])
def test_in_balance_the_watermark_takes_nothing_from_what_the_bound_allows(trace, bound):
    plant = Plant(lengths_s(trace), SLOTS, SAMPLES, N, bound, BALANCED_S).run(100)
    model = simulate(Facts(SLOTS, SAMPLES, N, lengths_s(trace), ahead=SLOTS // 4, score_s=0.01), bound, batches=100)
    assert plant.per_s(10) / (SLOTS / MEAN_S) >= model.fraction - 0.03
    assert max(plant.ages) <= bound
    if bound == 7:
        assert unsteadiness(plant.by_batch(lambda look: look.decision.watermark, 10)) <= 0.1


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("bound", [7, 20])
def test_V7_a_slow_trainer_never_waits_and_gets_samples_far_fresher_than_the_bound_allows(trace, bound):
    plant = Plant(lengths_s(trace), SLOTS, SAMPLES, N, bound, 2 * BALANCED_S).run(100)
    assert plant.per_s(20) >= 0.99 * SAMPLES * N / (2 * BALANCED_S)
    assert statistics.fmean(plant.ages[20 * SAMPLES :]) <= 4.0
    after = [look for look in plant.looks if look.batch >= 20]
    assert sum(look.decision.binding == "demand" for look in after) >= 0.8 * len(after)
    assert unsteadiness(plant.by_batch(lambda look: look.decision.watermark, 20)) <= 0.1
    assert unsteadiness(plant.by_batch(lambda look: look.in_flight + look.ready, 20)) <= 0.05, "what is live stands still"


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("bound", [7, 50])
def test_a_slow_reward_service_is_kept_at_work_and_what_waits_for_it_stays_bounded(trace, bound):
    slow = 8.0  # leaves a second, of the 32 that the trainer would take and the 16 that the engines could make
    plant = Plant(lengths_s(trace), SLOTS, SAMPLES, N, bound, BALANCED_S / 2, scorers=4, scorer_s=4 / slow).run(100)
    assert plant.per_s(20) >= 0.99 * slow
    assert max(plant.by_batch(lambda look: look.scoring, 20)) <= 2.5 * SAMPLES * N
    assert unsteadiness(plant.by_batch(lambda look: look.in_flight + look.ready, 20)) <= 0.05


@pytest.mark.parametrize("trace", TRACES)
def test_trajectories_that_wait_for_tools_leave_their_slots_to_others(trace):
    """Four turns with three tools of 2 s between them: as long beside the engines as on them."""
    plant = Plant(lengths_s(trace), SLOTS, SAMPLES, N, 20, BALANCED_S, turns=4, tool_s=2.0).run(100)
    assert plant.per_s(20) >= 0.98 * SLOTS / MEAN_S
    assert statistics.fmean(plant.by_batch(lambda look: look.running, 20)) >= 0.98 * SLOTS
    assert unsteadiness(plant.by_batch(lambda look: look.decision.watermark, 20)) <= 0.1


def test_A4_tools_that_are_the_slow_stage_are_bounded_by_the_bound_alone():
    plant = Plant(lengths_s("mild"), SLOTS, SAMPLES, N, 6, BALANCED_S, turns=4, tool_s=2.0, tools=16).run(60)
    assert plant.per_s(10) >= 0.9 * 16 / (3 * 2.0)
    assert max(look.in_flight for look in plant.looks) <= (6 + 1) * SAMPLES * N


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize(("slowness", "bound"), [(2.0, 20), (1.0, 7)])
def test_a_minute_of_failing_engines_leaves_demand_where_it_was(trace, slowness, bound):
    storm = (100.0, 160.0)
    plant = Plant(lengths_s(trace), SLOTS, SAMPLES, N, bound, slowness * BALANCED_S, storm=storm).run(120)
    calm = Plant(lengths_s(trace), SLOTS, SAMPLES, N, bound, slowness * BALANCED_S).run(120)

    def live(plant: Plant, since: float, until: float) -> float:
        return statistics.fmean(look.decision.caps.demand_cap + look.ready for look in plant.looks if since <= look.at < until)

    before, after = live(plant, 60, 100), live(plant, 160, 200)
    assert abs(after / before - 1.0) <= 0.1, "the first batches after it want what those before it wanted"
    late = [at for at in plant.applied_at if at > 200]
    per_s = (len(late) - 1) * SAMPLES * N / (late[-1] - late[0])
    assert per_s >= 0.97 * calm.per_s(20)


# ---- what it is made of -------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    looks=st.lists(st.tuples(st.floats(0.5, 2.0), st.integers(0, 100), st.integers(0, 300), st.floats(0.0, 5.0)), max_size=30),
    faults=st.lists(st.tuples(st.floats(0.5, 2.0), st.integers(0, 3), st.integers(0, 2), st.floats(0.0, 1.0)), min_size=60, max_size=90),
)
def test_a_stage_that_is_given_little_to_do_is_not_taken_for_a_slow_one(looks, faults):
    """After any past, a minute in which it has next to nothing to do lets the stage go: it does not bind for ever at what it did then."""
    measured = Measured()
    for look in looks:
        measured.reward.look(*look)
    learned = measured.reward.per_s
    for span_s, ended, fewest, work_s in faults:
        measured.reward.look(span_s, ended, min(fewest, ended), max(work_s, 1.0))
    if learned is None:
        assert measured.reward.per_s is None
    else:
        assert measured.reward.per_s is not None and measured.reward.per_s >= learned


@settings(max_examples=200, deadline=None)
@given(
    slots=st.integers(0, 500),
    busy=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    ready=st.integers(0, 5000),
    admissible_samples=st.integers(0, 100),
    free=st.integers(-(1 << 20), 1 << 30),
    times=st.one_of(st.none(), st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))),
    n=st.integers(1, 16),
)
def test_L0_with_nothing_in_flight_only_the_bound_and_the_store_can_refuse_a_sample(slots, busy, ready, admissible_samples, free, times, n):
    watermark = Watermark(8 * n)
    if times is not None:
        working(watermark, training_s=times[0], sample_s=times[1])
    given = {"kv_slots": slots, "ready": ready, "admissible_samples": admissible_samples, "store_free_bytes": free, "n": n}
    idle = decide(watermark, **given, in_flight=0, aside=0)
    assert idle.watermark >= n or idle.binding in ("staleness", "store")
    in_flight, aside = sum(busy), busy[1]
    some = decide(watermark, **given, in_flight=in_flight, aside=aside)
    assert some.watermark == min(vars(some.caps).values()) == getattr(some.caps, f"{some.binding}_cap")
    assert some.caps.staleness_cap - in_flight == admissible_samples * n
