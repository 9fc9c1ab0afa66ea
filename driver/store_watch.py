"""Is what was put still there? And when it is not: what a start does after a crash of the host, while the run goes on.

    the owner dies, or is silent ─▶ gate shut (named; no new sample, nothing is trained) ─▶ it is back
        ─▶ all is still there (it was cut off)          ─▶ gate open
        ─▶ a piece of memory is gone: a new epoch       ─▶ rows from the snapshot, or their trajectories run again; weights are
           exported anew; what was applied is committed ─▶ gate open

A process of ours that dies is told at once by the launcher; everything else is seen by asking once a second. That a piece of memory
is there says the store itself (`Store.parts`): when a name is missing, what lay there is gone for good.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from driver.core import Core
from driver.events import RowsLost
from driver.ledger_rows import Upsert
from driver.ledger_state import CONSUMED, READY, Sample
from driver.row_snapshot import RowSnapshot, wanted_keys
from store import StoreError

log = logging.getLogger("headrace.store")
LOOK_S = 1.0
CONFIRM_S = 0.5
ANSWER_S = 5.0  # a store that has not said by then how it is counts as silent
PREFIX = "store_lost/"
SIDE = "store"
T = TypeVar("T")


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """One loss of what lay in the store, in trajectories with rows, as the ledger keeps it."""

    time: float
    reason: str
    kept: int = 0
    """Their rows were on a host that was not lost."""
    snapshot: int = 0
    again: int = 0
    """Ready, and in no copy: sampled again."""
    consumed_without_rows: int = 0
    """Committed at once where they were applied, else their batch is made again."""


class StoreWatch:
    """One run's. `again` is told each sample of which something runs again."""

    def __init__(self, core: Core, snapshot: RowSnapshot, again: Callable[[Sample], None]) -> None:
        self._core = core
        self._gate = core.gate
        self._store = core.store
        self._snapshot = snapshot
        self._again = again
        self._asked = asyncio.Event()
        self._threads = ThreadPoolExecutor(1, "store watch")  # of its own: what hangs holds up nobody else
        self._answer: asyncio.Future[frozenset[str]] | None = None
        self._parts: frozenset[str] = frozenset()
        self._down: dict[str, str] = {}  # processes of ours that do not run, with the reason
        self._cause: str | None = None  # that a process died says more than that nobody answers since
        kept = core.db.query(f"SELECT value FROM meta WHERE name LIKE '{PREFIX}%' ORDER BY name")
        self.losses = [msgspec.json.decode(value, type=Loss) for (value,) in kept]
        self._gate.on_doubt = self._asked.set

    # ---- what is said to it --------------------------------------------------------------------------------------------------

    def down(self, name: str, reason: str) -> None:
        """A process that holds the store has died, or is to be ended because it hangs."""
        self._cause = self._down[name] = reason.splitlines()[0].partition("; its log")[0]
        self._shut(self._cause)

    def up(self, name: str) -> None:
        self._down.pop(name, None)
        self._asked.set()

    def facts(self) -> dict[str, Any]:
        """For the status."""
        last = msgspec.to_builtins(self.losses[-1]) if self.losses else None
        return {"away": self._gate.reason, "losses": len(self.losses), "last_loss": last}

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Before anything reads the store. Raises Unavailable."""
        self._parts = await self._in_thread(self._store.parts)

    async def run(self) -> None:
        """Consumes doubts; waits for its time; unblocked by a process that comes, or a call of anybody's that failed. Ends never: its
        owner cancels it."""
        while True:
            self._asked.clear()
            await self._look()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._asked.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look(self) -> None:
        if self._down:
            return
        try:
            found = await self._ask()
            if self._parts - found and self._cause is None:  # one that can just be reached again may not have said all
                await asyncio.sleep(CONFIRM_S)
                found |= await self._ask()
        except StoreError as error:
            self._shut(self._cause or str(error))
            return
        lost = self._parts - found
        if lost:
            reason = self._cause or self._gate.reason or f"its memory is not there any more: {', '.join(sorted(lost))}"
            self._gate.shut(reason)
            self._gate.lost()
            try:
                await self._recover(reason)
            except StoreError as error:  # away again: what is still missing is found by the next look
                self._shut(str(error))
                return
        self._parts = found
        if self._gate.reason is not None:
            self._cause = None
            self._gate.open()
            self._core.waiting(SIDE, None)
            self._core.ring()

    async def _ask(self) -> frozenset[str]:
        """One question at a time: the one before may still wait for its answer."""
        if self._answer is None:
            self._answer = asyncio.ensure_future(self._in_thread(self._store.parts))
        done, _ = await asyncio.wait([self._answer], timeout=ANSWER_S)
        if not done:
            raise StoreError(f"{self._store.location} has not answered for {ANSWER_S:g} s")
        answer, self._answer = self._answer, None
        return answer.result()

    def _shut(self, reason: str) -> None:
        self._gate.shut(reason)
        self._core.waiting(SIDE, f"the store is away: {reason}", SIDE)
        self._core.ring()

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    # ---- after a loss ----------------------------------------------------------------------------------------------------------

    async def _recover(self, reason: str) -> None:
        """The gate is shut, so nothing becomes ready meanwhile; what the trainer is at goes on with the rows that it has read."""
        core = self._core
        core.waiting(SIDE, f"what lay in the store is lost ({reason}): rows are brought back from the snapshot, or made again", SIDE)
        core.ring()
        wanted = wanted_keys(core)
        keys = {key for those in wanted.values() for key in those}
        present = keys & set(await self._in_thread(self._store.keys))
        restored = await self._in_thread(self._snapshot.restore, keys - present)
        counted: Counter[str] = Counter()
        again: set[int] = set()
        for traj_uid, those in wanted.items():
            trajectory = core.ledger.trajectory(traj_uid)
            if trajectory is None or trajectory.state not in (READY, CONSUMED):
                continue  # it has ended meanwhile
            if present.issuperset(those):
                counted["kept"] += 1
            elif (present | restored).issuperset(those):
                counted["snapshot"] += 1
            elif trajectory.state == CONSUMED:
                counted["consumed_without_rows"] += 1  # the trainer's loop looks after them
            else:
                counted["again"] += 1
                core.apply(RowsLost(traj_uid=traj_uid, reason=f"its rows were lost with the store: {reason}"))
                again.add(trajectory.uid)
        for uid in sorted(again):
            self._again(core.ledger.samples[uid])
        loss = Loss(time=time.time(), reason=reason, **counted)
        name = f"{PREFIX}{len(self.losses):06d}"
        core.db.write([Upsert("meta", {"name": name, "value": msgspec.json.encode(loss)})])
        self.losses.append(loss)
        log.warning(
            "the store was lost (%s). Trajectories with rows: %d kept, %d from the snapshot; without: %d ready ones are made again, %d "
            "consumed ones are committed if they were applied, else their batch is made again",
            reason,
            loss.kept,
            loss.snapshot,
            loss.again,
            loss.consumed_without_rows,
        )
