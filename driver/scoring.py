"""Leaves to the reward service and back: gathered for a few milliseconds, sent as one call, home by leaf id (section 8, L4).

A result that says `ok: false` is a failed score: the data budget decides on another try, and no number is made up. A service that is
gone is waited for; the launcher replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from driver.core import Core
from reward.client import RewardClient, RewardUnavailable
from reward.wire import Job, Result

log = logging.getLogger("headrace.scoring")
SLOW_S = 5.0
CALL_S = 0.1  # more than a call needs besides the scoring itself


class ScoreFailed(Exception):
    """No score. `data`: the scorer failed on this leaf; otherwise the service could not be asked."""

    def __init__(self, message: str, *, data: bool) -> None:
        super().__init__(message)
        self.data = data


@dataclass
class _Waiting:
    job: Job
    future: asyncio.Future[Result]


class Scoring:
    def __init__(self, core: Core, *, wait_s: float, deadline_s: float) -> None:
        self._core = core
        self._wait_s = wait_s
        self._deadline_s = deadline_s
        self._client: RewardClient | None = None
        self._up = asyncio.Event()
        self._pending: list[_Waiting] = []
        self._arrived = asyncio.Event()
        self._since: dict[str, float] = {}  # leaf -> when its score was asked for, the oldest first
        self._fewest = 0  # of those that were in flight at any time since the last look
        self._looked = (time.monotonic(), 0)  # when, and how many were scored by then
        self.failed = 0
        self.scored = 0

    def attach(self, client: RewardClient) -> None:
        self._client = client
        self._up.set()
        self._core.waiting("reward", None)

    def detach(self, reason: str) -> None:
        self._client = None
        self._up.clear()
        self._core.waiting("reward", f"the reward service is starting again: {reason.splitlines()[0]}", "starting")

    @property
    def client(self) -> RewardClient | None:
        """Of the service that answers now."""
        return self._client

    @property
    def in_flight(self) -> int:
        return len(self._since)

    def holds(self, traj_uid: str) -> bool:
        """A leaf of this trajectory waits for its score."""
        return any(leaf_id.startswith(traj_uid) for leaf_id in self._since)

    def look(self) -> None:
        """Once a second: how fast scores come when they are what is slow, and a word when they are (L1): a scorer that hangs holds
        everything behind it."""
        (then, scored), now, fewest = self._looked, time.monotonic(), self._fewest
        self._looked, self._fewest = (now, self.scored), self.in_flight
        if self._client is None:
            return
        work_s = self._core.measured.scorer_s.or_else(0.0) + self._wait_s + CALL_S
        self._core.measured.reward.look(now - then, self.scored - scored, fewest, work_s)
        oldest_s = time.monotonic() - next(iter(self._since.values())) if self._since else 0.0
        slow = f"{self.in_flight} answers wait for their score, the first for over {int(oldest_s) // 5 * 5} s"
        self._core.waiting("reward", slow if oldest_s > SLOW_S else None, "slow")

    async def score(self, job: Job) -> Result:
        """The result of one leaf. Raises ScoreFailed."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._pending.append(_Waiting(job, future))
        self._arrived.set()
        began = self._since[job.leaf_id] = time.monotonic()
        try:
            result = await future
        finally:
            del self._since[job.leaf_id]
            self._fewest = min(self._fewest, self.in_flight)
        if not result.ok or result.score is None:
            self.failed += 1
            raise ScoreFailed(f"reward: {result.error}", data=True)
        self.scored += 1
        self._core.measured.scored(time.monotonic() - began, result.seconds)
        return result

    async def run(self) -> None:
        """Consumes jobs; waits for the first and `wait_s` for more, and for the service; unblocked by `score` and `attach`."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._arrived.wait()
                await asyncio.sleep(self._wait_s)
                await self._up.wait()
                self._arrived.clear()
                batch, self._pending = [w for w in self._pending if not w.future.done()], []
                if batch:
                    group.create_task(self._send(batch))

    async def _send(self, batch: list[_Waiting]) -> None:
        client = self._client
        if client is None:  # it died in this very turn of the loop
            self._pending = batch + self._pending
            self._arrived.set()
            return
        try:
            results = {r.leaf_id: r for r in await client.score([w.job for w in batch], self._deadline_s)}
        except RewardUnavailable as error:
            log.warning("reward service: %s", error)
            for waiting in batch:
                if not waiting.future.done():
                    waiting.future.set_exception(ScoreFailed(f"reward service: {error}", data=False))
            return
        for waiting in batch:
            if waiting.future.done():
                continue
            result = results.get(waiting.job.leaf_id)
            if result is None:
                waiting.future.set_exception(ScoreFailed("the reward service did not answer for this leaf", data=False))
            else:
                waiting.future.set_result(result)
