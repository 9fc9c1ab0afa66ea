"""The state machine: A1 and A2 over any sequence of legal events, crashes and restarts, and what illegal events do (nothing)."""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from driver.batcher import Candidate, admissible, choose, feasible
from driver.events import (
    BatchApplied,
    BatchAssembled,
    BatchUnmade,
    EpochBegan,
    EvaluationBegan,
    EvaluationEnded,
    Found,
    MixChanged,
    Restarted,
    RowSkipped,
    RowsLost,
    RowSolved,
    SampleDiscarded,
    TrajectoryDiscarded,
    TrajectoryRetried,
    VersionCommitted,
    VersionServed,
)
from driver.ledger import IllegalEvent, Ledger
from driver.ledger_db import LedgerDB
from driver.ledger_load import check
from driver.ledger_rows import Upsert
from driver.ledger_state import CONSUMED, FINISHED, READY, RUNNING, traj_uid_of
from driver.mix import Change
from tests.driver.conftest import fields, ready, register

P, N, BOUND = 2, 2, 2


class AnyRun(RuleBasedStateMachine):
    """Everything that can happen to a run, in any order: the counts always balance and nothing is trained twice or too old. Group commits
    come at any moment, and so do ends of the process: what is rebuilt from the database is the ledger of the last commit, field by field,
    and the run goes on from there."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-test-ledger-", dir="/dev/shm"))
        self.db = LedgerDB(self.directory / "ledger.sqlite")
        self.ledger = self.db.load()
        self.ended: Counter[str] = Counter()  # traj_uid -> how often it was written as finished
        self.trained: dict[str, int] = {}
        self.pending: list[list[Upsert]] = []
        self.left_out: set[tuple[int, int]] = set()  # rows that a pass went by
        self.committed = copy.deepcopy((self.ledger, self.ended, self.trained))

    def teardown(self) -> None:
        self.commit()
        self.db.close()
        found = check(self.directory / "ledger.sqlite")
        shutil.rmtree(self.directory)
        assert found.well, found

    def commit(self) -> None:
        for writes in self.pending:
            self.db.write(writes)
        self.pending = []
        asyncio.run(self.db.durable())
        self.committed = copy.deepcopy((self.ledger, self.ended, self.trained))

    @precondition(lambda self: self.pending)
    @rule()
    def a_group_is_committed(self) -> None:
        self.commit()

    @precondition(lambda self: len(self.pending) > 2)
    @rule(killed=st.booleans())
    def the_driver_is_restarted(self, killed: bool) -> None:
        if not killed:
            self.commit()
        self.pending = []
        self.db.close()
        self.db = LedgerDB(self.directory / "ledger.sqlite")
        self.ledger = self.db.load()
        before, self.ended, self.trained = copy.deepcopy(self.committed)
        assert fields(self.ledger) == fields(before)
        self.apply(Restarted(found=Found(memory=1), time=7.0))

    def apply(self, event: object) -> None:
        writes = self.ledger.apply(event)  # type: ignore[arg-type]
        self.pending.append(writes)
        for write in writes:
            values = write.values
            if write.table == "trajectories" and values["state"] == FINISHED:
                traj_uid = traj_uid_of(values["uid"], values["idx"])
                self.ended[traj_uid] += 1
                assert values["outcome"] in ("trained", "evaluated", "discarded")
                assert (values["reason"] is None) == (values["outcome"] != "discarded"), "a discard has its reason"

    def has(self, state: str) -> bool:
        """A step that changes nothing would be wasted."""
        return any(t.state == state for s in self.ledger.live() for t in s.trajectories)

    def some(self, data: st.DataObject, state: str) -> str | None:
        found = [t.traj_uid for s in self.ledger.live() for t in s.trajectories if t.state == state]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: len(self.ledger.samples) < 4 * P)
    @rule(count=st.integers(1, 2 * P))
    def register_if_A4_allows(self, count: int) -> None:
        deadline = self.ledger.serving_version + BOUND
        for _ in range(count):
            if deadline >= self.ledger.next_batch and admissible(self.ledger.live_by_deadline, deadline, self.ledger.next_batch, P):
                self.apply(register(self.ledger, tag=self.ledger.serving_version, bound=BOUND, n=N))

    @precondition(lambda self: self.has(RUNNING))
    @rule(data=st.data(), score=st.sampled_from([0.0, 1.0]))
    def a_trajectory_gets_ready(self, data: st.DataObject, score: float) -> None:
        if (found := self.some(data, RUNNING)) is not None:
            trajectory = self.ledger.trajectory(found)
            assert trajectory is not None
            self.apply(ready(trajectory.uid, trajectory.index, score))

    @precondition(lambda self: self.has(RUNNING))
    @rule(score=st.sampled_from([0.0, 1.0]))
    def the_oldest_samples_get_ready(self, score: float) -> None:
        """A batch's worth: one trajectory at a time seldom gets there."""
        for sample in list(self.ledger.live())[:P]:
            for trajectory in sample.in_state(RUNNING):
                self.apply(ready(sample.uid, trajectory.index, score))

    @precondition(lambda self: self.has(RUNNING))
    @rule(data=st.data())
    def a_trajectory_is_retried(self, data: st.DataObject) -> None:
        if (found := self.some(data, RUNNING)) is not None:
            self.apply(TrajectoryRetried(traj_uid=found, kind="infrastructure", reason="engine died"))

    @precondition(lambda self: self.has(RUNNING))
    @rule(data=st.data())
    def a_trajectory_is_discarded(self, data: st.DataObject) -> None:
        if (found := self.some(data, RUNNING)) is not None:
            self.apply(TrajectoryDiscarded(traj_uid=found, reason="data: bad prompt", time=3.0))

    @precondition(lambda self: not any(self.ledger.evaluated()))
    @rule(rows=st.integers(1, 2))
    def an_evaluation_begins(self, rows: int) -> None:
        before = dict(self.ledger.live_by_deadline)
        self.apply(EvaluationBegan(first_uid=self.ledger.next_uid, rows=rows, n=N, version=self.ledger.trained_version, time=1.0))
        assert dict(self.ledger.live_by_deadline) == before, "it is under no bound"
        assert not any(s.evaluation for s in self.ledger.live()), "and in no batch"

    @precondition(lambda self: any(self.ledger.evaluated()))
    @rule(data=st.data())
    def an_evaluation_ends(self, data: st.DataObject) -> None:
        samples = list(self.ledger.evaluated())
        first = samples[0].uid
        everything = [(s.uid - first, t.index) for s in samples for t in s.trajectories]
        good = data.draw(st.sets(st.sampled_from(everything)))
        rewards = tuple((row, index, 0.5) for row, index in everything if (row, index) in good)
        failed = tuple((row, index, "evaluation: late") for row, index in everything if (row, index) not in good)
        self.apply(EvaluationEnded(first_uid=first, epoch=0, report=b"{}", rewards=rewards, failed=failed, time=2.0))

    @precondition(lambda self: any(self.ledger.evaluated()))
    @rule()
    def an_evaluation_is_cut_short(self) -> None:
        for sample in list(self.ledger.evaluated()):
            self.apply(SampleDiscarded(uid=sample.uid, reason="evaluation: the driver was restarted", time=2.0))

    @precondition(lambda self: sum(self.ledger.live_by_deadline.values()) > P)
    @rule(data=st.data())
    def a_sample_is_discarded(self, data: st.DataObject) -> None:
        live = [s.uid for s in self.ledger.live()]
        if live:
            self.apply(SampleDiscarded(uid=data.draw(st.sampled_from(live)), reason="filtered", time=3.0))

    @precondition(lambda self: self.has(READY))
    @rule(data=st.data())
    def a_row_is_solved(self, data: st.DataObject) -> None:
        known = {*self.ledger.solved, *self.left_out}  # a sample is judged once
        settled = [s.uid for s in self.ledger.live() if not s.waiting and (s.segment, s.row_index) not in known]
        if settled:
            self.apply(RowSolved(uid=data.draw(st.sampled_from(settled)), of=N, time=3.0))

    @precondition(lambda self: self.ledger.solved)
    @rule(data=st.data())
    def a_solved_row_is_left_out_of_the_next_pass(self, data: st.DataObject) -> None:
        (segment, row_index), solved_in = data.draw(st.sampled_from(sorted(self.ledger.solved.items())))
        self.left_out.add((segment, row_index))
        place = {"segment": segment, "row_index": row_index, "pass_index": solved_in + 1, "position": self.ledger.cursor[""].position}
        self.apply(RowSkipped(dataset_id="", **place, time=3.0))

    @rule(weight=st.sampled_from([0.5, 2.0]))
    def a_dataset_gets_another_share(self, weight: float) -> None:
        self.apply(MixChanged(changes={"": Change(weight=weight)}, by="request", time=3.0))

    @precondition(lambda self: self.has(READY))
    @rule(data=st.data())
    def ready_rows_are_lost(self, data: st.DataObject) -> None:
        if (found := self.some(data, READY)) is not None:
            self.apply(RowsLost(traj_uid=found, reason="host restart"))

    @precondition(lambda self: self.has(READY))
    @rule()
    def a_batch_is_assembled(self) -> None:
        candidates = [Candidate(s.uid, s.deadline_batch, not s.waiting) for s in self.ledger.live()]
        choice = choose(candidates, self.ledger.next_batch, P)
        if choice.uids is not None:
            self.apply(BatchAssembled(batch_id=self.ledger.next_batch, uids=choice.uids, plan=b"[]", time=4.0))

    @precondition(lambda self: self.ledger.trained_version < self.ledger.next_batch)
    @rule(skipped=st.sampled_from([None, None, "loss is not finite"]))
    def a_batch_is_applied(self, skipped: str | None) -> None:
        self.apply(BatchApplied(batch_id=self.ledger.trained_version, epoch=self.ledger.epoch, skipped=skipped, report=b"{}", time=5.0))

    @precondition(lambda self: self.has(RUNNING) or self.has(READY))
    @rule(skipped=st.sampled_from([None, None, "loss is not finite"]))
    def a_batch_goes_all_the_way(self, skipped: str | None) -> None:
        """What a run does when nothing happens."""
        self.the_oldest_samples_get_ready(1.0)
        self.a_batch_is_assembled()
        if self.ledger.trained_version < self.ledger.next_batch:
            self.a_batch_is_applied(skipped)

    @precondition(lambda self: self.ledger.trained_version > self.ledger.committed_version)
    @rule()
    def a_checkpoint_is_committed(self) -> None:
        for batch in self.ledger.batches.values():
            if batch.batch_id < self.ledger.trained_version and not batch.skipped:
                for uid in batch.uids:
                    for trajectory in self.ledger.samples[uid].in_state(CONSUMED):
                        assert trajectory.traj_uid not in self.trained, "A2: trained twice"
                        assert batch.batch_id <= self.ledger.samples[uid].deadline_batch, "A3"
                        self.trained[trajectory.traj_uid] = batch.batch_id
        self.apply(VersionCommitted(version=self.ledger.trained_version, checkpoint="somewhere", time=6.0))

    @precondition(lambda self: self.ledger.trained_version > self.ledger.committed_version)
    @rule()
    def the_trainer_is_lost(self) -> None:
        if self.ledger.trained_version > self.ledger.committed_version:
            self.apply(EpochBegan(epoch=self.ledger.epoch + 1, version=self.ledger.committed_version))

    @precondition(lambda self: self.ledger.trained_version < self.ledger.next_batch)
    @rule(data=st.data())
    def rows_of_uncommitted_batches_are_lost(self, data: st.DataObject) -> None:
        pending = [b for b in self.ledger.batches if b >= self.ledger.trained_version]
        if not pending:
            return
        first = data.draw(st.sampled_from(pending))
        for batch_id in sorted((b for b in pending if b >= first), reverse=True):
            uids = self.ledger.batches[batch_id].uids
            rows = [t.traj_uid for uid in uids for t in self.ledger.samples[uid].in_state(CONSUMED)]
            lost = frozenset(data.draw(st.sets(st.sampled_from(rows))))
            self.apply(BatchUnmade(batch_id=batch_id, lost=lost))

    @precondition(lambda self: self.ledger.serving_version < self.ledger.trained_version)
    @rule(data=st.data())
    def the_engines_catch_up(self, data: st.DataObject) -> None:
        low = min(self.ledger.serving_version, self.ledger.trained_version)
        self.apply(VersionServed(version=data.draw(st.integers(low, self.ledger.trained_version))))

    @invariant()
    def A1_everything_registered_is_somewhere(self) -> None:
        counts = self.ledger.counts
        assert counts.registered == self.ledger.next_uid * N
        assert counts.registered == sum(counts.by_state.values())
        live = Counter(t.state for s in self.ledger.samples.values() for t in s.trajectories)
        for state in (RUNNING, READY, CONSUMED):
            assert live[state] == counts.by_state[state]
        assert sum(self.ledger.staleness.values()) == self.ledger.samples_taken
        takeable = [s for s in self.ledger.live() if not s.waiting and s.in_state(READY)]
        assert self.ledger.settled_samples == len(takeable)
        assert sum(counts.by_outcome.values()) == counts.by_state[FINISHED] == len(self.ended)

    @invariant()
    def A2_nothing_ends_twice(self) -> None:
        assert all(times == 1 for times in self.ended.values())
        assert set(self.trained) <= set(self.ended)

    @invariant()
    def A4_what_is_live_still_fits(self) -> None:
        ledger = self.ledger
        assert ledger.live_by_deadline == Counter(s.deadline_batch for s in ledger.live())
        assert feasible(ledger.live_by_deadline, ledger.next_batch, P)


