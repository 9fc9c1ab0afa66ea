"""Users' roles at work: items to their processes, what they made of them to the streams.

    queue ──oldest──▶ an instance that is free ──handle()──▶ reply ──room in its streams?──▶ one commit: done · published · state
      ▲                      │ dies, hangs, raises
      └──────────────────────┘ again, until it is done or its tries are used

One task for each life of an instance. Nothing is given before the last reply is on disk, so a role that a full stream holds back reads no
more either: back-pressure. No loop of the run waits for any of this. The batches' metrics are read from the run's history, at the pace
of their slowest reader, and training never waits for one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from driver.core import Bell
from driver.planner import Plan
from driver.role_wire import Given, Made
from driver.roles import METRICS, VERSIONS
from driver.schema import misfit
from driver.stream_db import StreamDB
from driver.streams import Item, Streams, Write
from rollout.client import BROKEN

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.roles")
AGAIN_S = 0.2  # before an item that raised is given again
OBITUARY_S = 0.5
LOOK_S = 1.0


class ItemFailed(Exception):
    """The role's code raised, or made something that can not be published; the text is its own."""


class NoReply(Exception):
    """The process did not answer: it died, or it hangs."""


class OwnRoles:
    """`run` for as long as the run lives; `attach` and `detach` as its processes come and go."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config = run.config.roles
        self._bell = run.core.bell()
        self._lives: dict[str, tuple[asyncio.Task[None], Bell]] = {}
        self._released: set[str] = set()
        self._group: asyncio.TaskGroup | None = None
        self._db: StreamDB | None = None
        self.streams = Streams({}, {})
        self._fed_from = run.core.ledger.trained_version - 1

    def open(self, plan: Plan) -> None:
        """Before any process of a role starts."""
        if self._config and self._db is None:
            self._db = StreamDB(self._run.config.directory / "streams.sqlite")
            self.streams = self._db.load(plan)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    async def run(self) -> None:
        """Consumes what the run has to tell (metrics, versions); waits for news and for room; unblocked by any change. Never ends."""
        async with asyncio.TaskGroup() as self._group:
            while True:
                self._bell.clear()
                await self._commit(self._news())
                await self._bell.wait(LOOK_S)

    async def finish(self, deadline_s: float) -> None:
        """The run has ended: let the roles read what is left, and say so when one does not."""
        until = time.monotonic() + deadline_s
        while behind := self._behind():
            if time.monotonic() > until:
                log.warning("the run ends with items that were not read: %s", behind)
                return
            await asyncio.sleep(0.05)

    def _behind(self) -> str:
        queues = self.streams.queues
        works = self._run.processes.works
        readers = [(name, role, reader) for name, queue in queues.items() for role, reader in queue.readers.items() if works(role)]
        left = [f"{name} by {role}: {reader.waiting}" for name, role, reader in readers if reader.waiting]
        if any(name == METRICS.name for name, _, _ in readers) and self._unfed():
            left.append(f"{METRICS.name}, not published yet")
        return ", ".join(left)

    # ---- what the run tells ----------------------------------------------------------------------------------------------

    def _unfed(self) -> list[dict[str, Any]]:
        queue = self.streams.queues[METRICS.name]
        fed = self._fed_from if queue.last_key is None else queue.last_key
        recent = self._run.history.recent
        return [line for line in recent if line["batch_id"] > fed] if recent and recent[-1]["batch_id"] > fed else []

    def _news(self) -> list[Write]:
        """As many batches as there is room for, each once however often it was trained; and the newest versions."""
        writes: list[Write] = []
        if (queue := self.streams.queues.get(METRICS.name)) is not None:
            for line in self._unfed()[: queue.room]:
                writes += queue.publish(_plain(line), key=line["batch_id"])
        if (latest := self.streams.latest.get(VERSIONS.name)) is not None:
            ledger = self._run.core.ledger
            writes += latest.publish({name: getattr(ledger, name) for name in VERSIONS.schema})
        if writes:
            self._ring()
        return writes

    # ---- one life of one instance ------------------------------------------------------------------------------------------

    def attach(self, role: str, index: int, url: str) -> None:
        """A process answers at this address."""
        assert self._group is not None
        name, bell = f"{role}-{index}", Bell()
        self.detach(name, None)
        self._lives[name] = self._group.create_task(self._serve(role, index, url, bell), name=f"items of {name}"), bell
        self._run.core.waiting(f"role {role}", None)

    async def release(self, name: str, deadline_s: float) -> None:
        """One instance too many: it ends with the item it is at, or, when that takes too long, gives it to another."""
        self._released.add(name)
        self._ring()
        try:
            if name in self._lives:
                await asyncio.wait([self._lives[name][0]], timeout=deadline_s)
        finally:
            self.detach(name, None)
            self._released.discard(name)

    def detach(self, name: str, reason: str | None) -> None:
        """This life is over. With a reason, what it was at counts as one of the item's tries."""
        life = self._lives.pop(name, None)
        if life is not None:
            life[0].cancel()
        role = name.rpartition("-")[0]
        writes: list[Write] = []
        for queue in self.streams.queues.values():
            if role in queue.readers:
                for seq in [s for s, holder in queue.readers[role].given.items() if holder == name] if reason else ():
                    writes += queue.lost(role, seq, f"its process was lost: {reason}", self._config[role].tries)
                queue.give_back(role, name)
        if writes and self._group is not None:
            self._group.create_task(self._commit(writes))
        self._ring()

    def _ring(self) -> None:
        for _, bell in self._lives.values():
            bell.ring()

    async def _serve(self, role: str, index: int, url: str, bell: Bell) -> None:
        """Consumes items; waits for one; unblocked by a publisher, or by another instance that lost one. Its owner cancels it."""
        name = f"{role}-{index}"
        assert self._db is not None
        seen: dict[str, int] = {}
        begin = True
        while name not in self._released:
            bell.clear()
            newer = self._newer(role, seen)
            item = self._next(role, name, newer)
            if item is None:
                await bell.wait(60.0)
                continue
            given = Given(
                stream=item.stream,
                seq=item.seq,
                value=item.value,
                tries=item.tries,
                count=self._run.processes.wanted[role],
                latest={stream: self.streams.latest[stream].value for stream in newer},
                begin=begin,
                state=self._db.states.get((role, index)) if begin else None,
            )
            queue = self.streams.queues.get(item.stream)
            try:
                made = await self._ask(role, url, given)
            except NoReply as lost:
                # Where it has died, its supervisor says so in a moment, and how; that cancels this task and gives the item back.
                await asyncio.sleep(OBITUARY_S)
                await self._run.processes.replace(name, str(lost))
                return
            except ItemFailed as failed:
                log.warning("%s, item %d of %s: %s", name, item.seq, item.stream, failed)
                if queue is not None:
                    await self._commit(queue.lost(role, item.seq, str(failed), self._config[role].tries))
                else:
                    seen |= newer  # a value is not given twice: there will be a newer one
                await asyncio.sleep(AGAIN_S)
                continue
            begin = False
            seen |= newer
            while (why := self.streams.fits(made.published)) is not None:
                self._run.core.waiting(f"role {role}", why)
                bell.clear()
                await bell.wait(LOOK_S)
            self._run.core.waiting(f"role {role}", None)
            writes = [*self.streams.publish(made.published), *([] if queue is None else queue.done(role, item.seq))]
            if made.state is not None:
                self._db.states[role, index] = made.state
                writes.append(("state", (role, index, made.state)))
            self._ring()
            await asyncio.shield(self._commit(writes))

    def _newer(self, role: str, seen: dict[str, int]) -> dict[str, int]:
        """Of the `latest` streams it subscribes: what it has not been told yet."""
        wanted = [name for name, each in self._config[role].subscribes.items() if each.kind == "latest"]
        latest = self.streams.latest
        return {name: latest[name].version for name in wanted if latest[name].version > seen.get(name, 0)}

    def _next(self, role: str, name: str, newer: dict[str, int]) -> Item | None:
        """What to hand out now: a newer value first, for it may be what the items are to be read with."""
        for stream, version in newer.items():
            return Item(stream, version, self.streams.latest[stream].value)
        for stream, each in self._config[role].subscribes.items():
            if each.kind == "queue" and (item := self.streams.queues[stream].take(role, name)) is not None:
                return item
        return None

    async def _ask(self, role: str, url: str, given: Given) -> Made:
        deadline_s = self._config[role].deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._run.http.post(url + "/v1/item", content=orjson.dumps(given.model_dump()), timeout=None)
        except TimeoutError as late:
            raise NoReply(f"it hangs: item {given.seq} of {given.stream} is not done after {deadline_s:g} s") from late
        except BROKEN as broken:
            raise NoReply(f"no answer to item {given.seq} of {given.stream}: {type(broken).__name__} {broken}".rstrip()) from broken
        try:
            made = Made.model_validate(orjson.loads(reply.content))
        except (ValidationError, orjson.JSONDecodeError) as error:
            raise ItemFailed(f"the process answered {reply.status_code}, and not in our form: {error}") from error
        if made.error is not None:
            raise ItemFailed(made.error)
        for stream, value in made.published:
            declared = self._config[role].publishes.get(stream)
            if declared is None or (why := misfit(value, declared.schema_)):
                raise ItemFailed(f"it published to {stream!r} what is not declared" + ("" if declared is None else f": {why}"))
        if why := self.streams.too_many(made.published):
            raise ItemFailed(why)
        return made

    async def _commit(self, writes: list[Write]) -> None:
        if self._db is not None:
            await self._db.commit(writes)


def _plain(line: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: what is not a number is null."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS))
    return plain
