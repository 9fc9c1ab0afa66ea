"""On real GPUs, for whoever has one: `pytest -m gpu tests/trainer`. Skipped without; written without, too.

Layouts of more ranks than there are GPUs are skipped.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import GPUS, Lab
from tests.trainer.steps import ADAM, assert_equal_steps, dealt
from trainer.spec import TrainerSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="torch sees no GPU")]
MakeSpec = Callable[..., TrainerSpec]


@pytest.fixture(scope="module")
def gpu_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("gpu_lab"), "cuda")
    yield lab
    lab.close()


@pytest.fixture
def on_gpu(make_spec: MakeSpec) -> MakeSpec:
    def make(model: str = "qwen3", **changes: Any) -> TrainerSpec:
        spec = make_spec(model, device="cuda", optimizer=ADAM, **changes)
        if spec.world_size > GPUS:
            pytest.skip(f"{spec.world_size} ranks, and torch sees {GPUS} GPUs")
        return spec

    return make


@pytest.fixture
def requests_of(rows: Any, plan: Any) -> Callable[[TrainerSpec], list[Any]]:
    drawn = [rows.ragged(71, 9), rows.ragged(72, 8)]
    return lambda spec: [plan(i, [dealt(some, spec.dp, 3)]) for i, some in enumerate(drawn)]


@pytest.mark.parametrize("layout", ["1111", "2111", "1211", "1121", "1112", "2221"])
@pytest.mark.parametrize("model", ["qwen3", "llama_tied"])
def test_M2_two_steps_on_cuda_equal_plain_torch(
    gpu_lab: Lab, on_gpu: MakeSpec, requests_of: Callable[[TrainerSpec], list[Any]], model: str, layout: str
) -> None:
    spec = on_gpu(model, **dict(zip(("tp", "pp", "cp", "dp"), map(int, layout), strict=True)))
    assert_equal_steps(gpu_lab.layout(spec, requests_of(spec)), gpu_lab.reference(spec, requests_of(spec)))


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}], ids=str)
@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed")
def test_M2_layers_of_transformer_engine_are_the_same_model_as_ours_in_bf16(
    gpu_lab: Lab, on_gpu: MakeSpec, requests_of: Callable[[TrainerSpec], list[Any]], layout: dict[str, Any]
) -> None:
    spec = on_gpu("qwen3", dtype="bfloat16", **layout)
    theirs = gpu_lab.layout(spec, requests_of(spec))
    ours = gpu_lab.layout(spec.model_copy(update={"transformer_engine": "off"}), requests_of(spec))
    assert ours.seen["attention_calls"] and not theirs.seen["attention_calls"], "each has its own attention"
    assert theirs.distance(ours, "log_probs") < 0.1
    assert theirs.error(ours, "weights") < 0.05


def test_an_offloaded_optimizer_makes_the_same_steps_and_goes_on_from_a_checkpoint(
    gpu_lab: Lab, on_gpu: MakeSpec, requests_of: Callable[[TrainerSpec], list[Any]], tmp_path: Path
) -> None:
    spec, partly = on_gpu(), on_gpu(optimizer_offload=0.5)
    first, second = requests_of(spec)
    whole = gpu_lab.layout(spec, [first, second])
    gpu_lab.layout(partly, [first], save=tmp_path)
    resumed = gpu_lab.layout(partly, [second], resume=tmp_path / "step_00000001")
    assert resumed.error(whole, "weights") < 1e-5
