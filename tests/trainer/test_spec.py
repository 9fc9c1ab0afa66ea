"""A wrong spec is said in words before anything starts; and what the driver imports of the trainer is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trainer.spec import TrainerSpec

GOOD: dict[str, Any] = {"run_id": "r", "run_dir": "/tmp/r", "store_location": "tmpfs:/dev/shm/x", "model_path": "/m", "port": 9000}


def test_experts_over_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"ep \(2\) does not divide tp x cp x dp \(3\)"):
        TrainerSpec.model_validate({**GOOD, "dp": 3, "ep": 2})


def test_a_spec_survives_its_file(tmp_path: Path) -> None:
    spec = TrainerSpec.model_validate({**GOOD, "tp": 2, "dp": 3, "optimizer": {"eps": 1e-6}})
    (tmp_path / "spec.json").write_text(spec.model_dump_json())
    assert TrainerSpec.read(tmp_path / "spec.json") == spec
    assert spec.world_size == 6 and spec.layout == {"tp": 2, "pp": 1, "cp": 1, "dp": 3, "ep": 1}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the trainer's spec"),
        ("{", "is not valid"),
        ('{"run_id": "r"}', "model_path: missing"),
        ('{"optimizer": {"weight_decai": 1}}', "optimizer.weight_decai: unknown field"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_field(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"spec\.json") as error:
        TrainerSpec.read(path)
    assert words in str(error.value)


def test_an_address_others_can_reach_wants_a_token() -> None:
    with pytest.raises(ValidationError, match="set a token"):
        TrainerSpec.model_validate({**GOOD, "host": "0.0.0.0"})
    assert TrainerSpec.model_validate({**GOOD, "host": "0.0.0.0", "token": "t"}).token == "t"


@pytest.mark.parametrize(
    ("switches", "words"),
    [({"sequence_parallel": True}, "tp is 1"), ({"distributed_optimizer": True, "optimizer": {"kind": "sgd"}}, "adam only")],
)
def test_a_switch_with_nothing_to_switch_is_refused(switches: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainerSpec.model_validate({**GOOD, **switches})


def test_the_driver_s_side_of_the_trainer_imports_no_torch() -> None:
    code = "import sys, trainer.spec, trainer.wire, trainer.client, trainer.checkpoints; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)
