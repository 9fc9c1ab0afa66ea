"""One run: its parts put together, started, watched, and ended in order.

    dispatch ─▶ scoring ─▶ (ledger) ─▶ training ─▶ snapshot ─▶ push ─▶ dispatch
        ▲ watermark, A4                 │ commit: archive, then free rows

Start reads the ledger and reconciles it with what is really there (store keys, checkpoints), and says what it found. End, by rule or by
SIGTERM, leaves the ledger, a checkpoint and the ready rows on disk, and nothing in memory. Each loop is one task; the first that ends
with an exception ends the run visibly, with its reason in `failure` (H8).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from driver import whatif_facts
from driver.archive import Archive
from driver.balance import Terms
from driver.bias_watch import BiasWatch
from driver.core import Core
from driver.curriculum import Curriculum
from driver.dispatch import Dispatch
from driver.distributed import Courier, DistributedTransport
from driver.ended import Ended
from driver.engine_watch import EngineWatch
from driver.evaluation import Evaluator
from driver.events import Found, RunEnded, SampleDiscarded
from driver.feed import Feed
from driver.finished import Finished
from driver.history import History
from driver.holds import Holds
from driver.launcher import StartFailed
from driver.ledger_db import LedgerDB, LedgerError
from driver.ledger_rows import Upsert
from driver.own_roles import OwnRoles
from driver.planned import plan_of
from driver.planner import Plan, PlanError
from driver.prefix_log import PrefixLog
from driver.processes import Processes
from driver.publish import Publisher
from driver.push import Pusher
from driver.reconcile import CannotContinue, reconcile
from driver.routing import Routing
from driver.row_snapshot import RowSnapshot
from driver.run_store import RunStore
from driver.scoring import Scoring
from driver.settings import RunConfig
from driver.snapshot import PushImpossible, Snapshot
from driver.store_watch import StoreWatch
from driver.stream_db import StreamError
from driver.training import CheckpointMissing, Training
from driver.transport import Transports
from driver.turns import direct
from driver.watermark import Watermark
from rollout.client import make_http
from rollout.pool import EnginePool
from rollout.router import RouterClient
from rollout.tokens import TokenizerView
from store import StoreStats, Unavailable
from trainer.client import TrainerRefused

log = logging.getLogger("headrace.run")
KEEP_S = 60
EXPECTED = (StartFailed, TrainerRefused, CheckpointMissing, LedgerError, PushImpossible, PlanError, StreamError)
"""Their text is for the user and says it all."""


class Run:
    def __init__(self, config: RunConfig) -> None:
        plan_of(config)  # what can not be started is refused before anything is made
        self.config = config
        self.beside: Callable[[], dict[str, Plan]] = dict  # the plans of the service's other runs, which `Runs` knows
        config.directory.mkdir(parents=True, exist_ok=True)
        self.log_directory = config.directory / "logs"
        self.log_directory.mkdir(exist_ok=True)
        db = LedgerDB(config.directory / "ledger.sqlite")
        ledger = db.load()
        self.run_store = RunStore(config)
        store = self.run_store.store
        feed = Feed(db, seed=config.seed, shuffle=config.shuffle, passes=config.stop.epochs)
        self.core = Core(config, ledger, db, feed, store)
        self.store = store
        self.http = make_http()
        self.pool = EnginePool()
        self.tokenizer = TokenizerView(config.model.path)
        self.finished = Finished(self.core, self.tokenizer, Archive(config.directory / "archive"))
        self.courier = Courier(self.http)
        self.transports = Transports.of(config, lambda: DistributedTransport.of(config, self.courier))
        self.transports.sweep()
        self.pusher = self._pusher_of(self.pool)
        self.publisher = Publisher(self.core, self.pool, self.pusher)
        self.scoring = Scoring(self.core, wait_s=config.reward.batch_wait_s, deadline_s=config.reward.deadline_s)
        watermark = Watermark(config.batch.samples * config.rollout.n, self.core.measured)
        self.watermark = watermark
        self.bias = BiasWatch(self.core)
        rollout = config.rollout
        self.routing: Routing | None = None
        if rollout.router_url is not None:
            router = RouterClient(rollout.router_url, self.http, rollout.router_api_key, vocab_size=self.tokenizer.vocab_size)
            self.routing = Routing(self.core, self.pool, router, rollout.engine_api_key, lambda: self.processes.engine_urls)
        self.prefixes = PrefixLog(
            config.directory / "prefixes.sqlite",
            db,
            every_s=rollout.prefix_log_every_s,
            every_tokens=rollout.prefix_log_every_tokens,
            verified=self.pusher.verified,
        )
        self.snapshot = RowSnapshot(config.directory / "rows.sqlite", self.core, store, config.store.snapshot_every_s)
        self.found: Found | None = None  # at start, when there was something
        self.dispatch = Dispatch(
            self.core,
            self.pool,
            self.pusher,
            self.scoring,
            self.tokenizer,
            watermark,
            on_discarded=self.finished.discarded,
            on_cut=self.bias.cut,
            routing=self.routing,
            prefixes=self.prefixes,
        )
        self.holds = Holds(self.core, cut=self.dispatch.cut, moving=lambda: any(slot.state == "open" for slot in self.pool.slots.values()))
        self.evaluator_pool = EnginePool() if config.evaluation is not None and config.evaluation.engines else self.pool
        self.evaluator: Evaluator | None = None
        if config.evaluation is not None:
            own = self.evaluator_pool is not self.pool
            self.evaluator = Evaluator(
                self.core,
                config.evaluation,
                self.evaluator_pool,
                self._pusher_of(self.evaluator_pool) if own else self.pusher,
                self.publisher,
                self.scoring,
                self.tokenizer,
                self.finished,
                direct if own else self.dispatch.turns.way,
            )
        self.engine_watch = EngineWatch(
            self.core,
            self.pool,
            interval_s=config.rollout.loads_interval_s,
            stall_s=config.rollout.stall_s if self.routing is None else None,
            replace=lambda slot, reason: self.processes.replace(slot.engine_id, reason),
        )
        self.model_facts = orjson.loads((config.model.path / "config.json").read_bytes())
        self.terms = Terms.of(config, self.model_facts)
        self.training = Training(
            self.core,
            self.http,
            canary_ids=canary_ids(self.tokenizer, config.rollout.context_length),
            on_snapshot=self._offer,
            on_applied=lambda batch_id, report: self.history.applied(batch_id, report),
            archive=self.finished.committed,
            on_running_again=self.dispatch.enqueue,
            replace=lambda reason: self.processes.replace("trainer-0", reason),
            holds=self.holds,
            terms=self.terms,
        )
        self.processes = Processes(self)
        self.own_roles = OwnRoles(self)
        self.state = "starting"
        self.failure: str | None = None
        self.history = History(self)
        self.dispatch.judge.pause = self.pause
        self.curriculum = Curriculum(self, config.curriculum) if config.curriculum is not None else None
        self.store_watch = StoreWatch(self.core, self.snapshot, again=self.dispatch.enqueue)
        self._stop = asyncio.Event()

    def _pusher_of(self, pool: EnginePool) -> Pusher:
        return Pusher(
            pool,
            deadline_s=self.config.push.deadline_s,
            logprob_tolerance=self.config.logprob_tolerance,
            replace=lambda slot, reason: self.processes.replace(slot.engine_id, reason),
            transports=self.transports,
            gate=self.core.gate,
        )

    def _offer(self, snapshot: Snapshot) -> None:
        if self.evaluator is not None:
            self.evaluator.offer(snapshot)  # first: what it holds is not freed
        self.publisher.offer(snapshot)

    # ---- life ----------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the run has ended by its rules, was stopped, or failed. The state says which; LedgerError and the like do not escape."""
        if (ended := Ended.of(self.core.ledger)) is not None:
            log.info("%s", ended.words(self.core.run_id))
            await self._wind_down()
            return
        try:
            await self.run_store.open(self)
            self.found = reconcile(self.core, self.store, self.dispatch.settle, self.prefixes, self.snapshot)
            self._cut_evaluation("evaluation: the driver was restarted")
        except (CannotContinue, LedgerError, StartFailed, PlanError, Unavailable, OSError) as error:
            self.failure, self.state = str(error), "failed"
            await self._wind_down()
            return
        rollout = self.config.rollout
        self.dispatch.judge.recall()
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
                *([("evaluation", self.evaluator.run())] if self.evaluator is not None else []),
                *([("roles", self.own_roles.run())] if self.config.roles else []),
                *([("routing", self.routing.run())] if self.routing is not None else []),
                *([("prefix log", self.prefixes.run())] if rollout.prefix_log_every_s is not None else []),
                *([("snapshot", self.snapshot.run())] if self.snapshot.every_s is not None else []),
                *([("store", self.store_watch.run())] if self.run_store.place is not None else []),
                *([("curriculum", self.curriculum.run())] if self.curriculum is not None else []),
            )
        ]
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        saying = asyncio.create_task(whatif_facts.say(self), name="what if")
        self.state = self._last_intent()
        try:
            await asyncio.wait([training, *others, stop], return_when=asyncio.FIRST_COMPLETED)
            self.failure = _first_failure([training, *others], self.config.directory)
            if self.failure is not None:
                self.state = "failed"
            if self.failure is None and training.done():
                await self._last_evaluation(others)
                if not (
                    self._stop.is_set() and self.evaluator is not None and self.evaluator.busy
                ):  # else the next start evaluates, and ends
                    self._end_by_rule()
                await self.own_roles.finish(self.config.stop_deadline_s)
            elif self.failure is None and self._stop.is_set():
                await self._stop_training(training)
        except LedgerError as error:  # its last writes
            self.failure, self.state = str(error), "failed"
        finally:
            stop.cancel()
            for task in [*others, training, saying]:
                task.cancel()
            await asyncio.gather(*others, training, saying, stop, return_exceptions=True)
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

    async def _last_evaluation(self, others: list[asyncio.Task[None]]) -> None:
        """Of the last version, while everything still runs."""
        if self.evaluator is None or self.core.ending == "cancelled":
            return
        finish = asyncio.create_task(self.evaluator.finish(self.publisher.newest), name="last evaluation")
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait([finish, stopped, *others], return_when=asyncio.FIRST_COMPLETED)
        for task in (finish, stopped):
            task.cancel()
        await asyncio.gather(finish, stopped, return_exceptions=True)
        self.failure = _first_failure([finish, *others], self.config.directory)

    def _end_by_rule(self) -> None:
        """All batches are committed; whatever is still live ends with the reason the run ended for."""
        wanted = self.config.stop.batches
        done = "all batches trained" if wanted is not None and self.core.ledger.next_batch >= wanted else "input exhausted"
        how = self.core.ending or self.core.draining or self.core.feed.all_left_out() or done
        for sample in list(self.core.ledger.live()):
            unfinished = [t for t in sample.trajectories if t.state != "finished"]
            self.core.apply(SampleDiscarded(uid=sample.uid, reason=f"run ended: {how}", time=time.time()))
            for trajectory in unfinished:
                self.finished.discarded(sample, trajectory)
            self.finished.free(unfinished)
        self._cut_evaluation(f"run ended: {how}")
        self.core.apply(RunEnded(how=how))

    def _cut_evaluation(self, reason: str) -> None:
        """What runs of one is discarded, and is so in the archive before the ledger says it."""
        cut = list(self.core.ledger.evaluated())
        if cut and self.evaluator is not None:
            self.finished.evaluation_cut(self.evaluator.rows, cut, reason)
        for sample in cut:
            self.core.apply(SampleDiscarded(uid=sample.uid, reason=reason, time=time.time()))

    async def _wind_down(self) -> None:
        """Processes end, what must survive goes to disk, the store goes. The ledger stays open for reading until `close`."""
        core = self.core
        await self.processes.stop()
        self.own_roles.close()
        self.publisher.free_all()
        self.transports.sweep()
        unlogged = self.prefixes.close()
        try:
            if core.ledger.ended is None:
                self.dispatch.turns.count_resampled(unlogged)
            self.bias.look()
            await core.db.durable()
        except LedgerError as error:
            self.failure = self.failure or str(error)
        if over := core.ledger.ended is not None and not core.db.failure:
            self.prefixes.close(remove=True)
        self.snapshot.close(remove=over)
        try:
            self.finished.archive.flush()
        except OSError as error:
            self.failure = self.failure or str(error)
        with contextlib.suppress(OSError):  # it is missed by the model only
            whatif_facts.keep(core.measured, self.config.directory)
        self.history.metrics.close()
        await core.gate.settle(self.config.stop_deadline_s)
        await self._in_time(core.gate.ask(self._keep_rows))
        core.gate.close()
        self.store_watch.close()
        await self.processes.stop_store()
        await self.http.aclose()
        if self.failure:
            self.state = "failed"
            log.error("the run has stopped: %s", self.failure)
        else:
            self.state = "finished" if core.ledger.ended else "stopped"
        for side in list(core.waits):
            core.waiting(side, None)

    async def _in_time(self, keeping: Awaitable[None]) -> None:
        """A store that hangs does not keep the run from ending."""
        try:
            async with asyncio.timeout(self.config.stop_deadline_s):
                await keeping
        except TimeoutError:
            self.failure = (
                self.failure or f"{self.run_store.store.location} has not given its rows within {self.config.stop_deadline_s:g} s"
            )

    def _keep_rows(self) -> None:
        """What the ledger on disk may still speak of goes to disk too; where it can not, it stays in shared memory for the next start."""
        wanted = self.core.ledger.ended is None or self.core.db.failure
        failure = self.run_store.keep(self.config.directory / "parked" if wanted else None)
        self.failure = self.failure or failure

    def close(self) -> None:
        """Let go of the ledger."""
        self.core.db.close()

    def store_stats(self) -> StoreStats:
        return self.run_store.stats(self)

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

    # ---- once a second ----

    async def _tick_loop(self) -> None:
        """Once a second: is the ledger well, busy shares, the archive's age; once a minute what was measured is kept. Owned by `run`."""
        seconds = 0
        while True:
            await asyncio.sleep(1.0)
            if self.core.db.failure:  # nothing may be about to be written
                raise LedgerError(self.core.db.failure)
            self.history.measure_busy()
            self.scoring.look()
            self.bias.look()
            if self.finished.archive.due:
                await asyncio.to_thread(self.finished.archive.flush)
            if (seconds := seconds + 1) % KEEP_S == 0:
                with contextlib.suppress(OSError):
                    whatif_facts.keep(self.core.measured, self.config.directory)


def canary_ids(tokenizer: TokenizerView, context_length: int) -> list[int]:
    """The fixed sequence whose log-probs every verified engine must agree on with the trainer: spread over the vocabulary."""
    length = min(32, context_length // 2)
    return [(7 + 37 * i) % tokenizer.vocab_size for i in range(length)]


def _first_failure(tasks: list[asyncio.Task[None]], directory: Path) -> str | None:
    """The reason of the first task that died, with its traceback in the log."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                return f"{task.get_name()}: {error}; free space on the disk of {directory} or make it writable, then start again"
            if not isinstance(error, EXPECTED):  # one of ours, with its place
                log.error("the %s loop has died", task.get_name(), exc_info=error)
            return f"{task.get_name()}: {error or type(error).__name__}"
    return None
