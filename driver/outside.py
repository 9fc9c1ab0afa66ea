"""Engines that somebody else starts and ends, given by their URL: asked what they can do, watched, and given up or taken again.

    asked ──usable──▶ registered ──push──▶ open ──silent, other weights, a failed push──▶ gone ──pause──▶ asked …

Each time one is taken (again) it is another incarnation, whatever its process did meanwhile: nothing that was known of it is believed, and
it gets no request before a whole push. One that was started anew behind the same address says so by its weight version, which is
not what the last push set. Nothing here can end such a process, so what a push would replace is left alone for a while instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from driver.ledger import Upsert
from rollout.address import NotAllowed, allowed_host, checked_url, engine_id_of
from rollout.answer import EngineError
from rollout.client import EngineClient
from rollout.pool import EngineSlot
from rollout.slot import State

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.outside")
HEARTBEAT_S = 1.0
ANSWER_S = 3.0
MISSES = 4  # on a busy machine an HTTP thread may be starved for seconds
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
ADDED = "engines added over REST"  # in the ledger's table `meta`
UNFINISHED = ("shut", "quarantined")  # a push was cut short: the engine may be paused, with weights of two versions


@dataclass
class Watched:
    """One engine of somebody else's. `given_up` gets the reason when the push, or a request, is done with it."""

    engine_id: str
    url: str
    task: asyncio.Task[None]
    given_up: asyncio.Future[str]


