"""The processes of a run: which there are, how each is started, and what its coming and going means to the loops.

Engines, the reward service, the trainer's warm parent, and the courier where pushes need one, are started and watched by the launcher;
here its events become: an engine registers with the pool (and gets the newest weights before its first request), the reward service is
attached, the trainer is brought to the ledger's version. A process that can not start at all fails the run with its own last words.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from driver.engine_facts import Unused
from driver.launcher import Died, Hung, LocalLauncher, LocalProcess, ProcessEvent, Quarantined, Ready, Started, StartFailed
from driver.ledger import Upsert
from driver.life import ProcessSpec
from driver.outside import Outside
from reward.client import RewardClient
from reward.spec import RewardSpec, ScorerSpec
from rollout.answer import EngineError
from rollout.capabilities import Capabilities
from rollout.client import EngineClient
from rollout.pool import EngineSlot
from rollout.sglang import launch
from trainer.courier_wire import CourierSpec
from trainer.spec import OptimizerSpec, TrainerSpec

if TYPE_CHECKING:
    from driver.run import Run

log = logging.getLogger("headrace.processes")
START_DEADLINE_S = 180.0
STOP_DEADLINE_S = 10.0
ALL_ENGINES = "all engines"  # their lives counted together
HEARTBEAT_S = 2.0
MISSES = 8  # on a busy laptop an HTTP thread may be starved for seconds; a process that hangs is replaced after 16 s


class Processes:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._core = run.core
        self._config = run.config
        self._directory = run.config.directory / "processes"
        self._launcher: LocalLauncher | None = None
        self.outside = Outside(run, self._watcher_failed)
        self._incarnations = {
            name.partition("/")[2]: int(value)
            for name, value in run.core.db.query("SELECT name, value FROM meta WHERE name LIKE 'incarnation/%'")
        }
        self._asking: set[asyncio.Task[None]] = set()
        self._news: dict[str, tuple[float, str]] = {}  # of the run's own engines: when they began or died, and of what
        self.taken: list[LocalProcess] = []  # of the run before, which its launcher released
        self.hand_over: frozenset[str] = frozenset()  # roles whose processes outlive this run
        self.released: list[LocalProcess] = []

    async def run(self) -> None:
        """Starts everything; then only the launcher's own failure, or a role that nothing can do without, ends it (by raising)."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._launcher = LocalLauncher(self._on_event)
        couriers = [self._courier()] if self._config.needs_courier else []
        specs = [self._trainer(), self._reward(), *couriers, *(self._engine(i) for i in range(self._config.rollout.engines))]
        taken, self.taken = {process.spec.name: process for process in self.taken}, []
        processes = [self._adopt(taken.pop(spec.name), spec) if spec.name in taken else await self._launcher.start(spec) for spec in specs]
        await asyncio.gather(*(process.stop(STOP_DEADLINE_S) for process in taken.values()))  # more than this run wants
        self.outside.start()
        async with asyncio.TaskGroup() as group:
            for process in processes:
                group.create_task(self._first_start(process))
        watch = asyncio.create_task(self._launcher.watch(), name="launcher")
        try:
            done, _ = await asyncio.wait([watch, self._lost], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
        finally:
            watch.cancel()

    async def _first_start(self, process: LocalProcess) -> None:
        """A process that can not start fails the run; twice, because the first may have been ended from outside."""
        try:
            await process.wait_ready(process.spec.start_deadline_s)
        except StartFailed as error:
            log.warning("%s; trying once more", error)
            await process.wait_ready(process.spec.start_deadline_s)

    def _adopt(self, process: LocalProcess, spec: ProcessSpec) -> LocalProcess:
        assert self._launcher is not None
        self._launcher.adopt(process, spec)
        log.info("%s (incarnation %d) is taken over from the run before", spec.name, process.incarnation)
        return process

    async def stop(self) -> None:
        """End all processes but those of the roles to hand over, which are `released`."""
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self.outside.stop()
        if self._launcher is not None:
            ready = [name for name, p in self._launcher.processes.items() if p.spec.role in self.hand_over and p.state == "ready"]
            self.released = [self._launcher.release(name) for name in ready]
            await self._launcher.stop(STOP_DEADLINE_S)

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
            if p.spec.role == "engine":
                yield Unused(name, p.url, p.incarnation, state, reason, time.monotonic() - since, limit_s)

    @property
    def facts(self) -> list[dict[str, Any]]:
        """For REST: every process with its state."""
        if self._launcher is None:
            return []
        driver = {"role": "driver", "index": 0, "state": "ready", "incarnation": 0, "pid": os.getpid(), "url": "", "children": []}
        return [
            driver,
            *(
                {
                    "role": p.spec.role,
                    "index": p.spec.index,
                    "state": p.state,
                    "incarnation": p.incarnation,
                    "pid": p.pid,
                    "url": p.url,
                    "children": _children(p.pid),  # the trainer's ranks, the reward service's workers
                }
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
                self._run.pool.absent[name] = "it is starting"
        elif isinstance(event, Ready):
            log.info("%s (incarnation %d) is ready at %s", name, event.incarnation, event.url)
            if event.role == "engine":
                asking = asyncio.create_task(self._register(event, name), name=f"registration of {name}")
                self._asking.add(asking)
                asking.add_done_callback(self._asked)
            elif event.role == "reward":
                self._run.scoring.attach(RewardClient(event.url, self._run.http))
            elif event.role == "courier":
                self._run.courier.attach(event.url, event.incarnation)
            else:
                self._run.training.attach(event.url, None)
        elif isinstance(event, Died | Hung | Quarantined):
            log.warning("%s (incarnation %d): %s", name, event.incarnation, event.reason)
            self._news[name] = (time.monotonic(), event.reason)
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
        if (process.state, process.incarnation) == ("ready", event.incarnation):
            self.enroll(name, client, event.incarnation, life, capabilities, process.pid)

    def _asked(self, asking: asyncio.Task[None]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled() and (error := asking.exception()) is not None and not self._lost.done():
            self._lost.set_exception(error)

    async def next_life(self) -> int:
        """A number that no life of any engine of this run has had. On disk before an engine is told it: engines outlive drivers."""
        life = self.last_incarnation(ALL_ENGINES) + 1
        self.note_incarnation(ALL_ENGINES, life)
        await self._core.db.durable()
        return life

    def enroll(
        self, name: str, client: EngineClient, incarnation: int, life: int, capabilities: Capabilities, pid: int | None = None
    ) -> EngineSlot:
        """Into the pool, under a number from `next_life`."""
        slot = self._run.pool.register(name, client, incarnation, self._config.rollout.max_open_requests, capabilities, pid)
        slot.life = life
        self._core.ring()
        return slot

    def _watcher_failed(self, error: BaseException) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)

    def _fail(self, reason: str) -> None:
        if not self._lost.done():
            self._lost.set_exception(StartFailed(reason))

    def _gone(self, event: Died | Hung | Quarantined, name: str) -> None:
        if event.role == "engine":
            slot = self._run.pool.slots.get(name)
            if slot is not None and slot.incarnation == event.incarnation:
                self._run.pool.gone(slot, event.reason)
            self._run.pool.absent[name] = event.reason
        elif event.role == "reward":
            self._run.scoring.detach(event.reason)
        elif event.role == "courier":
            self._run.courier.detach()
        else:
            self._run.training.detach(event.reason)
        if isinstance(event, Quarantined) and event.role != "engine":
            self._fail(event.reason)

    # ---- how each is started ---------------------------------------------------------------------------------------------

    def _spec(
        self, role: str, index: int, build: object, env: dict[str, str] | None = None, start_deadline_s: float = START_DEADLINE_S
    ) -> ProcessSpec:
        return ProcessSpec(
            role=role,
            index=index,
            build=build,  # type: ignore[arg-type]
            log_path=self._run.log_directory / f"{role}-{index}.log",
            heartbeat_s=HEARTBEAT_S,
            misses=MISSES,
            start_deadline_s=start_deadline_s,
            first_incarnation=self.last_incarnation(f"{role}-{index}") + 1,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {}),
        )

    def last_incarnation(self, name: str) -> int:
        return self._incarnations.get(name, 0)

    def note_incarnation(self, name: str, incarnation: int) -> None:
        self._incarnations[name] = incarnation
        self._core.db.write([Upsert("meta", {"name": f"incarnation/{name}", "value": str(incarnation).encode()})])

    def _module(self, module: str, *flags: str) -> list[str]:
        return [sys.executable, "-P", "-m", module, *flags]

    def _engine(self, index: int) -> ProcessSpec:
        rollout = self._config.rollout
        if rollout.engine == "sglang":
            return self._sglang(index)

        def build(incarnation: int, port: int) -> list[str]:
            flags = {
                "--model-path": self._config.model.path,
                "--host": "127.0.0.1",
                "--port": port,
                "--max-running-requests": rollout.max_running_requests,
                "--context-length": rollout.context_length,
                "--stream-interval": rollout.stream_interval,
                "--random-seed": self._config.seed * 1000 + index,
                "--threads": rollout.threads,
                "--dtype": self._config.trainer.dtype,  # what a push brings; its checksums are of those bytes
            }
            switches = ["--deterministic"] if rollout.deterministic else []
            return self._module("rollout.engine", *(str(part) for flag in flags.items() for part in flag), *switches, *rollout.engine_args)

        return self._spec("engine", index, build)

    def _sglang(self, index: int) -> ProcessSpec:
        rollout = self._config.rollout

        def server(port: int) -> launch.Server:
            return launch.Server(
                model_path=self._config.model.path,
                port=port,
                index=index,
                context_length=rollout.context_length,
                max_running_requests=rollout.max_running_requests,
                stream_interval=rollout.stream_interval,
                seed=self._config.seed * 1000 + index,
                dtype=self._config.trainer.dtype,
            )

        def build(incarnation: int, port: int) -> list[str]:
            return launch.command(rollout.sglang, server(port))

        spec = self._spec("engine", index, build, launch.environment(rollout.sglang, rollout.threads), rollout.sglang.start_deadline_s)
        # It has nothing to save, and asked to end it takes a dying child for a crash and diagnoses it for 5 s.
        return replace(spec, stop_signal=signal.SIGKILL)

    def _reward(self) -> ProcessSpec:
        reward = self._config.reward

        def build(incarnation: int, port: int) -> list[str]:
            spec = RewardSpec(
                port=port,
                workers=reward.workers,
                plugin_dir=Path.cwd(),
                scorers={task: ScorerSpec(**scorer.model_dump()) for task, scorer in reward.scorers.items()},
                incarnation=incarnation,
            )
            return self._module("reward.main", "--spec", self._write("reward-0", spec.model_dump_json()))

        return self._spec("reward", 0, build)

    def _trainer(self) -> ProcessSpec:
        config, trainer = self._config, self._config.trainer

        def build(incarnation: int, port: int) -> list[str]:
            spec = TrainerSpec(
                run_id=config.run_id,
                run_dir=config.directory,
                store_location=self._run.store.location,
                model_path=config.model.path,
                port=port,
                incarnation=incarnation * 1000,  # the warm parent counts its groups from here
                tp=trainer.tp,
                pp=trainer.pp,
                cp=trainer.cp,
                dp=trainer.dp,
                ep=trainer.ep,
                routing_replay=trainer.routing_replay,
                seed=config.seed,
                loss=trainer.loss.spec,
                critic=trainer.critic.spec if trainer.critic is not None else None,
                device=trainer.device,
                transformer_engine=trainer.transformer_engine,
                optimizer_offload=trainer.optimizer_offload,
                dtype=trainer.dtype,
                sequence_parallel=trainer.sequence_parallel,
                recompute=trainer.recompute,
                distributed_optimizer=trainer.distributed_optimizer,
                optimizer=OptimizerSpec(
                    kind=trainer.optimizer,
                    momentum=trainer.momentum,
                    betas=trainer.betas,
                    eps=trainer.eps,
                    weight_decay=trainer.weight_decay,
                    grad_clip=trainer.grad_clip,
                ),
                micro_batch_tokens=config.batch.micro_batch_tokens,
                threads_per_rank=trainer.threads_per_rank,
            )
            return self._module("trainer.main", "--spec", self._write("trainer-0", spec.model_dump_json()))

        return self._spec("trainer", 0, build)

    def _courier(self) -> ProcessSpec:
        trainer = self._config.trainer
        ranks = trainer.tp * trainer.pp * trainer.cp * trainer.dp

        def build(incarnation: int, port: int) -> list[str]:
            spec = CourierSpec(port=port, incarnation=incarnation, device=trainer.device, ranks=ranks)
            return self._module("trainer.courier", "--spec", self._write("courier-0", spec.model_dump_json()))

        return self._spec("courier", 0, build)

    def _write(self, name: str, text: str) -> str:
        path = self._directory / f"{name}.json"
        path.write_text(text)
        return str(path)


def _children(pid: int) -> list[int]:
    try:
        return [child.pid for child in psutil.Process(pid).children()]
    except (psutil.NoSuchProcess, ValueError):
        return []
