"""Which fraction of `min(C / E[L], B / tau)` a run can reach under each staleness bound S: a small discrete-event model of it.

    sample ──A4 admits──▶ n trajectories ──a free slot of C──▶ decoded ──scored──▶ ready ──P oldest, dry-run──▶ trained (tau)
       ▲                                                                                                         │
       └────────────────────────────── serving version ◀── gate open ◀── pause ◀── publish lag ◀────────────────┘

The rules are those of the driver: registration by A4 and by how many may be in flight, oldest first, the dry-run that holds a batch,
nothing dropped. Lengths are drawn from a trace, or from what the run has seen; everything else is a constant. Without lag, pause, scoring
and queue it is the model that the project's figures come from. Standard library only, so that a process that answers one question with it
starts in a tenth of a second: the facts come as JSON on its standard input.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

BOUNDS = (0, 1, 2, 3, 5, 7, 10)
GOOD = 0.85  # a bound that reaches this is worth naming; beyond it a larger one buys little
TRAJECTORIES = 80_000  # simulated for each bound: some 0.15 s of computing, and fractions that repeat within about 0.01
FEWEST_BATCHES, MOST_BATCHES = 60, 300


@dataclass(frozen=True)
class Facts:
    """A run as the model sees it. Seconds throughout; `lengths_s` are the decode times that trajectories are drawn from."""

    slots: int  # C: requests that the engines decode at once
    samples: int  # P
    n: int
    lengths_s: tuple[float, ...]
    training_s: float | None = None  # tau, of one batch; None: training takes exactly as long as generation, the hardest case
    ahead: int | None = None  # trajectories in flight beyond the slots, waiting at an engine; None: the rest of one sample
    overhead_s: float = 0.0  # of the trainer for each batch, beyond tau
    publish_s: float = 0.0  # from a batch's end to the shut gates
    pause_s: float = 0.0  # gates shut
    score_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.lengths_s or min(self.lengths_s) <= 0:
            raise ValueError("the model needs lengths, and each above 0")
        if min(self.slots, self.samples, self.n) < 1:
            raise ValueError(f"slots, samples and n must be at least 1, not {self.slots}, {self.samples} and {self.n}")

    @property
    def batch_trajectories(self) -> int:
        return self.samples * self.n

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.lengths_s)

    @property
    def tau_s(self) -> float:
        return self.batch_trajectories * self.mean_s / self.slots if self.training_s is None else self.training_s

    @property
    def bound_per_s(self) -> float:
        """min(C / E[L], B / tau), in trajectories a second: what neither side can exceed."""
        return min(self.slots / self.mean_s, self.batch_trajectories / self.tau_s if self.tau_s else math.inf)


@dataclass(frozen=True)
class Reached:
    """What one bound reaches. `held` is the share of the time in which P samples were ready and the batch waited for an older one."""

    bound: int
    fraction: float
    per_s: float
    staleness_mean: float
    staleness_max: int
    held: float


def what_if(facts: Facts, bounds: Sequence[int] = BOUNDS, *, seed: int = 0, batches: int | None = None) -> list[Reached]:
    """Each bound on the same draws of lengths, so that they differ by the bound alone."""
    if batches is None:
        batches = max(FEWEST_BATCHES, min(MOST_BATCHES, TRAJECTORIES // facts.batch_trajectories))
    return [simulate(facts, bound, batches=batches, seed=seed) for bound in bounds]


def drawn(lengths_s: Sequence[float], seed: int) -> Iterator[float]:
    """For ever, each as likely as it is frequent."""
    rng = random.Random(seed)
    return itertools.chain.from_iterable(rng.choices(lengths_s, k=1024) for _ in itertools.count())


def simulate(facts: Facts, bound: int, *, batches: int = 300, seed: int = 0, draws: Iterator[float] | None = None) -> Reached:
    """One bound, over the last nine tenths of `batches` batches."""
    samples, n, slots, score_s = facts.samples, facts.n, facts.slots, facts.score_s
    most = slots + (n - 1 if facts.ahead is None else facts.ahead)
    draws = drawn(facts.lengths_s, seed) if draws is None else draws
    busy_s = facts.tau_s + facts.overhead_s
    publish_s, pause_s = facts.publish_s, facts.pause_s

    now = paused_s = 0.0  # the engines' clock is `now - paused_s`, and stands still in a pause
    number = itertools.count()
    decoding: list[tuple[float, int, int]] = []  # end on the engines' clock, order, sample
    waiting: deque[int] = deque()  # sent, without a slot
    scoring: deque[tuple[float, int]] = deque()
    later: list[tuple[float, int, str]] = []  # the trainer's and the push's next steps
    tags: list[int] = []  # by sample
    missing: list[int] = []
    live: dict[int, int] = {}  # samples by tag, the oldest first; tags only grow
    ready: dict[int, int] = {}
    registered = ready_samples = trained = taken = serving = 0
    pushing: int | None = None
    training = shut = False
    free = slots
    holding_since: float | None = None
    held_s = 0.0
    ages: list[tuple[int, int]] = []
    warm = max(1, batches // 10)
    warm_at = 0.0

    def feasible(take: dict[int, int]) -> bool:
        """The dry-run: what stays behind fits, tag by tag, into the batches left to it."""
        behind = 0
        for tag, count in live.items():
            behind += count - take.get(tag, 0)
            if behind > (tag + bound - taken) * samples:
                return False
        return True

    while trained < batches:
        # What can be done at this instant: a batch, then registrations, then slots.
        if not training and ready_samples >= samples:
            take: dict[int, int] = {}
            left = samples
            for tag, count in ready.items():
                take[tag] = min(count, left)
                left -= take[tag]
                if not left:
                    break
            if feasible(take):
                if holding_since is not None:
                    held_s, holding_since = held_s + now - holding_since, None
                for tag, count in take.items():
                    ages.append((taken - tag, count))
                    for counts in (ready, live):
                        counts[tag] -= count
                        if not counts[tag]:
                            del counts[tag]
                ready_samples -= samples
                taken += 1
                training = True
                heapq.heappush(later, (now + busy_s, next(number), "trained"))
            elif holding_since is None:
                holding_since = now
        if not shut:
            room = (serving + bound + 1) * samples - registered
            while True:
                while free and waiting:
                    free -= 1
                    heapq.heappush(decoding, (now - paused_s + next(draws), next(number), waiting.popleft()))
                if room <= 0 or slots - free + len(waiting) + n > most:
                    break
                room -= 1
                live[serving] = live.get(serving, 0) + 1
                tags.append(serving)
                missing.append(n)
                waiting.extend([registered] * n)
                registered += 1

        # The next thing that happens by itself.
        at_decoded = decoding[0][0] + paused_s if decoding and not shut else math.inf
        at_scored = scoring[0][0] if scoring else math.inf
        at_later = later[0][0] if later else math.inf
        if at_decoded <= at_later and at_decoded <= at_scored:
            now = at_decoded
            sample = heapq.heappop(decoding)[2]
            free += 1
            if score_s:
                scoring.append((now + score_s, sample))
                continue
        elif at_scored <= at_later:
            assert at_scored < math.inf, "nothing would ever happen again (L0)"
            now, sample = scoring.popleft()
        else:
            now, _, what = heapq.heappop(later)
            if what == "trained":
                training = False
                trained += 1
                if trained == warm:
                    warm_at, held_s = now, 0.0
                    ages.clear()
            elif what == "shut":
                shut = True
                heapq.heappush(later, (now + pause_s, next(number), "open"))
            else:
                shut, paused_s = False, paused_s + pause_s
                assert pushing is not None
                serving, pushing = pushing, None
            if pushing is None and trained > serving:
                if publish_s or pause_s:
                    pushing = trained
                    heapq.heappush(later, (now + publish_s, next(number), "shut"))
                else:
                    serving = trained
            continue
        missing[sample] -= 1
        if not missing[sample]:
            ready_samples += 1
            tag = tags[sample]
            if tag in ready:
                ready[tag] += 1
            else:
                ready = dict(sorted((ready | {tag: 1}).items()))
    span_s = now - warm_at
    counted = sum(count for _, count in ages)
    per_s = (trained - warm) * facts.batch_trajectories / span_s
    return Reached(
        bound=bound,
        fraction=per_s / facts.bound_per_s,
        per_s=per_s,
        staleness_mean=sum(age * count for age, count in ages) / counted,
        staleness_max=max(age for age, _ in ages),
        held=held_s / span_s,
    )


def advice(found: Sequence[Reached], bound: int) -> str:
    """`S = 2 reaches 0.46 of the bound; S = 5 would reach 0.86`: this one, and the smallest that is worth naming beside it."""
    here = next(reached for reached in found if reached.bound == bound)
    words = f"S = {bound} reaches {here.fraction:.2f} of the bound"
    larger = [reached for reached in found if reached.bound > bound and reached.fraction >= here.fraction + 0.05]
    better = next((reached for reached in larger if reached.fraction >= GOOD), max(larger, key=lambda r: r.fraction, default=None))
    return words if better is None else f"{words}; S = {better.bound} would reach {better.fraction:.2f}"


def clipped(lengths: Sequence[float], most: float) -> tuple[float, ...]:
    """Lengths as a run would see them, whose answers end at `most` tokens."""
    return tuple(min(length, most) for length in lengths)


def question(facts: Facts, bounds: Sequence[int], seed: int = 0) -> bytes:
    """What `main` reads."""
    return json.dumps({"facts": asdict(facts), "bounds": list(bounds), "seed": seed}).encode()


def answers(reply: bytes) -> list[Reached]:
    """What `main` wrote."""
    return [Reached(**item) for item in json.loads(reply)]


def main() -> None:
    """One question on standard input, its answers on standard output."""
    asked: dict[str, Any] = json.load(sys.stdin)
    facts = Facts(**(asked["facts"] | {"lengths_s": tuple(asked["facts"]["lengths_s"])}))
    json.dump([asdict(reached) for reached in what_if(facts, asked["bounds"], seed=asked["seed"])], sys.stdout)


def with_tokens(facts: Facts, tokens: Sequence[float], token_s: float) -> Facts:
    """The same run with answers of so many tokens, at so many seconds for each."""
    return replace(facts, lengths_s=tuple(max(1.0, count) * token_s for count in tokens))


if __name__ == "__main__":
    main()