@pytest.mark.timeout(600)  # seconds, unless it fails: the smallest case is then sought for minutes
def test_A1_A2_A4_W1_V6_hold_over_any_sequence_of_events_kills_and_restarts() -> None:
    run_state_machine_as_test(AnyRun, settings=settings(max_examples=150, stateful_step_count=50, deadline=None))


def small_ledger() -> Ledger:
    ledger = Ledger()
    ledger.apply(register(ledger))
    ledger.apply(ready(0, 0))
    return ledger


@pytest.mark.parametrize(
    "event",
    [
        ready(0, 0),  # ready already
        ready(7, 0),  # unknown
        BatchAssembled(batch_id=0, uids=(0,), plan=b"", time=0.0),  # one trajectory still runs
        BatchAssembled(batch_id=1, uids=(), plan=b"", time=0.0),  # not the next batch
        BatchApplied(batch_id=0, epoch=0, skipped=None, report=b"", time=0.0),  # not assembled
        VersionCommitted(version=1, checkpoint="x", time=0.0),  # not trained
        VersionServed(version=1),  # not trained
        EpochBegan(epoch=2, version=0),  # skips one
        SampleDiscarded(uid=9, reason="x", time=0.0),
        RowsLost(traj_uid=traj_uid_of(0, 1), reason="x"),  # still running
        register(Ledger()),  # uid 0 again
    ],
)
def test_an_event_that_does_not_fit_changes_nothing(event):
    ledger = small_ledger()
    before = copy.deepcopy(vars(ledger))
    with pytest.raises(IllegalEvent):
        ledger.apply(event)
    assert vars(ledger) == before


