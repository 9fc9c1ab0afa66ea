"""The next batch, as the staleness preset lets it be: `policy` decides from the ledger's facts, this makes it so and keeps the account.

    ledger ─facts─▶ policy.decide ─┬─ a batch: who still runs of it is discarded first, then it is assembled
                                   └─ none: why, for `/v1/why`; how long it is held, for alarms and `/v1/.../staleness`

The count of holds lives in the ledger's database, and what was discarded is counted by reason there. A hold that is going on begins anew
with a restart of the driver, as its requests do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from driver.core import Core
from driver.ledger_rows import Upsert
from driver.ledger_state import READY, RUNNING, Sample
from driver.policy import Decision, Group, Hold, Preset, decide, facts_of, is_ready, plainly_too_few
from driver.settings import RunConfig

log = logging.getLogger("headrace.holds")
LOOK_S = 1.0  # between two looks at a batch that nothing else changes
LEAST_LOOK_S = 0.01
LONG_LOOK_S = 0.001  # what takes longer is followed by a rest
REST = 9.0  # times what the look took


class HoldCounts(msgspec.Struct):
    """Holds that are over."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0
    discarding: int = 0  # ended by discarding the stragglers


def preset_of(config: RunConfig) -> Preset:
    staleness = config.staleness
    return Preset(
        staleness.preset,
        config.rollout.n,
        config.rollout.min_group,
        Preset.hold_s if staleness.hold_s is None else staleness.hold_s,
        config.partial_k,
        Preset.partial_after_s if staleness.partial_after_s is None else staleness.partial_after_s,
    )


