"""Workers that can be killed, and the jobs they share.

    score(jobs) ── by scorer, in chunks ──▶ queue ──▶ worker 0 … worker n−1 ── one answer a job ──▶ home by leaf

A worker answers job by job, so its limit holds for one job and not for its chunk: when none comes in time the worker is killed, with
everything it started, the job it was at fails, and the rest of the chunk goes back to the front of the queue. A batched function, called
once for many, is called again job by job when that call hangs or kills its worker. A job whose worker died gets one more try: the death
may have come from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import psutil

from reward.frames import Ready, ScorerFacts, ScorerSetup, Setup, Task, decode_outcome, decode_ready, frame, take_frames
from reward.outcome import Outcome
from reward.spec import RewardSpec
from reward.wire import Job, Result

log = logging.getLogger("headrace.reward")
START_LIMIT_S = 120.0
CHUNK_JOBS = 32
READ_BYTES = 1 << 18
BATCH_JOBS = 256


class ScorerError(ValueError):
    """A scorer cannot be loaded: a person must act."""


class WorkerLost(Exception):
    """The worker process ended, or said something that is no answer."""


@dataclass(eq=False)
class Call:
    """One request: done when each of its jobs has its result."""

    expected: int
    done: asyncio.Future[list[Result]]
    results: list[Result] = field(default_factory=list)

    def finish(self, result: Result) -> None:
        self.results.append(result)
        if len(self.results) == self.expected and not self.done.done():
            self.done.set_result(self.results)


@dataclass(frozen=True, eq=False)
class Item:
    job: Job
    call: Call
    deaths: int = 0


@dataclass(frozen=True, eq=False)
class Chunk:
    scorer: str
    items: list[Item]


class Worker:
    """One worker process and its pipe."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._sink, self._source = process, process.stdin, process.stdout
        self._buffer = bytearray()
        self.scorers: dict[str, ScorerFacts] = {}

    @classmethod
    async def start(cls, setup: Setup) -> Worker:
        """Raises ScorerError when a scorer cannot be loaded, WorkerLost when the process ends or is not ready in time."""
        command = (sys.executable, "-P", "-m", "reward.worker", str(os.getpid()))
        pipe = asyncio.subprocess.PIPE
        worker = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True))
        try:
            worker.scorers = await worker._load(setup)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def _load(self, setup: Setup) -> dict[str, ScorerFacts]:
        self._sink.write(frame(setup))
        try:
            async with asyncio.timeout(START_LIMIT_S):
                ready: Ready = decode_ready((await self._read())[0])
        except TimeoutError as error:
            raise WorkerLost(f"loading the scorers took more than {START_LIMIT_S:g} s") from error
        except msgspec.MsgspecError as error:
            raise WorkerLost(f"the worker did not say what it loaded: {error}") from error
        if ready.error is not None:
            raise ScorerError(ready.error)
        return ready.scorers

    @property
    def alive(self) -> bool:
        return self._process.returncode is None and not self._sink.is_closing()

    def send(self, task: Task) -> None:
        if not self.alive:
            raise WorkerLost(f"the worker ended ({_how(self._process.returncode)})")
        self._sink.write(frame(task))

    async def answers(self) -> list[Outcome]:
        """At least one, and all that have arrived."""
        try:
            return [decode_outcome(body) for body in await self._read()]
        except msgspec.MsgspecError as error:
            raise WorkerLost(f"the worker's answer cannot be read: {error}") from error

    async def _read(self) -> list[bytes]:
        while not (bodies := take_frames(self._buffer)):
            data = await self._source.read(READ_BYTES)
            if not data:
                # The pipe ends a moment before the process is reaped.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._process.wait()
                raise WorkerLost(f"the worker ended ({_how(self._process.returncode)})")
            self._buffer += data
        return bodies

    def stopped(self) -> str | None:
        """Why nothing came of it, when somebody has stopped its process (SIGSTOP); else None."""
        with contextlib.suppress(psutil.Error):
            if psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED:
                return f"process {self._process.pid} was stopped from outside"
        return None

    async def kill(self) -> None:
        """End the worker, if it lives or has only just died, and whatever it started: its session is its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._sink.close()

    async def discard(self) -> None:
        """`kill`, unless it ended some time ago: its number may be another's by now."""
        if self._process.returncode is None:
            await self.kill()
        self._sink.close()


