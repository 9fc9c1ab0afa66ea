"""A3 and A4 as properties: random schedules of registering, finishing, discarding, serving and taking batches."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.batcher import Candidate, admissible, choose, feasible, smallest_batch


def holds(live: Counter[int], next_batch: int, samples_per_batch: int) -> bool:
    """A4 written out, independently of `feasible`."""
    for d in range(min(live, default=0), max(live, default=0) + 1):
        if sum(c for deadline, c in live.items() if deadline <= d) > max(0, (d - next_batch + 1) * samples_per_batch):
            return False
    return True


@given(st.dictionaries(st.integers(0, 8), st.integers(1, 9), max_size=6), st.integers(0, 6), st.integers(1, 5))
def test_feasible_is_the_prefix_sum_rule_of_A4(live, next_batch, samples_per_batch):
    assert feasible(live, next_batch, samples_per_batch) == holds(Counter(live), next_batch, samples_per_batch)


@given(st.dictionaries(st.integers(0, 8), st.integers(1, 9), max_size=6), st.integers(0, 8), st.integers(0, 6), st.integers(1, 5))
def test_admissible_is_the_most_that_keeps_A4(live, deadline, next_batch, samples_per_batch):
    if not holds(Counter(live), next_batch, samples_per_batch):
        return
    room = admissible(live, deadline, next_batch, samples_per_batch)
    assert room == 0 or holds(Counter(live) + Counter({deadline: room}), next_batch, samples_per_batch)
    assert not holds(Counter(live) + Counter({deadline: room + 1}), next_batch, samples_per_batch)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), st.data())
def test_A3_A4_no_schedule_breaks_the_bound_and_L0_every_schedule_goes_on(bound, samples_per_batch, data):
    """Serving lags, trajectories finish in any order, some samples are discarded: nothing taken is too old, nothing sticks."""
    next_batch, trained, serving, uid = 0, 0, 0, 0
    live: dict[int, tuple[int, bool]] = {}  # uid -> (deadline, ready)

    def counts() -> Counter[int]:
        return Counter(deadline for deadline, _ in live.values())

    def take() -> bool:
        nonlocal next_batch, trained
        choice = choose([Candidate(u, d, r) for u, (d, r) in live.items()], next_batch, samples_per_batch)
        if choice.uids is None:
            return False
        assert len(choice.uids) == samples_per_batch
        for taken in choice.uids:
            assert live.pop(taken)[0] >= next_batch, "A3"
        next_batch += 1
        trained += 1
        return True

    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["register", "finish", "discard", "serve", "take"]))
        if action == "register":
            deadline = serving + bound
            if deadline >= next_batch and admissible(counts(), deadline, next_batch, samples_per_batch) > 0:
                live[uid] = (deadline, False)
                uid += 1
        elif action == "finish" and live:
            chosen = data.draw(st.sampled_from(sorted(live)))
            live[chosen] = (live[chosen][0], True)
        elif action == "discard" and live:
            del live[data.draw(st.sampled_from(sorted(live)))]
        elif action == "serve":
            serving = data.draw(st.integers(serving, trained))
        elif action == "take":
            take()
        assert holds(counts(), next_batch, samples_per_batch), "A4"
    # L0: once everything has finished and the engines have caught up, batches go on for ever.
    for _ in range(3):
        serving = trained
        while admissible(counts(), serving + bound, next_batch, samples_per_batch) > 0 and len(live) < (bound + 1) * samples_per_batch:
            live[uid] = (serving + bound, True)
            uid += 1
        live = {u: (d, True) for u, (d, _) in live.items()}
        if len(live) >= samples_per_batch:
            assert take(), "L0"


def test_V2_a_sample_that_finished_at_once_still_ages_in_ready():
    young = [Candidate(uid, 9, True) for uid in (5, 6)]
    old = Candidate(1, 4, True)
    assert choose([old, *young], 4, 2).uids == (1, 5)


def test_V3_a_batch_is_held_for_the_straggler_that_could_not_wait_and_says_so():
    candidates = [Candidate(0, 3, False), Candidate(1, 3, True), Candidate(2, 3, True)]
    choice = choose(candidates, 3, 2)
    assert choice.uids is None and choice.blocking_uid == 0 and choice.kind == "held"
    assert "sample 0" in choice.reason and "batch 3" in choice.reason
    # With one batch more to go the others may pass it.
    assert choose([Candidate(0, 4, False), *candidates[1:]], 3, 2).uids == (1, 2)


def test_W3_a_surplus_of_ready_samples_stays_for_the_next_batch():
    candidates = [Candidate(uid, 9, True) for uid in range(7)]
    assert choose(candidates, 0, 4).uids == (0, 1, 2, 3)
    assert choose(candidates[4:], 1, 4).uids is None


@pytest.mark.parametrize("running", [False, True])
def test_H2_a_short_last_batch_goes_only_when_nothing_more_will_come(running):
    candidates = [Candidate(0, 9, True), Candidate(1, 9, not running)]
    choice = choose(candidates, 0, 4, short_allowed=True)
    assert choice.uids == (None if running else (0, 1))
    assert choose(candidates, 0, 4).uids is None


def test_A4_after_a_loss_of_the_trainer_the_earliest_deadline_goes_first_and_not_the_first_registered():
    """Tags fall back with the version, so a sample registered later may have to be trained earlier."""
    older = [Candidate(uid, 7, True) for uid in range(3)]
    younger = [Candidate(uid, 4, True) for uid in range(3, 6)]
    assert choose([*older, *younger], 4, 3).uids == (3, 4, 5)


def test_a_smaller_batch_waits_until_what_was_registered_for_larger_ones_fits():
    assert smallest_batch({3: 6, 4: 2}, 2) == 3
    assert smallest_batch({}, 5) == 1
    everything = [Candidate(uid, 2, True) for uid in range(4)]
    assert "raise batch.samples" in choose(everything, 2, 2).reason
