"""How many trajectories should be in flight: the smallest of four caps, and which one binds.

Observations are pushed in, a decision is read out; no clock, no loop, no client. The caps gate new samples only: retries,
siblings and continuations always go, so a started sample is never starved by its successors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from driver.measured import Measured
from rollout.load import Load

AHEAD = 0.25  # of what engines run at once, so much more is sent: it waits there, and a slot that is free has its next request at once
LEAST_KEPT = 0.05  # what the demand is divided by: a filter that takes nearly everything does not ask for the moon


@dataclass(frozen=True)
class Caps:
    """All in trajectories."""

    kv_cap: int
    staleness_cap: int
    demand_cap: int
    store_cap: int


@dataclass(frozen=True)
class Decision:
    watermark: int
    binding: str
    caps: Caps


@dataclass(frozen=True)
class KvRoom:
    """How many requests the open engines run at once, and what sets that number, in words."""

    slots: int
    bound: str


def kv_room(engines: Iterable[tuple[Load | None, int]], *, max_running: int, mean_tokens: float | None) -> KvRoom:
    """Of the open engines, each with its last report or None, and how many requests it is sent at most.

    An engine runs as many requests as it says it can, or as its KV memory holds at the mean length of a request so far; before it has
    reported, the `max_running` that was configured.
    """
    slots: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for load, max_open in engines:
        at_once, bound = _at_once(load, max_open, max_running, mean_tokens)
        slots[bound] += at_once
        counts[bound] += 1
    words = ", ".join(
        f"{slots[bound]} requests at once on {count} {'engine' if count == 1 else 'engines'} by {bound}" for bound, count in counts.items()
    )
    return KvRoom(slots.total(), words or "no engine is open")


def _at_once(load: Load | None, max_open: int, max_running: int, mean_tokens: float | None) -> tuple[int, str]:
    """Of one engine: the number, and what sets it."""
    if load is None:
        at_once, bound = max_running, "rollout.max_running_requests"
    else:
        at_once, bound = load.max_running, "the engine's own limit"
        if mean_tokens and load.max_total_tokens < at_once * mean_tokens:
            at_once = max(1, int(load.max_total_tokens / mean_tokens))
            bound = f"KV memory of {load.max_total_tokens} tokens at a mean of {mean_tokens:.0f}"
    return (at_once, bound) if at_once <= max_open else (max_open, "rollout.max_open_requests")


@dataclass
class Watermark:
    """`batch_trajectories` = P * n. Until the run has measured its own times, demand does not bind."""

    batch_trajectories: int
    measured: Measured = field(default_factory=Measured)

    def demand(self) -> tuple[float, str] | None:
        """(trajectories a second that are wanted, by which stage): the slowest of those behind the engines. None: not known yet."""
        training_s = self.measured.training_s.value
        if training_s is None:
            return None
        trainer = (self.batch_trajectories / max(1e-6, training_s), "the trainer")
        if self.measured.reward.per_s is None:
            return trainer
        scored = (self.measured.reward.per_s / self.measured.leaves.or_else(1.0), "the reward service")
        return min(trainer, scored)

    def wanted(self) -> str:
        """What a demand that binds is made of, in words."""
        demand, working_s = self.demand(), self.working_s
        if demand is None or working_s is None:
            return "no batch was trained yet"
        per_s, stage = demand
        return f"{stage} takes {per_s:.3g} trajectories a second, a sample is in work for {working_s:.3g} s, and two batches may lie ready"

    @property
    def working_s(self) -> float | None:
        """How long a sample takes when it waits for nobody: its slowest trajectory's time on engines, with tools, and at the scorer."""
        sample_s = self.measured.sample_s.value
        return None if sample_s is None else sample_s + self.measured.scorer_s.or_else(0.0)

    def decide(
        self,
        *,
        kv_slots: int,
        in_flight: int,
        aside: int,
        ready: int,
        admissible_samples: int,
        n: int,
        store_free_bytes: int,
        sample_bytes: int,
        kept_share: float = 1.0,
    ) -> Decision:
        """The target now.

        kv_cap: what the engines can decode at once (`kv_room`), a little queue so that none idles, and those in flight that want no slot
        now (`aside`: with a tool, or at the scorer): in flight is not decoding.
        staleness_cap: what is in flight plus what A4 still lets in.
        demand_cap: Little's law: what the slowest stage behind the engines ends a second, times what a sample takes when it waits for
        nobody, plus two batches, less what is `ready`. Ready piling up lowers it, a waiting trainer raises it. In flight and ready
        together are what is live: a number that only registrations and batches change, so holding it makes no waves. It is made of
        working times alone, so it stands still while engines, scorers or the trainer fail; and what queues before a slow scorer is in
        flight, so that queue is no longer than the two batches. Of what is in flight
        the filter keeps `kept_share`: for what the trainer takes that much more has to be under way.
        store_cap: what is in flight plus what the store has room for at worst-case size.
        """
        kv_cap = max(n, kv_slots + math.ceil(kv_slots * AHEAD)) + aside  # a sample is the least there can be
        staleness_cap = in_flight + admissible_samples * n
        store_cap = in_flight + (store_free_bytes // max(1, sample_bytes)) * n
        demand, working_s = self.demand(), self.working_s
        if demand is None or working_s is None:
            demand_cap = max(kv_cap, 2 * self.batch_trajectories)
        else:
            per_s, _ = demand
            wanted = math.ceil(per_s * working_s) + 2 * self.batch_trajectories - ready
            demand_cap = max(n, math.ceil(wanted / max(LEAST_KEPT, kept_share)))
        caps = Caps(kv_cap, staleness_cap, demand_cap, store_cap)
        named = {"kv": kv_cap, "staleness": staleness_cap, "demand": demand_cap, "store": store_cap}
        binding = min(named, key=lambda name: named[name])
        return Decision(named[binding], binding, caps)