class Holds:
    """`cut` discards what is running of a sample; `moving` says whether some engine is open to requests."""

    def __init__(self, core: Core, *, cut: Callable[[Sample, str], None], moving: Callable[[], bool]) -> None:
        self._core = core
        self._cut = cut
        self._moving = moving
        self._alarmed: int | None = None
        self._seen: tuple[Any, ...] = ()
        self._due = self._rest_until = 0.0
        self.blocking_uid: int | None = None  # the sample that the next batch waits for
        self.preset = preset_of(core.config)
        self.hold: Hold | None = None
        self.again_s = LOOK_S
        found = core.db.query("SELECT value FROM meta WHERE name = 'holds'")
        self.counts = msgspec.json.decode(found[0][0], type=HoldCounts) if found else HoldCounts()

    # ---- deciding ------------------------------------------------------------------------------------------------------

    def look(self, *, short_allowed: bool) -> tuple[int, ...] | None:
        """The samples of the next batch, with nothing of them running any more; None while there is none, with the reason recorded."""
        core, ledger = self._core, self._core.ledger
        began = time.monotonic()
        if not self._worth_a_look(began, short_allowed):
            return None
        while (decision := self._decide(short_allowed)).cuts:
            # And decide again: once settled, a sample may still turn out to be one that is filtered.
            for cut in decision.cuts:
                self._cut(ledger.samples[cut.uid], cut.reason)
        self.blocking_uid = decision.blocking_uid
        if decision.uids is None:
            now = time.monotonic()
            self._due = now + self.again_s
            took_s = now - began
            self._rest_until = now + REST * took_s if took_s > LONG_LOOK_S else now
            core.waiting("trainer", decision.reason, "samples" if self.hold is None else "held")
            self._warn()
            return None
        core.waiting("trainer", None)
        self._due = 0.0
        return decision.uids

    def _worth_a_look(self, now: float, short_allowed: bool) -> bool:
        """A look goes over all that lives: not at each answer of thousands, and of the loop's time at most a tenth.

        Whatever else is so, there is one when the last one said that it is due: then reasons, holds and alarms are brought up to date.
        """
        ledger, strict = self._core.ledger, self.preset.name == "strict"
        seen = (ledger.settlings, 0 if strict else ledger.counts.by_state[READY], short_allowed, self._core.limits, ledger.next_batch)
        if now < self._due:
            too_few = strict and not short_allowed and ledger.settled_samples < self._core.samples_per_batch
            if seen == self._seen or too_few or now < self._rest_until:
                resting = now < self._rest_until and not too_few and seen != self._seen
                self.again_s = (min(self._rest_until, self._due) if resting else self._due) - now
                return False
        self._seen = seen
        return True

    def _decide(self, short_allowed: bool) -> Decision:
        core, ledger = self._core, self._core.ledger
        decision = self._plainly(short_allowed) or decide(
            [self._group(sample) for sample in ledger.live()],
            ledger.next_batch,
            core.samples_per_batch,
            self.preset,
            now=time.monotonic(),
            hold=self.hold,
            moving=self._moving(),
            short_allowed=short_allowed,
        )
        hold, alarm_s = decision.hold, core.config.staleness.alarm_s
        until_alarm_s = alarm_s - hold.held_s if hold is not None and hold.held_s < alarm_s else LOOK_S
        self.again_s = max(LEAST_LOOK_S, min(LOOK_S, until_alarm_s, LOOK_S if decision.again_s is None else decision.again_s))
        if self.hold is not None and decision.hold is None:
            self._ended(self.hold, discarding=bool(decision.cuts))
        self.hold = decision.hold
        return decision

    def _plainly(self, short_allowed: bool) -> Decision | None:
        """Without going over all that lives, when the answer is plain."""
        ledger = self._core.ledger
        newest = next(reversed(ledger.samples.values()), None)
        if self.preset.name != "strict" or short_allowed or newest is None or newest.evaluation or newest.batch_id is not None:
            return None
        ready, samples = ledger.settled_samples, self._core.samples_per_batch
        return plainly_too_few(ledger.live(), newest, ledger.live_by_deadline, ready, samples)

    def is_ready(self, sample: Sample) -> bool:
        """May it be taken as it is?"""
        return is_ready(self._group(sample), self.preset)

    def _group(self, sample: Sample) -> Group:
        return facts_of(sample, self.preset, time.time())

    # ---- the account ---------------------------------------------------------------------------------------------------

    def _ended(self, hold: Hold, *, discarding: bool) -> None:
        counts = self.counts
        held_s = hold.held_s + time.monotonic() - hold.seen_at
        counts.count, counts.discarding = counts.count + 1, counts.discarding + discarding
        counts.total_s, counts.longest_s = counts.total_s + held_s, max(counts.longest_s, held_s)
        self._core.db.write([Upsert("meta", {"name": "holds", "value": msgspec.json.encode(counts)})])

    def _warn(self) -> None:
        """Each held batch is logged once."""
        alarms = self.alarms()
        if alarms and self.hold is not None and self._alarmed != self.hold.batch_id:
            self._alarmed = self.hold.batch_id
            log.warning("%s", alarms[0])

    def alarms(self) -> list[str]:
        """A hold's deadline raises an alarm (L1); only preset `deadline` discards, by a key of its own."""
        hold, alarm_s = self.hold, self._core.config.staleness.alarm_s
        if hold is None or hold.held_s < alarm_s:
            return []
        sample = self._core.ledger.samples.get(hold.uid)
        running = [] if sample is None else sample.in_state(RUNNING)
        who = f"sample {hold.uid}, of which {len(running)} of {self.preset.n} trajectories run"
        return [
            f"batch {hold.batch_id} is held for {hold.held_s:.0f} s (staleness.alarm_s {alarm_s:g}) by {who}: "
            f"preset {self.preset.name} waits for it; headrace show {running[0].traj_uid if running else 'TRAJ'} says how far it is"
        ]

    def facts(self) -> dict[str, Any]:
        """For `/v1/runs/RUN/staleness`."""
        hold, by_reason = self.hold, self._core.ledger.counts.by_reason
        keys: dict[str, Any] = {
            "strict": {},
            "deadline": {"hold_s": self.preset.hold_s},
            "partial": {"partial_k": self.preset.partial_k, "partial_after_s": self.preset.partial_after_s},
        }[self.preset.name]
        return {
            "preset": {"name": self.preset.name, "alarm_s": self._core.config.staleness.alarm_s, **keys},
            "hold": None if hold is None else {"batch_id": hold.batch_id, "uid": hold.uid, "seconds": round(hold.held_s, 3)},
            "holds": {
                "count": self.counts.count,
                "seconds": round(self.counts.total_s, 3),
                "longest_s": round(self.counts.longest_s, 3),
                "ended_by_discards": self.counts.discarding,
            },
            "discarded_by_preset": {reason: c for reason, c in by_reason.items() if reason.partition(":")[0] in ("deadline", "partial")},
        }

    def gauges(self) -> dict[str, float]:
        return {
            "headrace_hold_batches_total": float(self.counts.count),
            "headrace_hold_seconds_total": self.counts.total_s,
            "headrace_hold_now_seconds": 0.0 if self.hold is None else self.hold.held_s,
        }