def test_A3_a_sample_past_its_deadline_is_never_taken():
    ledger = Ledger()
    ledger.apply(register(ledger, tag=0, bound=0, n=1))
    ledger.apply(ready(0, 0))
    ledger.next_batch = 1
    with pytest.raises(IllegalEvent, match="A3"):
        ledger.apply(BatchAssembled(batch_id=1, uids=(0,), plan=b"", time=0.0))


def test_a_skipped_step_discards_its_rows_with_the_reason():
    ledger = small_ledger()
    ledger.apply(ready(0, 1))
    ledger.apply(BatchAssembled(batch_id=0, uids=(0,), plan=b"", time=0.0))
    ledger.apply(BatchApplied(batch_id=0, epoch=0, skipped="loss is not finite", report=b"", time=0.0))
    ledger.apply(VersionCommitted(version=1, checkpoint="x", time=0.0))
    assert ledger.counts.by_outcome == {"discarded": 2}
    assert ledger.counts.by_reason == {"step skipped: loss is not finite": 2}
    assert ledger.trained_version == 1


def test_A2_the_result_of_an_evaluation_is_written_with_the_ends_of_its_answers_and_each_has_its_own():
    ledger = Ledger()
    names = []
    for first in (0, 1):  # one version, twice
        ledger.apply(EvaluationBegan(first_uid=first, rows=1, n=1, version=7, time=1.0))
        writes = ledger.apply(EvaluationEnded(first_uid=first, epoch=2, report=b"told", rewards=((0, 0, 1.0),), failed=(), time=2.0))
        names += [w.values["name"] for w in writes if w.table == "meta" and w.values["value"] == b"told"]
        assert any(w.table == "trajectories" and w.values["outcome"] == "evaluated" for w in writes)
    assert len(set(names)) == 2 and names == sorted(names) and all(name.startswith("evaluation/") for name in names)


def test_no_trajectory_id_is_a_prefix_of_another():
    ids = [traj_uid_of(uid, index) for uid in (0, 1, 10, 11, 2**53) for index in (0, 1, 10)]
    assert len({len(i) for i in ids}) == 1 and len(set(ids)) == len(ids)


def test_V6_a_batch_that_was_made_unmade_and_made_again_is_counted_once_after_a_restart(tmp_path):
    db = LedgerDB(tmp_path / "ledger.sqlite")
    ledger = db.load()
    taken = BatchAssembled(batch_id=0, uids=(0,), plan=b"[1]", time=1.0)
    for event in (
        register(ledger, n=1),
        ready(0, 0),
        taken,
        BatchUnmade(batch_id=0, lost=frozenset({traj_uid_of(0, 0)})),
        ready(0, 0),
        taken,
    ):
        db.write(ledger.apply(event))
        assert sum(ledger.staleness.values()) == ledger.samples_taken == ledger.next_batch
    db.close()
    again = LedgerDB(tmp_path / "ledger.sqlite")
    assert fields(again.load()) == fields(ledger)
    again.close()
