"""Starts the processes of a run, notices when one dies or hangs, and starts it anew.

Each process has a supervisor task. It starts the child (`driver.life`), asks for its health until that answers 200 and then once a
heartbeat, is told at once when the child exits, and after a death starts the next incarnation: later each time, until it died too often
and is left alone.

    start -> Started -> Ready -> (Hung ->) Died -> pause -> Started ...      too many deaths: Quarantined
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from driver.life import KILL_WAIT_S, Life, ProcessSpec, is_free
from driver.progress import Progress
from rollout.client import BROKEN, make_http

log = logging.getLogger("headrace.launcher")

State = Literal["starting", "ready", "waiting", "quarantined", "ended"]

START_BEAT_S = 0.05  # how often a starting process is asked
COLLISION_TRIES = 3


@dataclass(frozen=True)
class Restarts:
    """Pause before a restart: `first_s`, twice as long after each death, `longest_s` at most; `healthy_s` of life forgive the past.

    After `deaths` deaths within `within_s` the process is left alone.
    """

    first_s: float = 0.2
    longest_s: float = 10.0
    healthy_s: float = 60.0
    deaths: int = 5
    within_s: float = 60.0


@dataclass(frozen=True)
class ProcessEvent:
    role: str
    index: int
    incarnation: int


@dataclass(frozen=True)
class Started(ProcessEvent):
    url: str
    pid: int


@dataclass(frozen=True)
class Ready(ProcessEvent):
    url: str


@dataclass(frozen=True)
class Hung(ProcessEvent):
    reason: str


@dataclass(frozen=True)
class ChildHung(ProcessEvent):
    """A child of it was ended, which the process replaces by itself."""

    reason: str


@dataclass(frozen=True)
class Died(ProcessEvent):
    reason: str


@dataclass(frozen=True)
class Quarantined(ProcessEvent):
    reason: str


OnEvent = Callable[[ProcessEvent], None]


class StartFailed(Exception):
    """The process died or was not ready in time; the text says how, and what its log said last."""


class Process(Protocol):
    """A supervised process as its owner sees it, through all its incarnations."""

    spec: ProcessSpec
    state: State
    incarnation: int
    pid: int
    url: str
    health: dict[str, Any]
    progress: float | None

    async def wait_ready(self, deadline_s: float) -> None: ...
    def kill(self, reason: str) -> None: ...
    async def stop(self, deadline_s: float) -> None: ...


class Launcher(Protocol):
    """Where processes come from: this machine here, a cluster elsewhere. A spec says on which host and devices the plan wants it."""

    @property
    def processes(self) -> Mapping[str, Process]: ...
    async def start(self, spec: ProcessSpec) -> Process: ...
    async def end(self, name: str, deadline_s: float) -> None: ...
    async def watch(self) -> None: ...
    async def stop(self, deadline_s: float) -> None: ...


class LocalLauncher:
    """Processes on this machine. `on_event` is called on the event loop and must not block.

    The owner awaits `watch()` beside its own work: it raises when a supervisor itself fails, so that nothing goes unwatched in silence.
    """

    def __init__(self, on_event: OnEvent, restarts: Restarts | None = None) -> None:
        self.processes: dict[str, LocalProcess] = {}
        self._on_event = on_event
        self._restarts = restarts or Restarts()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, spec: ProcessSpec) -> "LocalProcess":
        """Begin to supervise; returns at once. `wait_ready` on what it returns waits for the process."""
        known = self.processes.get(spec.name)
        if known is not None and known.state not in ("quarantined", "ended"):
            raise ValueError(f"{spec.name} runs already; stop it first, or give the new one another index")
        process = LocalProcess(spec, self._on_event, self._restarts)
        self.processes[spec.name] = process
        process.task.add_done_callback(self._supervisor_ended)
        return process

    async def end(self, name: str, deadline_s: float) -> None:
        """One process, asked first and killed after the deadline; then it is not known any more."""
        process = self.processes[name]
        await process.stop(deadline_s)
        if self.processes.get(name) is process:
            del self.processes[name]

    def release(self, name: str) -> "LocalProcess":
        """Stop watching a process without ending it, for another launcher to adopt. It dies with this driver all the same."""
        process = self.processes.pop(name)
        process.task.remove_done_callback(self._supervisor_ended)
        process.on_event = lambda event: None
        return process

    def adopt(self, process: "LocalProcess", spec: ProcessSpec) -> None:
        """Watch a process that another launcher released; from its next life on it is `spec`. What it is now is told as events."""
        assert spec.name not in self.processes, spec.name
        process.spec = spec
        process.on_event = self._on_event
        self.processes[spec.name] = process
        process.task.add_done_callback(self._supervisor_ended)
        if process.state in ("starting", "ready"):
            self._on_event(Started(spec.role, spec.index, process.incarnation, process.url, process.pid))
        if process.state == "ready":
            self._on_event(Ready(spec.role, spec.index, process.incarnation, process.url))

    def _supervisor_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
            if not self._ended.done():
                self._ended.set_exception(error)

    async def watch(self) -> None:
        """Returns when the launcher is stopped; raises what a supervisor raised."""
        await asyncio.shield(self._ended)

    async def stop(self, deadline_s: float) -> None:
        """End all processes together: asked first, killed after the deadline."""
        await asyncio.gather(*(process.stop(deadline_s) for process in self.processes.values()))
        if not self._ended.done():
            self._ended.set_result(None)


class LocalProcess:
    """One supervised process. `progress` is the number of that name in its last health answer."""

    def __init__(self, spec: ProcessSpec, on_event: OnEvent, restarts: Restarts) -> None:
        self.spec = spec
        self.state: State = "starting"
        self.incarnation = spec.first_incarnation
        self.pid = 0
        self.url = ""
        self.health: dict[str, Any] = {}
        self.progress: float | None = None
        self.on_event = on_event
        self._http = make_http()
        self._restarts = restarts
        self._stop = asyncio.Event()
        self._stop_deadline_s = 0.0
        self._kill: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # What became of this life's start: None when it is ready, else why it is not.
        self._start_result: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(self._supervise(), name=f"supervisor of {spec.name}")

    async def wait_ready(self, deadline_s: float) -> None:
        """Until this or the coming incarnation is ready. StartFailed as soon as it dies at its start, restart or not."""
        result = self._start_result
        either: set[asyncio.Future[Any]] = {result, self.task}
        done, _ = await asyncio.wait(either, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise StartFailed(f"{self.spec.name} was not ready within {deadline_s:g} s; see {self.spec.log_path}")
        if not result.done():
            raise StartFailed(f"{self.spec.name} is not running: it was stopped, or its supervisor failed")
        reason = result.result()
        if reason is not None:
            raise StartFailed(reason)

    def kill(self, reason: str) -> None:
        """End this incarnation now, for a reason of the owner's; the next one follows as after any death."""
        if not self._kill.done():
            self._kill.set_result(reason)

    async def stop(self, deadline_s: float) -> None:
        """SIGTERM to the process group, SIGKILL after the deadline. Returns when the process is gone."""
        self._stop_deadline_s = deadline_s
        self._stop.set()
        await asyncio.wait({self.task}, timeout=deadline_s + 2 * KILL_WAIT_S)

    # --- the supervisor ---

    async def _supervise(self) -> None:
        deaths: deque[float] = deque(maxlen=self._restarts.deaths)
        pause_s = self._restarts.first_s
        collisions = 0
        try:
            while True:
                life = Life(self.spec, self.incarnation)
                reason = await self._live(life)
                if self._stop.is_set():
                    return
                if not life.was_ready and collisions < COLLISION_TRIES and not is_free(life.port):
                    collisions += 1  # somebody took the port between our choice and the child's bind: not the child's fault
                    log.warning("%s: port %d was taken meanwhile, trying another", self.spec.name, life.port)
                    continue
                collisions = 0
                self._died(life, reason)
                deaths.append(time.monotonic())
                if not self.spec.restart:
                    return
                if len(deaths) == self._restarts.deaths and deaths[-1] - deaths[0] <= self._restarts.within_s:
                    return self._quarantine(reason)
                if life.was_ready and life.lived_s() >= self._restarts.healthy_s:
                    pause_s = self._restarts.first_s
                if await finishes(self._stop.wait(), pause_s):
                    return
                pause_s = min(2 * pause_s, self._restarts.longest_s)
                self.incarnation += 1
                self.state = "starting"
        finally:
            if self.state != "quarantined":
                self.state = "ended"
            await self._http.aclose()

    def _died(self, life: Life, reason: str) -> None:
        self.state = "waiting"
        if not life.was_ready:
            self._start_result.set_result(reason)
        self._start_result = asyncio.get_running_loop().create_future()
        if not self.spec.restart:
            self._start_result.set_result(reason)
        self.on_event(Died(self.spec.role, self.spec.index, self.incarnation, reason))

    def _quarantine(self, reason: str) -> None:
        often = f"{self._restarts.deaths} times within {self._restarts.within_s:g} s"
        text = f"{self.spec.name} died {often} and is left alone; the last time: {reason}"
        self.state = "quarantined"
        self._start_result.set_result(text)
        self.on_event(Quarantined(self.spec.role, self.spec.index, self.incarnation, text))

    async def _live(self, life: Life) -> str:
        """One life from start to end; says why it ended. Whatever happens here, the child is gone afterwards."""
        await life.start()
        self._kill = asyncio.get_running_loop().create_future()
        self.pid, self.url = life.pid, life.url
        try:
            self.on_event(Started(self.spec.role, self.spec.index, self.incarnation, self.url, life.pid))
            beats = asyncio.create_task(self._heartbeats(life))
            stop = asyncio.create_task(self._stop.wait())
            try:
                ends: set[asyncio.Future[Any]] = {life.exited, beats, stop, self._kill}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                beats.cancel()
                stop.cancel()
                await asyncio.wait({beats, stop})
            if life.exited.done():
                return life.obituary()
            if self._stop.is_set():
                await life.terminate(self._stop_deadline_s)
                return "stopped"
            why = self._kill.result() if self._kill.done() else beats.result()
            return f"{life.title} was killed: {why}" + ("" if life.was_ready else life.last_words())
        finally:
            await life.destroy()

    async def _heartbeats(self, life: Life) -> str:
        """Returns only when the process must be killed, with the reason."""
        spec = self.spec
        deadline = time.monotonic() + spec.start_deadline_s
        while not await self._is_healthy(life):
            if time.monotonic() > deadline:
                return f"it was not ready within {spec.start_deadline_s:g} s"
            await asyncio.sleep(START_BEAT_S)
        life.was_ready = True
        self.state = "ready"
        self._start_result.set_result(None)
        self.on_event(Ready(spec.role, spec.index, self.incarnation, self.url))
        reason = await self._until_hung(life)
        self.on_event(Hung(spec.role, spec.index, self.incarnation, reason))
        return reason

    async def _until_hung(self, life: Life) -> str:
        """Until it does not answer, or answers and its work stands still; of a child that was stopped, the child is ended."""
        spec, missed = self.spec, 0
        progress = Progress(spec.stall_s)
        while True:
            await asyncio.sleep(spec.heartbeat_s)
            missed = 0 if await self._is_healthy(life) else missed + 1
            if missed >= spec.misses:
                reason = f"it hangs: {spec.misses} heartbeats of {spec.heartbeat_s:g} s without a healthy answer"
            elif not missed and (stood_s := progress.stands_for_s(self.health, time.monotonic())) is not None:
                reason = f"it hangs: it answers and is busy, and its work has stood still for {stood_s:.1f} s"
            else:
                continue
            stopped = life.end_stopped_children() if spec.children is not None else []
            if not stopped:
                return reason
            who = ", ".join(stopped)
            self.on_event(ChildHung(spec.role, spec.index, self.incarnation, f"{reason}; {who} was stopped from outside and is replaced"))
            missed = 0
            progress.again()

    async def _is_healthy(self, life: Life) -> bool:
        try:
            async with asyncio.timeout(max(self.spec.heartbeat_s, START_BEAT_S)):
                response = await self._http.get(life.url + self.spec.health_path)
        except (TimeoutError, *BROKEN):
            return False
        if response.status_code != 200:
            return False
        try:
            health = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            return True  # SGLang's own health has no body
        if isinstance(health, dict):
            self.health = health
            if isinstance(health.get("progress"), (int, float)):
                self.progress = health["progress"]
        return True


async def finishes(awaitable: Any, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            await awaitable
    except TimeoutError:
        return False
    return True
