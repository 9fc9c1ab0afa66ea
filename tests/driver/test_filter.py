"""What the filter takes and why, what it says when it takes everything, and that a filtered sample leaves nothing behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.batcher import Candidate, choose
from driver.events import BatchAssembled, MixChanged, TrajectoryDiscarded
from driver.filter import Streak, why_filtered
from driver.ledger_state import kind_of, traj_uid_of
from driver.mix import Change
from driver.settings_data import FilterConfig
from tests.driver.feeding import BATCH_SAMPLES, Lab, rows

N, P = 2, BATCH_SAMPLES


def test_the_bounds_are_dropped_and_what_lies_between_is_kept():
    config = FilterConfig(min_pass_rate=0.25, max_pass_rate=0.75)
    made = {right: why_filtered([1.0] * right + [0.0] * (8 - right), right, config) for right in range(9)}
    assert {right for right, reason in made.items() if reason is None} == {3, 4, 5}
    assert made[0] == "filtered: always wrong: 0 of 8" and made[8] == "filtered: always right: 8 of 8"
    assert made[2] == "filtered: pass rate at or below 0.25: 2 of 8" and made[6] == "filtered: pass rate at or above 0.75: 6 of 8"
    assert kind_of(made[6]) == "filtered: pass rate at or above 0.75", "counted without the particulars of one sample"


def test_0_and_1_drop_only_what_was_always_wrong_or_always_right():
    config = FilterConfig(min_pass_rate=0.0, max_pass_rate=1.0)
    kept = [right for right in range(9) if why_filtered([0.5] * 8, right, config) is None]
    assert kept == list(range(1, 8))


def test_N3_equal_rewards_are_dropped_by_their_own_switch_only():
    assert why_filtered([0.3] * 4, 0, FilterConfig(equal_rewards=True)) == "filtered: equal rewards: 4 of 0.3"
    assert why_filtered([0.3, 0.3, 0.4], 0, FilterConfig(equal_rewards=True)) is None
    assert why_filtered([0.3] * 4, 0, FilterConfig()) is None, "without a filter everything passes"


@pytest.mark.parametrize("bad", [{"min_pass_rate": 1.0}, {"max_pass_rate": 0.0}, {"min_pass_rate": 0.6, "max_pass_rate": 0.5}])
def test_a_filter_that_lets_nothing_through_is_refused(bad):
    with pytest.raises(ValueError, match="pass_rate"):
        FilterConfig(**bad)


def test_H7_the_words_of_the_alarm_name_the_cause_the_dataset_and_the_remedy():
    streak = Streak(batch_samples=4)
    for _ in range(12):
        streak.filtered("filtered: always right: 8 of 8", "d000001")
    assert streak.reached(3) and not streak.reached(None) and not streak.reached(5)
    words = streak.words()
    assert "the last 12 samples" in words and "3 batches' worth (12 × always right; 12 of d000001)" in words and "headrace mix" in words
    streak.kept()
    assert streak.samples == 0 and not streak.reached(1)


# ---- in its place: settled by dispatch, before anyone can take the sample ------------------------------------------------


@pytest.fixture
def lab(tmp_path):
    made: list[Lab] = []

    def make(*settings: str) -> Lab:
        made.append(Lab(tmp_path, *settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


BOTH = ("filter={min_pass_rate: 0, max_pass_rate: 1}",)


async def test_A1_a_filtered_sample_is_discarded_with_its_reason_its_rows_freed_archived_and_counted_apart(lab):
    its = await lab(*BOTH).with_data()
    assert its.dispatch.judge.kept_share == 1.0
    kept, easy, hard = its.sample(1.0, 0.0), its.sample(1.0, 1.0), its.sample(0.0, 0.0)
    assert its.dispatch.judge.kept_share == 1 / 3
    ledger = its.core.ledger
    assert list(ledger.samples) == [kept] and ledger.live_by_deadline.total() == 1
    assert its.discarded == [
        (traj_uid_of(easy, 0), "filtered: always right: 2 of 2"),
        (traj_uid_of(easy, 1), "filtered: always right: 2 of 2"),
        (traj_uid_of(hard, 0), "filtered: always wrong: 0 of 2"),
        (traj_uid_of(hard, 1), "filtered: always wrong: 0 of 2"),
    ]
    assert its.store.stats().objects == N, "the rows of the kept one"
    assert ledger.counts.balanced() and ledger.counts.by_reason == {"filtered: always right": 2, "filtered: always wrong": 2}
    assert ledger.cursor["d000000"].filtered == 2 and ledger.cursor["d000000"].registered == 3
    await its.db.durable()
    assert its.db.load().cursor["d000000"].filtered == 2


async def test_a_sample_is_judged_when_its_last_trajectory_has_ended_and_never_before(lab):
    its = await lab(*BOTH).with_data()
    its.sample(1.0)
    assert len(its.core.ledger.samples) == 1 and not its.discarded


async def test_a_group_too_small_is_no_work_of_the_filters(lab):
    its = await lab(*BOTH, "rollout.min_group=2").with_data()
    uid = its.sample(1.0)
    its.core.apply(TrajectoryDiscarded(traj_uid=traj_uid_of(uid, 1), reason="data: too long", time=3.0))
    its.dispatch.settle(its.core.ledger.samples[uid])
    assert its.discarded == [(traj_uid_of(uid, 0), "group too small: data: too long")]
    assert its.core.ledger.cursor["d000000"].filtered == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0)]), max_size=40))
def test_L0_batches_fill_with_P_samples_whatever_the_filter_takes(tmp_path_factory, answers):
    async def play() -> None:
        its = await Lab(tmp_path_factory.mktemp("lab"), *BOTH).with_data()
        try:
            ledger = its.core.ledger
            for rewards in answers:
                its.sample(*rewards)
                candidates = (Candidate(s.uid, s.deadline_batch, not s.waiting) for s in ledger.live())
                choice = choose(candidates, ledger.next_batch, P)
                if choice.uids is not None:
                    assert len(choice.uids) == P
                    its.core.apply(BatchAssembled(batch_id=ledger.next_batch, uids=choice.uids, plan=b"[]", time=3.0))
            mixed = sum(rewards == (1.0, 0.0) for rewards in answers)
            assert ledger.samples_taken == mixed // P * P and ledger.live_by_deadline.total() == mixed % P
            assert ledger.cursor.get("d000000") is None or ledger.cursor["d000000"].filtered == len(answers) - mixed
        finally:
            its.close()

    asyncio.run(play())


async def test_H7_when_all_groups_are_filtered_an_alarm_names_the_cause_and_after_50_batches_worth_the_run_is_paused(lab):
    its = await lab(*BOTH, "filter.alarm_batches=5").with_data()
    its.sample(1.0, 0.0)
    for number in range(1, 50 * P + 1):
        assert ("filter" in its.core.alarms) == (number > 5 * P)
        its.sample(1.0, 1.0)
    assert its.paused == 1
    words = its.core.alarms["filter"]
    assert f"the last {50 * P} samples" in words and f"{50 * P} × always right; {50 * P} of d000000" in words
    assert "the run is paused: headrace resume" in words and its.core.waits["filter"].reason == words
    for _ in range(5 * P):
        its.sample(1.0, 1.0)
    assert its.paused == 1 and "the run is paused: headrace resume" in its.core.alarms["filter"], "what was in flight does not hide it"
    its.sample(1.0, 0.0)
    assert "filter" not in its.core.alarms and "filter" not in its.core.waits, "one that passes ends it"
    assert its.dispatch.judge.streak.samples == 0, "and the count begins anew"


async def test_pass_rates_count_what_was_filtered_too_and_come_back_after_a_restart(lab):
    its = await lab(*BOTH).with_data()
    for rewards in ((1.0, 1.0), (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)):
        its.sample(*rewards)
    its.sample(1.0)  # still running: not yet an observation
    shown = its.dispatch.judge.rates.of("d000000")
    assert (shown["samples"], shown["pass_rate"]) == (4, 5 / 8)
    assert shown["by_task_type"] == {"default": {name: shown[name] for name in shown if name != "by_task_type"}}
    await its.db.durable()
    fresh = type(its.dispatch.judge)(its.core)
    fresh.recall()
    assert fresh.rates.of("d000000") == shown and list(fresh.recent) == ["d000000"] * 5


async def test_W2_with_skip_solved_a_row_that_was_always_right_is_left_out_of_the_next_pass(lab):
    its = await lab("filter.skip_solved=true").with_data(3)
    for rewards in ((1.0, 1.0), (1.0, 0.0), (1.0, 1.0)):
        its.sample(*rewards)
    second = its.core.ledger.samples[its.sample(1.0, 1.0)]
    assert (second.pass_index, second.row_index) == (1, 1), "the only one that was not solved"
    third = [its.core.ledger.samples[its.sample(0.0, 0.0)] for _ in range(2)]
    assert [(s.pass_index, s.row_index) for s in third] == [(2, 0), (2, 2)], "those left out are tried again, the other is not"
    assert its.core.ledger.cursor["d000000"].skipped == 3


async def test_a_priority_comes_after_the_siblings_of_a_started_sample(lab):
    its = await lab().with_data()
    its.dispatch._room = lambda: 1  # type: ignore[method-assign]
    its.dispatch._store_free_bytes = lambda reserved: 1 << 40  # type: ignore[method-assign]
    started, _ = its.dispatch._next()
    urgent, _, _ = await its.core.feed.add(None, "urgent", rows("now"), None)
    its.core.apply(MixChanged(changes={urgent: Change(priority=9)}, by="request", time=1.0))
    sample, sibling = its.dispatch._next()
    assert sample is started and sibling.index == 1
    after, first = its.dispatch._next()
    assert its.core.feed.dataset_of(after.segment) == urgent and first.index == 0, "then the next new sample is of the urgent one"