class Outside:
    """All engines of a run that it did not start. `on_failure` is told when a watcher itself fails, which is a fault of ours."""

    def __init__(self, run: Run, on_failure: Callable[[BaseException], None]) -> None:
        self._run = run
        self._on_failure = on_failure
        self.engines: dict[str, Watched] = {}
        found = run.core.db.query("SELECT value FROM meta WHERE name = ?", (ADDED,))
        self._added: list[str] = list(orjson.loads(found[0][0])) if found else []
        self._leaving: dict[str, asyncio.Task[None]] = {}  # by engine_id

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
        await asyncio.gather(*(self._let_go(slot, slot.state) for slot in slots if slot is not None))

    def add(self, url: str) -> str:
        """Over REST. Known already is fine. Raises NotAllowed."""
        config = self._run.config
        allowed_host(url, config.service.engine_hosts)
        engine_id = engine_id_of(url)
        if engine_id not in self.engines:
            if engine_id in {engine_id_of(ours) for ours in self._run.processes.engine_urls if ours}:
                raise NotAllowed(f"the engine at {engine_id} was started by this run and serves it already")
            self._remember([*self._added, checked_url(url)])
            self._watch(checked_url(url))
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
        return True

    def give_up(self, engine_id: str, reason: str) -> None:
        """Not to be trusted as it is: taken again after a pause, as if it were new."""
        watched = self.engines.get(engine_id)
        if watched is not None and not watched.given_up.done():
            watched.given_up.set_result(reason)

    def _leave(self, slot: EngineSlot, state: State) -> asyncio.Task[None]:
        """In a task of its own: half of it would leave the engine paused, and whoever asks for it may be cancelled."""
        leaving = asyncio.create_task(self._let_go(slot, state), name=f"leaving {slot.engine_id}")
        self._leaving[slot.engine_id] = leaving
        leaving.add_done_callback(lambda _: self._leaving.pop(slot.engine_id, None))
        return leaving

    async def _let_go(self, slot: EngineSlot, state: State) -> None:
        """`state`: that in which it was. One that still waits for its first push may be as a driver that was killed left it."""
        try:
            if state in UNFINISHED or (state == "starting" and await slot.client.is_paused()):
                await self._run.pusher.leave(slot)
        except EngineError as error:
            log.warning("%s does not say whether it is paused: %s", slot.engine_id, error)

    # ---- one engine ------------------------------------------------------------------------------------------------------

    def _watch(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        engine_id = engine_id_of(url)
        task = asyncio.create_task(self._follow(engine_id, url), name=f"engine {engine_id}")
        self.engines[engine_id] = Watched(engine_id, url, task, loop.create_future())
        self._run.pool.absent[engine_id] = "it was not asked yet"
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _follow(self, engine_id: str, url: str) -> None:
        """For as long as it belongs to the run."""
        watched, run, pause_s = self.engines[engine_id], self._run, FIRST_PAUSE_S
        rollout = run.config.rollout
        client = EngineClient(
            url, run.http, rollout.engine_api_key, admin_key=rollout.engine_admin_key, vocab_size=run.tokenizer.vocab_size
        )
        loop = asyncio.get_running_loop()
        if engine_id in self._leaving:  # it was removed a moment ago: the calls of two hands together may be illegal
            await asyncio.wait([self._leaving[engine_id]])
        while True:
            try:
                slot = await self._take(engine_id, client)
            except EngineError as error:
                self._say(watched, str(error))
            else:
                run.pool.absent.pop(engine_id, None)
                watched.given_up = loop.create_future()
                reason = await self._until_lost(watched, slot)
                state = slot.state
                if slot.state != "gone":
                    run.pool.gone(slot, reason)
                self._say(watched, reason)
                if state in UNFINISHED:
                    await asyncio.shield(self._leave(slot, state))
                if slot.served_requests:  # it was verified and open: what went before no longer counts
                    pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _say(self, watched: Watched, reason: str) -> None:
        if reason != self._run.pool.absent.get(watched.engine_id):
            log.warning("engine %s is not used: %s", watched.engine_id, reason)
        if self.engines.get(watched.engine_id) is watched:
            self._run.pool.absent[watched.engine_id] = reason
        self._run.core.ring()

    async def _take(self, engine_id: str, client: EngineClient) -> EngineSlot:
        """Ask it what it can do, and register it as a new incarnation. Raises EngineError."""
        run = self._run
        capabilities = await client.capabilities()
        run.transports.name_for(client, capabilities)
        await _same_model(client, run.model_facts)
        if not capabilities.embedded:
            await client.freeze_gc()
        incarnation = run.processes.last_incarnation(engine_id) + 1
        run.processes.note_incarnation(engine_id, incarnation)
        life = await run.processes.next_life()
        log.info("engine %s is taken, as incarnation %d", engine_id, incarnation)
        return run.processes.enroll(engine_id, client, incarnation, life, capabilities)

    async def _until_lost(self, watched: Watched, slot: EngineSlot) -> str:
        """Until it is silent, says another version, or is given up; the reason."""
        listening = asyncio.create_task(self._listen(slot), name=f"heartbeat of {slot.engine_id}")
        try:
            await asyncio.wait([watched.given_up, listening], return_when=asyncio.FIRST_COMPLETED)
            return watched.given_up.result() if watched.given_up.done() else listening.result()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _listen(self, slot: EngineSlot) -> str:
        """Ask for its version once a heartbeat: one call that says both that it lives and which weights it has."""
        missed = 0
        while True:
            expected = str(slot.verified) if slot.state == "open" else None
            try:
                said = await slot.client.says_version(deadline_s=ANSWER_S)
                missed = 0
            except EngineError as error:
                missed += 1
                if missed >= MISSES:
                    return f"{error}, {MISSES} times in a row"
            else:
                if expected is not None and slot.state == "open" and str(slot.verified) == expected != said:
                    return f"it says its weights are {said!r}, not {expected!r}: it was started anew, or another service pushes to it"
            await asyncio.sleep(HEARTBEAT_S)

    def _remember(self, urls: list[str]) -> None:
        """What was added over REST outlives a driver."""
        self._added = urls
        self._run.core.db.write([Upsert("meta", {"name": ADDED, "value": orjson.dumps(urls)})])


async def _same_model(client: EngineClient, expected: dict[str, Any]) -> None:
    """SGLang dies of a tensor whose shape does not fit, so what can be asked is asked. Raises EngineError."""
    said = await client.model_info()
    for name in ("architectures", "model_type"):
        if said.get(name) is not None and expected.get(name) is not None and said[name] != expected[name]:
            raise EngineError(
                "configuration", f"{client.url} serves a {said[name]}, the run trains a {expected[name]}: start it on that model"
            )
