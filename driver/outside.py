"""Engines that somebody else starts and ends, given by their URL: asked what they can do, watched, and given up or taken again.

    asked ──usable──▶ registered ──push──▶ open ──silent, other weights, a failed push──▶ gone ──pause──▶ asked …

Each time one is taken (again) it is another incarnation, whatever its process did meanwhile: nothing that was known of it is believed, and
it gets no request before a whole push. One that was started anew behind the same address says so by its weight version, which is
not what the last push set. Nothing here can end such a process, so what a push would replace is left alone for a while instead, longer
each time.

An engine serves one run. One whose weights another run named, and whose requests go on, is not taken: that run lives. One that another run
pushes to twice in a minute while this run has it is left to that run. A name alone says nothing: the run that gave it may have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from driver.engine_facts import Unused
from driver.engine_model import perhaps_another_model, same_model
from driver.ledger_rows import Upsert
from rollout.address import NotAllowed, allowed_host, checked_url, engine_id_of
from rollout.answer import EngineError
from rollout.client import EngineClient
from rollout.load import Load, load_of
from rollout.pool import EngineSlot
from rollout.slot import State
from rollout.version import parse_version

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.outside")
HEARTBEAT_S = 1.0
ANSWER_S = 3.0
MISSES = 4  # on a busy machine an HTTP thread may be starved for seconds
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
LONGEST_ALONE_S = 300.0  # after failed pushes: each of them stops what the engine does
CONTESTED_S = 60.0  # two pushes of another run within this, and the engine is the other run's
CONTESTED_PAUSE_S = 30.0  # the first; it doubles
LOOKS = 11  # five seconds: between two batches a run may have no request anywhere
LOOK_S = 0.5
AT_ONCE_S = 2.0  # for what is left to do when the service is to end at once
ADDED = "engines added over REST"  # in the ledger's table `meta`
UNFINISHED = ("shut", "quarantined")  # a push was cut short: the engine may be paused, with weights of two versions


@dataclass(frozen=True)
class Loss:
    """Why an engine is out of use. `contested`: another run pushed to it."""

    state: Literal["away", "quarantined"]
    reason: str
    contested: bool = False


@dataclass
class Watched:
    """One engine of somebody else's. `given_up` gets the reason when the push, or a request, is done with it."""

    engine_id: str
    url: str
    task: asyncio.Task[None]
    given_up: asyncio.Future[str]
    state: Literal["starting", "away", "quarantined"] = "starting"  # while it has no slot
    reason: str = "it was not asked yet"
    since: float = field(default_factory=time.monotonic)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    again: asyncio.Event = field(default_factory=asyncio.Event)  # not to be waited for any longer
    contested_at: float | None = None
    named: str | None = None  # its weights, when it was last asked before it was taken
    paused: tuple[str | None, float] | None = None  # under which name of another run's it is paused, since when
    wait_s: float = 0.0  # until it is asked again


