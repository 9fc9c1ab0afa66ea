"""One run: its parts put together, started, watched, and ended in order.

    dispatch ─▶ scoring ─▶ (ledger) ─▶ training ─▶ snapshot ─▶ push ─▶ dispatch
        ▲ watermark, A4                 │ commit: archive, then free rows

Start reads the ledger and reconciles it with what is really there (store keys, checkpoints), and says what it found. End, by rule or by
SIGTERM, leaves the ledger, a checkpoint and the ready rows on disk, and nothing in memory. Each loop is one task; the first that ends
with an exception ends the run visibly, with its reason in `failure` (H8).
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from typing import Any

import orjson

from driver import observe
from driver.archive import Archive, FinishedTrajectory, MetricsLog, read_metrics
from driver.batcher import smallest_batch
from driver.core import Core
from driver.dispatch import Dispatch
from driver.distributed import Courier, DistributedTransport
from driver.engine_watch import EngineWatch
from driver.events import RowsLost, RunEnded, SampleDiscarded, TrajectoryRetried
from driver.feed import Feed
from driver.launcher import StartFailed
from driver.ledger import Sample, Trajectory, Upsert
from driver.ledger_db import LedgerDB, LedgerError
from driver.processes import Processes
from driver.publish import Publisher
from driver.push import Pusher
from driver.routing import Routing
from driver.scoring import Scoring
from driver.settings import RunConfig
from driver.snapshot import PushImpossible
from driver.training import CheckpointMissing, Training, rows_present
from driver.transport import Transports
from driver.watermark import Watermark
from rollout.client import make_http
from rollout.pool import EnginePool
from rollout.router import RouterClient
from rollout.tokens import TokenizerView
from store import EmbeddedStore, Gone, Ref, StoreStats
from trainer.client import TrainerRefused
from trainer.wire import TrainReport

log = logging.getLogger("headrace.run")
EXPECTED = (StartFailed, TrainerRefused, CheckpointMissing, LedgerError, PushImpossible)  # their text is for the user and says it all
RECENT_BATCHES = 1000


class CannotContinue(RuntimeError):
    """A configuration with which this run can not go on. A sentence for the user."""


class Run:
    def __init__(self, config: RunConfig) -> None:
        self.config = config
        config.directory.mkdir(parents=True, exist_ok=True)
        self.log_directory = config.directory / "logs"
        self.log_directory.mkdir(exist_ok=True)
        db = LedgerDB(config.directory / "ledger.sqlite")
        ledger = db.load()
        store = EmbeddedStore(config.store_directory, config.store.capacity_bytes)
        store.claim()
        feed = Feed(db, seed=config.seed, shuffle=config.shuffle, passes=config.stop.epochs)
        self.core = Core(config, ledger, db, feed, store)
        self.store = store
        self.archive = Archive(config.directory / "archive")
        self.metrics = MetricsLog(config.directory)
        self.http = make_http()
        self.pool = EnginePool()
        self.tokenizer = TokenizerView(config.model.path)
        self.courier = Courier(self.http)
        self.transports = Transports.of(config, lambda: DistributedTransport.of(config, self.courier))
        self.transports.sweep()
        self.pusher = Pusher(
            self.pool,
            deadline_s=config.push.deadline_s,
            logprob_tolerance=config.logprob_tolerance,
            replace=lambda slot, reason: self.processes.replace(slot.engine_id, reason),
            transports=self.transports,
        )
        self.publisher = Publisher(self.core, self.pool, self.pusher)
        self.scoring = Scoring(self.core, wait_s=config.reward.batch_wait_s, deadline_s=config.reward.deadline_s)
        watermark = Watermark(config.batch.samples * config.rollout.n)
        self.watermark = watermark
        rollout = config.rollout
        self.routing: Routing | None = None
        if rollout.router_url is not None:
            router = RouterClient(rollout.router_url, self.http, rollout.router_api_key, vocab_size=self.tokenizer.vocab_size)
            self.routing = Routing(self.core, self.pool, router, rollout.engine_api_key, lambda: self.processes.engine_urls)
        self.dispatch = Dispatch(
            self.core,
            self.pool,
            self.pusher,
            self.scoring,
            self.tokenizer,
            watermark,
            on_discarded=self._archive_discarded,
            routing=self.routing,
        )
        self.engine_watch = EngineWatch(
            self.core,
            self.pool,
            interval_s=config.rollout.loads_interval_s,
            stall_s=config.rollout.stall_s if self.routing is None else None,
            replace=lambda slot, reason: self.processes.replace(slot.engine_id, reason),
        )
        self.training = Training(
            self.core,
            self.http,
            canary_ids=canary_ids(self.tokenizer, config.rollout.context_length),
            on_snapshot=self.publisher.offer,
            on_applied=self._on_applied,
            archive=self._archive_finished,
            on_running_again=self.dispatch.enqueue,
            replace=lambda reason: self.processes.replace("trainer-0", reason),
        )
        self.model_facts = orjson.loads((config.model.path / "config.json").read_bytes())
        self.processes = Processes(self)
        self.state = "starting"
        self.failure: str | None = None
        self.recent: collections.deque[dict[str, Any]] = collections.deque(
            (m for m in read_metrics(config.directory) if m["batch_id"] < ledger.trained_version), maxlen=RECENT_BATCHES
        )
        self.busy_shares: dict[str, float] = {}
        gaps = [m["logprob_gap_max"] for m in self.recent if m.get("logprob_gap_max") is not None]
        self._gap_of_rows: float | None = max(gaps, default=None)
        self._elapsed_before_s: float = self.recent[-1]["time_s"] if self.recent else 0.0
        self._busy_at = (time.monotonic(), 0.0, 0.0)
        self._last_applied_at: float | None = None
        self._stop = asyncio.Event()
        self._store_gone = False

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the run has ended by its rules, was stopped, or failed. The state says which; LedgerError and the like do not escape."""
        if self.core.ledger.ended is not None:
            log.info("run %s has ended (%s); for another one choose another run_id or run_dir", self.core.run_id, self.core.ledger.ended)
            await self._wind_down()
            return
        try:
            self._reconcile()
        except CannotContinue as error:
            self.failure, self.state = str(error), "failed"
            await self._wind_down()
            return
        training = asyncio.create_task(self.training.run(), name="training")
        others = [
            asyncio.create_task(coroutine, name=name)
            for name, coroutine in (
                ("processes", self.processes.run()),
                ("scoring", self.scoring.run()),
                ("dispatch", self.dispatch.run()),
                ("push", self.publisher.run()),
                ("engine watch", self.engine_watch.run()),
                ("tick", self._tick_loop()),
                *([("routing", self.routing.run())] if self.routing is not None else []),
            )
        ]
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        self.state = self._last_intent()
        try:
            await asyncio.wait([training, *others, stop], return_when=asyncio.FIRST_COMPLETED)
            self.failure = _first_failure([training, *others])
            if self.failure is not None:
                self.state = "failed"
            if self.failure is None and training.done():
                self._end_by_rule()
            elif self.failure is None and self._stop.is_set():
                await self._stop_training(training)
        finally:
            stop.cancel()
            for task in [*others, training]:
                task.cancel()
            await asyncio.gather(*others, training, stop, return_exceptions=True)
            await self.training.abandon()
            await self._wind_down()

    def stop(self) -> None:
        """SIGTERM: hold everything for the next start."""
        self._stop.set()

    async def _stop_training(self, training: asyncio.Task[None]) -> None:
        """Let the step in flight end, then hold what was applied in a checkpoint. Bounded: what is not saved is replayed."""
        self.core.stopping = True
        self.core.ring()
        try:
            async with asyncio.timeout(self.config.stop_deadline_s):
                await asyncio.wait([training])
                await self.training.save_now()
        except TimeoutError:
            log.warning(
                "stopped without a last checkpoint: it took longer than %.0f s; the batches since are replayed", self.config.stop_deadline_s
            )

    def _end_by_rule(self) -> None:
        """All batches are committed; whatever is still live ends with the reason the run ended for."""
        wanted = self.config.stop.batches
        done = "all batches trained" if wanted is not None and self.core.ledger.next_batch >= wanted else "input exhausted"
        how = self.core.ending or self.core.draining or done
        for sample in list(self.core.ledger.live()):
            unfinished = [t for t in sample.trajectories if t.state != "finished"]
            self.core.apply(SampleDiscarded(uid=sample.uid, reason=f"run ended: {how}", time=time.time()))
            for trajectory in unfinished:
                self._archive_discarded(sample, trajectory)
            self._free(unfinished)
        self.core.apply(RunEnded(how=how))

    async def _wind_down(self) -> None:
        """Processes end, what must survive goes to disk, the store goes. The ledger stays open for reading until `close`."""
        core = self.core
        await self.processes.stop()
        self.publisher.free_all()
        self.transports.sweep()
        try:
            if not core.db.failure:
                await core.db.durable()
        finally:
            try:
                self.archive.flush()
            except OSError as error:
                self.failure = self.failure or str(error)
            self.metrics.close()
            if core.ledger.ended is None:
                kept = self.store.park(self.config.directory / "parked")
                log.info("%d objects are kept in %s for the next start", kept, self.config.directory / "parked")
            self.store.remove()
            self._store_gone = True
            await self.http.aclose()
        if self.failure:
            self.state = "failed"
            log.error("the run has stopped: %s", self.failure)
        else:
            self.state = "finished" if core.ledger.ended else "stopped"
        core.waits.clear()

    def close(self) -> None:
        """Let go of the ledger."""
        self.core.db.close()

    def store_stats(self) -> StoreStats:
        return StoreStats(0, 0, self.config.store.capacity_bytes) if self._store_gone else self.store.stats()

    def _reconcile(self) -> None:
        """Compare the ledger with the store, drop what nobody owns, and make again what is gone."""
        core, ledger = self.core, self.core.ledger
        restored = self.store.unpark(self.config.directory / "parked")
        owned = set()
        lost = 0
        for sample in ledger.samples.values():
            for trajectory in sample.trajectories:
                if trajectory.state == "ready" and not rows_present(core, trajectory.leaves):
                    core.apply(RowsLost(traj_uid=trajectory.traj_uid, reason="rows lost with the host's memory"))
                    lost += 1
                owned |= {ref["key"] for leaf in trajectory.leaves for ref in (leaf.rollout, leaf.reward)}
        for trajectory in [t for s in ledger.live() for t in s.in_state("running") if t.reason is None]:
            # Whether it had been sent is not known: its next request counts as another try.
            core.apply(TrajectoryRetried(traj_uid=trajectory.traj_uid, kind="infrastructure", reason="the driver was restarted"))
        needed = smallest_batch(ledger.live_by_deadline, ledger.next_batch)
        if needed > self.config.batch.samples:
            raise CannotContinue(
                f"batch.samples is {self.config.batch.samples}, but samples were registered for larger batches: at least {needed} a batch "
                f"are needed to train them in time. Set batch.samples to {needed} or more, or begin a new run_id"
            )
        for sample in list(ledger.live()):
            self.dispatch.settle(sample)
        published = self.store.keys()
        orphans = [self.store.ref(key) for key in published if key not in owned]
        self.store.free(orphans)
        if ledger.next_uid:
            log.info(
                "continuing at version %d (committed %d, epoch %d): %d samples live, %d batches to finish, "
                "%d objects restored, %d trajectories without rows, %d orphans freed",
                ledger.trained_version,
                ledger.committed_version,
                ledger.epoch,
                sum(ledger.live_by_deadline.values()),
                len(ledger.batches),
                restored,
                lost,
                len(orphans),
            )

    # ---- commands ------------------------------------------------------------------------------------------------------

    def _last_intent(self) -> str:
        """What was asked for before a restart holds after it."""
        found = self.core.db.query("SELECT value FROM meta WHERE name = 'intent'")
        if not found:
            return "running"
        intent = orjson.loads(found[0][0])
        self.core.paused, self.core.draining, self.core.ending = intent["paused"], intent["draining"], intent["ending"]
        return str(intent["state"])

    def pause(self) -> None:
        self.core.paused = True
        self._intend("paused")

    def resume(self) -> None:
        self.core.paused = False
        self._intend("draining" if self.core.draining else "running")

    def drain(self) -> None:
        """No new samples; what is registered is finished and trained, then the run ends."""
        self.core.draining = "draining on request"
        self.core.paused = False
        self._intend("draining")

    def cancel(self) -> None:
        """The batch in training is finished; everything else is discarded, with that reason."""
        self.core.ending = "cancelled"
        self.core.draining = "cancelled"
        self.core.paused = False
        self._intend("cancelling")

    def _intend(self, state: str) -> None:
        """Show what was asked for, and keep it over a restart."""
        intent = {"paused": self.core.paused, "draining": self.core.draining, "ending": self.core.ending, "state": state}
        self.core.db.write([Upsert("meta", {"name": "intent", "value": orjson.dumps(intent)})])
        if self.state not in ("finished", "failed", "stopped"):
            self.state = state
        self.core.ring()

    # ---- batches -------------------------------------------------------------------------------------------------------

    def _on_applied(self, batch_id: int, report: TrainReport) -> None:
        """Metrics of one batch, and the stop rule on reward."""
        ledger, now = self.core.ledger, time.monotonic()
        samples = [ledger.samples[uid] for uid in ledger.batches[batch_id].uids]
        scored = [t for s in samples for t in s.in_state("consumed")]
        rewards = [t.reward for t in scored if t.reward is not None]
        correct = [leaf.is_correct for t in scored for leaf in t.leaves if leaf.is_correct is not None]
        ages = [batch_id - s.version_tag for s in samples]
        if self._last_applied_at is not None:
            self.watermark.observe_batch(now - self._last_applied_at)
        self._last_applied_at = now
        self._measure_busy()
        if report.logprob_gap_max is not None:
            self._gap_of_rows = max(report.logprob_gap_max, self._gap_of_rows or 0.0)
        decision = self.dispatch.decision
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
            "staleness_bound": self.config.staleness.bound,
            "in_flight": self.dispatch.in_flight,
            "watermark": decision.watermark if decision else None,
            "watermark_binding": decision.binding if decision else None,
            "ready": ledger.counts.by_state["ready"],
            "engine_busy": self.busy_shares.get("engines"),
            "trainer_busy": self.busy_shares.get("trainer"),
            "learning_rate": self.config.trainer.learning_rate_at(batch_id, self.config.stop.batches),
            **report.model_dump(exclude={"row_ids", "skipped_row_ids", "batch_id"}),
            "push_s": self.pusher.seconds,
            "serving_version": ledger.serving_version,
            "epoch": ledger.epoch,
            "discarded_total": ledger.counts.by_outcome["discarded"],
        }
        while self.recent and self.recent[-1]["batch_id"] >= batch_id:  # a replay
            self.recent.pop()
        self.recent.append(line)
        self.metrics.write(line)
        for alarm in observe.alarms(self):
            log.warning("%s", alarm)
        stop = self.config.stop
        window = [m["reward_mean"] for m in list(self.recent)[-stop.reward_window :]]
        if stop.reward is not None and len(window) == stop.reward_window and sum(window) / len(window) >= stop.reward:
            self.core.ending = f"mean reward reached {stop.reward}"
            self.core.draining = self.core.ending

    @property
    def gap_max(self) -> float | None:
        """The largest difference of log-probs seen, engine to trainer: of rows of one version, and of the pushes' fixed sequence."""
        return max((gap for gap in (self._gap_of_rows, self.publisher.gap_max) if gap is not None), default=None)

    @property
    def elapsed_s(self) -> float:
        return self._elapsed_before_s + time.monotonic() - self.core.started

    def _measure_busy(self) -> None:
        """Shares of the time since the last look (at least a second ago) in which engines and trainer worked."""
        then, engines_then, trainer_then = self._busy_at
        now, engines = time.monotonic(), sum(slot.busy_s() for slot in self.pool.slots.values())
        trainer = self.training.busy.seconds()
        if now - then < 1.0:
            return
        span = now - then
        self.busy_shares = {
            "engines": min(1.0, max(0.0, (engines - engines_then) / (span * max(1, len(self.pool.slots))))),
            "trainer": min(1.0, max(0.0, (trainer - trainer_then) / span)),
        }
        self._busy_at = (now, engines, trainer)

    async def _tick_loop(self) -> None:
        """Once a second: busy shares, and the archive's age. Owned by `run`."""
        while True:
            await asyncio.sleep(1.0)
            self._measure_busy()
            self.scoring.look()
            if self.archive.due:
                await asyncio.to_thread(self.archive.flush)

    # ---- ends of trajectories ------------------------------------------------------------------------------------------

    async def _archive_finished(self, samples: list[Sample], outcome: str, reason: str | None) -> None:
        """Text, tokens and lineage of trajectories about to be finished, durable before the ledger says so."""
        done = [(s, t) for s in samples for t in s.in_state("consumed")]
        await asyncio.to_thread(self._archive_rows, done, outcome, reason)

    def _archive_rows(self, done: list[tuple[Sample, Trajectory]], outcome: str, reason: str | None) -> None:
        for sample, trajectory in done:
            self.archive.append(self._finished(sample, trajectory, outcome, reason))
        self.archive.flush()

    def _archive_discarded(self, sample: Sample, trajectory: Trajectory) -> None:
        self.archive.append(self._finished(sample, trajectory, "discarded", trajectory.reason))

    def _finished(self, sample: Sample, trajectory: Trajectory, outcome: str, reason: str | None) -> FinishedTrajectory:
        row = self.core.feed.row(sample.segment, sample.row_index)
        leaf = trajectory.leaves[0] if trajectory.leaves else None
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        spans: list[list[int]] = []
        if leaf is not None:
            try:
                with self.store.open(Ref.from_wire(leaf.rollout)) as columns:
                    ids, mask = columns["input_ids"].tolist(), columns["response_mask"].tolist()
                    log_probs, spans = columns["rollout_log_probs"].tolist(), columns["version_spans"].tolist()
            except Gone:
                reason = f"{reason or ''} (its rows were gone)".strip()
        response = [token for token, trained in zip(ids[1:], mask, strict=True) if trained]
        prompt = row.prompt if row.prompt is not None else orjson.dumps(row.messages).decode()
        return FinishedTrajectory(
            traj_uid=trajectory.traj_uid,
            uid=sample.uid,
            run_id=self.core.run_id,
            dataset_id=self.core.feed.dataset_of(sample.segment),
            row_index=sample.row_index,
            outcome=outcome,
            reason=reason,
            version_tag=sample.version_tag,
            batch_id=sample.batch_id,
            reward=trajectory.reward,
            is_correct=leaf.is_correct if leaf else None,
            prompt=prompt,
            response=self.tokenizer.decode(response),
            input_ids=ids,
            response_mask=mask,
            rollout_log_probs=log_probs,
            version_spans=spans,
            attempts=1 + trajectory.infrastructure_attempts + trajectory.data_attempts,
            started_at=trajectory.started_at,
            finished_at=time.time(),
            parts="{}",
        )

    def texts(self, trajectory: Trajectory) -> list[str]:
        """The responses of a live trajectory's leaves, decoded from the store."""
        out = []
        for leaf in trajectory.leaves:
            with self.store.open(Ref.from_wire(leaf.rollout), ["input_ids", "response_mask"]) as columns:
                ids, mask = columns["input_ids"][1:], columns["response_mask"]
                out.append(self.tokenizer.decode(ids[mask == 1].tolist()))
        return out

    def _free(self, trajectories: list[Trajectory]) -> None:
        self.store.free(Ref.from_wire(ref) for t in trajectories for leaf in t.leaves for ref in (leaf.rollout, leaf.reward))


def canary_ids(tokenizer: TokenizerView, context_length: int) -> list[int]:
    """The fixed sequence whose log-probs every verified engine must agree on with the trainer: spread over the vocabulary."""
    length = min(32, context_length // 2)
    return [(7 + 37 * i) % tokenizer.vocab_size for i in range(length)]


def _first_failure(tasks: list[asyncio.Task[None]]) -> str | None:
    """The reason of the first task that died, with its traceback in the log."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if not isinstance(error, EXPECTED):  # one of ours, with its place
                log.error("the %s loop has died", task.get_name(), exc_info=error)
            return f"{task.get_name()}: {error or type(error).__name__}"
    return None