class WorkerPool:
    """`start`, then `run` for as long as the pool lives; `score` from any task."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        scorers = {name: ScorerSetup(scorer.rule, scorer.params, scorer.function, scorer.label) for name, scorer in spec.scorers.items()}
        self._setup = Setup(str(spec.plugin_dir.resolve()), scorers)
        self._workers: dict[int, Worker | None] = dict.fromkeys(range(spec.workers))
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._busy: set[int] = set()
        self._dismissed: set[int] = set()
        self._wanted = spec.workers
        self._group: asyncio.TaskGroup | None = None
        self._chunks: deque[Chunk] = deque()
        self._waiting = asyncio.Semaphore(0)
        self._facts: dict[str, ScorerFacts] = {}
        self.progress = 0
        self.busy_workers = 0

    @property
    def queued(self) -> int:
        return sum(len(chunk.items) for chunk in self._chunks)

    async def start(self) -> None:
        """All workers up, every scorer loaded in each. Raises ScorerError, WorkerLost."""
        first = await Worker.start(self._setup)
        self._workers[0], self._facts = first, first.scorers
        async with asyncio.TaskGroup() as group:
            for slot in list(self._workers)[1:]:
                group.create_task(self._start(slot))

    async def run(self) -> None:
        """Serves until cancelled; then no worker is left."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    self.resize(self._wanted)
                    await asyncio.get_running_loop().create_future()
                finally:
                    self._group = None
        finally:
            await self.stop()

    @property
    def workers(self) -> int:
        return self._wanted

    def resize(self, count: int) -> None:
        """So many workers from now on. A new one loads the scorers when its first chunk comes; one too many ends after its chunk."""
        self._wanted = count
        if self._group is None:
            return
        for slot in range(count):
            if slot not in self._serving:
                self._workers.setdefault(slot, None)
                self._serving[slot] = self._group.create_task(self._serve(slot))
        for slot, task in self._serving.items():
            if slot >= count and slot not in self._busy | self._dismissed:
                self._dismissed.add(slot)
                task.cancel()  # it waits for a chunk, and holds none

    async def stop(self) -> None:
        for slot, worker in self._workers.items():
            if worker is not None:
                await worker.discard()
                self._workers[slot] = None

    async def score(self, jobs: Sequence[Job]) -> list[Result]:
        """One result a job, in the order they end."""
        call = Call(len(jobs), asyncio.get_running_loop().create_future())
        groups: dict[str, list[Item]] = {}
        for job in jobs:
            name = self._spec.scorer_for(job.task_type)
            if name is None:
                known = ", ".join(self._spec.scorers)
                error = f"no scorer serves task type {job.task_type!r}; reward.scorers has {known}, and no '*'"
                self._finish(Item(job, call), Outcome(0, error=error), "")
            else:
                groups.setdefault(name, []).append(Item(job, call))
        for name, items in groups.items():
            share = -(-len(items) // self._wanted)
            size = BATCH_JOBS if self._facts[name].batched else max(1, min(CHUNK_JOBS, share))
            for start in range(0, len(items), size):
                self._chunks.append(Chunk(name, items[start : start + size]))
                self._waiting.release()
        try:
            return await call.done if jobs else []
        finally:
            # A caller who left is owed nothing: what is queued for it is skipped.
            call.done.cancel()

    async def _serve(self, slot: int) -> None:
        """Consumes chunks; waits for one; unblocked by `score`, and by a chunk another worker gave back. Ends when it is one too many."""
        try:
            while slot < self._wanted:
                await self._waiting.acquire()
                self._busy.add(slot)
                try:
                    await self._one_chunk(slot)
                finally:
                    self._busy.discard(slot)
        except asyncio.CancelledError:
            if slot not in self._dismissed:
                raise
        finally:
            self._dismissed.add(slot)  # it is on its way: nobody ends it twice
            worker, self._workers[slot] = self._workers[slot], None
            if worker is not None:
                await worker.discard()
            self._dismissed.discard(slot)
            del self._serving[slot]
        self.resize(self._wanted)  # it may have been wanted again while it ended

    async def _one_chunk(self, slot: int) -> None:
        chunk = self._chunks.popleft()
        items = [item for item in chunk.items if not item.call.done.done()]
        if items:
            self.busy_workers += 1
            try:
                worker = self._workers[slot]
                if worker is not None and not worker.alive:
                    self._workers[slot] = None
                    await worker.discard()
                    worker = None
                worker = worker or await self._start(slot)
                await self._run(slot, worker, Chunk(chunk.scorer, items))
            except (ScorerError, WorkerLost, OSError) as error:
                log.error("worker %d does not start: %s", slot, error)
                for item in items:
                    self._fail(item, chunk.scorer, f"could not be started again: {error}")
            finally:
                self.busy_workers -= 1

    async def _start(self, slot: int) -> Worker:
        worker = await Worker.start(self._setup)
        self._workers[slot] = worker
        return worker

    async def _run(self, slot: int, worker: Worker, chunk: Chunk) -> None:
        """Every item of the chunk ends here or is back in the queue; a worker that failed is gone from its slot."""
        limit_s = self._spec.scorers[chunk.scorer].time_limit_s
        pending = dict(enumerate(chunk.items))
        try:
            worker.send(Task(chunk.scorer, [item.job for item in chunk.items]))
            while pending:
                async with asyncio.timeout(limit_s):
                    outcomes = await worker.answers()
                for outcome in outcomes:
                    if outcome.index not in pending:
                        raise WorkerLost(f"the worker answered a job ({outcome.index}) it was not asked, or twice")
                    self._finish(pending.pop(outcome.index), outcome, self._facts[chunk.scorer].version)
            return
        except (TimeoutError, WorkerLost) as error:
            self._workers[slot] = None
            # Stopped from outside, it would have hung at any job: this one is not to blame.
            lost = str(error) if isinstance(error, WorkerLost) else worker.stopped()
            await worker.kill()
            left = list(pending.values())
            log.warning("worker %d lost at leaf %s: %s", slot, left[0].job.leaf_id, lost or f"no answer within {limit_s:g} s")
        if self._facts[chunk.scorer].batched and len(left) > 1:
            self._give_back([Chunk(chunk.scorer, [item]) for item in left])
            return
        culprit, rest = left[0], left[1:]
        again = [Chunk(chunk.scorer, rest)] if rest else []
        if lost is None:
            self._fail(culprit, chunk.scorer, f"gave no answer within {limit_s:g} s and was killed", limit_s)
        elif culprit.deaths:
            self._fail(culprit, chunk.scorer, f"ended its process twice: {lost}")
        else:
            again.append(Chunk(chunk.scorer, [Item(culprit.job, culprit.call, deaths=1)]))
        self._give_back(again)

    def _give_back(self, chunks: list[Chunk]) -> None:
        self._chunks.extendleft(reversed(chunks))
        for _ in chunks:
            self._waiting.release()

    def _fail(self, item: Item, scorer: str, reason: str, seconds: float = 0.0) -> None:
        label = self._spec.scorers[scorer].label
        self._finish(item, Outcome(0, seconds=seconds, error=f"{label} {reason}"), self._facts[scorer].version)

    def _finish(self, item: Item, outcome: Outcome, version: str) -> None:
        self.progress += 1
        item.call.finish(
            Result(
                leaf_id=item.job.leaf_id,
                ok=outcome.error is None,
                score=outcome.score,
                is_correct=outcome.is_correct,
                parts=outcome.parts,
                seconds=outcome.seconds,
                scorer_version=version,
                error=outcome.error,
            )
        )


def _how(return_code: int | None) -> str:
    if return_code is None:
        return "still running, its pipe closed"
    return f"exit code {return_code}" if return_code >= 0 else signal.Signals(-return_code).name
