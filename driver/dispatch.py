"""The rollout side of a run: what is sent next, and each trajectory on its way from running to ready.

    dataset row ──register (A4, watermark)──▶ n trajectories ──▶ engine ──tokens──▶ leaves ──▶ store ──▶ reward ──▶ ready
                                                  ▲   lost with its engine: on from its last token  │
                                                  └────────────────────────────────────────────────┘

Order of dispatch: what is running already (after a restart), then siblings of the oldest sample, then a new sample. The watermark and
A4 gate new samples only. One task a trajectory, owned by `run`; a task's own exception ends the run visibly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from driver.batcher import admissible
from driver.config import weights_bytes
from driver.core import Core
from driver.datasets import DataRow
from driver.events import Leaf, SampleDiscarded, SampleRegistered, TrajectoryDiscarded, TrajectoryReady
from driver.filter import Judge
from driver.ledger_state import DISCARDED, READY, RUNNING, Sample, Trajectory
from driver.lost_time import FULL
from driver.measured import BY_TRAJECTORY, Rate
from driver.next_row import NextRow, Unfit, prompt_ids
from driver.prefix_log import PrefixLog
from driver.push import Pusher
from driver.routing import Routing
from driver.row_writer import RowWriter
from driver.scoring import ScoreFailed, Scoring
from driver.turns import GivenUp, Turns, retry
from driver.watermark import Decision, KvRoom, Watermark, kv_room
from reward.wire import Job
from rollout.answer import Generation
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.tree import Leaf as TreeLeaf
from rollout.tree import Trajectory as Tree
from rollout.tree import row_columns
from rollout.workflow import Task, Workflow, WorkflowFailed, single_turn
from store import Ref, in_store
from store.rows import packed
from store.schema import reward_columns

log = logging.getLogger("headrace.dispatch")


class Dispatch:
    def __init__(
        self,
        core: Core,
        pool: EnginePool,
        pusher: Pusher,
        scoring: Scoring,
        tokenizer: TokenizerView,
        watermark: Watermark,
        *,
        on_discarded: Callable[[Sample, Trajectory], None],
        on_cut: Callable[[str, int], None] = lambda traj_uid, tokens: None,
        routing: Routing | None = None,
        prefixes: PrefixLog | None = None,
        workflow: Workflow = single_turn,
    ) -> None:
        self._on_cut = on_cut
        self._workflow = workflow
        self._routing = routing
        self._core = core
        self._pool = pool
        self.turns = Turns(core, pool, pusher, tokenizer, routing, prefixes)
        self._scoring = scoring
        self._tokenizer = tokenizer
        self._watermark = watermark
        self._on_discarded = on_discarded
        self._bell = core.bell()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._queue: deque[tuple[Sample, Trajectory]] = deque()  # registered, not yet sent
        self._rows: dict[int, DataRow] = {}  # of live samples
        self._prompts: dict[int, Sequence[int]] = {}  # the same in tokens
        self.next_row = NextRow(core, tokenizer)
        self.judge = Judge(core)
        self._request_tokens = Rate(BY_TRAJECTORY)  # prompt and answer
        self.decision: Decision | None = None
        self.kv_room: KvRoom | None = None  # what the decision took for kv_slots
        self.generating = 0
        self.tokens_sampled = 0
        self.cut_tokens = 0  # sampled for trajectories that the staleness preset discarded
        self._weights_bytes = weights_bytes(core.config.model.path, core.config.trainer.dtype)
        self.writer = RowWriter(core)
        self._worked: dict[int, list[float]] = {}  # of live samples: what each of their trajectories took that lost no request

    # ---- the loop ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Sent and not yet ready: queued at an engine, generating, or scoring."""
        return len(self._tasks)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def place(self, traj_uid: str) -> str:
        """Where a running trajectory is, in words."""
        if traj_uid not in self._tasks:
            return "not sent yet"
        if self._scoring.holds(traj_uid):
            return "at its scorer"
        slot = self.turns.where(traj_uid)
        if not self.turns.asks(traj_uid):
            return "between two turns" if slot is not None else "about to be sent"
        return "waiting for an engine" if slot is None or slot.state == "gone" else f"on {slot.engine_id}"

    async def run(self) -> None:
        """Consumes dataset rows; waits for room on the engines, for A4, for the watermark; unblocked by any change. Ends never: its
        owner cancels it. An exception of a trajectory's task is raised here."""
        for sample in self._core.ledger.live():
            self.enqueue(sample)
        async with asyncio.TaskGroup() as group:
            while True:
                self._bell.clear()
                while (following := self._next()) is not None:
                    sample, trajectory = following
                    self.turns.due(trajectory.traj_uid)
                    self._tasks[trajectory.traj_uid] = group.create_task(self._trajectory(sample, trajectory), name=trajectory.traj_uid)
                    self.generating += 1
                await asyncio.sleep(0)  # rows that were passed by have rung our own bell: others have their turn first
                await self._bell.wait(1.0)

    def enqueue(self, sample: Sample) -> None:
        """What is running of this sample, has no task and does not wait for one: after a restart, or because its rows were lost."""
        waits = {t.traj_uid for _, t in self._queue}
        self._queue.extend((sample, t) for t in sample.in_state(RUNNING) if t.traj_uid not in self._tasks and t.traj_uid not in waits)

    def cut(self, sample: Sample, reason: str) -> None:
        """Discard what is running of a sample: its requests are aborted and their slots free, its rows go, and its siblings are settled."""
        loop = asyncio.get_running_loop()
        for trajectory in sample.in_state(RUNNING):
            tokens = self.turns.progress.get(trajectory.traj_uid, 0)
            self.cut_tokens += tokens
            self._on_cut(trajectory.traj_uid, tokens)
            self._core.apply(TrajectoryDiscarded(traj_uid=trajectory.traj_uid, reason=reason, time=time.time()))
            self._on_discarded(sample, trajectory)
            if (task := self._tasks.get(trajectory.traj_uid)) is not None:
                # In the next turn of the loop: a task that is cancelled before its first step never comes to its `finally`. Its end closes
                # the connection, which is how a request is aborted at an engine.
                loop.call_soon(task.cancel)
        self.settle(sample)

    def _room(self) -> int:
        """Requests the open engines would take now, less those of tasks that have one or are about to ask for one."""
        capacity = sum(slot.capacity for slot in self._pool.slots.values() if slot.state == "open")
        return capacity - self.turns.asking

    def _next(self) -> tuple[Sample, Trajectory] | None:
        """What to send now, or None with the reason recorded."""
        core = self._core
        if core.paused or core.ending or core.stopping:
            ends = f"the run ends: {core.ending or 'stopped'}"
            core.waiting("rollout", "the run is paused" if core.paused else ends, "paused" if core.paused else "ending")
            return None
        if self._routing is not None and self._routing.reason is not None:
            core.waiting("rollout", f"router {self._routing.client.url}: {self._routing.reason}", "engines")
            return None
        if self._room() <= 0:
            full = bool(self._pool.slots) and any(slot.state == "open" for slot in self._pool.slots.values())
            core.waiting("rollout", None if full else self._pool.why(), "engines")
            return None
        while self._queue:
            sample, trajectory = self._queue.popleft()
            if trajectory.state == RUNNING:
                core.waiting("rollout", None)
                return sample, trajectory
        return self._register()

    def _register(self) -> tuple[Sample, Trajectory] | None:
        """Register the next dataset row if every gate lets it; its first trajectory is returned, its siblings are queued."""
        core, ledger, config = self._core, self._core.ledger, self._core.config
        if not self.next_row.look():
            return None
        closed = self._closed_gate()
        if closed is not None:
            kind, reason = closed
            core.waiting("rollout", reason, kind)
            return None
        place = core.feed.next_place(ledger.cursor)
        assert place is not None
        event = SampleRegistered(
            uid=ledger.next_uid,
            segment=place.segment,
            row_index=place.row_index,
            pass_index=place.pass_index,
            position=place.position,
            version_tag=ledger.serving_version,
            deadline_batch=ledger.serving_version + core.limits.bound,
            n=config.rollout.n,
            time=time.time(),
            dataset_id=place.dataset_id,
            credits=dict(place.credits),
        )
        core.apply(event)
        self.judge.registered(place.dataset_id)
        core.waiting("rollout", None)
        sample = ledger.samples[event.uid]
        head = self.next_row.head
        assert head is not None
        self._rows[event.uid], self._prompts[event.uid] = head.row, head.prompt
        self._queue.extend((sample, t) for t in sample.trajectories[1:])
        return sample, sample.trajectories[0]

    def _closed_gate(self) -> tuple[str, str] | None:
        """Why no new sample may be registered now, by kind and in words; None when one may."""
        core, ledger, config = self._core, self._core.ledger, self._core.config
        if core.draining is not None:
            return "draining", f"no new samples: {core.draining}"
        if core.gate.reason is not None:
            return "store", f"the store is away: {core.gate.reason}"
        if core.feed.next_place(ledger.cursor) is None:
            if not core.feed.datasets():
                return "data", "no dataset was submitted yet (headrace submit FILE)"
            if weightless := core.feed.weightless(ledger.cursor):
                names = ", ".join(weightless)
                return "data", f"only datasets of weight 0 have rows left: {names}; give one a weight (headrace mix), or drain"
            sent = core.feed.all_left_out() or "all rows were sent"
            if core.feed.closed:
                return "input over", sent
            return "data", f"{sent} and the dataset is open: append rows or close it"
        if self.writer.full:
            return "store", f"rows wait for room in the store: {next(iter(self.writer.full.values()))}"
        live = sum(ledger.live_by_deadline.values())
        if config.stop.batches is not None and live >= (config.stop.batches - ledger.next_batch) * core.limits.samples:
            return "input over", f"the last of {config.stop.batches} batches has all its samples"
        bound = core.limits.bound
        deadline = ledger.serving_version + bound
        if deadline < ledger.next_batch:
            return "lag", f"the engines serve version {ledger.serving_version}, too old for batch {ledger.next_batch} with bound {bound}"
        room = admissible(ledger.live_by_deadline, deadline, ledger.next_batch, core.limits.samples)
        reserved_bytes = (ledger.counts.by_state[RUNNING] - ledger.evaluating) * config.sample_bytes // config.rollout.n
        self.kv_room = kv_room(
            ((slot.load, slot.capacity) for slot in self._pool.slots.values() if slot.state == "open"),
            max_running=config.rollout.max_running_requests,
            mean_tokens=self._request_tokens.value,
        )
        self._watermark.batch_trajectories = core.limits.samples * config.rollout.n
        self.decision = self._watermark.decide(
            kv_slots=self.kv_room.slots,
            in_flight=self.in_flight + self.queued,
            aside=max(0, self.in_flight - self.turns.asking),
            ready=ledger.counts.by_state[READY],
            admissible_samples=room,
            n=config.rollout.n,
            store_free_bytes=self._store_free_bytes(reserved_bytes),
            sample_bytes=config.sample_bytes,
            kept_share=self.judge.kept_share,
        )
        if self.in_flight + self.queued + config.rollout.n > self.decision.watermark:
            d = self.decision
            if d.binding == "staleness":
                batches = f"batches {ledger.next_batch} to {deadline}"
                return "staleness", f"staleness bound {bound}: {live} live samples are all that {batches} can take"
            which = {"kv": f": {self.kv_room.bound}", "demand": f": {self._watermark.wanted()}"}.get(d.binding, "")
            words = f"watermark {d.watermark} reached with {self.in_flight + self.queued} in flight; {d.binding} binds{which}"
            return FULL if d.binding == "kv" else d.binding, words
        return None

    def _store_free_bytes(self, reserved_bytes: int) -> int:
        """Room for rows of samples not yet registered (B2). The store is asked at most five times a second."""
        return self._core.gate.room_bytes() - reserved_bytes - 2 * self._weights_bytes

    # ---- one trajectory ------------------------------------------------------------------------------------------------

    async def _trajectory(self, sample: Sample, trajectory: Trajectory) -> None:
        """From running to ready or discarded. Never raises for what an engine, a prompt or a scorer did."""
        generating = True

        def generated() -> None:
            nonlocal generating
            if generating:
                generating = False
                self.generating -= 1
                self._core.ring()

        try:
            await self._to_ready(sample, trajectory, generated)
        except GivenUp as reason:
            if trajectory.state == RUNNING:
                self._core.apply(TrajectoryDiscarded(traj_uid=trajectory.traj_uid, reason=str(reason), time=time.time()))
                self._on_discarded(sample, trajectory)
        except asyncio.CancelledError as cut:
            # Its frames hold asyncio's time-outs, these the task, and the task its error: a circle with all that the trajectory had.
            raise cut.with_traceback(None)  # noqa: B904
        finally:
            generated()
            self.turns.forget(trajectory)
            del self._tasks[trajectory.traj_uid]
            self.settle(sample)
            self._core.ring()

    async def _to_ready(self, sample: Sample, trajectory: Trajectory, generated: Callable[[], None]) -> None:
        core = self._core
        if trajectory.state != RUNNING:  # discarded between the making of its task and this first step
            return
        row = self._row(sample)
        began = time.monotonic()
        tree = await self._run_workflow(row, trajectory)
        generated()
        self._measure(trajectory, tree, time.monotonic() - began)
        while True:  # what was sampled is scored again after a failure, never sampled again
            try:
                leaves = await self._score(row, trajectory, tree)
                break
            except ScoreFailed as error:
                retry(core, trajectory, "data" if error.data else "infrastructure", str(error))
        reward = sum(leaf.score for leaf in leaves) / len(leaves)
        if trajectory.state != RUNNING:  # its sample was discarded meanwhile
            core.gate.free([ref for leaf in leaves for ref in leaf.stored])
            return
        core.apply(
            TrajectoryReady(
                traj_uid=trajectory.traj_uid,
                leaves=tuple(leaves),
                reward=reward,
                finish_reason=tree.turns[-1].finish_reason or "stop",
                time=time.time(),
            )
        )
        self.tokens_sampled += sum(leaf.response_tokens for leaf in leaves)
        self._request_tokens.observe(max(leaf.length for leaf in leaves))
        core.measured.leaves.observe(len(leaves))

    def _measure(self, trajectory: Trajectory, tree: Tree, took_s: float) -> None:
        """Only where no request was lost: what a dead engine cost says nothing of how long a trajectory takes."""
        spent = self.turns.spent.get(trajectory.traj_uid)
        if spent is not None and not spent.lost:
            tokens = sum(len(turn.token_ids) for turn in tree.turns if turn.log_probs)
            aside_s = max(0.0, took_s - spent.asked_s)
            self._core.measured.trajectory(engine_s=spent.engine_s, aside_s=aside_s, tokens=tokens)
            self._worked.setdefault(trajectory.uid, []).append(spent.engine_s + aside_s)

    async def _run_workflow(self, row: DataRow, trajectory: Trajectory) -> Tree:
        try:
            prompt = self._prompts.get(trajectory.uid) or prompt_ids(row, self._tokenizer, self._core.config)
        except Unfit as unfit:  # registered when it did fit
            raise GivenUp(f"data: {unfit}") from unfit
        turns = 0

        async def generate(input_ids: Sequence[int]) -> Generation:
            nonlocal turns
            turns += 1
            return await self.turns.generate(trajectory, turns - 1, list(input_ids))

        while True:
            try:
                return await self._workflow(Task(tuple(prompt), row.fields), generate)
            except WorkflowFailed as error:  # no turn of it is kept: what the environment made of them is gone
                retry(self._core, trajectory, "data", f"workflow: {error}")
                self.turns.begin_again(trajectory)
                turns = 0

    # ---- rows and scores -----------------------------------------------------------------------------------------------

    async def _score(self, row: DataRow, trajectory: Trajectory, tree: Tree) -> list[Leaf]:
        """Put the leaves' rollout columns as one object, score each, put their reward columns as one. On failure the objects are freed."""
        core, config = self._core, self._core.config
        leaves = tree.leaves()
        name = f"{trajectory.traj_uid}a{trajectory.infrastructure_attempts + trajectory.data_attempts:04d}"
        rows = [row_columns(leaf, config.rollout.sampling.temperature) for leaf in leaves]
        refs: list[Ref] = []
        epoch, rollout = core.gate.epoch, packed(rows)
        try:
            refs.append(await self.writer.put(name, "rollout", rollout, len(rows)))
            jobs = [self._job(row, f"{name}l{number:04d}", leaf) for number, leaf in enumerate(leaves)]
            results: list[Any] = await asyncio.gather(*map(self._scoring.score, jobs), return_exceptions=True)
            for failure in filter(lambda result: isinstance(result, BaseException), results):
                try:
                    raise failure
                finally:
                    failure, results = None, []  # this frame, which its traceback holds, would hold it: a circle with all rows
            reward = reward_columns([(result.score, result.is_correct) for result in results])
            refs.append(await self.writer.put(name, "reward", reward, len(rows)))
            while epoch != core.gate.epoch:  # the store was lost meanwhile, and with it what had been put
                epoch, refs = core.gate.epoch, []
                for hop, columns in (("rollout", rollout), ("reward", reward)):
                    refs.append(await self.writer.put(f"{name}~{epoch}", hop, columns, len(rows)))
        except BaseException:
            core.gate.free(in_store(refs))
            raise
        rollout_wire, reward_wire = (ref.to_wire() for ref in refs)
        return [
            Leaf(
                row_id=job.leaf_id,
                rollout=rollout_wire,
                reward=reward_wire,
                length=len(columns["input_ids"]),
                response_tokens=int(columns["response_mask"].sum()),
                score=result.score,
                is_correct=result.is_correct,
                row=number,
                extras=self.turns.extras.of(trajectory.traj_uid, leaf),
            )
            for number, (job, leaf, columns, result) in enumerate(zip(jobs, leaves, rows, results, strict=True))
        ]

    def _job(self, row: DataRow, leaf_id: str, leaf: TreeLeaf) -> Job:
        *before, last = leaf.turns
        return Job(
            leaf_id=leaf_id,
            task_type=row.task_type,
            prompt=self._tokenizer.decode([token for turn in before for token in turn.token_ids]),
            response=self._tokenizer.decode(last.token_ids),
            answer=row.answer,
            fields=row.fields,
            finish_reason=leaf.finish_reason or "stop",
        )

    def _row(self, sample: Sample) -> DataRow:
        if sample.uid not in self._rows:
            self._rows[sample.uid] = self._core.feed.row(sample.segment, sample.row_index)
        return self._rows[sample.uid]

    def settle(self, sample: Sample) -> None:
        """When no trajectory of a sample is running any more: keep it as ready, or discard it whole if too few are ready (M6), or
        because the filter says so. No loop runs between its last trajectory's end and this: nobody takes a sample before it is judged."""
        if sample.waiting:
            return
        row = self._rows.pop(sample.uid, None)
        self._prompts.pop(sample.uid, None)
        worked = self._worked.pop(sample.uid, [])
        if len(worked) == len(sample.trajectories):
            self._core.measured.sample_s.observe(max(worked))
        self.turns.forget_sample(sample.uid)
        ready = sample.in_state("ready")
        if sample.batch_id is not None or not ready:
            return
        filtered_from = None
        if len(ready) < self._core.config.rollout.min_group:
            missing = next((t.reason for t in sample.trajectories if t.outcome == DISCARDED), "its siblings were discarded")
            reason = f"group too small: {missing}"
        else:
            filtered = self.judge.settled(sample, ready, row.task_type if row is not None else None)
            if filtered is None:
                return
            reason, filtered_from = filtered, self._core.feed.dataset_of(sample.segment)
        self._core.apply(SampleDiscarded(uid=sample.uid, reason=reason, time=time.time(), filtered_from=filtered_from))
        for trajectory in ready:
            self._on_discarded(sample, trajectory)
        self._core.gate.free([ref for t in ready for leaf in t.leaves for ref in leaf.stored])
