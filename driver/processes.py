"""The processes of a run: which there are, how each is started, and what its coming and going means to the loops.

Engines, the reward service, the trainer's warm parent, and the courier where pushes need one, are started and watched by the launcher;
here its events become: an engine registers with the pool (and gets the newest weights before its first request), the reward service is
attached, the trainer is brought to the ledger's version. A process that can not start at all fails the run with its own last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import psutil

from driver.engine_facts import Unused
from driver.launcher import (
    ChildHung,
    Died,
    Hung,
    Launcher,
    LocalLauncher,
    LocalProcess,
    Process,
    ProcessEvent,
    Quarantined,
    Ready,
    Started,
    StartFailed,
)
from driver.ledger_rows import Upsert
from driver.life import ProcessSpec
from driver.outside import Outside
from driver.planned import plan_of
from driver.planner import Plan
from driver.process_specs import Specs
from driver.roles import STORE, configured
from driver.scale import TRAINER, Leaving, NotScalable, Scaled, Wanted
from reward.client import RewardClient, RewardUnavailable
from rollout.answer import EngineError
from rollout.capabilities import Capabilities
from rollout.client import EngineClient
from rollout.pool import EnginePool, EngineSlot

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.processes")
STOP_DEADLINE_S = 10.0
ALL_ENGINES = "all engines"  # their lives counted together
LEAVE_S = 5.0  # what an engine needs to end its requests with what they have
MOST_INSTANCES = 64
NO_PLAN = Plan((), (), (), ())


class Processes:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._core = run.core
        self._config = run.config
        self._directory = run.config.directory / "processes"
        self._launcher: Launcher | None = None
        self.outside = Outside(run, self._watcher_failed)
        self._incarnations = {
            name.partition("/")[2]: int(value)
            for name, value in run.core.db.query("SELECT name, value FROM meta WHERE name LIKE 'incarnation/%'")
        }
        self._asking: set[asyncio.Task[Any]] = set()
        self._news: dict[str, tuple[float, str]] = {}  # of the run's own engines: when they began or died, and of what
        self.wanted = Wanted(run.core.db, configured(run.config))
        self.specs = Specs(run, self.wanted, self.last_incarnation)
        self.plan: Plan = NO_PLAN
        self._leaving = Leaving(self._left)
        self._stopping = False
        self.taken: list[LocalProcess] = []  # of the run before, which its launcher released
        self.hand_over: frozenset[str] = frozenset()  # roles whose processes outlive this run
        self.released: list[LocalProcess] = []

    async def begin(self) -> None:
        """The plan, and of its processes the one that holds the store: before anything reads it. StartFailed, PlanError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._launcher = LocalLauncher(self._on_event)
        self.plan = plan_of(self._config, self.wanted.counts, others=self._run.beside())
        for warning in self.plan.warnings:
            log.warning("plan: %s", warning)
        for placement in self.plan.processes.values():
            if placement.role.name == STORE:
                await self._first_start(await self._launcher.start(self.specs.of(placement)))

    async def run(self) -> None:
        """Starts everything else; then only the launcher's own failure, or a role that nothing can do without, ends it (by raising)."""
        assert self._launcher is not None
        self._run.own_roles.open(self.plan)
        await self._converge()
        taken, self.taken = self.taken, []
        await asyncio.gather(*(process.stop(STOP_DEADLINE_S) for process in taken))  # more than this run wants
        needed = [name for name, placement in self.plan.processes.items() if placement.role.start_together]
        self.outside.start()
        async with asyncio.TaskGroup() as group:
            for name in needed:
                group.create_task(self._first_start(self._launcher.processes[name]))
        watch = asyncio.create_task(self._launcher.watch(), name="launcher")
        try:
            done, _ = await asyncio.wait([watch, self._lost], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            watch.cancel()

    async def _first_start(self, process: Process) -> None:
        """A process that can not start fails the run; twice, because the first may have been ended from outside."""
        for last in (False, True):
            try:
                return await process.wait_ready(process.spec.start_deadline_s)
            except StartFailed as error:
                if process.spec.name not in self.plan.processes:
                    return  # scaled down meanwhile
                if last:
                    raise
                log.warning("%s; trying once more", error)

    def _adopt(self, name: str, spec: ProcessSpec) -> bool:
        """Take a process of the run before, if there is one of this name."""
        process = next((one for one in self.taken if one.spec.name == name), None)
        if process is None:
            return False
        assert isinstance(self._launcher, LocalLauncher)
        self.taken.remove(process)
        self._launcher.adopt(process, spec)
        log.info("%s (incarnation %d) is taken over from the run before", spec.name, process.incarnation)
        return True

    async def stop(self) -> None:
        """End all processes but those of the roles to hand over, which are `released`, and the store's."""
        self._stopping = True
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        self._leaving.cancel()
        await self._leaving.wait()
        await self.outside.stop()
        launcher = self._launcher
        if isinstance(launcher, LocalLauncher):
            found = [launcher.processes[name] for name in sorted(self.plan.processes.keys() & launcher.processes.keys())]
            ready = [process.spec.name for process in found if process.spec.role in self.hand_over and process.state == "ready"]
            self.released = [launcher.release(name) for name in ready]
        if launcher is not None:
            ending = [process for process in launcher.processes.values() if process.spec.role != STORE]
            await asyncio.gather(*(process.stop(STOP_DEADLINE_S) for process in ending))

    async def stop_store(self) -> None:
        """The last: what is to be kept of it has been."""
        if self._launcher is not None:
            await self._launcher.stop(STOP_DEADLINE_S)

    # ---- how many there are ----------------------------------------------------------------------------------------------

    async def scale(self, role: str, count: int) -> Scaled:
        """From now on, and after restarts, so many. What is too many ends with nothing lost. NotScalable, PlanError (a ValueError too)."""
        if role == "trainer":
            raise NotScalable(TRAINER)
        if role not in self.wanted:
            raise NotScalable(f"there is no role {role!r} to scale; there are {', '.join(self.wanted.roles)}")
        if self._launcher is None or self._stopping or self._core.ledger.ended is not None:
            state = "ending" if self._run.state == "running" else self._run.state
            raise NotScalable(f"run {self._core.run_id} is {state}: it has no processes to scale")
        least = 0 if role in self._config.roles or (role == "rollout" and self.outside.engines) else 1
        if not least <= count <= MOST_INSTANCES:
            hold = "; to hold the run for a while: headrace pause" if count == 0 else ""
            raise NotScalable(f"{role} can have {least} to {MOST_INSTANCES} instances here, not {count}{hold}")
        before = self.plan
        standing = {name: placement for name, placement in before.processes.items() if name in self._launcher.processes}
        plan = plan_of(self._config, self.wanted.counts | {role: count}, standing, self._run.beside())
        was = self.wanted[role]
        self.wanted.ask(role, count)
        self.plan = plan
        await self._core.db.durable()
        again = await self._converge(again=role)
        gone, new = before.processes.keys() - plan.processes.keys(), plan.processes.keys() - before.processes.keys()
        scaled = Scaled(role, was, count, tuple(sorted(new)), tuple(sorted(gone)), tuple(again))
        log.info("%s", scaled.words)
        return scaled

    async def _converge(self, again: str | None = None) -> list[str]:
        """Start what is planned and not there, let go of what is there and not planned. Of role `again` also what had been left alone is
        started, and named in the answer."""
        launcher, started_again = self._launcher, []
        if launcher is None or self._stopping:
            return []
        planned = self.plan.processes
        for name in launcher.processes.keys() - planned.keys():
            if name not in self._leaving:
                self._leaving.add(name, asyncio.create_task(self._leave(name), name=f"end of {name}"))
        for name, placement in planned.items():
            process = launcher.processes.get(name)
            if name in self._leaving:
                continue  # looked at again when it has ended
            if process is not None and process.state == "quarantined" and placement.role.name == again:
                started_again.append(name)
                self._core.waiting(f"engine {name}", None)
            elif process is not None and process.state != "ended":
                continue
            spec = self.specs.of(placement)
            if not self._adopt(name, spec):
                await launcher.start(spec)
        if again == "reward" and self._run.scoring.client is not None:
            await self._resize(self._run.scoring.client)
        return started_again

    async def _resize(self, reward: RewardClient) -> None:
        """The reward service's workers. One that does not hear it is being replaced, and its next life is told at its start."""
        try:
            await reward.resize(self.wanted["reward"])
        except RewardUnavailable as error:
            log.warning("the number of reward workers: %s", error)

    def _left(self) -> None:
        """A process has ended in order; it may have been wanted again meanwhile."""
        if not self._stopping:
            self._ask(self._converge(), "converge")

    async def _leave(self, name: str) -> None:
        """No request is lost and none is sampled anew: each is ended with what it has, and goes on elsewhere from its last token."""
        launcher = self._launcher
        assert launcher is not None
        role = launcher.processes[name].spec.role
        if role in self._config.roles:
            await self._run.own_roles.release(name, self._config.roles[role].deadline_s)
        pool = self._pool_of(role)
        slot = pool.slots.get(name)
        if slot is not None:
            slot.released = True
            pool.gone(slot, "scaled down")
            self._core.ring()
            if self._run.routing is not None:
                await self._run.routing.without(slot.url)
            try:
                await slot.client.abort_all()
                await slot.emptied(LEAVE_S)
            except EngineError as error:
                log.info("%s, on its way out: %s", name, error)
        await launcher.end(name, STOP_DEADLINE_S)
        pool.absent.pop(name, None)
        self._core.waiting(f"engine {name}", None)
        self._core.ring()

    async def replace(self, name: str, reason: str) -> None:
        """End this incarnation; the launcher starts the next one. An engine that somebody else started is left alone, then taken again."""
        assert self._launcher is not None
        if name in self.outside.engines:
            self.outside.give_up(name, reason)
        elif name in self._launcher.processes:
            self._launcher.processes[name].kill(reason)

    @property
    def engine_urls(self) -> list[str]:
        """Of all engines that belong to the run, also of those that cannot be used now."""
        started = [] if self._launcher is None else [p.url for p in self._launcher.processes.values() if p.spec.role == "engine"]
        return [*started, *(watched.url for watched in self.outside.engines.values())]

    def unused_engines(self) -> Iterator[Unused]:
        """The run's own as their processes are, whatever the pool knows of them."""
        processes = {} if self._launcher is None else self._launcher.processes
        for name, p in processes.items():
            since, reason = self._news.get(name, (time.monotonic(), ""))
            limit_s = p.spec.start_deadline_s if p.state == "starting" else None
            state = {"starting": "starting", "ready": "starting", "quarantined": "quarantined"}.get(p.state, "gone")
            if p.spec.role == "engine" and p.state != "ended" and name not in self._leaving:
                yield Unused(name, p.url, p.incarnation, state, reason, time.monotonic() - since, limit_s)

    async def shown(self) -> list[dict[str, Any]]:
        """For REST: every process with its state and its children, which are the trainer's ranks and the reward service's workers."""
        facts = self.facts
        children = await asyncio.to_thread(_children, [each["pid"] for each in facts[1:]])
        return [each | {"children": children.get(each["pid"], [])} for each in facts]

    @property
    def facts(self) -> list[dict[str, Any]]:
        """Every process with its state."""
        if self._launcher is None:
            return []
        driver = {"role": "driver", "index": 0, "state": "ready", "incarnation": 0, "pid": os.getpid(), "url": ""}
        return [
            driver,
            *(
                {"role": p.spec.role, "index": p.spec.index, "state": p.state, "incarnation": p.incarnation, "pid": p.pid, "url": p.url}
                for p in self._launcher.processes.values()
            ),
        ]

    # ---- what their coming and going means -----------------------------------------------------------------------------

    def _on_event(self, event: ProcessEvent) -> None:
        name = f"{event.role}-{event.index}"
        if isinstance(event, Started):
            # Incarnations grow over restarts of the driver too: an old process is never taken for a new one.
            self.note_incarnation(name, event.incarnation)
            self._news[name] = (time.monotonic(), "")
            if event.role == "engine":
                self._run.pool.absent.setdefault(name, "it is starting")
        elif isinstance(event, Ready):
            log.info("%s (incarnation %d) is ready at %s", name, event.incarnation, event.url)
            if event.role in ("engine", "evaluator"):
                self._ask(self._register(event, name), f"registration of {name}")
            elif event.role == "reward":
                reward = RewardClient(event.url, self._run.http)
                self._run.scoring.attach(reward)
                self._ask(self._resize(reward), "reward workers")  # it may have been told another number, or be of the run before
            elif event.role == "courier":
                self._run.courier.attach(event.url, event.incarnation)
            elif event.role == STORE:
                self._run.store_watch.up(name)
            elif event.role in self._config.roles:
                self._run.own_roles.attach(event.role, event.index, event.url)
            else:
                self._run.training.attach(event.url, None)
        elif isinstance(event, ChildHung):
            log.warning("%s (incarnation %d): %s", name, event.incarnation, event.reason)
        elif isinstance(event, Died | Hung | Quarantined):
            log.warning("%s (incarnation %d): %s", name, event.incarnation, event.reason)
            self._news[name] = (time.monotonic(), event.reason.splitlines()[0])
            self._gone(event, name)
        self._core.ring()

    async def _register(self, event: Ready, name: str) -> None:
        """Ask the engine what it can do, and give it to the pool if that is enough."""
        client = EngineClient(event.url, self._run.http, vocab_size=self._run.tokenizer.vocab_size)
        assert self._launcher is not None
        process = self._launcher.processes[name]
        try:
            capabilities = await client.capabilities()
            self._run.transports.name_for(client, capabilities)
            if not capabilities.embedded:
                await client.freeze_gc()
        except EngineError as error:
            if (process.state, process.incarnation) != ("ready", event.incarnation):
                return  # it died meanwhile, and its next life registers itself
            if error.kind == "configuration":
                self._fail(f"{name}: {error}")
            else:
                process.kill(f"it does not say what it can do: {error}")
            return
        life = await self.next_life()
        if (process.state, process.incarnation) == ("ready", event.incarnation) and name not in self._leaving:
            self.enroll(name, client, event.incarnation, life, capabilities, process.pid, self._pool_of(event.role))

    def _ask(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Beside everything else; its exception ends the run."""
        asking = asyncio.create_task(work, name=name)
        self._asking.add(asking)
        asking.add_done_callback(self._asked)

    def _asked(self, asking: asyncio.Task[Any]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled() and (error := asking.exception()) is not None and not self._lost.done():
            self._lost.set_exception(error)

    async def next_life(self) -> int:
        """A number that no life of any engine of this run has had. On disk before an engine is told it: engines outlive drivers."""
        life = self.last_incarnation(ALL_ENGINES) + 1
        self.note_incarnation(ALL_ENGINES, life)
        await self._core.db.durable()
        return life

    def _pool_of(self, role: str) -> EnginePool:
        return self._run.evaluator_pool if role == "evaluator" else self._run.pool

    def enroll(
        self,
        name: str,
        client: EngineClient,
        incarnation: int,
        life: int,
        capabilities: Capabilities,
        pid: int | None = None,
        pool: EnginePool | None = None,
    ) -> EngineSlot:
        """Into the pool, under a number from `next_life`."""
        pool = pool or self._run.pool
        slot = pool.register(name, client, incarnation, self._config.rollout.max_open_requests, capabilities, pid)
        slot.life = life
        pool.absent.pop(name, None)
        self._core.ring()
        return slot

    def _watcher_failed(self, error: BaseException) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)

    def _fail(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_exception(StartFailed(reason))

    def _gone(self, event: Died | Hung | Quarantined, name: str) -> None:
        if event.role in ("engine", "evaluator"):
            pool = self._pool_of(event.role)
            slot = pool.slots.get(name)
            if slot is not None and slot.incarnation == event.incarnation:
                pool.gone(slot, event.reason)
            pool.absent[name] = event.reason.splitlines()[0]
            if isinstance(event, Quarantined):
                role = "rollout" if event.role == "engine" else event.role
                remedy = f"headrace scale {role} {self.wanted[role]} starts it again"
                self._core.waiting(f"engine {name}", f"{name} is out of use: {event.reason.splitlines()[0]}; {remedy}")
        elif event.role == "reward":
            self._run.scoring.detach(event.reason)
        elif event.role == "courier":
            self._run.courier.detach()
        elif event.role == STORE:
            self._run.store_watch.down(name, event.reason)
        elif event.role in self._config.roles:
            self._run.own_roles.detach(name, event.reason.splitlines()[0])
            state = "is out of use" if isinstance(event, Quarantined) else "starts again"
            remedy = f"; headrace scale {event.role} {self.wanted[event.role]} starts it again" if isinstance(event, Quarantined) else ""
            self._core.waiting(f"role {event.role}", f"{name} {state}: {event.reason.splitlines()[0]}{remedy}")
        else:
            self._run.training.detach(event.reason)
        if isinstance(event, Quarantined) and event.role in ("trainer", "reward", "courier", STORE):
            self._fail(event.reason)

    def last_incarnation(self, name: str) -> int:
        return self._incarnations.get(name, 0)

    def note_incarnation(self, name: str, incarnation: int) -> None:
        self._incarnations[name] = incarnation
        self._core.db.write([Upsert("meta", {"name": f"incarnation/{name}", "value": str(incarnation).encode()})])

    def works(self, role: str) -> bool:
        """Some process of this role is there, or about to be."""
        processes = [] if self._launcher is None else self._launcher.processes.values()
        return any(process.spec.role == role and process.state in ("starting", "ready", "waiting") for process in processes)


def _children(pids: list[int]) -> dict[int, list[int]]:
    """Of each, out of all processes of the host: 10 ms and more."""
    children: dict[int, list[int]] = {pid: [] for pid in pids}
    for pid in psutil.pids() if pids else ():
        with contextlib.suppress(psutil.Error):
            children.get(psutil.Process(pid).ppid(), []).append(pid)
    return children
