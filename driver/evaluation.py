"""A held-out set, scored at chosen versions: the evaluator role.

    snapshots ──every k versions──▶ due ─▶ registered ─▶ engines ─tokens─▶ reward ─▶ finished(evaluated) ─▶ result of that version

Promise: training and pushes never wait for an evaluation (H11). Evaluation traffic is in no batch, in no bound of staleness and in no
demand; each of its trajectories is registered and ends as `evaluated`, or as discarded with its reason. A result is tied to its version:
on engines of its own every token is of that version; on the engines of the run an answer may live through a push, and the result says which
share of the tokens is of which version. While one evaluation runs, versions that come due wait, and of those only the newest is evaluated.

A driver that dies in the middle discards what ran (`evaluation: the driver was restarted`); the next version that is offered is evaluated.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from driver.core import Core
from driver.datasets import DataRow, read_rows, scorable
from driver.events import EvaluationBegan, EvaluationEnded
from driver.finished import Finished
from driver.next_row import Unfit, prompt_ids
from driver.publish import Publisher
from driver.push import Pusher
from driver.scoring import ScoreFailed, Scoring
from driver.settings_evaluation import EvaluationConfig
from driver.snapshot import Snapshot, SnapshotGone
from driver.turns import ENGINE_WAIT_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, GivenUp, Way
from reward.wire import Job
from rollout.answer import EngineError, Generation
from rollout.pool import EnginePool, Lease
from rollout.tokens import TokenizerView

log = logging.getLogger("headrace.evaluation")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation, as it is kept and shown."""

    version: int
    epoch: int
    rows: int
    answers: int
    """scored ones"""
    reward_mean: float | None
    correct_mean: float | None
    by_task_type: dict[str, float]
    response_tokens_mean: float | None
    versions: dict[str, float]
    """`epoch/version` → share of the tokens"""
    one_version: bool
    failed: dict[str, int]
    tokens_resampled: int
    seconds: float
    time: float


@dataclass
class _Answer:
    """What became of one trajectory."""

    generation: Generation | None = None
    prompt_ids: tuple[int, ...] = ()
    reward: float | None = None
    is_correct: bool | None = None
    reason: str | None = None
    attempts: int = 1


