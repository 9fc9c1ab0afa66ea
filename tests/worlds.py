"""A simulated world around the real ledger, batcher, policy and bias meter: engines, trainer and pushes are events with durations.

It does what the shells do (`dispatch._register`, `dispatch.settle`, `holds.look`, `training`, `publish`, `reconcile`), in the same order,
with a clock of its own. After every event A4 is checked by its definition, not by the batcher's function, and every batch by A3.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from driver.batcher import admissible
from driver.bias import End, Meter
from driver.events import (
    BatchApplied,
    BatchAssembled,
    BatchUnmade,
    EpochBegan,
    EvaluationBegan,
    EvaluationEnded,
    Leaf,
    RowsLost,
    SampleDiscarded,
    SampleRegistered,
    TrajectoryDiscarded,
    TrajectoryReady,
    TrajectoryRetried,
    VersionCommitted,
    VersionServed,
)
from driver.ledger import Ledger
from driver.ledger_state import CONSUMED, READY, RUNNING, Sample, kind_of
from driver.limits import Limits
from driver.policy import Decision, Hold, Preset, decide, facts_of

DATA = Path(__file__).parent / "data"
Draw = Callable[[random.Random], float]


def trace(name: str) -> list[float]:
    """Output lengths of a public trace: `conversation` has the mild tail, `synthetic` the heavy one."""
    return [max(1.0, float(line)) for line in (DATA / f"lengths_{name}.csv").read_text().splitlines()[1:]]


TRACES = {name: trace(name) for name in ("conversation", "synthetic")}


def drawing(name: str) -> Draw:
    """A distribution of lengths by name."""
    if name in TRACES:
        return lambda rng: rng.choice(TRACES[name])
    return {
        "pareto": lambda rng: min(1e5, 10.0 * rng.paretovariate(0.9)),  # a tail without a mean
        "bimodal": lambda rng: 60.0 if rng.random() < 0.9 else 3600.0,  # V4: 1 minute and 60
        "constant": lambda rng: 100.0,
    }[name]


@dataclass
class Faults:
    """Mean times between faults in trajectories' mean lengths, and chances; None and 0 are never."""

    kill_engine: float | None = None
    lose_trainer: float | None = None
    lose_host: float | None = None
    change_config: float | None = None
    evaluate: float | None = None
    discard: float = 0.0  # of a trajectory, at its end
    filtered: float = 0.0  # of a sample, before it is ready
    skip: float = 0.0  # of a step
    push_fails: float = 0.0


