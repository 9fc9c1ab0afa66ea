"""The discrete-event model of the hard bound (the contract's A4), kept as it was given: full batches, no lag, no queue, no discards.

Trajectory slots, oldest-first batches. Batch b may start only if at least P groups are ready and, after the oldest P ready ones are
taken, for every tag t the live groups with tag <= t still fit into the batches left to them: count <= (t + S - b) * P. Admission:
registered so far <= (S + version + 1) * P. `partial`: a group is ready with so many of its trajectories missing.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Modelled:
    fraction: float  # of min(C / E[L], B / tau)
    mean_staleness: float
    max_staleness: int
    ended_at: float


def model(lens: Sequence[float], *, C: int, P: int, n: int, S: int, batches: int, seed: int = 0, partial: int = 0) -> Modelled:
    rng = random.Random(seed)
    mean = statistics.fmean(lens)
    B = P * n
    tau = B * mean / C
    ideal = min(C / mean, B / tau)
    now, seq, version, busy, free, gid, step = 0.0, 0, 0, False, C, 0, 0
    events: list[tuple[float, int, int, int]] = []
    pending: list[int] = []
    groups: dict[int, list[int]] = {}
    stale: list[int] = []
    warm = (0.0, 0)

    def push(at: float, kind: int, group: int) -> None:
        nonlocal seq
        heapq.heappush(events, (at, seq, kind, group))
        seq += 1

    def dispatch() -> None:
        nonlocal free, gid
        while free > 0:
            if not pending:
                if gid >= (S + version + 1) * P:
                    return
                groups[gid] = [version, n]
                pending.extend([gid] * n)
                gid += 1
            group = pending.pop(0)
            free -= 1
            push(now + rng.choice(lens), 0, group)

    def try_train() -> None:
        nonlocal busy
        if busy:
            return
        ready = [g for g in groups if groups[g][1] <= partial]
        if len(ready) < P:
            return
        pick = ready[:P]
        taken, left = set(pick), {}
        for g in groups:
            if g not in taken:
                left[groups[g][0]] = left.get(groups[g][0], 0) + 1
        cum = 0
        for t in sorted(left):
            cum += left[t]
            if cum > (t + S - version) * P:
                return
        for g in pick:
            stale.append(version - groups[g][0])
            del groups[g]
        busy = True
        push(now + tau, 1, 0)

    dispatch()
    while step < batches:
        now, _, kind, group = heapq.heappop(events)
        if kind == 0:
            free += 1
            if group in groups:
                groups[group][1] -= 1
        else:
            busy = False
            version += 1
            step += 1
            if step == batches // 10:
                warm = (now, step)
                stale.clear()
        try_train()
        dispatch()
    at, steps = warm
    return Modelled((step - steps) * B / (now - at) / ideal, statistics.fmean(stale), max(stale), now)
