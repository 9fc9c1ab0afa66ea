"""A run in miniature, in simulated time, around the real watermark: engines, tools, scorers and a trainer with queues before each.

The product's decisions (`Watermark.decide`, A4's `admissible` and `feasible`) are made on the product's own measurements (`Measured`),
pushed in where the driver pushes them. Engines can fail for a while: every request there is lost, and tried again each half second.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from driver.batcher import admissible, feasible
from driver.measured import Measured
from driver.watermark import Decision, Watermark

AGAIN_S = 0.5


@dataclass(eq=False)
class Traj:
    sample: Sample
    turns: int
    lost: bool = False
    tries: int = 0
    engine_s: float = 0.0
    aside_s: float = 0.0
    asked_at: float = 0.0


@dataclass(eq=False)
class Sample:
    tag: int
    missing: int
    worked: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Look:
    """Taken at each decision."""

    at: float
    batch: int
    decision: Decision
    in_flight: int
    running: int
    scoring: int
    ready: int


@dataclass
class Plant:
    lengths_s: Sequence[float]
    slots: int
    samples: int
    n: int
    bound: int
    training_s: float
    scorers: int = 1000
    scorer_s: float = 0.01
    turns: int = 1
    tool_s: float = 0.0
    tools: int | None = None  # so many run at once; None: any number
    storm: tuple[float, float] = (math.inf, math.inf)
    seed: int = 0
    looks: list[Look] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.measured = Measured()
        self.watermark = Watermark(self.samples * self.n, self.measured)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.engine_queue: deque[Traj] = deque()
        self.running: set[Traj] = set()
        self.tool_queue: deque[Traj] = deque()
        self.in_tool = 0
        self.score_queue: deque[Traj] = deque()
        self.scoring = self.at_scorer = 0
        self.scored = self.scored_before = 0
        self.fewest = 0
        self.live: list[Sample] = []
        self.version = 0
        self.next_batch = 0
        self.training = False
        self.in_flight = 0
        self.applied_at: list[float] = []
        self.ages: list[int] = []

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), what))

    @property
    def failing(self) -> bool:
        return self.storm[0] <= self.now < self.storm[1]

    def run(self, batches: int, until: float = math.inf) -> Plant:
        self.later(1.0, self.look)
        if self.storm[0] < math.inf:
            self.later(self.storm[0], self.fail)
        while self.version < batches and self.now < until:
            self.train()
            self.dispatch()
            self.now, _, what = heapq.heappop(self.events)
            what()
        return self

    # ---- the product's side: admission, batches, measurements ----

    def by_deadline(self) -> Counter[int]:
        return Counter(sample.tag + self.bound for sample in self.live)

    def ready(self) -> int:
        return sum(self.n - sample.missing for sample in self.live)

    def dispatch(self) -> None:
        while True:
            deadline = self.version + self.bound
            if deadline < self.next_batch:
                return
            asking = len(self.engine_queue) + len(self.running)
            decision = self.watermark.decide(
                kv_slots=self.slots,
                in_flight=self.in_flight,
                aside=self.in_flight - asking,
                ready=self.ready(),
                admissible_samples=admissible(self.by_deadline(), deadline, self.next_batch, self.samples),
                n=self.n,
                store_free_bytes=1 << 60,
                sample_bytes=1,
            )
            self.looks.append(Look(self.now, self.version, decision, self.in_flight, len(self.running), self.scoring, self.ready()))
            if self.in_flight + self.n > decision.watermark:
                return
            sample = Sample(self.version, self.n)
            self.live.append(sample)
            self.in_flight += self.n
            for _ in range(self.n):
                self.ask(Traj(sample, self.turns))

    def train(self) -> None:
        ready = [sample for sample in self.live if not sample.missing][: self.samples]
        if self.training or len(ready) < self.samples:
            return
        behind = Counter(sample.tag + self.bound for sample in self.live if sample not in ready)
        if not feasible(behind, self.next_batch + 1, self.samples):
            return
        self.ages += [self.next_batch - sample.tag for sample in ready]
        self.live = [sample for sample in self.live if sample not in ready]
        self.next_batch += 1
        self.training = True

        def applied() -> None:
            self.training = False
            self.version += 1
            self.applied_at.append(self.now)
            self.measured.training_s.observe(self.training_s)

        self.later(self.training_s, applied)

    def look(self) -> None:
        """Once a second, as `Scoring.look`."""
        self.measured.reward.look(1.0, self.scored - self.scored_before, self.fewest, self.scorer_s + 0.1)
        self.scored_before, self.fewest = self.scored, self.scoring
        self.later(1.0, self.look)

    # ---- the world's side ----

    def ask(self, traj: Traj) -> None:
        traj.asked_at = self.now
        self.engine_queue.append(traj)
        self.fill()

    def fill(self) -> None:
        while self.engine_queue and len(self.running) < self.slots:
            traj = self.engine_queue.popleft()
            self.running.add(traj)
            traj.tries += 1
            seconds, ends = (AGAIN_S, self.lose) if self.failing else (self.rng.choice(self.lengths_s) / self.turns, self.decoded)
            self.later(seconds, partial(ends, traj, traj.tries))

    def fail(self) -> None:
        for traj in list(self.running):
            self.lose(traj, traj.tries)

    def lose(self, traj: Traj, tries: int) -> None:
        if traj.tries == tries:
            self.running.discard(traj)
            traj.tries += 1  # what was to come of this one comes no more
            traj.lost = True
            self.ask(traj)

    def decoded(self, traj: Traj, tries: int) -> None:
        if traj.tries != tries:
            return
        self.running.discard(traj)
        traj.engine_s += self.now - traj.asked_at
        traj.turns -= 1
        if traj.turns:
            self.tool_queue.append(traj)
            traj.asked_at = self.now
            self.use_tools()
        else:
            if not traj.lost:
                self.measured.trajectory(engine_s=traj.engine_s, aside_s=traj.aside_s, tokens=1)
                traj.sample.worked.append(traj.engine_s + traj.aside_s)
            self.scoring += 1
            traj.asked_at = self.now
            self.score_queue.append(traj)
            self.score()
        self.fill()

    def use_tools(self) -> None:
        while self.tool_queue and (self.tools is None or self.in_tool < self.tools):
            traj = self.tool_queue.popleft()
            self.in_tool += 1

            def answered(traj: Traj = traj) -> None:
                self.in_tool -= 1
                traj.aside_s += self.now - traj.asked_at
                self.ask(traj)
                self.use_tools()

            self.later(self.tool_s, answered)

    def score(self) -> None:
        while self.score_queue and self.at_scorer < self.scorers:
            traj = self.score_queue.popleft()
            self.at_scorer += 1

            def scored(traj: Traj = traj) -> None:
                self.at_scorer -= 1
                self.scoring -= 1
                self.scored += 1
                self.fewest = min(self.fewest, self.scoring)
                self.in_flight -= 1
                traj.sample.missing -= 1
                if len(traj.sample.worked) == self.n and not traj.sample.missing:
                    self.measured.sample_s.observe(max(traj.sample.worked))
                self.measured.scored(self.now - traj.asked_at, self.scorer_s)
                self.score()

            self.later(self.scorer_s, scored)

    # ---- what is asked of it ----

    def per_s(self, warm: int) -> float:
        return (len(self.applied_at) - warm) * self.samples * self.n / (self.applied_at[-1] - self.applied_at[warm - 1])

    def by_batch(self, value: Callable[[Look], float], warm: int) -> list[float]:
        """The mean of a value in each batch's time."""
        found: dict[int, list[float]] = {}
        for look in self.looks:
            found.setdefault(look.batch, []).append(value(look))
        return [sum(values) / len(values) for batch, values in sorted(found.items()) if batch >= warm]