@dataclass
class World:
    draw: Draw
    bound: int = 2
    samples_per_batch: int = 4
    slots: int = 16
    preset: Preset = field(default_factory=lambda: Preset(n=4, partial_k=3))
    step_s: float = 100.0
    push_s: Callable[[random.Random], float] = lambda rng: 0.0
    checkpoint_every: int = 3
    rows: int | None = None  # input; None: never ends
    batches: int | None = None
    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    unit_s: float = 100.0
    window_versions: int = 5
    checked: bool = True

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)  # of lengths alone, as in the model
        self.dice = random.Random(self.seed + 1)
        self.ledger = Ledger()
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = 0
        self.free = self.slots
        self.queue: deque[tuple[Sample, int]] = deque()
        self.tries: dict[str, int] = {}  # traj_uid in a slot -> which of its tries
        self.length: dict[str, float] = {}
        self.began: dict[str, float] = {}
        self.busy = False
        self.life = 0  # of the trainer
        self.pushing = False
        self.hold: Hold | None = None
        self.walked = 0  # rows of the input
        self.changed = True  # since the last look for a batch
        self.timer: float | None = None
        self.meter = Meter(self.window_versions)
        self.tokens: dict[str, int] = {}
        self.max_live = self.max_lag = 0
        self.staleness: list[tuple[int, int]] = []  # (batch_id, staleness) of each sample taken
        self.stepped: list[float] = []  # when each step ended
        self.most = self.samples_per_batch  # P as A4 is checked with: on its way from what it was to what is wanted
        self.wasted = self.generated = 0.0  # slot time of what was cut, and of what ended by itself
        for name in ("kill_engine", "lose_trainer", "lose_host", "change_config", "evaluate"):
            self._next_fault(name)

    # ---- time ----------------------------------------------------------------------------------------------------------

    def at(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, self.order, action, arguments))
        self.order += 1

    def run(self, *, steps: int = 10**9, events: int = 10**9) -> None:
        """Until so many steps were trained, so many events passed, or nothing will ever happen any more."""
        self._look_around()
        for _ in range(events):
            if self.ledger.trained_version >= steps or not self.events:
                return
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
            self._look_around()

    def _look_around(self) -> None:
        self._push()
        self._try_train()
        self._dispatch()
        self._check()

    @property
    def over(self) -> bool:
        """Everything wanted was trained, or all input is walked and nothing lives."""
        wanted = self.batches is not None and self.ledger.next_batch >= self.batches
        return (wanted or (self._exhausted and not self.ledger.live_by_deadline)) and self.ledger.trained_version == self.ledger.next_batch

    @property
    def samples_now(self) -> int:
        """As `Core.samples_per_batch`."""
        return Limits(self.bound, self.samples_per_batch).samples_now(self.ledger.live_by_deadline, self.ledger.next_batch)

    def _check(self) -> None:
        if not self.checked:
            return
        ledger, per_batch = self.ledger, max(self.samples_per_batch, self.most)
        assert self.samples_now <= per_batch, "a smaller P is adopted step by step, and never grows again on the way"
        self.most = self.samples_now
        deadlines = Counter(s.deadline_batch for s in ledger.live())
        assert ledger.settled_samples == sum(not s.waiting for s in ledger.live())
        live = 0
        for d in sorted(deadlines):
            live += deadlines[d]
            assert live <= max(0, (d - ledger.next_batch + 1) * per_batch), f"A4 broken for deadline {d} at batch {ledger.next_batch}"
        self.max_live = max(self.max_live, live)
        self.max_lag = max(self.max_lag, ledger.trained_version - ledger.serving_version)
        assert 0 <= self.free <= self.slots and len(self.tries) <= self.slots, "slots in use and free make the whole"

    # ---- rollout -------------------------------------------------------------------------------------------------------

    @property
    def _exhausted(self) -> bool:
        return self.rows is not None and self.walked >= self.rows

    def apply(self, event: Any) -> None:
        self.ledger.apply(event)
        # Whether one more trajectory of an unfinished sample is ready makes no batch in strict, and looking takes long.
        self.changed |= self.preset.name != "strict" or not isinstance(event, TrajectoryReady | SampleRegistered)
        for sample in (s for s in self.ledger.just_over if not s.evaluation):
            ends = [
                End(t.outcome or "", self.tokens.pop(t.traj_uid, None), t.reward, None if t.reason is None else kind_of(t.reason))
                for t in sample.trajectories
            ]
            self.meter.add(sample.version_tag, "task", "dataset", ends)

    def _dispatch(self) -> None:
        while self.free > 0:
            if not self.queue and not self._register():
                return
            sample, index = self.queue.popleft()
            trajectory = sample.trajectories[index]
            if trajectory.state == RUNNING and trajectory.traj_uid not in self.tries:
                self._send(trajectory.traj_uid)

    def _register(self) -> bool:
        ledger = self.ledger
        live = sum(ledger.live_by_deadline.values())
        if self._exhausted or (self.batches is not None and live >= (self.batches - ledger.next_batch) * self.samples_per_batch):
            return False
        deadline = ledger.serving_version + self.bound
        if deadline < ledger.next_batch or admissible(ledger.live_by_deadline, deadline, ledger.next_batch, self.samples_per_batch) < 1:
            return False
        uid = ledger.next_uid
        self.apply(
            SampleRegistered(
                uid=uid,
                segment=0,
                row_index=self.walked,
                pass_index=0,
                position=self.walked,
                version_tag=ledger.serving_version,
                deadline_batch=deadline,
                n=self.preset.n,
                time=self.now,
            )
        )
        self.walked += 1
        self.queue.extend((ledger.samples[uid], index) for index in range(self.preset.n))
        return True

    def _send(self, traj_uid: str) -> None:
        self.free -= 1
        length = self.draw(self.rng)
        self.length[traj_uid], self.began[traj_uid] = length, self.now
        number = self.tries[traj_uid] = self.order
        self.at(length, self._ended, traj_uid, number)

    def _ended(self, traj_uid: str, number: int) -> None:
        if self.tries.get(traj_uid) != number:
            return  # it was cut, or lost with its engine and sent again
        self._leave_slot(traj_uid)
        trajectory = self.ledger.trajectory(traj_uid)
        assert trajectory is not None and trajectory.state == RUNNING
        sample = self.ledger.samples[trajectory.uid]
        self.generated += self.length[traj_uid]
        tokens = self.tokens[traj_uid] = int(self.length.pop(traj_uid))
        if self.dice.random() < self.faults.discard:
            self.apply(TrajectoryDiscarded(traj_uid=traj_uid, reason="data: scripted", time=self.now))
        else:
            leaf = Leaf(f"{traj_uid}l", {}, {}, tokens, tokens, 1.0)
            reward = float(self.dice.random() < 0.5) if self.faults.filtered else 1.0
            self.apply(TrajectoryReady(traj_uid=traj_uid, leaves=(leaf,), reward=reward, finish_reason="stop", time=self.now))
        self.settle(sample)

    def _leave_slot(self, traj_uid: str) -> None:
        del self.tries[traj_uid]
        self.free += 1

    def settle(self, sample: Sample) -> None:
        """As `Dispatch.settle`; and the filter, which runs before ready."""
        if sample.waiting or sample.batch_id is not None:
            return
        self.changed = True
        ready = sample.in_state(READY)
        if ready and len(ready) < self.preset.min_group:
            self.apply(SampleDiscarded(uid=sample.uid, reason="group too small: scripted", time=self.now))
        elif ready and self.dice.random() < self.faults.filtered:
            self.apply(SampleDiscarded(uid=sample.uid, reason="filtered", time=self.now))

    def cut(self, sample: Sample, reason: str) -> None:
        """As `Dispatch.cut`."""
        for trajectory in sample.in_state(RUNNING):
            traj_uid = trajectory.traj_uid
            if traj_uid in self.tries:
                self._leave_slot(traj_uid)
                self.tokens[traj_uid] = int(self.now - self.began[traj_uid])
                self.wasted += self.now - self.began[traj_uid]
            self.apply(TrajectoryDiscarded(traj_uid=traj_uid, reason=reason, time=self.now))
        self.settle(sample)

    # ---- training ------------------------------------------------------------------------------------------------------

    def _try_train(self) -> None:
        ledger = self.ledger
        if self.busy or not self.changed:
            return
        self.changed = False
        if ledger.trained_version < ledger.next_batch:
            self._step(ledger.trained_version)  # a replay
            return
        if self.batches is not None and ledger.next_batch >= self.batches:
            return
        while (decision := self._decide()).cuts:
            for cut in decision.cuts:
                self.cut(ledger.samples[cut.uid], cut.reason)
        if decision.uids is None:
            self._look_again(decision.again_s)
            return
        for uid in decision.uids:
            sample = ledger.samples[uid]
            assert ledger.next_batch <= sample.deadline_batch, "A3"
            self.staleness.append((ledger.next_batch, ledger.next_batch - sample.version_tag))
        assert len(decision.uids) == self.samples_now or self._exhausted, "a batch is full"
        self.apply(BatchAssembled(batch_id=ledger.next_batch, uids=decision.uids, plan=b"[]", time=self.now))
        self._step(ledger.trained_version)

    def _decide(self) -> Decision:
        ledger = self.ledger
        decision = decide(
            [facts_of(s, self.preset, self.now) for s in ledger.live()],
            ledger.next_batch,
            self.samples_now,
            self.preset,
            now=self.now,
            hold=self.hold,
            short_allowed=self._exhausted,
        )
        self.hold = decision.hold
        return decision

    def _look_again(self, seconds: float | None) -> None:
        """One timer at a time."""
        if seconds is None or (self.timer is not None and self.timer <= self.now + seconds):
            return
        self.timer = self.now + seconds

        def fire(due: float) -> None:
            if self.timer == due:
                self.timer = None
            self.changed = True

        self.at(seconds + 1e-6, fire, self.timer)

    def _step(self, batch_id: int) -> None:
        self.busy = True
        self.at(self.step_s, self._stepped, batch_id, self.life)

    def _stepped(self, batch_id: int, life: int) -> None:
        if life != self.life:
            return  # lost with its trainer
        self.busy = False
        self.stepped.append(self.now)
        skipped = "loss is not finite" if self.dice.random() < self.faults.skip else None
        self.apply(BatchApplied(batch_id=batch_id, epoch=self.ledger.epoch, skipped=skipped, report=b"{}", time=self.now))
        if self.ledger.trained_version % self.checkpoint_every == 0:
            self.commit()

    def commit(self) -> None:
        if self.ledger.trained_version > self.ledger.committed_version:
            self.apply(VersionCommitted(version=self.ledger.trained_version, checkpoint="somewhere", time=self.now))

    def _push(self) -> None:
        """The newest version, one push at a time: what was trained meanwhile is pushed by the next."""
        ledger = self.ledger
        if self.pushing or ledger.serving_version == ledger.trained_version:
            return
        seconds = self.push_s(self.dice)
        if seconds <= 0.0 and not self.faults.push_fails:
            self.apply(VersionServed(version=ledger.trained_version))
            return
        self.pushing = True
        self.at(seconds, self._pushed, ledger.trained_version, ledger.epoch)

    def _pushed(self, version: int, epoch: int) -> None:
        self.pushing = False
        if self.dice.random() >= self.faults.push_fails and epoch == self.ledger.epoch:
            self.apply(VersionServed(version=version))

    # ---- faults --------------------------------------------------------------------------------------------------------

    def _next_fault(self, name: str) -> None:
        mean = getattr(self.faults, name)
        if mean is not None:
            self.at(self.dice.expovariate(1.0) * mean * self.unit_s, self._fault, name)

    def _fault(self, name: str) -> None:
        if getattr(self.faults, name) is not None:
            getattr(self, name)()
            self._next_fault(name)

    def heal(self) -> None:
        """No fault happens any more; what is on its way goes on."""
        self.faults = Faults()

    def kill_engine(self) -> None:
        """Some of what runs is lost and sent again."""
        for traj_uid in [t for t in list(self.tries) if self.dice.random() < 0.5]:
            trajectory = self.ledger.trajectory(traj_uid)
            assert trajectory is not None
            self.apply(TrajectoryRetried(traj_uid=traj_uid, kind="infrastructure", reason="killed"))
            self._leave_slot(traj_uid)
            self.queue.appendleft((self.ledger.samples[trajectory.uid], trajectory.index))

    def evaluate(self) -> None:
        """Evaluation traffic takes slots for a while, and is in no bound."""
        ledger = self.ledger
        if any(ledger.evaluated()):
            return
        taken, first_uid, version = self.dice.randint(0, self.free), ledger.next_uid, ledger.serving_version
        self.free -= taken
        self.apply(EvaluationBegan(first_uid=first_uid, rows=2, n=1, version=version, time=self.now))

        def ended() -> None:
            self.free += taken
            if any(sample.uid == first_uid for sample in ledger.evaluated()):  # or the driver was restarted meanwhile
                rewards, failed = ((0, 0, 1.0),), ((1, 0, "evaluation: scripted"),)
                self.apply(EvaluationEnded(first_uid=first_uid, epoch=0, report=b"{}", rewards=rewards, failed=failed, time=self.now))

        self.at(self.unit_s, ended)

    def lose_trainer(self) -> None:
        """It comes back at its last checkpoint, and gets the batches after it again."""
        self.life += 1
        self.busy, self.changed = False, True
        if self.ledger.committed_version < self.ledger.trained_version:
            self.apply(EpochBegan(epoch=self.ledger.epoch + 1, version=self.ledger.committed_version))

    def lose_host(self) -> None:
        """All rows in memory may be gone: ready ones run again, batches that can not be replayed are unmade, newest first."""
        ledger = self.ledger
        for sample in list(ledger.live()):
            for trajectory in sample.in_state(READY):
                if self.dice.random() < 0.7:
                    self.apply(RowsLost(traj_uid=trajectory.traj_uid, reason="host"))
        self.lose_trainer()
        first = next((b for b in sorted(ledger.batches) if b >= ledger.trained_version and self.dice.random() < 0.5), None)
        for batch_id in sorted((b for b in ledger.batches if first is not None and b >= first), reverse=True):
            uids = ledger.batches[batch_id].uids
            rows = [t.traj_uid for uid in uids for t in ledger.samples[uid].in_state(CONSUMED)]
            self.apply(BatchUnmade(batch_id=batch_id, lost=frozenset(r for r in rows if batch_id == first or self.dice.random() < 0.7)))
            self.staleness = [(b, s) for b, s in self.staleness if b < batch_id]
            self.most = max(self.most, len(uids))
        self.restart()

    def restart(self) -> None:
        """The driver's: what runs has no request any more."""
        for traj_uid in list(self.tries):
            self._leave_slot(traj_uid)
        self.queue.clear()
        self.hold = None
        for sample in list(self.ledger.evaluated()):
            self.apply(SampleDiscarded(uid=sample.uid, reason="evaluation: the driver was restarted", time=self.now))
        for sample in list(self.ledger.live()):
            self.queue.extend((sample, t.index) for t in sample.in_state(RUNNING))
            self.settle(sample)

    def change_config(self) -> None:
        """Another S and P, over REST or by a restart with another file: what lives keeps its deadline, and P shrinks as A4 lets it."""
        self.samples_per_batch = self.dice.randint(1, min(12, 2 * self.samples_per_batch))
        self.bound = self.dice.randint(0, 4)
        self.changed = True
        if self.dice.random() < 0.5:
            self.lose_trainer()
            self.restart()
