"""What the driver tells the processes it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from driver.config import load_config
from driver.processes import Processes
from trainer.spec import TrainerSpec

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"


def test_the_trainer_is_told_the_configured_layout(tmp_path: Path) -> None:
    config = load_config(CONFIG, [f"run_dir={tmp_path}", "trainer.tp=2", "trainer.pp=2", "trainer.cp=3", "trainer.dp=4"])
    mixture = config.trainer.model_copy(update={"ep": 6, "routing_replay": True})
    nothing_before = SimpleNamespace(query=lambda *_: [])
    run: Any = SimpleNamespace(
        config=config.model_copy(update={"trainer": mixture}),
        core=SimpleNamespace(db=nothing_before),
        log_directory=tmp_path,
        store=SimpleNamespace(location="tmpfs:/nowhere"),
    )
    (tmp_path / "processes").mkdir()
    argv = Processes(run)._trainer().build(1, 9000)
    spec = TrainerSpec.read(Path(argv[argv.index("--spec") + 1]))
    assert spec.layout == {"tp": 2, "pp": 2, "cp": 3, "dp": 4, "ep": 6} and spec.world_size == 48 and spec.routing_replay
