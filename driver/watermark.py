"""How many trajectories should be in flight: the smallest of four caps, and which one binds.

Observations are pushed in, a decision is read out; no clock, no loop, no client. The caps gate new samples only: retries,
siblings and continuations always go, so a started sample is never starved by its successors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollout.load import Load

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
class Rate:
    """Exponentially weighted mean of a duration or size; None until the first observation."""

    weight: float = 0.2
    value: float | None = None

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + self.weight * (value - self.value)


@dataclass
class Watermark:
    """`batch_trajectories` = P * n. Rates are learned from what happens; until then demand does not bind."""

    batch_trajectories: int
    batch_period_s: Rate = field(default_factory=Rate)
    in_flight_s: Rate = field(default_factory=lambda: Rate(weight=0.02))

    def observe_batch(self, period_s: float) -> None:
        """Time from the start of one training step to the start of the next that the trainer could have made."""
        self.batch_period_s.observe(period_s)

    def observe_trajectory(self, in_flight_s: float) -> None:
        """From dispatch to ready."""
        self.in_flight_s.observe(in_flight_s)

    def decide(
        self,
        *,
        kv_slots: int,
        in_flight: int,
        ready: int,
        admissible_samples: int,
        n: int,
        store_free_bytes: int,
        sample_bytes: int,
        kept_share: float = 1.0,
    ) -> Decision:
        """The target now.

        kv_cap: what the engines can decode at once (`kv_room`), and a little queue so that none idles.
        staleness_cap: what is in flight plus what A4 still lets in.
        demand_cap: Little's law, rate the trainer eats at times the time in flight, plus two batches less what lies ready: ready
        piling up lowers it, a waiting trainer (ready = 0) raises it. Of what is in flight the filter keeps `kept_share`, so for what the
        trainer takes that much more has to be under way.
        store_cap: what is in flight plus what the store has room for at worst-case size.
        """
        kv_cap = max(n, kv_slots + math.ceil(kv_slots * 0.25))  # a sample is the least there can be
        staleness_cap = in_flight + admissible_samples * n
        store_cap = in_flight + (store_free_bytes // max(1, sample_bytes)) * n
        if self.batch_period_s.value is None or self.in_flight_s.value is None:
            demand_cap = max(kv_cap, 2 * self.batch_trajectories)
        else:
            per_s = self.batch_trajectories / max(1e-6, self.batch_period_s.value)
            wanted = math.ceil(per_s * self.in_flight_s.value) + max(n, 2 * self.batch_trajectories - ready)
            demand_cap = math.ceil(wanted / max(LEAST_KEPT, kept_share))
        caps = Caps(kv_cap, staleness_cap, demand_cap, store_cap)
        named = {"kv": kv_cap, "staleness": staleness_cap, "demand": demand_cap, "store": store_cap}
        binding = min(named, key=lambda name: named[name])
        return Decision(named[binding], binding, caps)
