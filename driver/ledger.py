"""The state of a run and the only way it changes: `Ledger.apply(event) -> writes`.

Promise: `registered = running + ready + consumed + finished` after every event (A1); a trajectory ends exactly once, as trained,
evaluated or discarded with a reason (A2). An event that is not legal in the present state raises `IllegalEvent` and changes nothing.

Mechanism: the live part (unfinished samples, uncommitted batches, counters) is kept here in plain objects; each event answers with
the rows to upsert, which `ledger_db` commits in groups. Counters are rows too: an event writes the ones that it changed, with their new
value, so that a start reads them and never the rows of what has ended. No clock, no I/O: times and ids come inside the events.

    running ──TrajectoryReady──▶ ready ──BatchAssembled──▶ consumed ──VersionCommitted─▶ finished(trained)
       │                           │                          │
       └──TrajectoryDiscarded──────┴──SampleDiscarded         └──BatchUnmade──▶ ready or running (rows lost)
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import msgspec

from driver.events import (
    BatchApplied,
    BatchAssembled,
    BatchUnmade,
    EpochBegan,
    EvaluationBegan,
    EvaluationEnded,
    Event,
    MixChanged,
    Restarted,
    RowSkipped,
    RowsLost,
    RowSolved,
    RunEnded,
    SampleDiscarded,
    SampleRegistered,
    TrajectoryDiscarded,
    TrajectoryReady,
    TrajectoryRetried,
    VersionCommitted,
    VersionServed,
)
from driver.ledger_rows import Upsert, batch_row, meta, sample_row, trajectory_row
from driver.ledger_state import (
    APPLIED,
    ASSEMBLED,
    COMMITTED,
    CONSUMED,
    DISCARDED,
    EVALUATED,
    EVALUATION,
    FINISHED,
    OUTCOME,
    READY,
    REASON,
    RUNNING,
    STALENESS,
    STATE,
    TRAINED,
    UNMADE,
    Batch,
    Counts,
    Sample,
    Trajectory,
    kind_of,
    traj_uid_of,
)
from driver.mix import Cursor, Walk


class IllegalEvent(RuntimeError):
    """An event that does not fit the state: a fault of ours, never of the user."""


class Ledger:
    def __init__(self) -> None:
        self.last_discard: tuple[str, str] | None = None  # traj_uid and reason in full
        self._changed: dict[tuple[str, str], None] = {}  # counters that the present event has changed, by kind and name
        self.samples: dict[int, Sample] = {}  # live and consumed, in order of registration
        self.batches: dict[int, Batch] = {}  # not committed, in order
        self.counts = Counts()
        self.live_by_deadline: collections.Counter[int] = collections.Counter()
        self.staleness: collections.Counter[int] = collections.Counter()  # of samples taken, by batch_id - version_tag
        self.next_uid = 0
        self.next_batch = 0
        self.trained_version = 0
        self.committed_version = 0
        self.serving_version = 0
        self.epoch = 0
        self.cursor: Cursor = {}  # by dataset: its share and the next row to register
        self.mixes = 0  # changes of shares so far
        self.solved: dict[tuple[int, int], int] = {}  # (segment, row) -> the pass in which it was always right
        self.checkpoint: str | None = None
        self.ended: str | None = None
        self.samples_taken = 0
        self.just_over: list[Sample] = []  # by the last event: all of it has finished
        self.settled_samples = 0
        self.evaluating = 0  # trajectories of an evaluation that runs
        self.settlings = 0  # grows with each event that may make another batch possible
        self.restarts = 0

    # ---- reading -----------------------------------------------------------------------------------------------------

    def live(self) -> Iterator[Sample]:
        """Registered to be trained, neither taken nor discarded; oldest first."""
        return (s for s in self.samples.values() if s.batch_id is None and not s.evaluation)

    def evaluated(self) -> Iterator[Sample]:
        """Of an evaluation that runs."""
        return (s for s in self.samples.values() if s.evaluation)

    def trajectory(self, traj_uid: str) -> Trajectory | None:
        uid, separator, index = traj_uid.removeprefix("s").partition("t")
        if not (separator and uid.isdecimal() and index.isdecimal()):
            return None
        sample = self.samples.get(int(uid))
        return sample.trajectories[int(index)] if sample and int(index) < len(sample.trajectories) else None

    def settled(self, uid: int) -> bool:
        """No trajectory of the sample is running any more."""
        return not self.samples[uid].waiting

    # ---- changing ----------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> list[Upsert]:
        """Change the state by one event; returns what must be written. IllegalEvent leaves everything as it was."""
        self.just_over = []
        touched = self._touched(event)
        before = sum(sample.settled for sample in touched)
        discarded = self.last_discard
        writes: list[Upsert] = getattr(self, "_on_" + type(event).__name__)(event)
        assert self.counts.balanced(), f"A1 broken by {event}"
        more = sum(sample.settled for sample in touched) - before
        self.settled_samples += more
        self.settlings += bool(more) or not isinstance(event, TrajectoryReady | SampleRegistered | TrajectoryRetried)
        if self.last_discard is not discarded:
            writes.append(meta("last_discard", self.last_discard))
        writes += [Upsert("counters", {"kind": kind, "name": name, "value": self._counter(kind, name)}) for kind, name in self._changed]
        self._changed.clear()
        return writes

    def _counter(self, kind: str, name: str) -> int:
        if kind == STALENESS:
            return self.staleness[int(name)]
        return {STATE: self.counts.by_state, OUTCOME: self.counts.by_outcome, REASON: self.counts.by_reason}[kind][name]

    def _on_SampleRegistered(self, e: SampleRegistered) -> list[Upsert]:
        if e.uid != self.next_uid:
            raise IllegalEvent(f"sample {e.uid} registered, expected {self.next_uid}")
        if e.deadline_batch < self.next_batch:
            raise IllegalEvent(f"sample {e.uid} would be born after its deadline")
        self.next_uid += 1
        sample = Sample(e.uid, e.segment, e.row_index, e.pass_index, e.version_tag, e.deadline_batch, [])
        for index in range(e.n):
            sample.trajectories.append(Trajectory(traj_uid_of(e.uid, index), e.uid, index, started_at=e.time))
        self.samples[e.uid] = sample
        self.live_by_deadline[e.deadline_batch] += 1
        self.counts.registered += e.n
        self._add_state(RUNNING, e.n)
        walk = self._moved(e.dataset_id, e.pass_index, e.segment, e.position)
        walk.registered += 1
        for dataset_id, credit in e.credits.items():
            self.cursor.setdefault(dataset_id, Walk()).credit = credit
        return [
            sample_row(sample),
            *[trajectory_row(t) for t in sample.trajectories],
            *self._walks(e.dataset_id, *e.credits),
            meta("next_uid", self.next_uid),
        ]

    def _on_TrajectoryReady(self, e: TrajectoryReady) -> list[Upsert]:
        trajectory = self._in_state(e.traj_uid, RUNNING)
        if not e.leaves:
            raise IllegalEvent(f"{e.traj_uid} is ready without a row")
        self._move(trajectory, READY)
        trajectory.leaves, trajectory.reward, trajectory.finish_reason, trajectory.ready_at = e.leaves, e.reward, e.finish_reason, e.time
        return [trajectory_row(trajectory)]

    def _on_TrajectoryRetried(self, e: TrajectoryRetried) -> list[Upsert]:
        trajectory = self._in_state(e.traj_uid, RUNNING)
        if e.kind == "data":
            trajectory.data_attempts += 1
        else:
            trajectory.infrastructure_attempts += 1
        trajectory.reason = e.reason
        return [trajectory_row(trajectory)]

    def _on_TrajectoryDiscarded(self, e: TrajectoryDiscarded) -> list[Upsert]:
        trajectory = self._in_state(e.traj_uid, RUNNING, READY)
        self._finish(trajectory, DISCARDED, e.reason)
        return [trajectory_row(trajectory), *self._forget_if_over(self.samples[trajectory.uid])]

    def _on_SampleDiscarded(self, e: SampleDiscarded) -> list[Upsert]:
        sample = self.samples.get(e.uid)
        if sample is None or sample.batch_id is not None:
            raise IllegalEvent(f"sample {e.uid} is not live")
        writes = []
        for trajectory in sample.trajectories:
            if trajectory.state in (RUNNING, READY):
                self._finish(trajectory, DISCARDED, e.reason)
                writes.append(trajectory_row(trajectory))
        if e.filtered_from is not None:
            self.cursor.setdefault(e.filtered_from, Walk()).filtered += 1
            writes += self._walks(e.filtered_from)
        return writes + self._forget_if_over(sample)

    def _on_RowsLost(self, e: RowsLost) -> list[Upsert]:
        trajectory = self._in_state(e.traj_uid, READY)
        self._move(trajectory, RUNNING)
        self._reset(trajectory, e.reason)
        return [trajectory_row(trajectory)]

    def _on_BatchAssembled(self, e: BatchAssembled) -> list[Upsert]:
        if e.batch_id != self.next_batch:
            raise IllegalEvent(f"batch {e.batch_id} assembled, expected {self.next_batch}")
        samples = []
        for uid in e.uids:
            sample = self.samples.get(uid)
            if sample is None or sample.batch_id is not None or sample.waiting or not sample.in_state(READY):
                raise IllegalEvent(f"sample {uid} can not be taken by batch {e.batch_id}")
            if sample.deadline_batch < e.batch_id:
                raise IllegalEvent(f"A3: sample {uid} with deadline {sample.deadline_batch} in batch {e.batch_id}")
            samples.append(sample)
        writes: list[Upsert] = []
        for sample in samples:
            sample.batch_id = e.batch_id
            self._leave_live(sample)
            self._add_staleness(e.batch_id - sample.version_tag, 1)
            writes.append(sample_row(sample))
            for trajectory in sample.in_state(READY):
                self._move(trajectory, CONSUMED)
                writes.append(trajectory_row(trajectory, leaves=False))  # they are there, and some are rows themselves
        self.batches[e.batch_id] = Batch(e.batch_id, ASSEMBLED, e.uids, e.plan)
        self.next_batch += 1
        self.samples_taken += len(samples)
        return [*writes, batch_row(self.batches[e.batch_id], e.time), meta("next_batch", self.next_batch)]

    def _on_BatchApplied(self, e: BatchApplied) -> list[Upsert]:
        batch = self.batches.get(e.batch_id)
        if batch is None or e.batch_id != self.trained_version or e.epoch != self.epoch:
            raise IllegalEvent(f"batch {e.batch_id} (epoch {e.epoch}) applied on version {self.trained_version} (epoch {self.epoch})")
        batch.state, batch.skipped = APPLIED, e.skipped
        self.trained_version = e.batch_id + 1
        row = batch_row(batch, e.time)
        row.values["report"] = e.report
        return [row, meta("trained_version", self.trained_version)]

    def _on_BatchUnmade(self, e: BatchUnmade) -> list[Upsert]:
        batch = self.batches.get(e.batch_id)
        if batch is None or e.batch_id != self.next_batch - 1 or e.batch_id < self.trained_version:
            raise IllegalEvent(f"batch {e.batch_id} can not be unmade")
        writes: list[Upsert] = []
        for uid in batch.uids:
            sample = self.samples[uid]
            self._add_staleness(e.batch_id - sample.version_tag, -1)
            sample.batch_id = None
            self.live_by_deadline[sample.deadline_batch] += 1
            for trajectory in sample.in_state(CONSUMED):
                if trajectory.traj_uid in e.lost:
                    self._move(trajectory, RUNNING)
                    self._reset(trajectory, "rows lost")
                else:
                    self._move(trajectory, READY)
                writes.append(trajectory_row(trajectory))
            writes.append(sample_row(sample))
        del self.batches[e.batch_id]
        self.next_batch -= 1
        self.samples_taken -= len(batch.uids)
        unmade = Upsert("batches", {"batch_id": e.batch_id, "state": UNMADE})
        return [*writes, unmade, meta("next_batch", self.next_batch)]

    def _on_VersionCommitted(self, e: VersionCommitted) -> list[Upsert]:
        if e.version > self.trained_version or e.version < self.committed_version:
            raise IllegalEvent(f"version {e.version} committed; trained {self.trained_version}, committed {self.committed_version}")
        self.committed_version, self.checkpoint = e.version, e.checkpoint
        writes = [meta("committed_version", e.version), meta("checkpoint", e.checkpoint)]
        for batch_id in [b for b in self.batches if b < e.version]:
            batch = self.batches.pop(batch_id)
            batch.state = COMMITTED
            writes.append(batch_row(batch, e.time))
            for uid in batch.uids:
                sample = self.samples[uid]
                for trajectory in sample.in_state(CONSUMED):
                    if batch.skipped:
                        self._finish(trajectory, DISCARDED, f"step skipped: {batch.skipped}")
                    else:
                        self._finish(trajectory, TRAINED, None)
                    writes.append(trajectory_row(trajectory))
                writes += self._forget_if_over(sample)
        return writes

    def _on_EpochBegan(self, e: EpochBegan) -> list[Upsert]:
        if e.epoch != self.epoch + 1 or e.version > self.trained_version or e.version < self.committed_version:
            raise IllegalEvent(f"epoch {e.epoch} at version {e.version}; now epoch {self.epoch}, version {self.trained_version}")
        self.epoch, self.trained_version = e.epoch, e.version
        self.serving_version = min(self.serving_version, e.version)
        for batch in self.batches.values():
            if batch.batch_id >= e.version:
                batch.state = ASSEMBLED
        return [
            meta("epoch", e.epoch),
            meta("trained_version", e.version),
            meta("serving_version", self.serving_version),
            *[batch_row(b, None) for b in self.batches.values()],
        ]

    def _on_VersionServed(self, e: VersionServed) -> list[Upsert]:
        if e.version > self.trained_version:
            raise IllegalEvent(f"version {e.version} served, trained is {self.trained_version}")
        self.serving_version = e.version
        return [meta("serving_version", e.version)]

    def _on_EvaluationBegan(self, e: EvaluationBegan) -> list[Upsert]:
        if e.first_uid != self.next_uid:
            raise IllegalEvent(f"evaluation registered from sample {e.first_uid}, expected {self.next_uid}")
        self.next_uid += e.rows
        writes = [meta("next_uid", self.next_uid)]
        for row in range(e.rows):
            uid = e.first_uid + row
            sample = Sample(uid, EVALUATION, row, 0, e.version, 0, [])
            sample.trajectories = [Trajectory(traj_uid_of(uid, index), uid, index, started_at=e.time) for index in range(e.n)]
            self.samples[uid] = sample
            writes += [sample_row(sample), *map(trajectory_row, sample.trajectories)]
        self.counts.registered += e.rows * e.n
        self.evaluating += e.rows * e.n
        self._add_state(RUNNING, e.rows * e.n)
        return writes

    def _on_EvaluationEnded(self, e: EvaluationEnded) -> list[Upsert]:
        told = {(row, index) for row, index, _ in (*e.rewards, *e.failed)}
        known = {(s.uid - e.first_uid, t.index) for s in self.evaluated() for t in s.trajectories}
        if told != known or len(told) != len(e.rewards) + len(e.failed):
            raise IllegalEvent(f"evaluation from sample {e.first_uid}: {len(told)} ends for {len(known)} trajectories")
        samples = list(self.evaluated())
        for row, index, reward in e.rewards:
            trajectory = self.samples[e.first_uid + row].trajectories[index]
            trajectory.reward, trajectory.ready_at = reward, e.time
            self._finish(trajectory, EVALUATED, None)
        for row, index, reason in e.failed:
            self._finish(self.samples[e.first_uid + row].trajectories[index], DISCARDED, reason)
        writes = [trajectory_row(t) for s in samples for t in s.trajectories]
        name = f"evaluation/{samples[0].version_tag:016d}/{e.epoch:08d}/{e.first_uid:016d}"
        result = Upsert("meta", {"name": name, "value": e.report})
        return [*writes, result, *[write for s in samples for write in self._forget_if_over(s)]]

    def _on_MixChanged(self, e: MixChanged) -> list[Upsert]:
        for dataset_id, change in e.changes.items():
            walk = self.cursor.setdefault(dataset_id, Walk())
            walk.weight = walk.weight if change.weight is None else change.weight
            walk.priority = walk.priority if change.priority is None else change.priority
            if change.own_passes:
                walk.passes, walk.own_passes = change.passes, True
        self.mixes += 1
        row = {"number": self.mixes - 1, "from_uid": self.next_uid, "decided_by": e.by, "why": e.why, "decided_at": e.time}
        row |= {"trained_version": self.trained_version, "changes": msgspec.json.encode(e.changes)}
        return [*self._walks(*e.changes), Upsert("mixes", row)]

    def _on_RowSolved(self, e: RowSolved) -> list[Upsert]:
        sample = self.samples[e.uid]
        self.solved[sample.segment, sample.row_index] = sample.pass_index
        row = {"segment": sample.segment, "row_index": sample.row_index, "pass_index": sample.pass_index}
        return [Upsert("solved_rows", row | {"uid": e.uid, "trajectories": e.of, "solved_at": e.time})]

    def _on_RowSkipped(self, e: RowSkipped) -> list[Upsert]:
        solved_in = self.solved.get((e.segment, e.row_index))
        if solved_in is None or solved_in != e.pass_index - 1:
            raise IllegalEvent(f"row {e.row_index} of segment {e.segment} was not solved in the pass before {e.pass_index}")
        del self.solved[e.segment, e.row_index]
        walk = self._moved(e.dataset_id, e.pass_index, e.segment, e.position)
        walk.skipped += 1
        row = {"segment": e.segment, "row_index": e.row_index, "pass_index": solved_in, "skipped_at": e.time}
        return [*self._walks(e.dataset_id), Upsert("solved_rows", row)]

    def _on_RunEnded(self, e: RunEnded) -> list[Upsert]:
        self.ended = e.how
        return [meta("ended", e.how)]

    def _on_Restarted(self, e: Restarted) -> list[Upsert]:
        self.restarts += 1
        return [Upsert("restarts", {"number": self.restarts, "time": e.time, "found": msgspec.json.encode(e.found)})]

    def _touched(self, event: Event) -> list[Sample]:
        """The samples of which it changes a state."""
        uids: tuple[int, ...] = ()
        if isinstance(event, TrajectoryReady | TrajectoryDiscarded | RowsLost):
            trajectory = self.trajectory(event.traj_uid)
            uids = () if trajectory is None else (trajectory.uid,)
        elif isinstance(event, SampleDiscarded):
            uids = (event.uid,)
        elif isinstance(event, BatchAssembled):
            uids = event.uids
        elif isinstance(event, BatchUnmade) and event.batch_id in self.batches:
            uids = self.batches[event.batch_id].uids
        return [self.samples[uid] for uid in uids if uid in self.samples]

    # ---- small parts -------------------------------------------------------------------------------------------------

    def _moved(self, dataset_id: str, pass_index: int, segment: int, position: int) -> Walk:
        """The dataset's walk, past this row."""
        walk = self.cursor.setdefault(dataset_id, Walk())
        walk.pass_index, walk.segment, walk.position = pass_index, segment, position + 1
        return walk

    def _walks(self, *dataset_ids: str) -> list[Upsert]:
        """One row a dataset, so that a sample costs no more when there are a thousand datasets that are walked."""
        return [meta(f"cursor/{dataset_id}", self.cursor[dataset_id]) for dataset_id in dict.fromkeys(dataset_ids)]

    def _in_state(self, traj_uid: str, *states: str) -> Trajectory:
        trajectory = self.trajectory(traj_uid)
        if trajectory is None or trajectory.state not in states:
            raise IllegalEvent(f"{traj_uid} is {trajectory.state if trajectory else 'unknown or finished'}, not {' or '.join(states)}")
        return trajectory

    def _move(self, trajectory: Trajectory, state: str) -> None:
        self._add_state(trajectory.state, -1)
        self._add_state(state, 1)
        trajectory.state = state

    def _add_state(self, state: str, by: int) -> None:
        self.counts.by_state[state] += by
        self._changed[STATE, state] = None

    def _add_staleness(self, staleness: int, by: int) -> None:
        self.staleness[staleness] += by
        self._changed[STALENESS, str(staleness)] = None

    def _finish(self, trajectory: Trajectory, outcome: str, reason: str | None) -> None:
        self._move(trajectory, FINISHED)
        trajectory.outcome, trajectory.reason = outcome, reason
        self.counts.by_outcome[outcome] += 1
        self._changed[OUTCOME, outcome] = None
        if reason:
            self.counts.by_reason[kind_of(reason)] += 1
            self._changed[REASON, kind_of(reason)] = None
            self.last_discard = (trajectory.traj_uid, reason)

    def _reset(self, trajectory: Trajectory, reason: str) -> None:
        trajectory.leaves, trajectory.reward, trajectory.ready_at = (), None, None
        trajectory.infrastructure_attempts += 1
        trajectory.reason = reason

    def _leave_live(self, sample: Sample) -> None:
        self.live_by_deadline[sample.deadline_batch] -= 1
        if not self.live_by_deadline[sample.deadline_batch]:
            del self.live_by_deadline[sample.deadline_batch]

    def _forget_if_over(self, sample: Sample) -> list[Upsert]:
        """A sample whose trajectories are all finished leaves the live view; its rows stay in the database."""
        if any(t.state != FINISHED for t in sample.trajectories):
            return []
        if sample.batch_id is None and not sample.evaluation:
            self._leave_live(sample)
        self.evaluating -= len(sample.trajectories) * sample.evaluation
        del self.samples[sample.uid]
        self.just_over.append(sample)
        row = sample_row(sample)
        row.values["over"] = 1
        return [row]
