"""How others schedule rollouts, re-implemented as policies in a discrete-event model beside `driver/whatif.py`, for comparison with it.

    sync            generate a batch, train it, generate the next
    one_step_off    batch k+1 is generated, whole, while batch k trains
    group_slots     the n slots of a group are free again when its longest answer ends; bound S as in A4
    windowed_fifo   batches take samples strictly in the order of registration, and at most `window` batches of them are registered and
                    not trained: a straggler holds all behind it
    dropping        batches take the oldest ready samples at once; what would be older than S is thrown away, running or ready
    partial         as A4, but a sample is taken with n - 1 of its n: the straggler's work is thrown away
    longest_first   A4 by somebody who knows every length beforehand: of each P samples the longest is registered first

They are policies, not programs: what they are named after may do more, or less, than is modelled here. C slots, B = P * n trajectories, tau
for a batch, no lag, no queue, no time to score, as in the model of A4.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from driver.whatif import Facts, Reached, drawn, simulate


@dataclass(frozen=True)
class Outcome:
    """`wasted` is the share of decoded seconds that no batch trained."""

    fraction: float
    staleness_mean: float
    staleness_max: int
    wasted: float = 0.0

    @classmethod
    def of(cls, reached: Reached) -> Outcome:
        return cls(reached.fraction, reached.staleness_mean, reached.staleness_max)


def sync(facts: Facts, batches: int, seed: int = 0) -> Outcome:
    return Outcome.of(simulate(facts, 0, batches=batches, seed=seed))


def one_step_off(facts: Facts, batches: int, seed: int = 0) -> Outcome:
    """Each batch's samples start together on free slots; the next batch starts when both this generation and the training have ended."""
    draws = drawn(facts.lengths_s, seed)
    took = []
    for _ in range(batches):
        free = [0.0] * facts.slots
        heapq.heapify(free)
        ends = 0.0
        for _ in range(facts.batch_trajectories):
            end = heapq.heappop(free) + next(draws)
            heapq.heappush(free, end)
            ends = max(ends, end)
        took.append(max(ends, facts.tau_s))
    per_s = facts.batch_trajectories / statistics.fmean(took[batches // 10 :])
    return Outcome(per_s / facts.bound_per_s, 1.0, 1)


def group_slots(facts: Facts, bound: int, batches: int, seed: int = 0) -> Outcome:
    """A group is one request of the longest of n, on C / n slots."""
    draws = drawn(facts.lengths_s, seed)
    longest = (max(itertools.islice(draws, facts.n)) for _ in itertools.count())
    groups = Facts(max(1, facts.slots // facts.n), facts.samples, 1, facts.lengths_s, training_s=facts.tau_s, ahead=0)
    reached = simulate(groups, bound, batches=batches, draws=longest)
    per_s = reached.per_s * facts.n
    return Outcome(per_s / facts.bound_per_s, reached.staleness_mean, reached.staleness_max)


def partial(facts: Facts, bound: int, batches: int, seed: int = 0) -> Outcome:
    return _Model(facts, bound, seed, enough=facts.n - 1).run(batches)


def longest_first(facts: Facts, bound: int, batches: int, seed: int = 0) -> Outcome:
    draws = drawn(facts.lengths_s, seed)

    def windows() -> Iterator[float]:
        while True:
            window = [list(itertools.islice(draws, facts.n)) for _ in range(facts.samples)]
            yield from itertools.chain.from_iterable(sorted(window, key=max, reverse=True))

    return Outcome.of(simulate(facts, bound, batches=batches, draws=windows()))


def ceiling(facts: Facts, bound: int) -> float:
    """What no policy exceeds that registers P samples a version, in an order that does not know their lengths, and drops none: the longest
    of them, registered when the version was served, must be ready when batch v + S starts, so S + 1 batches take its time and one tau."""
    drawn_at_once = drawn(facts.lengths_s, 0)
    longest_s = statistics.fmean(max(itertools.islice(drawn_at_once, facts.batch_trajectories)) for _ in range(2000))
    return min(1.0, (bound + 1) * facts.tau_s / (longest_s + facts.tau_s))


def windowed_fifo(facts: Facts, window: int, batches: int, seed: int = 0) -> Outcome:
    return _Model(facts, window - 1, seed, in_order=True).run(batches)


def dropping(facts: Facts, bound: int, batches: int, seed: int = 0) -> Outcome:
    return _Model(facts, bound, seed, drops=True).run(batches)


@dataclass
class _Sample:
    tag: int
    missing: int
    spent_s: float = 0.0
    gone: bool = False


class _Model:
    """One loop for the policies that differ in what a batch may take and what happens to the rest."""

    def __init__(
        self, facts: Facts, bound: int, seed: int, *, enough: int | None = None, in_order: bool = False, drops: bool = False
    ) -> None:
        self.facts, self.bound = facts, bound
        self.enough = facts.n if enough is None else enough
        self.in_order, self.drops = in_order, drops
        self.draws: Iterator[float] = drawn(facts.lengths_s, seed)
        self.live: deque[_Sample] = deque()
        self.registered = 0
        self.dropped = 0

    def ready(self, sample: _Sample) -> bool:
        return sample.missing <= self.facts.n - self.enough

    def choose(self, batch: int) -> list[_Sample] | None:
        samples = self.facts.samples
        if self.in_order:
            first = list(itertools.islice(self.live, samples))
            return first if len(first) == samples and all(map(self.ready, first)) else None
        ready = [sample for sample in self.live if self.ready(sample)][:samples]
        if len(ready) < samples:
            return None
        if self.drops:
            return ready
        taken, left = set(map(id, ready)), 0
        for sample in self.live:
            left += id(sample) not in taken
            if left > (sample.tag + self.bound - batch) * samples:
                return None
        return ready

    def run(self, batches: int) -> Outcome:
        facts, n = self.facts, self.facts.n
        order = itertools.count()
        events: list[tuple[float, int, _Sample | None, float]] = []
        waiting: deque[_Sample] = deque()
        now, version, free, training = 0.0, 0, facts.slots, False
        used_s = wasted_s = 0.0
        ages: list[int] = []
        warm_at, warm = 0.0, max(1, batches // 10)
        while version < batches:
            if not training and (chosen := self.choose(version)) is not None:
                for sample in chosen:
                    ages.append(version - sample.tag)
                    sample.gone = True
                    used_s += sample.spent_s
                self.live = deque(sample for sample in self.live if not sample.gone)
                if self.drops:  # what could only be taken later than S allows
                    old = [sample for sample in self.live if version + 1 - sample.tag > self.bound]
                    for sample in old:
                        sample.gone = True
                        wasted_s += sample.spent_s
                    self.dropped += len(old)
                    self.live = deque(sample for sample in self.live if not sample.gone)
                    freed, cut_s = self._cut(events, waiting, now)
                    free, wasted_s = free + freed, wasted_s + cut_s
                training = True
                heapq.heappush(events, (now + facts.tau_s, next(order), None, 0.0))
            while free:
                if not waiting:
                    if self.registered - self.dropped >= (self.bound + version + 1) * facts.samples:
                        break
                    sample = _Sample(version, n)
                    self.registered += 1
                    self.live.append(sample)
                    waiting.extend([sample] * n)
                sample = waiting.popleft()
                free -= 1
                length_s = next(self.draws)
                heapq.heappush(events, (now + length_s, next(order), sample, length_s))
            now, _, ended, length_s = heapq.heappop(events)
            if ended is None:
                training, version = False, version + 1
                if version == warm:
                    warm_at = now
                    ages.clear()
                    used_s = wasted_s = 0.0
                continue
            free += 1
            ended.missing -= 1
            ended.spent_s += length_s
            if ended.gone:  # its batch went without it
                wasted_s += length_s
        per_s = (version - warm) * facts.batch_trajectories / (now - warm_at)
        wasted = wasted_s / (used_s + wasted_s) if wasted_s else 0.0
        return Outcome(per_s / facts.bound_per_s, statistics.fmean(ages), max(ages), wasted)

    @staticmethod
    def _cut(events: list[tuple[float, int, _Sample | None, float]], waiting: deque[_Sample], now: float) -> tuple[int, float]:
        """Running trajectories of dropped samples end at once: how many slots that frees, and the seconds they had run."""
        for sample in [sample for sample in waiting if sample.gone]:
            waiting.remove(sample)
        kept = [event for event in events if event[2] is None or not event[2].gone]
        cut = [event for event in events if event[2] is not None and event[2].gone]
        events[:] = kept
        heapq.heapify(events)
        return len(cut), sum(now - (ends_at - length_s) for ends_at, _, _, length_s in cut)
