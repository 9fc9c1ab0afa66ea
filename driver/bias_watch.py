"""The bias meter of a run: fed by the ledger, kept in its database, shown over REST and in the status.

Every sample that is over goes into `bias.Meter` once, right after the event that ended it. The windows it changed are written within a
second and at the end, each under a name of its own; a SIGKILL in between loses that second's samples from the meter, never from the
ledger, and counts none twice.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from driver.alarms import Alarm
from driver.bias import DIMENSIONS, KEPT_WINDOWS, End, Meter, Row, Window, rows
from driver.core import Core
from driver.ledger_rows import Upsert
from driver.ledger_state import DISCARDED, Sample, Trajectory, kind_of


class BiasWatch:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._tokens_of_cut: dict[str, int] = {}  # how far trajectories were that were cut off, until their sample is over
        saved = [msgspec.json.decode(value, type=Window) for (value,) in core.db.query("SELECT value FROM meta WHERE name LIKE 'bias/%'")]
        self.meter = Meter(core.config.staleness.bias_window_versions, saved)
        self.alarms: list[Alarm] = []
        self._judged_at: int | None = None
        core.on_over.append(self._over)

    def cut(self, traj_uid: str, tokens: int) -> None:
        """A running trajectory is discarded after so many tokens."""
        self._tokens_of_cut[traj_uid] = tokens

    def _over(self, sample: Sample) -> None:
        if sample.evaluation:
            return
        feed = self._core.feed
        task_type = feed.task_type(sample.segment, sample.row_index)
        ends = [
            End(t.outcome or DISCARDED, self._tokens(t), t.reward, None if t.reason is None else kind_of(t.reason))
            for t in sample.trajectories
        ]
        self.meter.add(sample.version_tag, task_type or "(none)", feed.dataset_of(sample.segment), ends)

    def _tokens(self, trajectory: Trajectory) -> int | None:
        cut = self._tokens_of_cut.pop(trajectory.traj_uid, None)
        return sum(leaf.response_tokens for leaf in trajectory.leaves) if trajectory.leaves else cut

    @property
    def oldest_version(self) -> int:
        """No sample of a lower one lives, or will be registered."""
        ledger = self._core.ledger
        if ledger.ended is not None:
            return ledger.trained_version + self.meter.window_versions
        return min((s.version_tag for s in ledger.samples.values() if not s.evaluation), default=ledger.serving_version)

    def look(self) -> None:
        """Once a second: judge what has changed, and write it."""
        oldest = self.oldest_version
        if self.meter.changed or oldest != self._judged_at:
            self.alarms, self._judged_at = self.meter.alarms(oldest, self._core.config.staleness.bias_tolerance), oldest
        self.save()

    def save(self) -> None:
        changed, self.meter.changed = self.meter.changed, set()
        if not changed:
            return
        versions = self.meter.window_versions
        self._core.db.write(
            Upsert("meta", {"name": f"bias/{first // versions % KEPT_WINDOWS}", "value": msgspec.json.encode(self.meter.windows[first])})
            for first in sorted(changed)
        )

    def facts(self, version: int | None = None) -> dict[str, Any]:
        """For `/v1/runs/RUN/bias`: all windows in a line each; one of them, and all together, by length, task and dataset.

        The one is that of samples with this version_tag (closed or not), or the newest that is closed. KeyError: nothing is kept of it.
        """
        meter, closed = self.meter, self.meter.closed(self.oldest_version)
        everything, over = [meter.windows[first] for first in sorted(meter.windows)], {window.first for window in closed}
        window = closed[-1] if closed else None
        if version is not None:
            window = meter.windows[version - version % meter.window_versions]
        return {
            "run_id": self._core.run_id,
            "window_versions": meter.window_versions,
            "tolerance": self._core.config.staleness.bias_tolerance,
            "alarms": [alarm.words for alarm in self.alarms],
            "windows": [_line(window) | {"closed": window.first in over} for window in everything],
            "window": _table(window) if window is not None else None,
            "total": _table(meter.total(everything)) if everything else None,
        }

    def gauges(self) -> dict[str, float]:
        """The widest gap of each dimension in the newest closed window."""
        closed = self.meter.closed(self.oldest_version)
        found = {name: max((abs(row.gap) for row in rows(closed[-1], name)), default=0.0) if closed else 0.0 for name in DIMENSIONS}
        return {
            **{f"headrace_bias_{name}_gap_ratio": gap for name, gap in found.items()},
            "headrace_bias_alarms": float(len(self.alarms)),
        }


def _line(window: Window) -> dict[str, Any]:
    whole = window.whole
    return {
        "versions": [window.first, window.last],
        "samples": window.samples,
        "sampled": whole.sampled,
        "trained": whole.trained,
        "filtered": whole.filtered,
        "cut_by_the_end": window.ended,
        "reward_mean": whole.reward,
        "lost_to": window.reasons,
    }


def _table(window: Window) -> dict[str, Any]:
    return _line(window) | {name: [_shown(row) for row in rows(window, name)] for name in DIMENSIONS}


def _shown(row: Row) -> dict[str, Any]:
    return asdict(row) | {"gap": row.gap}
