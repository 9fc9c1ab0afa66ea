"""What the driver tells the processes it starts."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from driver.config import load_config
from driver.processes import Processes
from trainer.courier_wire import CourierSpec
from trainer.loss_spec import CriticSpec
from trainer.spec import TrainerSpec

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"


def processes(tmp_path: Path, *settings: str, **beyond: Any) -> Processes:
    """`beyond` are settings of the trainer that the demo's model would not take."""
    config = load_config(CONFIG, [f"run_dir={tmp_path}", *settings])
    nothing_before = SimpleNamespace(query=lambda *_: [])
    run: Any = SimpleNamespace(
        config=config.model_copy(update={"trainer": config.trainer.model_copy(update=beyond)}),
        core=SimpleNamespace(db=nothing_before),
        log_directory=tmp_path,
        store=SimpleNamespace(location="tmpfs:/nowhere"),
    )
    (tmp_path / "processes").mkdir(parents=True)
    return Processes(run)


def trainer_spec(found: Processes) -> TrainerSpec:
    argv = found.specs.trainer().build(1, 9000)
    return TrainerSpec.read(Path(argv[argv.index("--spec") + 1]))


def test_the_trainer_is_told_the_configured_layout(tmp_path: Path) -> None:
    layout = ("trainer.tp=2", "trainer.pp=2", "trainer.cp=3", "trainer.dp=4")
    spec = trainer_spec(processes(tmp_path, *layout, ep=6, routing_replay=True))
    assert spec.layout == {"tp": 2, "pp": 2, "cp": 3, "dp": 4, "ep": 6} and spec.world_size == 48 and spec.routing_replay


def test_the_trainer_is_told_every_switch_and_the_engines_the_dtype_of_what_is_pushed_to_them(tmp_path: Path) -> None:
    switches = {"tp": 2, "sequence_parallel": "true", "recompute": "full", "distributed_optimizer": "true", "dtype": "bfloat16"}
    switches |= {"transformer_engine": "off", "optimizer_offload": 0.25}
    found = processes(tmp_path, *(f"trainer.{name}={value}" for name, value in switches.items()), device="cuda")
    spec = trainer_spec(found)
    assert (spec.sequence_parallel, spec.recompute, spec.distributed_optimizer, spec.dtype) == (True, "full", True, "bfloat16")
    assert (spec.device, spec.transformer_engine, spec.optimizer_offload) == ("cuda", "off", 0.25)
    argv = found.specs.engine("engine", 0).build(1, 9000)
    assert argv[argv.index("--dtype") + 1] == "bfloat16"


def test_a_run_on_sglang_starts_the_real_server_with_the_same_settings(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.23\n")
    python.chmod(0o755)
    chosen = ("rollout.engine=sglang", f"rollout.sglang.python={python}", "rollout.sglang.device=cpu", "rollout.sglang.start_deadline_s=77")
    found = processes(tmp_path / "run", *chosen, "trainer.dtype=bfloat16", "seed=3")
    spec = found.specs.engine("engine", 1)
    argv = spec.build(1, 9000)
    told = dict(pairwise(argv))
    assert argv[:4] == [str(python), "-P", "-m", "sglang.launch_server"]
    assert (told["--port"], told["--dtype"], told["--random-seed"], told["--context-length"]) == ("9000", "bfloat16", "3001", "64")
    assert spec.start_deadline_s == 77 and spec.stop_signal is signal.SIGKILL and spec.env["SGLANG_USE_CPU_ENGINE"] == "1"


def test_the_trainer_is_told_the_kind_of_optimizer(tmp_path: Path) -> None:
    optimizer = trainer_spec(processes(tmp_path, "trainer.optimizer=sgd", "trainer.momentum=0.5", "trainer.eps=1e-4")).optimizer
    assert (optimizer.kind, optimizer.momentum, optimizer.eps) == ("sgd", 0.5, 1e-4)


def test_the_trainer_is_told_of_its_critic(tmp_path: Path) -> None:
    assert trainer_spec(processes(tmp_path, "trainer.critic={gamma: 0.9}")).critic == CriticSpec(gamma=0.9)
    assert trainer_spec(processes(tmp_path / "none")).critic is None


def test_the_courier_is_told_what_it_takes_to_know_where_the_trainer_computes(tmp_path: Path) -> None:
    found = processes(tmp_path, "push.transport=distributed", "trainer.tp=2", "trainer.dp=2", device="cuda")
    argv = found.specs.courier().build(5, 9000)
    assert argv[1:4] == ["-P", "-m", "trainer.courier"]
    assert CourierSpec.read(Path(argv[-1])) == CourierSpec(port=9000, incarnation=5, device="cuda", ranks=4)
