"""The filter: a sample that can teach nothing, or too little, is discarded before it is ready, and says so when it takes everything.

Promise: whether a sample passes is a function of its rewards and of `filter` alone. A filtered one is `discarded(filtered: …)` in the
ledger, its rows are freed, and ordinary admission brings another, so that batches always fill. When it takes sample after sample the
alarm names what was wrong with them and what to do, and after `pause_batches` batches' worth the run is paused: no silent loop (H7).
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import msgspec

from driver.core import Core
from driver.events import Leaf, RowSolved
from driver.ledger_state import RUNNING, Sample, Trajectory, kind_of, traj_uid_of
from driver.pass_rates import Observation, PassRates, is_right, observation
from driver.settings import FilterConfig

FILTERED = "filtered"
RECENT_SAMPLES = 256  # of which the real shares of datasets and of the filter are taken


def why_filtered(rewards: list[float], right: int, config: FilterConfig) -> str | None:
    """The reason to discard a sample with these rewards of which so many are right; None to keep it. Up to the second colon the reason is
    what is counted."""
    of = len(rewards)
    rate = right / of
    if config.max_pass_rate is not None and rate >= config.max_pass_rate:
        kind = "always right" if right == of else f"pass rate at or above {config.max_pass_rate:g}"
        return f"{FILTERED}: {kind}: {right} of {of}"
    if config.min_pass_rate is not None and rate <= config.min_pass_rate:
        kind = "always wrong" if right == 0 else f"pass rate at or below {config.min_pass_rate:g}"
        return f"{FILTERED}: {kind}: {right} of {of}"
    if config.equal_rewards and max(rewards) == min(rewards):
        return f"{FILTERED}: equal rewards: {of} of {rewards[0]:g}"
    return None


class Streak:
    """Samples filtered one after another since the last that was kept."""

    def __init__(self, batch_samples: int) -> None:
        self._batch_samples = batch_samples
        self.kinds: collections.Counter[str] = collections.Counter()
        self.datasets: collections.Counter[str] = collections.Counter()

    @property
    def samples(self) -> int:
        return self.kinds.total()

    def kept(self) -> None:
        self.kinds.clear()
        self.datasets.clear()

    def filtered(self, reason: str, dataset_id: str) -> None:
        self.kinds[kind_of(reason).partition(": ")[2]] += 1
        self.datasets[dataset_id] += 1

    def reached(self, batches: int | None) -> bool:
        """With the last sample it became a multiple of so many batches' worth."""
        return batches is not None and self.samples > 0 and self.samples % (batches * self._batch_samples) == 0

    def words(self) -> str:
        kinds = ", ".join(f"{count} × {kind}" for kind, count in self.kinds.most_common(5))
        datasets = ", ".join(f"{count} of {dataset_id}" for dataset_id, count in self.datasets.most_common(5))
        return (
            f"the filter took the last {self.samples} samples one after another, {self.samples / self._batch_samples:.0f} batches' worth "
            f"({kinds}; {datasets}): no batch can fill. Look at the rewards (headrace list --outcome discarded, headrace show TRAJ), "
            "then give other prompts, change the weights of the datasets (headrace mix), or loosen `filter`"
        )


class Judge:
    """One run's filter, with what it remembers: the streak, recent pass rates, recent choices."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._config = core.config.filter
        self.streak = Streak(core.config.batch.samples)
        self.rates = PassRates(core.config.filter.window)
        self._kept: collections.deque[bool] = collections.deque(maxlen=RECENT_SAMPLES)
        self.recent: collections.deque[str] = collections.deque(maxlen=RECENT_SAMPLES)  # datasets of the newest samples
        self.pause: Callable[[], None] = lambda: None  # the run's

    def registered(self, dataset_id: str) -> None:
        self.recent.append(dataset_id)

    def settled(self, sample: Sample, ready: list[Trajectory], task_type: str | None) -> str | None:
        """Why this sample is discarded; None when it is kept. With `task_type` None it was seen before a restart and is only judged."""
        config = self._config
        right = sum(is_right(t, config.right_from) for t in ready)
        reason = why_filtered([t.reward or 0.0 for t in ready], right, config)
        known = self._core.ledger.solved.get((sample.segment, sample.row_index)) == sample.pass_index
        if config.skip_solved and right == len(ready) == len(sample.trajectories) and not known:
            self._core.apply(RowSolved(uid=sample.uid, of=right, time=time.time()))
        if task_type is None:
            return reason
        dataset_id = self._core.feed.dataset_of(sample.segment)
        self.rates.observe(dataset_id, observation(ready, task_type, sample.version_tag, config.right_from))
        self._kept.append(reason is None)
        if reason is None:
            self.streak.kept()
            self._say(None)
            return None
        self.streak.filtered(reason, dataset_id)
        pause = self.streak.reached(config.pause_batches)
        if pause:
            self.pause()
        if pause or self.streak.reached(config.alarm_batches):  # what was in flight at the pause is filtered after it
            self._say(self.streak.words() + ("; the run is paused: headrace resume goes on" if self._core.paused else ""))
        return reason

    @property
    def kept_share(self) -> float:
        """Of the newest settled samples, those that the filter let pass."""
        return sum(self._kept) / len(self._kept) if self._kept else 1.0

    def _say(self, words: str | None) -> None:
        self._core.alarm("filter", words)
        self._core.waiting("filter", words, "filter")

    def recall(self) -> None:
        """After a restart: recent choices and pass rates, from the newest samples of the ledger. The streak begins anew."""
        db, feed = self._core.db, self._core.feed
        newest = db.query(
            "SELECT uid, segment, row_index, version_tag FROM samples WHERE segment >= 0 ORDER BY uid DESC LIMIT ?",
            (max(RECENT_SAMPLES, self._config.window),),
        )
        for uid, segment, row_index, version_tag in reversed(newest):
            dataset_id = feed.dataset_of(segment)
            self.recent.append(dataset_id)
            ended = self._core.ledger.samples.get(uid)
            if ended is not None and ended.waiting:
                continue
            scored = [t for t in self._scored(uid) if t.reward is not None]
            if len(scored) >= self._core.config.rollout.min_group:
                observed: Observation = observation(scored, feed.row(segment, row_index).task_type, version_tag, self._config.right_from)
                self.rates.observe(dataset_id, observed)

    def _scored(self, uid: int) -> list[Trajectory]:
        live = self._core.ledger.samples.get(uid)
        if live is not None:
            return [t for t in live.trajectories if t.state != RUNNING]
        stored = self._core.db.query("SELECT idx, reward, leaves FROM trajectories WHERE uid = ? AND reward IS NOT NULL", (uid,))
        return [Trajectory(traj_uid_of(uid, index), uid, index, leaves=_leaves(leaves), reward=reward) for index, reward, leaves in stored]


def _leaves(stored: bytes | None) -> tuple[Leaf, ...]:
    return msgspec.json.decode(stored, type=tuple[Leaf, ...]) if stored else ()
