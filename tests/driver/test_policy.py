"""Who gives way: the presets as arithmetic, and their keys in the configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from driver.batcher import choose, feasible
from driver.config import ConfigError, load_config
from driver.holds import preset_of
from driver.ledger_state import DISCARDED, FINISHED, READY, RUNNING, Sample, Trajectory, traj_uid_of
from driver.policy import Decision, Group, Hold, Preset, decide, facts_of, is_ready, plainly_too_few

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"
DEADLINE = Preset("deadline", n=8, min_group=2, hold_s=60.0)
PARTIAL = Preset("partial", n=8, min_group=2, partial_k=7, partial_after_s=5.0)


def full(uid: int, deadline: int) -> Group:
    return Group(uid, deadline, 0, 8)


def held(preset: Preset, groups: list[Group], seconds: float, *, batch: int = 3, samples: int = 2, **more: bool) -> Decision:
    """The decision on a batch that was first looked at so long ago."""
    first = decide(groups, batch, samples, preset, now=100.0, **more)
    return decide(groups, batch, samples, preset, now=100.0 + seconds, hold=first.hold, **more)


STRAGGLER = [Group(0, 3, 1, 7), full(1, 3), full(2, 4)]
"""Batch 3 has its two samples, and sample 0 must be trained by batch 3: the dry-run holds it."""


def test_V3_strict_waits_and_says_for_how_long():
    decision = held(Preset("strict"), STRAGGLER, 10_000.0)
    assert decision.uids is None and not decision.cuts
    assert decision.hold == Hold(3, 0, 10_000.0, 10_100.0) and "batch 3 is held for sample 0" in decision.reason


def test_V3_deadline_discards_the_straggler_with_a_reason_and_makes_the_batch_at_once():
    early = held(DEADLINE, STRAGGLER, 59.0)
    assert early.uids is None and not early.cuts and early.again_s == pytest.approx(1.0)
    late = held(DEADLINE, STRAGGLER, 61.5)
    assert late.uids == (0, 1) and [cut.uid for cut in late.cuts] == [0]
    assert late.cuts[0].reason == "deadline: held too long: batch 3 waited 61.5 s for it (staleness.hold_s 60)"


def test_deadline_holds_the_next_batch_anew():
    hold = held(DEADLINE, STRAGGLER, 59.0).hold
    assert hold is not None
    later = [Group(g.uid, g.deadline_batch + 1, g.running, g.ready) for g in STRAGGLER]
    assert decide(later, 4, 2, DEADLINE, now=1000.0, hold=hold).hold == Hold(4, 0, 0.0, 1000.0)


def test_a_hold_stands_still_while_no_engine_is_open():
    assert held(DEADLINE, STRAGGLER, 1000.0, moving=False).hold == Hold(3, 0, 0.0, 1100.0)


def test_V3_at_S_0_the_last_samples_of_a_batch_are_spared_their_last_trajectories():
    groups = [full(0, 3), Group(1, 3, 3, 5)]
    assert held(DEADLINE, groups, 61.0).uids == (0, 1)
    assert [cut.uid for cut in held(DEADLINE, groups, 61.0).cuts] == [1]


def test_L0_a_sample_that_the_batch_can_not_spare_is_waited_for_as_a_new_one_would_come_no_sooner():
    groups = [full(0, 3), Group(1, 3, 7, 1)]
    decision = held(DEADLINE, groups, 10_000.0)
    assert decision.uids is None and not decision.cuts
    assert decision.hold is not None and decision.hold.held_s == 10_000.0, "it is held, and a person is told"


def test_work_that_the_batch_waits_for_in_its_own_right_is_no_straggler():
    """Engines are slow and the trainer waits: nothing of a sample that is just being made goes."""
    groups = [full(0, 3), Group(1, 3, 2, 6), Group(2, 4, 8, 0)]
    assert held(DEADLINE, groups, 10_000.0).hold is None
    assert held(DEADLINE, groups, 10_000.0).uids is None


def test_partial_trains_k_of_n_some_time_after_the_kth_and_names_it():
    groups = [Group(0, 3, 1, 7, 4.0), full(1, 3)]
    early = decide(groups, 3, 2, PARTIAL, now=0.0)
    assert early.uids is None and early.again_s == pytest.approx(1.0)
    groups = [Group(0, 3, 1, 7, 5.0), full(1, 3)]
    taken = decide(groups, 3, 2, PARTIAL, now=0.0)
    assert taken.uids == (0, 1) and [cut.uid for cut in taken.cuts] == [0]
    assert taken.cuts[0].reason == "partial: 7 of 8: batch 3 took its sample without it, 5.0 s after the 7th was ready"


def test_partial_takes_nothing_from_a_sample_that_is_not_taken():
    groups = [full(0, 3), full(1, 3), Group(2, 9, 1, 7, 60.0)]
    assert decide(groups, 3, 2, PARTIAL, now=0.0) == Decision((0, 1))


@st.composite
def live(draw):
    """Live samples for which A4 holds, as admission leaves them."""
    batch, samples, n = draw(st.integers(0, 4)), draw(st.integers(1, 3)), 4
    groups = []
    for uid in range(draw(st.integers(0, 10))):
        running = draw(st.integers(0, n))
        enough_s = draw(st.sampled_from([0.0, 10.0])) if 0 < running <= 1 else None
        groups.append(Group(uid, batch + draw(st.integers(0, 4)), running, n - running, enough_s))
    assume(feasible(Counter(g.deadline_batch for g in groups), batch, samples))
    return groups, batch, samples


@given(live(), st.sampled_from(["strict", "deadline", "partial"]), st.floats(0, 100), st.booleans())
def test_A4_L0_whatever_is_cut_makes_the_batch_and_what_stays_behind_fits(world, name, seconds, short):
    groups, batch, samples = world
    preset = Preset(name, n=4, min_group=2, hold_s=50.0, partial_k=3, partial_after_s=5.0)
    decision = held(preset, groups, seconds, batch=batch, samples=samples, short_allowed=short)
    if name == "strict":
        assert not decision.cuts, "nothing is ever discarded for age or length"
    assert decision.uids is not None or not decision.cuts, "a discard makes a batch, or is not made"
    if decision.uids is None:
        return
    by_uid = {g.uid: g for g in groups}
    cut = {c.uid for c in decision.cuts}
    gone = {uid for uid in cut if by_uid[uid].ready < preset.min_group and name == "deadline"}
    assert not gone & set(decision.uids)
    assert all(by_uid[uid].running == 0 or uid in cut for uid in decision.uids), "nothing taken runs any more"
    assert all(by_uid[uid].deadline_batch >= batch for uid in decision.uids), "A3"
    left = Counter(g.deadline_batch for g in groups if g.uid not in gone and g.uid not in decision.uids)
    assert feasible(left, batch + 1, samples), "A4"


@given(live())
def test_deadline_discards_of_the_fewest_samples(world):
    groups, batch, samples = world
    decision = held(DEADLINE, groups, 100.0, batch=batch, samples=samples)
    if not decision.cuts:
        return
    *fewer, _last = [c.uid for c in decision.cuts]
    from driver.batcher import Candidate

    kept = [g for g in groups if g.uid not in fewer or g.ready >= 2]
    candidates = [Candidate(g.uid, g.deadline_batch, g.running == 0 or g.uid in fewer) for g in kept]
    assert choose(candidates, batch, samples).uids is None


def test_ready_means_the_same_everywhere():
    assert is_ready(full(0, 3), Preset("strict")) and is_ready(full(0, 3), PARTIAL)
    almost = Group(0, 3, 1, 7, 5.0)
    assert is_ready(almost, PARTIAL) and not is_ready(almost, DEADLINE) and not is_ready(Group(0, 3, 1, 7, 4.9), PARTIAL)


# ---- the keys --------------------------------------------------------------------------------------------------------------


def test_O1_strict_is_the_default_and_keys_of_another_preset_are_refused():
    assert preset_of(load_config(CONFIG, [])).name == "strict"
    with pytest.raises(ConfigError, match="hold_s is a key of preset deadline, and preset is strict: remove it, or set preset: deadline"):
        load_config(CONFIG, ["staleness.hold_s=5"])
    with pytest.raises(ConfigError, match="partial_k is a key of preset partial"):
        load_config(CONFIG, ["staleness.preset=deadline", "staleness.partial_k=5"])


def test_presets_have_their_defaults_and_partial_must_leave_somebody_out():
    assert preset_of(load_config(CONFIG, ["staleness.preset=deadline"])).hold_s == 60.0
    partial = preset_of(load_config(CONFIG, ["staleness.preset=partial", "staleness.partial_after_s=2"]))
    assert (partial.partial_k, partial.partial_after_s) == (7, 2.0)
    for k in (8, 9):
        with pytest.raises(ConfigError, match=r"must be below n and at least rollout\.min_group"):
            load_config(CONFIG, ["staleness.preset=partial", f"staleness.partial_k={k}"])
    with pytest.raises(ConfigError, match="min_group"):
        load_config(CONFIG, ["staleness.preset=partial", "rollout.n=2"])


def live_sample(uid: int, deadline: int, states: str) -> Sample:
    named = {"r": RUNNING, "R": READY, "d": FINISHED}
    trajectories = [Trajectory(traj_uid_of(uid, i), uid, i, named[s], DISCARDED if s == "d" else None) for i, s in enumerate(states)]
    return Sample(uid, 0, uid, 0, deadline - 2, deadline, trajectories)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(3, 6), st.sampled_from(["rrr", "rrr", "rRR", "rRd", "RRR", "RRd"])), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_O3_the_short_look_says_what_the_whole_one_says(world, samples):
    """Deadlines go back after a loss of the trainer, and a straggler may hold a batch of few: then it says nothing."""
    live = [live_sample(uid, deadline, states) for uid, (deadline, states) in enumerate(world)]
    preset = Preset("strict", n=3, min_group=2)
    short = plainly_too_few(live, live[-1], Counter(s.deadline_batch for s in live), sum(s.settled for s in live), samples)
    if short is not None:
        assert short == decide([facts_of(s, preset, 0.0) for s in live], 3, samples, preset, now=0.0)


def test_O3_thousands_that_run_are_not_looked_through_for_a_batch_that_has_too_few():
    live = [live_sample(0, 3, "RRR"), live_sample(1, 4, "rRR"), live_sample(2, 4, "rrr"), live_sample(3, 4, "rrr")]

    def no_further():
        yield from live[:2]
        pytest.fail("it goes on after the first unfinished one")

    decision = plainly_too_few(no_further(), live[-1], Counter({3: 1, 4: 3}), 1, 2)
    assert decision == Decision(None, "1 of 2 samples are ready; the oldest unfinished is sample 1", blocking_uid=1)