class Outside:
    """All engines of a run that it did not start. `on_failure` is told when a watcher itself fails, which is a fault of ours."""

    def __init__(self, run: Run, on_failure: Callable[[BaseException], None]) -> None:
        self._run = run
        self._on_failure = on_failure
        self.engines: dict[str, Watched] = {}
        found = run.core.db.query("SELECT value FROM meta WHERE name = ?", (ADDED,))
        self._added: list[str] = list(orjson.loads(found[0][0])) if found else []
        self._leaving: dict[str, asyncio.Task[bool]] = {}  # by engine_id
        self._left = False

    def start(self) -> None:
        """Those of the configuration, and those that were added over REST before a restart."""
        for url in [*self._run.config.rollout.engine_urls, *self._added]:
            if engine_id_of(url) not in self.engines:
                self._watch(checked_url(url))

    async def stop(self) -> None:
        """Leave none paused by a push that was cut short."""
        tasks = [watched.task for watched in self.engines.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._leaving.values(), return_exceptions=True)
        slots = [self._run.pool.slots.get(engine_id) for engine_id in self.engines]
        await asyncio.gather(*(self._leave(slot, slot.state) for slot in slots if slot is not None))
        self._left = True

    async def leave_at_once(self, deadline_s: float = AT_ONCE_S) -> list[str]:
        """What `stop` does, within `deadline_s`, while everything else goes on. Which engines may be left paused."""
        if self._left:
            return []
        for watched in self.engines.values():
            watched.task.cancel()
        for engine_id in self.engines:
            slot = self._run.pool.slots.get(engine_id)
            if slot is not None and engine_id not in self._leaving:
                state = slot.state
                self._run.pool.gone(slot, "the service ends at once")  # which ends a push
                self._leave(slot, state)
        leaving = dict(self._leaving)
        if leaving:
            await asyncio.wait(leaving.values(), timeout=deadline_s)
        return [engine_id for engine_id, task in leaving.items() if not (task.done() and not task.cancelled() and task.result())]

    def unused(self) -> Iterator[Unused]:
        """Those that are neither registered nor served by."""
        now = time.monotonic()
        for one in self.engines.values():
            incarnation = self._run.processes.last_incarnation(one.engine_id)
            yield Unused(one.engine_id, one.url, incarnation, one.state, one.reason, now - one.since)

    async def heard(self, engine_id: str, within_s: float) -> tuple[str, str]:
        """Its state and why, as soon as it has answered or not, at the latest after `within_s`."""
        watched = self.engines.get(engine_id)
        if watched is None:
            return "gone", "it was removed meanwhile"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await watched.asked.wait()
        slot = self._run.pool.slots.get(engine_id)
        return (watched.state, watched.reason) if slot is None else (slot.state, slot.reason)

    def add(self, url: str) -> str:
        """Over REST. One that is known already is asked again at once. Raises NotAllowed."""
        config = self._run.config
        engine_id = engine_id_of(url)
        of_config = engine_id in {engine_id_of(known) for known in config.rollout.engine_urls}
        if not of_config:
            allowed_host(url, config.service.engine_hosts)
        if engine_id not in self.engines:
            if engine_id in {engine_id_of(ours) for ours in self._run.processes.engine_urls if ours}:
                raise NotAllowed(f"the engine at {engine_id} was started by this run and serves it already")
            if not of_config:
                self._remember([*self._added, checked_url(url)])
            self._watch(checked_url(url))
        elif engine_id not in self._run.pool.slots:
            self.engines[engine_id].asked.clear()
            self.engines[engine_id].again.set()
        return engine_id

    def remove(self, engine_id: str) -> bool:
        """No new request goes there; those that run there end there. False when there is none of this name."""
        watched = self.engines.pop(engine_id, None)
        if watched is None:
            return False
        watched.task.cancel()
        self._remember([url for url in self._added if engine_id_of(url) != engine_id])
        slot = self._run.pool.slots.get(engine_id)
        if slot is not None:
            state = slot.state
            self._run.pool.gone(slot, "removed")
            self._leave(slot, state)
        self._run.pool.absent.pop(engine_id, None)
        self._run.core.ring()
        log.info("engine %s is removed: no new request goes there", engine_id)
        return True

    def give_up(self, engine_id: str, reason: str) -> None:
        """Not to be trusted as it is: taken again after a pause, as if it were new."""
        watched = self.engines.get(engine_id)
        if watched is not None and not watched.given_up.done():
            watched.given_up.set_result(reason)

    def _leave(self, slot: EngineSlot, state: State) -> asyncio.Task[bool]:
        """In a task of its own: half of it would leave the engine paused, and whoever asks for it may be cancelled."""
        leaving = asyncio.create_task(self._let_go(slot, state), name=f"leaving {slot.engine_id}")
        self._leaving[slot.engine_id] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(slot.engine_id, None))
        return leaving

    async def _let_go(self, slot: EngineSlot, state: State) -> bool:
        """`state`: that in which it was. One that still waits for its first push may be as a driver that was killed left it. False: it
        may be paused."""
        try:
            if state in UNFINISHED or (state == "starting" and await slot.client.is_paused()):
                return await self._run.pusher.leave(slot)
        except EngineError as error:
            log.warning("%s does not say whether it is paused: %s", slot.engine_id, error)
            return False
        return True

    # ---- one engine ------------------------------------------------------------------------------------------------------

    def _watch(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        engine_id = engine_id_of(url)
        task = asyncio.create_task(self._follow(engine_id, url), name=f"engine {engine_id}")
        self.engines[engine_id] = Watched(engine_id, url, task, loop.create_future())
        self._run.pool.absent[engine_id] = "it was not asked yet"
        task.add_done_callback(self._ended)
        self._run.core.ring()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _follow(self, engine_id: str, url: str) -> None:
        """For as long as it belongs to the run."""
        watched, run = self.engines[engine_id], self._run
        pause_s = alone_s = FIRST_PAUSE_S
        contested_s = CONTESTED_PAUSE_S
        rollout = run.config.rollout
        client = EngineClient(
            url, run.http, rollout.engine_api_key, admin_key=rollout.engine_admin_key, vocab_size=run.tokenizer.vocab_size
        )
        loop = asyncio.get_running_loop()
        if engine_id in self._leaving:  # it was removed a moment ago: the calls of two hands together may be illegal
            await asyncio.wait([self._leaving[engine_id]])
        while True:
            watched.again.clear()
            try:
                slot, named = await self._take(engine_id, client)
            except EngineError as error:
                self._say(watched, Loss("quarantined" if error.kind == "configuration" else "away", str(error)))
                wait_s, pause_s = pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                watched.state, watched.reason = "starting", "registered, not verified yet"
                watched.asked.set()
                watched.given_up = loop.create_future()
                loss = await self._until_lost(watched, slot, named)
                state = slot.state
                if slot.state != "gone":
                    run.pool.gone(slot, loss.reason)
                if slot.was_open:  # what went before no longer counts
                    pause_s = alone_s = FIRST_PAUSE_S
                elif loss.state == "quarantined" and slot.weights_sent and run_named(named) in (None, run.config.run_id):
                    loss = Loss(loss.state, loss.reason + await perhaps_another_model(slot, run.config.model.path))
                if loss.contested:
                    loss, wait_s, contested_s = self._contested(watched, loss, contested_s)
                elif loss.state == "quarantined":
                    wait_s, alone_s = alone_s, min(2 * alone_s, LONGEST_ALONE_S)
                else:
                    wait_s, pause_s = pause_s, min(2 * pause_s, LONGEST_PAUSE_S)
                self._say(watched, loss)
                if state in UNFINISHED and not loss.contested:  # calls between those of another run's push may be illegal
                    await asyncio.shield(self._leave(slot, state))
            watched.wait_s = wait_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await watched.again.wait()

    @staticmethod
    def _contested(watched: Watched, loss: Loss, contested_s: float) -> tuple[Loss, float, float]:
        """Once may be the last push of a run that ended. What to say, how long to leave the engine alone, and how long the next time."""
        now, before = time.monotonic(), watched.contested_at
        watched.contested_at = now
        if before is None or now - before > CONTESTED_S + contested_s:
            return loss, FIRST_PAUSE_S, CONTESTED_PAUSE_S
        return Loss("quarantined", loss.reason, contested=True), contested_s, min(2 * contested_s, LONGEST_ALONE_S)

    def _say(self, watched: Watched, loss: Loss) -> None:
        if loss.reason != self._run.pool.absent.get(watched.engine_id):
            log.warning("engine %s is not used: %s", watched.engine_id, loss.reason)
        if self.engines.get(watched.engine_id) is watched:
            self._run.pool.absent[watched.engine_id] = loss.reason
        if watched.state != loss.state:
            watched.since = time.monotonic()
        watched.state, watched.reason = loss.state, loss.reason
        watched.asked.set()
        self._run.core.ring()

    async def _take(self, engine_id: str, client: EngineClient) -> tuple[EngineSlot, str | None]:
        """Ask it what it can do, and register it as a new incarnation; with the name its weights had. Raises EngineError."""
        run = self._run
        capabilities = await client.capabilities()
        run.transports.name_for(client, capabilities)
        await same_model(client, run.model_facts, run.config.model.path)
        named = await self._refuse_if_serving(self.engines[engine_id], client)
        if not capabilities.embedded:
            await client.freeze_gc()
        incarnation = run.processes.last_incarnation(engine_id) + 1
        run.processes.note_incarnation(engine_id, incarnation)
        life = await run.processes.next_life()
        log.info("engine %s is taken, as incarnation %d", engine_id, incarnation)
        return run.processes.enroll(engine_id, client, incarnation, life, capabilities), named

    async def _refuse_if_serving(self, watched: Watched, client: EngineClient) -> str | None:
        """The name of its weights. EngineError when another run gave it, and lives: it gave another one since we last asked, requests
        come and go, or the pause of its push may yet end.

        That requests run is not enough: a paused server, and one whose run was killed, go on saying what they last counted.
        """
        named = await client.says_version(deadline_s=ANSWER_S)
        other = run_named(named)
        previous, watched.named = watched.named, named
        if other in (None, self._run.config.run_id):
            return named
        if previous not in (None, named):
            raise EngineError("configuration", _serves(str(other)))
        if await client.is_paused():
            return self._refuse_if_paused_lately(watched, named, str(other))
        watched.paused = None
        before: Load | None = None
        for look in range(LOOKS):
            if look:
                await asyncio.sleep(LOOK_S)
            try:
                load = load_of(await client.loads(), own=0, at_s=0.0, trust_s=1.0)
            except EngineError as error:
                log.warning("%s does not say whether it runs requests: %s", client.url, error)
                return named
            if before is not None and load.running + before.running and load.differs_from(before):
                raise EngineError("configuration", _serves(str(other)))
            before = load
        if await client.says_version(deadline_s=ANSWER_S) != named:
            raise EngineError("configuration", _serves(str(other)))
        return named

    def _refuse_if_paused_lately(self, watched: Watched, named: str | None, other: str) -> str | None:
        now, limit_s = time.monotonic(), self._run.config.push.deadline_s
        if watched.paused is None or watched.paused[0] != named:
            watched.paused = (named, now)
        if now - watched.paused[1] < limit_s:
            why = f"run {other} is pushing to it, or has left it paused: it is taken if it is still paused in {limit_s:.0f} s"
            raise EngineError("infrastructure", why)
        return named

    async def _until_lost(self, watched: Watched, slot: EngineSlot, named: str | None) -> Loss:
        """Until it is silent, says another version, or is given up; the reason."""
        listening = asyncio.create_task(self._listen(slot, named), name=f"heartbeat of {slot.engine_id}")
        try:
            either: set[asyncio.Future[Any]] = {watched.given_up, listening}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return Loss("quarantined", watched.given_up.result()) if watched.given_up.done() else listening.result()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, slot: EngineSlot, named: str | None) -> Loss:
        """Ask for its version once a heartbeat: one call that says both that it lives and which weights it has. `named`: before we came."""
        missed = 0
        ours = self._run.config.run_id
        while True:
            expected = str(slot.verified) if slot.state == "open" else None
            try:
                said = await slot.client.says_version(deadline_s=ANSWER_S)
                missed = 0
            except EngineError as error:
                missed += 1
                if missed >= MISSES:
                    return Loss("away", f"{error}, {MISSES} times in a row")
            else:
                if said != named and (other := run_named(said)) is not None and other != ours:
                    return Loss("away", _serves(other), contested=True)
                if expected is not None and slot.state == "open" and str(slot.verified) == expected != said:
                    return Loss(
                        "away", f"it says its weights are {said!r}, not {expected!r}: it was started anew, or another service pushes to it"
                    )
            await asyncio.sleep(HEARTBEAT_S)

    def _remember(self, urls: list[str]) -> None:
        """What was added over REST outlives a driver."""
        self._added = urls
        self._run.core.db.write([Upsert("meta", {"name": ADDED, "value": orjson.dumps(urls)})])


def run_named(version: str | None) -> str | None:
    """The run that gave this name to weights; None for a name that no run gives."""
    try:
        return parse_version(version or "").run
    except ValueError:
        return None


def _serves(other: str) -> str:
    return (
        f"it serves run {other}, and an engine serves one run: end that run, or take the engine out of one of them "
        "(rollout.engine_urls, DELETE …/engines/ID)"
    )
