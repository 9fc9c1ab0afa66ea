"""How each process of a run is started: its command, its settings file, its environment.

Engines get flags as SGLang's, all others one JSON file. A command is made anew for each life, so that it says the number of workers, or
whatever else, that is wanted then.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from driver.hosts import visible
from driver.life import ProcessSpec, free_port
from driver.planner import Placement
from driver.role_wire import RoleSpec
from driver.scale import Wanted
from reward.spec import RewardSpec, ScorerSpec
from rollout.sglang import launch
from trainer.courier_wire import CourierSpec
from trainer.spec import OptimizerSpec, TrainerSpec

if TYPE_CHECKING:
    from driver.run import Run

START_DEADLINE_S = 180.0
HEARTBEAT_S = 2.0
MISSES = 8  # on a busy laptop an HTTP thread may be starved for seconds; a process that hangs is replaced after 16 s


class Specs:
    def __init__(self, run: Run, wanted: Wanted, last_incarnation: Callable[[str], int]) -> None:
        self._run = run
        self._config = run.config
        self._wanted = wanted
        self._last_incarnation = last_incarnation
        self._directory = run.config.directory / "processes"

    def of(self, placement: Placement) -> ProcessSpec:
        """How this part of the plan is started, and where."""
        return replace(self._of(placement), host=placement.host, devices=placement.devices)

    def _of(self, placement: Placement) -> ProcessSpec:
        role = placement.role
        if role.name in ("rollout", "evaluator"):
            assert role.process is not None
            return self.engine(role.process, placement.index, placement.devices)
        if role.own:
            return self._own(placement)
        return {"trainer": self.trainer, "reward": self.reward, "courier": self.courier, "store": self.store}[role.name]()

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
            first_incarnation=self._last_incarnation(f"{role}-{index}") + 1,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | (env or {}),
        )

    def _module(self, module: str, *flags: str) -> list[str]:
        return [sys.executable, "-P", "-m", module, *flags]

    def engine(self, role: str, index: int, devices: tuple[int, ...] = ()) -> ProcessSpec:
        rollout = self._config.rollout
        if rollout.engine == "sglang":
            return self._sglang(role, index, devices)

        def build(incarnation: int, port: int) -> list[str]:
            flags = {
                "--model-path": self._config.model.path,
                "--host": "127.0.0.1",
                "--port": port,
                "--max-running-requests": rollout.max_running_requests,
                "--context-length": rollout.context_length,
                "--stream-interval": rollout.stream_interval,
                "--random-seed": self._seed(role, index),
                "--threads": rollout.threads,
                "--dtype": self._config.trainer.dtype,  # what a push brings; its checksums are of those bytes
            }
            switches = ["--deterministic"] * rollout.deterministic
            switches += ["--enable-return-routed-experts"] * self._routed(role)
            return self._module("rollout.engine", *(str(part) for flag in flags.items() for part in flag), *switches, *rollout.engine_args)

        return self._spec(role, index, build)

    def _routed(self, role: str) -> bool:
        """Its rows are trained with the routing of their sampling; an evaluation's answers are no rows."""
        return self._config.trainer.routing_replay and role != "evaluator"

    def _seed(self, role: str, index: int) -> int:
        return self._config.seed * 1000 + index + (500 if role == "evaluator" else 0)

    def _sglang(self, role: str, index: int, devices: tuple[int, ...]) -> ProcessSpec:
        rollout = self._config.rollout

        def server(port: int) -> launch.Server:
            return launch.Server(
                model_path=self._config.model.path,
                port=port,
                first_device=devices[0] if devices else index * rollout.sglang.tp,
                context_length=rollout.context_length,
                max_running_requests=rollout.max_running_requests,
                stream_interval=rollout.stream_interval,
                seed=self._seed(role, index),
                dtype=self._config.trainer.dtype,
                routed_experts=routed,
            )

        routed = self._routed(role)

        def build(incarnation: int, port: int) -> list[str]:
            if not routed:
                return launch.command(rollout.sglang, server(port))
            return launch.behind_sidecar(rollout.sglang, server(free_port()), port, self._run.store.location, rollout.threads)

        env = None if routed else launch.environment(rollout.sglang, rollout.threads)
        spec = self._spec(role, index, build, env, rollout.sglang.start_deadline_s)
        # It has nothing to save, and asked to end it takes a dying child for a crash and diagnoses it for 5 s.
        return replace(spec, stop_signal=signal.SIGKILL)

    def reward(self) -> ProcessSpec:
        reward = self._config.reward

        def build(incarnation: int, port: int) -> list[str]:
            spec = RewardSpec(
                port=port,
                workers=self._wanted["reward"],
                plugin_dir=Path.cwd(),
                scorers={task: ScorerSpec(**scorer.model_dump()) for task, scorer in reward.scorers.items()},
                incarnation=incarnation,
            )
            return self._module("reward.main", "--spec", self._write("reward-0", spec.model_dump_json()))

        longest_s = max((scorer.time_limit_s for scorer in reward.scorers.values()), default=0.0)
        return replace(self._spec("reward", 0, build), stall_s=max(reward.deadline_s, 2 * longest_s), children="worker")

    def trainer(self) -> ProcessSpec:
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

        return replace(self._spec("trainer", 0, build), stall_s=trainer.stall_s, children="rank")

    def courier(self) -> ProcessSpec:
        trainer = self._config.trainer
        ranks = trainer.tp * trainer.pp * trainer.cp * trainer.dp

        def build(incarnation: int, port: int) -> list[str]:
            spec = CourierSpec(port=port, incarnation=incarnation, device=trainer.device, ranks=ranks)
            return self._module("trainer.courier", "--spec", self._write("courier-0", spec.model_dump_json()))

        return self._spec("courier", 0, build)

    def store(self) -> ProcessSpec:
        """It imports no torch, and is there in a second or two."""
        place = self._run.run_store.place
        assert place is not None

        def build(incarnation: int, port: int) -> list[str]:
            return self._module("store.mooncake_owner", *place.owner(port))

        return self._spec("store", 0, build, start_deadline_s=60.0)

    def _own(self, placement: Placement) -> ProcessSpec:
        """A process of a user's role. It sees the GPUs it was placed on and no others."""
        role, index = placement.role.name, placement.index
        config = self._config.roles[role]

        def build(incarnation: int, port: int) -> list[str]:
            spec = RoleSpec(
                role=role,
                index=index,
                port=port,
                incarnation=incarnation,
                logic=config.logic,
                plugin_dir=Path.cwd(),
                params=config.params,
                publishes={stream: each.schema_ for stream, each in config.publishes.items()},
            )
            return self._module("driver.role_host", "--spec", self._write(f"{role}-{index}", spec.model_dump_json()))

        return self._spec(role, index, build, {"CUDA_VISIBLE_DEVICES": visible(placement.devices)})

    def _write(self, name: str, text: str) -> str:
        path = self._directory / f"{name}.json"
        path.write_text(text)
        return str(path)
