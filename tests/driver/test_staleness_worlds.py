"""docs/staleness.md as properties: random schedules around the real ledger, batcher, policy and meter (tests/worlds.py)."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.policy import Preset
from tests.hard_bound_des import model
from tests.worlds import TRACES, Faults, World, drawing

LENGTHS = ("conversation", "synthetic", "pareto", "bimodal", "constant")
EVERY_FAULT = st.builds(
    Faults,
    kill_engine=st.sampled_from([None, 2.0, 10.0]),
    lose_trainer=st.sampled_from([None, 5.0, 30.0]),
    lose_host=st.sampled_from([None, 10.0, 50.0]),
    change_config=st.sampled_from([None, 10.0, 50.0]),
    evaluate=st.sampled_from([None, 3.0]),
    discard=st.sampled_from([0.0, 0.05, 0.3]),
    filtered=st.sampled_from([0.0, 0.3]),
    skip=st.sampled_from([0.0, 0.3]),
    push_fails=st.sampled_from([0.0, 0.5]),
)


@st.composite
def worlds(draw, presets=("strict",), faults=EVERY_FAULT):
    n = draw(st.integers(2, 5))
    name = draw(st.sampled_from(presets))
    min_group = draw(st.integers(1, n - 1))
    preset = Preset(
        name,
        n=n,
        min_group=min_group,
        hold_s=draw(st.sampled_from([1.0, 50.0, 1000.0])),
        partial_k=draw(st.integers(min_group, n - 1)),
        partial_after_s=draw(st.sampled_from([0.0, 50.0])),
    )
    lengths = draw(st.sampled_from(LENGTHS))
    push_s = draw(st.sampled_from([0.0, 30.0, 2000.0]))
    return World(
        drawing(lengths),
        bound=draw(st.integers(0, 4)),
        samples_per_batch=draw(st.integers(1, 5)),
        slots=draw(st.integers(1, 40)),
        preset=preset,
        step_s=draw(st.sampled_from([1.0, 100.0, 3000.0])),
        push_s=lambda rng: rng.expovariate(1.0) * push_s,
        checkpoint_every=draw(st.integers(1, 4)),
        rows=draw(st.one_of(st.none(), st.integers(1, 60))),
        batches=draw(st.one_of(st.none(), st.integers(1, 40))),
        faults=draw(faults),
        seed=draw(st.integers(0, 2**32)),
    )


def goes_on(world: World) -> None:
    """L0: from here on nothing fails and every trajectory ends; then batches are made, or all input is trained to its last row."""
    world.heal()
    ahead = world.ledger.next_batch + 3
    for _ in range(200):
        world.run(steps=ahead, events=2000)
        if world.ledger.trained_version >= ahead or (world.over and not world.tries):
            return
    raise AssertionError(f"L0: stuck at batch {world.ledger.next_batch} with {world.ledger.live_by_deadline}")


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, 1500))
def test_A3_A4_L0_strict_keeps_the_bound_over_any_schedule_and_never_discards_for_age_or_length(world, events):
    world.run(events=events)  # A4 at every instant and A3 at every batch are checked inside
    goes_on(world)
    world.commit()
    kinds = {reason.partition(":")[0] for reason in world.ledger.counts.by_reason}
    assert kinds <= {"data", "group too small", "filtered", "step skipped", "evaluation"}, kinds


@settings(max_examples=100, deadline=None)
@given(worlds(presets=("deadline", "partial")), st.integers(0, 1500))
def test_A3_A4_L0_the_other_presets_keep_the_bound_too(world, events):
    world.run(events=events)
    goes_on(world)


@settings(max_examples=60, deadline=None)
@given(worlds(presets=("strict", "deadline", "partial")))
def test_A2_a_run_over_closed_input_ends_with_every_trajectory_ended_once(world):
    world.rows, world.batches = 30, None
    world.run(events=400)
    world.heal()
    world.run(events=200_000)
    assert world.over and not world.ledger.live_by_deadline, "L0"
    world.commit()
    counts = world.ledger.counts
    assert counts.registered == sum(counts.by_outcome.values())
    assert not world.ledger.samples and world.free == world.slots
    meter = world.meter.total(world.meter.windows.values()).whole
    assert meter.trained == counts.by_outcome["trained"] and meter.sampled + meter.filtered == 30 * world.preset.n


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
@pytest.mark.parametrize(("bound", "samples"), [(1, 32), (3, 32), (3, 16)])
def test_A4_with_full_batches_and_no_lag_it_is_the_model_event_for_event(name, bound, samples):
    lens, slots, n, batches = TRACES[name], 64, 4, 40
    modelled = model(lens, C=slots, P=samples, n=n, S=bound, batches=batches, seed=7)
    world = World(
        drawing(name),
        bound=bound,
        samples_per_batch=samples,
        slots=slots,
        preset=Preset(n=n, partial_k=n - 1),
        step_s=samples * n * statistics.fmean(lens) / slots,
        seed=7,
        checked=False,
    )
    world.run(steps=batches)
    assert world.now == pytest.approx(modelled.ended_at, rel=1e-9), "the same schedule to the last event"
    ages = [age for batch, age in world.staleness if batches // 10 <= batch < batches]
    assert max(ages) == modelled.max_staleness <= bound
    assert statistics.fmean(ages) == pytest.approx(modelled.mean_staleness, abs=0.05)


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_partial_at_once_is_at_least_as_fast_as_its_model_for_a_cut_trajectory_frees_its_slot(name):
    lens, slots, n, samples, batches = TRACES[name], 64, 4, 16, 60
    modelled = model(lens, C=slots, P=samples, n=n, S=2, batches=batches, seed=3, partial=1)
    preset = Preset("partial", n=n, partial_k=n - 1)
    step_s = samples * n * statistics.fmean(lens) / slots
    world = World(drawing(name), bound=2, samples_per_batch=samples, slots=slots, preset=preset, step_s=step_s, seed=3, checked=False)
    world.run(steps=batches)
    assert world.now < 1.1 * modelled.ended_at
    assert max(age for _, age in world.staleness) <= 2


# ---- the lines of cases/faults.md ------------------------------------------------------------------------------------------


def test_V1_with_S_0_and_a_push_that_takes_long_admission_paces_and_nothing_is_evicted():
    world = World(drawing("conversation"), bound=0, push_s=lambda rng: 30_000.0, step_s=10.0)
    world.run(steps=8)
    assert world.ledger.trained_version == 8, "no hang"
    assert {age for _, age in world.staleness} == {0}
    assert not world.ledger.counts.by_reason and not world.ledger.counts.by_outcome["discarded"]
    assert world.max_live == world.samples_per_batch, "nobody is registered for weights that are not there yet"


def test_V2_the_age_of_a_sample_counts_its_wait_in_ready():
    world = World(drawing("constant"), bound=4, slots=200, step_s=10_000.0)
    world.run(steps=12)
    assert max(age for _, age in world.staleness) == 4, "they were ready at once and waited four batches"


@pytest.mark.parametrize("preset", ["strict", "deadline", "partial"])
def test_V3_one_straggler_a_hundred_times_slower_holds_no_slot_of_its_siblings(preset):
    world = World(
        lambda rng: 100.0,
        bound=1,
        samples_per_batch=2,
        slots=8,
        step_s=10.0,
        preset=Preset(preset, n=4, hold_s=500.0, partial_k=3, partial_after_s=500.0),
    )
    drawn = iter([10_000.0])
    world.draw = lambda rng: next(drawn, 100.0)
    world.run(events=6)
    assert world.free == 0 and len(world.tries) == 8, "their slots went to other samples at once"
    world.run(steps=3)
    reasons = dict(world.ledger.counts.by_reason)
    if preset == "strict":
        assert not reasons and world.now >= 10_000.0, "the batch was held for it"
    else:
        world.commit()
        named = {"deadline": "deadline: held too long", "partial": "partial: 3 of 4"}[preset]
        assert reasons == {named: 1} and world.now < 2_000.0
        assert len(world.tries) == world.slots - world.free


@pytest.mark.parametrize("preset", ["strict", "deadline", "partial"])
def test_V4_bimodal_lengths_share_trained_is_share_sampled_in_strict_and_the_meter_shows_where_it_is_not(preset):
    """1 minute and 60, one in ten. What a preset costs is told, never silent."""
    world = World(
        drawing("bimodal"),
        bound=2,
        samples_per_batch=8,
        slots=64,
        preset=Preset(preset, n=8, hold_s=120.0, partial_k=6),
        step_s=120.0,
        seed=5,
        checked=False,
    )
    world.run(steps=45)
    world.commit()
    oldest = min(s.version_tag for s in world.ledger.samples.values())
    closed = world.meter.closed(oldest)
    assert len(closed) >= 3
    total = world.meter.total(closed)
    long = total.cells["length"][max(total.cells["length"], key=int)] if preset == "strict" else None
    alarms = world.meter.alarms(oldest, 0.02)
    if preset == "strict":
        assert long is not None and long.trained == long.sampled and 0.05 < long.sampled / total.whole.sampled < 0.2
        assert not alarms and total.whole.trained == total.whole.sampled
    else:
        assert total.whole.trained < total.whole.sampled
        assert alarms and "bias by length" in alarms[0].words and preset in alarms[0].words, alarms


def test_V7_a_producer_ten_times_faster_than_the_trainer_for_an_hour_is_bounded_and_drops_nothing():
    world = World(drawing("conversation"), bound=3, slots=400, samples_per_batch=4, step_s=1000.0)
    world.run(steps=60)
    assert world.max_live <= (world.bound + 1) * world.samples_per_batch
    assert len(world.ledger.samples) <= (world.bound + 1 + world.checkpoint_every + 1) * world.samples_per_batch
    assert max(age for _, age in world.staleness) <= world.bound
    assert not world.ledger.counts.by_outcome["discarded"]
    assert len(world.meter.windows) <= 32


def test_V9_a_trainer_ahead_of_a_slow_push_shows_its_lag_and_tags_say_what_engines_have():
    world = World(drawing("constant"), bound=3, slots=100, step_s=100.0, push_s=lambda rng: 250.0)
    tags = []
    apply = world.apply

    def noted(event):
        if type(event).__name__ == "SampleRegistered":
            tags.append((event.version_tag, world.ledger.serving_version, world.ledger.trained_version))
        apply(event)

    world.apply = noted
    world.run(steps=30)
    assert world.max_lag >= 2
    assert all(tag == serving for tag, serving, _ in tags) and any(serving < trained for _, serving, trained in tags)
    assert max(age for _, age in world.staleness) <= 3