class Evaluator:
    """`pool` and `pusher` are the run's, or, with engines of its own, another pair."""

    def __init__(
        self,
        core: Core,
        config: EvaluationConfig,
        pool: EnginePool,
        pusher: Pusher,
        publisher: Publisher,
        scoring: Scoring,
        tokenizer: TokenizerView,
        finished: Finished,
        way: Callable[[Lease], Way],
    ) -> None:
        self._core = core
        self._config = config
        self._pool = pool
        self._pusher = pusher
        self._publisher = publisher
        self._scoring = scoring
        self._tokenizer = tokenizer
        self._finished = finished
        self._way = way
        self._bell = core.bell()
        batches = scorable(read_rows(config.data, mapping=config.mapping), core.config)
        self.rows: list[DataRow] = [row for batch in batches for row in batch][: config.samples]
        kept = core.db.query("SELECT value FROM meta WHERE name LIKE 'evaluation/%' ORDER BY name")
        self.results: list[Result] = [msgspec.json.decode(value, type=Result) for (value,) in kept]
        self._due: Snapshot | None = None  # the newest version that wants an evaluation
        self._held: Snapshot | None = None  # what the engines of its own have, or get
        self._running: int | None = None
        self._resampled = 0
        self.done = self.of = 0  # of the evaluation that runs, in trajectories
        self.alarm: str | None = None

    # ---- what is due -----------------------------------------------------------------------------------------------------

    @property
    def own_engines(self) -> bool:
        return self._config.engines > 0

    @property
    def running(self) -> int | None:
        """The version that is evaluated now."""
        return self._running

    @property
    def busy(self) -> bool:
        """An evaluation runs, or is due."""
        return self._running is not None or self._due is not None

    @property
    def _next_due(self) -> int:
        last = max((result.version for result in self.results), default=None)
        return 0 if last is None else (last // self._config.every + 1) * self._config.every

    def offer(self, snapshot: Snapshot) -> None:
        """A new version. Of those that are due and wait, only the newest is evaluated."""
        if snapshot.version < self._next_due or snapshot.version == self._running:
            return
        if self._running is not None and snapshot.version % self._config.every:
            return
        self._wants(snapshot)

    def _wants(self, snapshot: Snapshot) -> None:
        if self._due is not None and self._due.version != snapshot.version:
            log.info("version %d is not evaluated: version %d is due", self._due.version, snapshot.version)
        self._due = snapshot
        self._hold()
        self._core.ring()

    def _hold(self) -> None:
        """Buckets stay in the store while the engines of its own may need them."""
        if self.own_engines:
            self._publisher.hold(*(s for s in (self._due, self._held) if s is not None))

    def demand(self) -> int:
        """Evaluate the newest version whether it is due or not. Its number."""
        newest = self._publisher.newest
        if newest is None:
            raise LookupError("no version has been published yet")
        if self._running != newest.version:
            self._wants(newest)
        return newest.version

    # ---- the loops -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consumes versions that are due; waits for one, and for an engine that has it; unblocked by any change. Never ends."""
        self._stop_rule()  # a driver that died after a result had not ended the run yet
        async with asyncio.TaskGroup() as group:
            if self.own_engines:
                group.create_task(self._keep_pushed())
            while True:
                self._bell.clear()
                due = self._due
                if due is None or not self._served(due):
                    await self._bell.wait(1.0)
                    continue
                self._due = None
                await self._evaluate(due)

    def _served(self, due: Snapshot) -> bool:
        if self.own_engines:
            self._held = due
            self._hold()
            return any(slot.state == "open" and self._has(slot.verified, due) for slot in self._pool.slots.values())
        ledger = self._core.ledger
        return ledger.serving_version >= due.version and not self._core.stopping

    @staticmethod
    def _has(verified: Any, snapshot: Snapshot) -> bool:
        return verified is not None and (verified.epoch, verified.version) == (snapshot.epoch, snapshot.version)

    async def _keep_pushed(self) -> None:
        """The version that is evaluated, to every engine of its own that lacks it, whenever one comes or comes back."""
        bell = self._core.bell()
        while True:
            bell.clear()
            held = self._held
            lacking = held is not None and [
                slot
                for slot in self._pool.slots.values()
                if slot.state in ("starting", "open", "shut") and not self._has(slot.verified, held)
            ]
            if held is None or not lacking:
                await bell.wait(1.0)
                continue
            await self._core.gate.usable()
            try:
                await self._pusher.push_all(held)
            except SnapshotGone as error:
                log.warning("version %d can not be evaluated any more: %s", held.version, error)
                self._held = None
                self._hold()
            self._core.ring()

    async def finish(self, snapshot: Snapshot | None) -> None:
        """At the end of a run: the last version, if it has none, and what runs, to its end."""
        if snapshot is not None and snapshot.version not in [*(result.version for result in self.results), self._running]:
            self._wants(snapshot)
        bell = self._core.bell()
        until = time.monotonic() + 2 * self._config.deadline_s
        while self.busy:
            bell.clear()
            await bell.wait(1.0)
            if time.monotonic() > until:
                self.alarm = "the last version was not evaluated: no engine had it in time"
                log.warning("%s", self.alarm)
                return

    # ---- one evaluation --------------------------------------------------------------------------------------------------

    async def _evaluate(self, snapshot: Snapshot) -> None:
        core, config = self._core, self._config
        began, epoch, version = time.time(), snapshot.epoch, snapshot.version
        self._running, self._resampled = version, 0
        first = core.ledger.next_uid
        core.apply(EvaluationBegan(first_uid=first, rows=len(self.rows), n=config.n, version=version, time=began))
        self.done, self.of = 0, len(self.rows) * config.n
        room = asyncio.Semaphore(config.max_open)
        answers: dict[tuple[int, int], _Answer] = {}

        async def one(row: int, index: int) -> None:
            async with room:
                answers[row, index] = await self._answer(self.rows[row], version, row, index)
                self.done += 1

        late = False
        try:
            async with asyncio.timeout(config.deadline_s), asyncio.TaskGroup() as group:
                for row in range(len(self.rows)):
                    for index in range(config.n):
                        group.create_task(one(row, index))
        except TimeoutError:
            late = True
        everything = {
            (row, index): answers.get((row, index), _Answer(reason=f"evaluation: not answered within {config.deadline_s:g} s"))
            for row in range(len(self.rows))
            for index in range(config.n)
        }
        result = self._result(snapshot, everything, began)
        await core.db.durable()  # the archive speaks of no id that another sample could still get
        await asyncio.to_thread(self._archive, first, everything, version, began)
        core.apply(
            EvaluationEnded(
                first_uid=first,
                rewards=tuple((row, index, answer.reward) for (row, index), answer in everything.items() if answer.reward is not None),
                failed=tuple((row, index, answer.reason or "") for (row, index), answer in everything.items() if answer.reward is None),
                epoch=epoch,
                report=msgspec.json.encode(result),
                time=time.time(),
            )
        )
        self.results.append(result)
        self._running = None
        self._hold()
        self._say(result, late)
        core.ring()

    def _say(self, result: Result, late: bool) -> None:
        shown = "no answer was scored" if result.reward_mean is None else f"reward {result.reward_mean:.4f} over {result.answers} answers"
        spread = "" if result.one_version else f" (shares of versions: {', '.join(f'{v} {s:.2f}' for v, s in result.versions.items())})"
        log.info("evaluation of version %d: %s in %.1f s%s", result.version, shown, result.seconds, spread)
        failed = sum(result.failed.values())
        if late or failed * 10 > result.answers + failed:
            reason = max(result.failed, key=lambda name: result.failed[name])
            self.alarm = f"the evaluation of version {result.version} lacks {failed} of {result.answers + failed} answers: {reason}"
            log.warning("%s", self.alarm)
        else:
            self.alarm = None
        self._stop_rule()

    def _stop_rule(self) -> None:
        core, config = self._core, self._config
        means = [result.reward_mean for result in self.results if result.reward_mean is not None]
        if core.ending is not None or not means:
            return
        if config.stop_reward is not None and means[-1] >= config.stop_reward:
            core.ending = f"an evaluation's mean reward reached {config.stop_reward:g}"
        elif config.patience is not None and len(means) > config.patience:
            best_before = max(means[: -config.patience])
            if max(means[-config.patience :]) <= best_before:
                core.ending = f"{config.patience} evaluations brought no mean reward above {best_before:.4g}"
        if core.ending is not None:
            core.draining = core.ending
            log.info("the run ends: %s", core.ending)

    def _result(self, snapshot: Snapshot, answers: dict[tuple[int, int], _Answer], began: float) -> Result:
        scored = {key: answer for key, answer in answers.items() if answer.reward is not None}
        rewards = [answer.reward for answer in scored.values() if answer.reward is not None]
        correct = [answer.is_correct for answer in scored.values() if answer.is_correct is not None]
        tokens: Counter[str] = Counter()
        lengths = []
        by_task: dict[str, list[float]] = {}
        for (row, _), answer in scored.items():
            assert answer.generation is not None and answer.reward is not None
            lengths.append(len(answer.generation.output_ids))
            by_task.setdefault(self.rows[row].task_type, []).append(answer.reward)
            for text, start, end in answer.generation.spans:
                tokens["/".join(text.split("/")[1:3])] += end - start
        total = tokens.total()
        failed = Counter(answer.reason or "" for answer in answers.values() if answer.reward is None)
        return Result(
            version=snapshot.version,
            epoch=snapshot.epoch,
            rows=len(self.rows),
            answers=len(scored),
            reward_mean=sum(rewards) / len(rewards) if rewards else None,
            correct_mean=sum(correct) / len(correct) if correct else None,
            by_task_type={name: sum(values) / len(values) for name, values in sorted(by_task.items())},
            response_tokens_mean=sum(lengths) / len(lengths) if lengths else None,
            versions={name: count / total for name, count in sorted(tokens.items())},
            one_version=set(tokens) <= {f"{snapshot.epoch}/{snapshot.version}"},
            failed=dict(failed),
            tokens_resampled=self._resampled,
            seconds=time.time() - began,
            time=began,
        )

    # ---- one answer ------------------------------------------------------------------------------------------------------

    async def _answer(self, row: DataRow, version: int, number: int, index: int) -> _Answer:
        """From prompt to score. Never raises for what an engine, a prompt or a scorer did."""
        answer = _Answer()
        try:
            await self._generated(answer, row, version, number, index)
            await self._scored(answer, row, f"evaluation/{version}/{number}/{index}")
        except GivenUp as reason:
            answer.reason = f"evaluation: {reason}"
        return answer

    async def _generated(self, answer: _Answer, row: DataRow, version: int, number: int, index: int) -> None:
        rollout = self._core.config.rollout
        try:
            answer.prompt_ids = tuple(prompt_ids(row, self._tokenizer, self._core.config))
        except Unfit as unfit:
            raise GivenUp(str(unfit)) from unfit
        room = rollout.context_length - 1 - len(answer.prompt_ids)
        temperature = self._config.temperature
        sampling: dict[str, Any] = {
            "temperature": rollout.sampling.temperature if temperature is None else temperature,
            "max_new_tokens": min(self._config.max_new_tokens or rollout.sampling.max_new_tokens, room),
            "stream_interval": rollout.stream_interval,
        }
        if rollout.sampling.stop_token_ids:
            sampling["stop_token_ids"] = list(rollout.sampling.stop_token_ids)
        if rollout.deterministic:
            name = f"{self._core.run_id}/{self._core.config.seed}/evaluation/{version}/{number}/{index}"
            sampling["sampling_seed"] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
        avoid: tuple[str, ...] = ()
        for tried in range(rollout.infrastructure_retries + 1):
            if tried > 1:
                await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (tried - 2), LONGEST_PAUSE_S))
            answer.attempts = tried + 1
            rid = f"{self._core.run_id}.e{version:016d}.{number:08d}.{index:04d}.{tried:06d}"
            try:
                async with self._pool.acquire(ENGINE_WAIT_S, f"evaluation of version {version}", avoid=avoid) as lease:
                    slot, way = lease.slot, self._way(lease)
                    try:
                        made = await way.client.generate(
                            list(answer.prompt_ids),
                            sampling,
                            rid,
                            stall_s=rollout.stall_s,
                            clock=way.clock,
                            version=way.version,
                            on_tokens=lambda *_, slot=slot: slot.heard(),
                        )
                        slot.heard()
                    except EngineError as error:
                        if error.status is not None:
                            slot.heard()
                        if error.kind == "data":
                            raise GivenUp(str(error)) from error
                        self._resampled += len(error.prefix.output_ids)
                        avoid = (slot.engine_id,)
                        continue
            except TimeoutError as error:
                raise GivenUp(str(error)) from error
            trusted = await self._pusher.trusted(made)
            if len(trusted.output_ids) == len(made.output_ids) and made.finish_reason != "abort":
                answer.generation = made
                return
            self._resampled += len(made.output_ids)
        raise GivenUp(f"no engine answered in {rollout.infrastructure_retries + 1} tries")

    async def _scored(self, answer: _Answer, row: DataRow, leaf_id: str) -> None:
        assert answer.generation is not None
        rollout = self._core.config.rollout
        job = Job(
            leaf_id=leaf_id,
            task_type=row.task_type,
            prompt=self._tokenizer.decode(list(answer.prompt_ids)),
            response=self._tokenizer.decode(list(answer.generation.output_ids)),
            answer=row.answer,
            fields=row.fields,
            finish_reason=answer.generation.finish_reason or "stop",
        )
        left = {True: rollout.data_retries, False: rollout.infrastructure_retries}
        while True:
            try:
                result = await self._scoring.score(job)
                break
            except ScoreFailed as error:
                if left[error.data] == 0:
                    raise GivenUp(str(error)) from error
                left[error.data] -= 1
        answer.reward, answer.is_correct = result.score, result.is_correct

    # ---- what is kept ----------------------------------------------------------------------------------------------------

    def _archive(self, first: int, answers: dict[tuple[int, int], _Answer], version: int, began: float) -> None:
        for (row, index), answer in answers.items():
            self._finished.evaluated(
                self.rows[row],
                uid=first + row,
                index=index,
                version=version,
                prompt_ids=answer.prompt_ids,
                made=answer.generation,
                reward=answer.reward,
                is_correct=answer.is_correct,
                reason=answer.reason,
                attempts=answer.attempts,
                began=began,
            )
        self._finished.archive.flush()

    def gauges(self) -> dict[str, float]:
        last = self.results[-1] if self.results else None
        mean = last.reward_mean if last is not None else None
        return {
            "headrace_evaluation_results_total": float(len(self.results)),
            "headrace_evaluation_open_trajectories": float(self.of - self.done if self._running is not None else 0),
            **({} if last is None else {"headrace_evaluation_version": float(last.version)}),
            **({} if mean is None else {"headrace_evaluation_reward_mean": mean}),
        }

    def facts(self) -> dict[str, Any]:
        """For REST."""
        return {
            "every": self._config.every,
            "rows": len(self.rows),
            "n": self._config.n,
            "engines": self._config.engines,
            "running": None if self._running is None else {"version": self._running, "done": self.done, "of": self.of},
            "due": None if self._due is None else self._due.version,
            "results": [msgspec.to_builtins(result) for result in self.results],
            "alarm": self.alarm,
        }
