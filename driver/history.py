"""What a run has done, batch by batch: the metrics line of each, how busy both sides are, and the stop rule on reward."""

from __future__ import annotations

import collections
import logging
import time
from typing import TYPE_CHECKING, Any

from driver import observe, observe_data
from driver.alarms import Said
from driver.archive import MetricsLog, read_metrics
from trainer.wire import TrainReport

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.history")
RECENT_BATCHES = 1000


class History:
    """Goes on where the metrics on disk end."""

    def __init__(self, run: Run) -> None:
        self._run = run
        directory = run.config.directory
        self.metrics = MetricsLog(directory)
        known = (m for m in read_metrics(directory) if m["batch_id"] < run.core.ledger.trained_version)
        self.recent: collections.deque[dict[str, Any]] = collections.deque(known, maxlen=RECENT_BATCHES)
        self.busy_shares: dict[str, float] = {}
        gaps = [m["logprob_gap_max"] for m in self.recent if m.get("logprob_gap_max") is not None]
        self._gap_of_rows: float | None = max(gaps, default=None)
        self._elapsed_before_s: float = self.recent[-1]["time_s"] if self.recent else 0.0
        self._busy_at = (time.monotonic(), 0.0, 0.0)
        self._said = Said(log)

    def applied(self, batch_id: int, report: TrainReport) -> None:
        """Metrics of one batch, and the stop rule on reward."""
        ledger = self._run.core.ledger
        samples = [ledger.samples[uid] for uid in ledger.batches[batch_id].uids]
        scored = [t for s in samples for t in s.in_state("consumed")]
        rewards = [t.reward for t in scored if t.reward is not None]
        correct = [leaf.is_correct for t in scored for leaf in t.leaves if leaf.is_correct is not None]
        ages = [batch_id - s.version_tag for s in samples]
        self.measure_busy()
        if report.logprob_gap_max is not None:
            self._gap_of_rows = max(report.logprob_gap_max, self._gap_of_rows or 0.0)
        decision = self._run.dispatch.decision
        line: dict[str, Any] = {
            "batch_id": batch_id,
            "time_s": self.elapsed_s,
            "reward_mean": sum(rewards) / len(rewards),
            "reward_correct": sum(correct) / len(correct) if correct else None,
            "samples": len(samples),
            "trajectories": len(scored),
            "response_tokens_mean": sum(leaf.response_tokens for t in scored for leaf in t.leaves) / len(scored),
            "staleness_mean": sum(ages) / len(ages),
            "staleness_max": max(ages),
            "staleness_bound": self._run.core.limits.bound,
            "in_flight": self._run.dispatch.in_flight,
            "watermark": decision.watermark if decision else None,
            "watermark_binding": decision.binding if decision else None,
            "ready": ledger.counts.by_state["ready"],
            "engine_busy": self.busy_shares.get("engines"),
            "trainer_busy": self.busy_shares.get("trainer"),
            "learning_rate": self._run.config.trainer.learning_rate_at(batch_id, self._run.config.stop.batches),
            **report.model_dump(exclude={"row_ids", "skipped_row_ids", "batch_id"}),
            "push_s": self._run.pusher.seconds,
            "serving_version": ledger.serving_version,
            "epoch": ledger.epoch,
            "discarded_total": ledger.counts.by_outcome["discarded"],
            "filtered_samples_total": observe_data.filtered_samples(self._run),
            "samples_by_dataset": dict(collections.Counter(self._run.core.feed.dataset_of(s.segment) for s in samples)),
        }
        while self.recent and self.recent[-1]["batch_id"] >= batch_id:  # a replay
            self.recent.pop()
        self.recent.append(line)
        self.metrics.write(line)
        self._said.look(observe.lasting(self._run))
        stop = self._run.config.stop
        window = [m["reward_mean"] for m in list(self.recent)[-stop.reward_window :]]
        if stop.reward is not None and len(window) == stop.reward_window and sum(window) / len(window) >= stop.reward:
            self._run.core.ending = f"mean reward reached {stop.reward}"
            self._run.core.draining = self._run.core.ending

    @property
    def gap_max(self) -> float | None:
        """The largest difference of log-probs seen, engine to trainer: of rows of one version, and of the pushes' fixed sequence."""
        return max((gap for gap in (self._gap_of_rows, self._run.publisher.gap_max) if gap is not None), default=None)

    @property
    def elapsed_s(self) -> float:
        return self._elapsed_before_s + time.monotonic() - self._run.core.started

    def measure_busy(self) -> None:
        """Shares of the time since the last look (at least a second ago) in which engines and trainer worked."""
        then, engines_then, trainer_then = self._busy_at
        now, engines = time.monotonic(), sum(slot.busy_s() for slot in self._run.pool.slots.values())
        trainer = self._run.training.busy.seconds()
        if now - then < 1.0:
            return
        span = now - then
        self.busy_shares = {
            "engines": min(1.0, max(0.0, (engines - engines_then) / (span * max(1, len(self._run.pool.slots))))),
            "trainer": min(1.0, max(0.0, (trainer - trainer_then) / span)),
        }
        self._busy_at = (now, engines, trainer)
