"""Which samples may be registered, and which make the next batch: staleness as a bound (A3, A4), by arithmetic alone.

With `b` the next batch to be assembled, the invariant is that for every `d`

    live samples with deadline_batch <= d   <=   (d - b + 1) * P

that is, what must be trained by batch `d` fits into the batches up to `d`. Oldest first is earliest deadline first, which is
optimal, so the invariant is exactly "nothing has to be dropped for age". A new sample or a batch is allowed only if it still holds
afterwards. Nothing here knows a clock, a loop or a database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def feasible(live_by_deadline: Mapping[int, int], next_batch: int, samples_per_batch: int) -> bool:
    """Does the invariant hold for these live samples (registered, neither taken nor discarded)?"""
    live = 0
    for deadline in sorted(live_by_deadline):
        live += live_by_deadline[deadline]
        if live and live > (deadline - next_batch + 1) * samples_per_batch:
            return False
    return True


def smallest_batch(live_by_deadline: Mapping[int, int], next_batch: int) -> int:
    """The fewest samples per batch with which these live samples can all be trained in time."""
    live, needed = 0, 1
    for deadline in sorted(live_by_deadline):
        live += live_by_deadline[deadline]
        needed = max(needed, -(-live // max(1, deadline - next_batch + 1)))
    return needed


def admissible(live_by_deadline: Mapping[int, int], deadline: int, next_batch: int, samples_per_batch: int) -> int:
    """How many more samples with this deadline may be registered now (0 or more)."""
    room: int | None = None
    live = 0
    deadlines = sorted({*live_by_deadline, deadline})
    for d in deadlines:
        live += live_by_deadline.get(d, 0)
        if d >= deadline:
            left = (d - next_batch + 1) * samples_per_batch - live
            room = left if room is None else min(room, left)
    assert room is not None
    return max(0, room)


@dataclass(frozen=True)
class Candidate:
    """A live sample as the batcher sees it."""

    uid: int
    deadline_batch: int
    ready: bool


@dataclass(frozen=True)
class Choice:
    """The samples of the next batch, or the reason in words why there is none yet."""

    uids: tuple[int, ...] | None
    reason: str = ""
    blocking_uid: int | None = None
    kind: str = "samples"  # held: P are ready, and taking them would make an older one miss its deadline


def too_few(ready: int, samples_per_batch: int, oldest_uid: int) -> Choice:
    return Choice(None, f"{ready} of {samples_per_batch} samples are ready; the oldest unfinished is sample {oldest_uid}", oldest_uid)


def choose(candidates: Iterable[Candidate], next_batch: int, samples_per_batch: int, *, short_allowed: bool = False) -> Choice:
    """Take the P oldest ready samples, if what stays behind still fits (the dry-run); else hold, and say for whom.

    `candidates` are all live samples. Oldest means earliest deadline, then first registered: after a loss of the trainer the tags go
    back, so a later sample may have the earlier deadline. `short_allowed` lets a last batch with
    fewer samples through: only when no more samples will come (drain, or input closed and nothing else is running).
    """
    everything = sorted(candidates, key=lambda c: (c.deadline_batch, c.uid))
    ready = [c for c in everything if c.ready]
    if len(ready) < samples_per_batch and not (short_allowed and ready and len(ready) == len(everything)):
        oldest = next((c for c in everything if not c.ready), None)
        if oldest is None:
            return Choice(None, f"{len(ready)} of {samples_per_batch} samples are ready and none is running")
        return too_few(len(ready), samples_per_batch, oldest.uid)
    taken = ready[:samples_per_batch]
    taken_uids = {c.uid for c in taken}
    left: dict[int, int] = {}
    for candidate in everything:
        if candidate.uid not in taken_uids:
            left[candidate.deadline_batch] = left.get(candidate.deadline_batch, 0) + 1
    if not feasible(left, next_batch + 1, samples_per_batch):
        straggler = next((c for c in everything if not c.ready), None)
        if straggler is None:
            return Choice(
                None, f"{len(everything)} ready samples do not fit into their batches of {samples_per_batch}: raise batch.samples"
            )
        return Choice(
            None,
            f"batch {next_batch} is held for sample {straggler.uid}, which must be trained by batch {straggler.deadline_batch}",
            straggler.uid,
            "held",
        )
    assert all(c.deadline_batch >= next_batch for c in taken), "A3: a sample outlived its deadline"
    return Choice(tuple(c.uid for c in taken))
