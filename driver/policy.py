"""Who gives way when a straggler holds a batch: three presets, decided by arithmetic alone from facts and the time they were seen.

    strict     the batch waits. Nothing is discarded for its age or its length; past `alarm_s` a person is told.
    deadline   it waits `hold_s`. Then the running trajectories of the stragglers are discarded, and the batch goes at once.
    partial    a sample is ready with `k` of its n trajectories, `after_s` after the k-th: who still runs when it is taken is discarded.

A batch is *held* from the first look at which it could be assembled if its stragglers did not exist. So a discard makes a batch (unless the
filter then takes the sample), and one that would not is not made: a sample that starts anew comes no sooner than the one that runs. The
bound is kept by admission and the dry-run (`batcher`) in all three; what the presets add only takes live samples away, which never breaks
it (docs/staleness.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from driver.batcher import Candidate, Choice, choose, too_few
from driver.ledger_state import READY, RUNNING, Sample


@dataclass(frozen=True)
class Preset:
    """What was configured; `n` and `min_group` are those of a sample."""

    name: str = "strict"
    n: int = 8
    min_group: int = 2
    hold_s: float = 60.0
    partial_k: int = 7
    partial_after_s: float = 0.0


@dataclass(frozen=True)
class Group:
    """A live sample: how many of its trajectories run and are ready, and for how long at least `partial_k` have been ready."""

    uid: int
    deadline_batch: int
    running: int
    ready: int
    enough_s: float | None = None


@dataclass(frozen=True)
class Hold:
    """A batch that would go but for its stragglers, the oldest of which is `uid`: held so long, as of the last look."""

    batch_id: int
    uid: int
    held_s: float
    seen_at: float


@dataclass(frozen=True)
class Cut:
    """The running trajectories of this sample are discarded, with this reason."""

    uid: int
    reason: str


@dataclass(frozen=True)
class Decision:
    """The samples of the next batch; or None, with the reason in words and how soon to look again. With cuts: once they are made."""

    uids: tuple[int, ...] | None
    reason: str = ""
    cuts: tuple[Cut, ...] = ()
    hold: Hold | None = None
    again_s: float | None = None
    blocking_uid: int | None = None


def facts_of(sample: Sample, preset: Preset, now: float) -> Group:
    """Of a live sample; `now` on the clock of its `ready_at`."""
    running = ready = 0
    for trajectory in sample.trajectories:
        running += trajectory.state == RUNNING
        ready += trajectory.state == READY
    enough_s: float | None = None
    if running and preset.name == "partial" and ready >= preset.partial_k:
        ready_at = sorted(t.ready_at for t in sample.trajectories if t.state == READY and t.ready_at is not None)
        enough_s = max(0.0, now - ready_at[preset.partial_k - 1])
    return Group(sample.uid, sample.deadline_batch, running, ready, enough_s)


def is_ready(group: Group, preset: Preset) -> bool:
    """May the sample be taken as it is? The one meaning of ready, for batches and for what is shown."""
    if group.running == 0:
        return True
    return preset.name == "partial" and group.enough_s is not None and group.enough_s >= preset.partial_after_s


def plainly_too_few(
    live: Iterable[Sample], newest: Sample, live_by_deadline: Mapping[int, int], ready: int, samples_per_batch: int
) -> Decision | None:
    """What `decide` says under `strict` when fewer than P samples are ready and nothing else is in question; None when something may be.

    Thousands of samples can be live, and this is what the trainer waits for most: it looks no further than to the first unfinished one
    of `live`, which is in order of registration. `newest` has nothing ready and runs, so that no batch can be held for stragglers alone.
    """
    if ready >= samples_per_batch or any(t.state != RUNNING for t in newest.trajectories):
        return None
    passed: list[int] = []
    for sample in live:
        if sample.waiting:
            break
        passed.append(sample.deadline_batch)
    else:
        return None
    deadline = sample.deadline_batch
    earlier = sum(count for d, count in live_by_deadline.items() if d < deadline)
    if sample is newest or earlier != sum(d < deadline for d in passed):  # alone, or a later one has an earlier deadline
        return None
    choice = too_few(ready, samples_per_batch, sample.uid)
    return Decision(None, choice.reason, blocking_uid=choice.blocking_uid)


def decide(
    groups: Sequence[Group],
    next_batch: int,
    samples_per_batch: int,
    preset: Preset,
    *,
    now: float,
    hold: Hold | None = None,
    moving: bool = True,
    short_allowed: bool = False,
) -> Decision:
    """The next batch, or how long it has been held and for whom. `groups` are all live samples; `hold` is what the last look said.

    `now` is a clock that never jumps. While `moving` is false (no engine is open to requests) it stands still for a hold.
    """
    candidates = [Candidate(g.uid, g.deadline_batch, is_ready(g, preset)) for g in groups]
    choice = choose(candidates, next_batch, samples_per_batch, short_allowed=short_allowed)
    by_uid = {g.uid: g for g in groups}
    if choice.uids is not None:
        unfinished = [by_uid[uid] for uid in choice.uids if by_uid[uid].running]
        return Decision(choice.uids, cuts=tuple(Cut(g.uid, _partial(g, next_batch, preset)) for g in unfinished))
    waiting = sorted((g for g in groups if not is_ready(g, preset)), key=lambda g: (g.deadline_batch, g.uid))
    if not _held(groups, waiting, next_batch, samples_per_batch, preset, short_allowed):
        return Decision(None, choice.reason, again_s=_until_enough(waiting, preset), blocking_uid=choice.blocking_uid)
    same = hold is not None and hold.batch_id == next_batch
    held_s = 0.0 if hold is None or not same else hold.held_s + (now - hold.seen_at if moving else 0.0)
    if preset.name == "deadline" and held_s >= preset.hold_s:
        made = _without(groups, waiting, next_batch, samples_per_batch, preset, short_allowed)
        if made is not None:
            cut, choice = made
            reason = f"deadline: held too long: batch {next_batch} waited {held_s:.1f} s for it (staleness.hold_s {preset.hold_s:g})"
            return Decision(choice.uids, cuts=tuple(Cut(g.uid, reason) for g in cut))
    left_s = preset.hold_s - held_s if preset.name == "deadline" and held_s < preset.hold_s else _until_enough(waiting, preset)
    hold = Hold(next_batch, waiting[0].uid, held_s, now)
    return Decision(None, choice.reason, hold=hold, again_s=left_s, blocking_uid=choice.blocking_uid)


def _partial(group: Group, batch_id: int, preset: Preset) -> str:
    after = f", {group.enough_s:.1f} s after the {_ordinal(preset.partial_k)} was ready" if group.enough_s is not None else ""
    return f"partial: {group.ready} of {preset.n}: batch {batch_id} took its sample without it{after}"


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _until_enough(waiting: Sequence[Group], preset: Preset) -> float | None:
    """Until the next sample may be taken without its last trajectories."""
    if preset.name != "partial":
        return None
    return min((preset.partial_after_s - g.enough_s for g in waiting if g.enough_s is not None), default=None)


def _spared(group: Group, preset: Preset) -> bool:
    """Without its running trajectories it is still a sample."""
    return group.ready >= preset.min_group


def _held(
    groups: Sequence[Group], waiting: Sequence[Group], next_batch: int, samples_per_batch: int, preset: Preset, short_allowed: bool
) -> bool:
    """Would the batch go without its stragglers?

    With P ready samples it is the dry-run that holds it, for the oldest unfinished. With fewer it is held only when each unfinished sample
    could be spared its running trajectories, and the batch would then go: whatever else runs is work that the batch waits for in its
    own right. A last unfinished sample holds it too; where it can not be spared it is waited for, whatever the preset.
    """
    if not waiting:
        return False
    if len(groups) - len(waiting) >= samples_per_batch:
        return True
    if len(waiting) == 1 and (len(groups) >= samples_per_batch or short_allowed):
        return True
    if not all(_spared(g, preset) for g in waiting):
        return False
    return _choose_without(groups, waiting, next_batch, samples_per_batch, preset, short_allowed).uids is not None


def _without(
    groups: Sequence[Group], waiting: Sequence[Group], next_batch: int, samples_per_batch: int, preset: Preset, short_allowed: bool
) -> tuple[Sequence[Group], Choice] | None:
    """The fewest stragglers, earliest deadline first, without whose running trajectories the batch goes; None when it does not.

    More stragglers never make it harder (each prefix sum of what stays behind only falls), so bisection finds the fewest.
    """
    if len(groups) - len(waiting) < samples_per_batch and not all(_spared(g, preset) for g in waiting):
        return None

    def goes(count: int) -> bool:
        return _choose_without(groups, waiting[:count], next_batch, samples_per_batch, preset, short_allowed).uids is not None

    count = bisect.bisect_left(range(len(waiting) + 1), True, lo=1, key=goes)
    if count > len(waiting):
        return None
    cut = waiting[:count]
    return cut, _choose_without(groups, cut, next_batch, samples_per_batch, preset, short_allowed)


def _choose_without(
    groups: Sequence[Group], cut: Sequence[Group], next_batch: int, samples_per_batch: int, preset: Preset, short_allowed: bool
) -> Choice:
    """The batch as it would be if what runs of these samples were discarded: who is still a sample is ready then, who is not is gone."""
    settled = {g.uid for g in cut}
    candidates = [
        Candidate(g.uid, g.deadline_batch, g.uid in settled or is_ready(g, preset))
        for g in groups
        if g.uid not in settled or _spared(g, preset)
    ]
    return choose(candidates, next_batch, samples_per_batch, short_allowed=short_allowed)
