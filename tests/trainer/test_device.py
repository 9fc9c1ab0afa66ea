"""Where the ranks compute, and what is refused, with GPUs that are only pretended: none is needed, and none is initialised."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed
    from trainer import cpu

    cpu.install()
    from megatron.core.extensions import transformer_engine_spec_provider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.utils import PkgVersion

    from trainer import device, layers, moe, te
    from trainer.rows import Row, pack
    from trainer.spec import TrainerSpec
    from trainer.state import inside

FACTS: dict[str, Any] = {"run_id": "r", "run_dir": "/tmp/r", "store_location": "tmpfs:/dev/shm/x", "model_path": "/m", "port": 9000}


def spec(**changes: Any) -> TrainerSpec:
    return TrainerSpec.model_validate({**FACTS, **changes})


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return lambda count: monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.fixture
def as_if_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No shim; no test may leave its mark on the environment."""
    before = dict(os.environ)
    monkeypatch.setattr(cpu, "installed", lambda: False)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    ("wish", "count", "layout", "found"),
    [
        ("auto", 0, {}, "cpu"),
        ("auto", 1, {}, "cuda"),
        ("auto", 3, {"tp": 2, "dp": 2}, "cpu"),
        ("auto", 4, {"tp": 2, "dp": 2}, "cuda"),
        ("auto", 8, {"pp": 2}, "cuda"),
        ("cpu", 8, {}, "cpu"),
        ("cuda", 2, {"cp": 2}, "cuda"),
    ],
)
def test_ranks_compute_on_cuda_when_there_is_a_gpu_for_each_and_nobody_objects(
    gpus: Callable[[int], None], wish: str, count: int, layout: dict[str, int], found: str
) -> None:
    gpus(count)
    assert device.choose(spec(device=wish, **layout)).type == found


def test_only_the_ranks_of_this_machine_need_its_gpus(gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert device.choose(spec(device="cuda", dp=4)).type == "cuda"


def test_cuda_without_a_gpu_for_every_rank_is_refused_with_both_numbers_and_a_remedy(gpus: Callable[[int], None]) -> None:
    gpus(1)
    with pytest.raises(ValueError, match=r"torch sees 1 here.*there are 4 ranks.*CUDA_VISIBLE_DEVICES.*or set device to cpu"):
        device.choose(spec(device="cuda", tp=2, dp=2))


def test_the_optimizer_is_not_offloaded_from_a_cpu(gpus: Callable[[int], None]) -> None:
    with pytest.raises(ValueError, match="on the CPU there is nothing to offload to"):
        spec(device="cpu", optimizer_offload=0.5)
    gpus(1)
    assert device.choose(spec(optimizer_offload=0.5)).type == "cuda"
    with pytest.raises(ValueError, match=r"torch sees 1 GPUs for 2 ranks\): there is nothing to offload to"):
        device.choose(spec(optimizer_offload=0.5, dp=2))


def test_a_trainer_that_cannot_have_its_gpus_ends_with_the_reason(lab: Any, make_spec: Callable[..., TrainerSpec], tmp_path: Any) -> None:
    (tmp_path / "spec.json").write_text(make_spec(device="cuda", dp=2).model_dump_json())
    pid = lab.ask("trainer", spec_path=str(tmp_path / "spec.json"), log=str(tmp_path / "log"))["pid"]
    assert lab.ask("wait", pid=pid) == {"code": 2}
    said = (tmp_path / "log").read_text()
    assert "trainer: device cuda needs a GPU for each rank: torch sees 0 here" in said and "Traceback" not in said


def test_on_the_cpu_gpus_are_hidden_from_all_that_follows() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert device.here() == torch.device("cpu") and device.backend(device.here()) == "gloo"


def test_on_cuda_each_rank_takes_the_gpu_of_its_number(as_if_on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: taken[-1])
    monkeypatch.setenv("RANK", "5")
    assert device.enter() == torch.device("cuda", 5)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert device.enter() == torch.device("cuda", 1)
    assert device.backend(device.here()) == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(("tp", "given", "then"), [(1, None, None), (2, None, "1"), (2, "8", "8")])
def test_tensor_parallel_ranks_on_cuda_launch_in_order_unless_the_user_says_otherwise(
    as_if_on_cuda: None, monkeypatch: pytest.MonkeyPatch, tp: int, given: str | None, then: str | None
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if given:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    device.install(torch.device("cuda"), tp)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == then
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"


def test_a_parent_whose_imports_initialised_cuda_does_not_fork(as_if_on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    device.untouched()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node"):
        device.untouched()


def tensors(value: Any) -> list[torch.Tensor]:
    """All in a dataclass, however deep."""
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value):
        return [found for field in fields(value) for found in tensors(getattr(value, field.name))]
    return [found for each in value.values() for found in tensors(each)] if isinstance(value, dict) else []


def test_a_pack_goes_to_the_device_whole_and_stays_itself_on_the_cpu() -> None:
    rows = []
    for number, size in enumerate((5, 9)):
        trained = np.arange(2, size - 1)
        columns = {"behaviour": np.zeros(len(trained), np.float32)}
        routes = np.zeros((size - 1, 2, 2), np.int32)
        rows.append(Row(str(number), None, np.arange(size), trained, columns, np.zeros((0, 4)), 1.0, 1.0, routes=routes))
    packed = pack(rows, [row.trained for row in rows], ("behaviour",), cp_size=2)
    assert device.moved(packed, torch.device("cpu")) is packed
    gone = device.moved(packed, torch.device("meta"))
    # tokens, at, target, temperature, one column, row, slot; four of cumulated lengths, and the routes
    assert len(tensors(packed)) == len(tensors(gone)) == 12
    assert {each.device.type for each in tensors(gone)} == {"meta"}
    assert gone.packing.lengths == packed.packing.lengths == (12, 8) and gone.packing.max_seqlen_q == 12


def test_transformer_engine_is_taken_where_it_is_there_on_cuda_in_bf16_and_not_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(te.transformer_engine, "HAVE_TE", True)
    assert te.wanted(spec(dtype="bfloat16"), gpu)
    assert not te.wanted(spec(dtype="bfloat16", transformer_engine="off"), gpu)
    assert not te.wanted(spec(dtype="float32"), gpu)
    assert not te.wanted(spec(dtype="bfloat16"), torch.device("cpu"))
    monkeypatch.setattr(te.transformer_engine, "HAVE_TE", False)
    assert not te.wanted(spec(dtype="bfloat16"), gpu)


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_layers_of_transformer_engine_have_modules_in_the_same_places_as_ours(
    monkeypatch: pytest.MonkeyPatch, sparse: bool, qk_layernorm: bool
) -> None:
    """So that parameters have the same names, and checkpoints move."""
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", transformer_engine_spec_provider.TESpecProvider, raising=False)
    monkeypatch.setattr("megatron.core.utils._te_version", PkgVersion("2.8.0"))
    for grouped in ("TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"):
        monkeypatch.setattr(transformer_engine_spec_provider, grouped, object)
    config = SimpleNamespace(num_moe_experts=4 if sparse else None, qk_layernorm=qk_layernorm)

    def places(made: Any) -> dict[str, bool]:
        layer, attention = made.submodules, made.submodules.self_attention.submodules
        parts = {**vars(layer), **{f"self_attention.{name}": part for name, part in vars(attention).items()}}
        parts |= {f"mlp.{name}": part for name, part in vars(layer.mlp.submodules).items()}
        # Not a module with parameters: what a layer leaves out, and what is told to checkpoints of Megatron's own format.
        return {name: part not in (None, IdentityOp) for name, part in parts.items() if not name.endswith(("keys_map", "shared_experts"))}

    ours, theirs = layers.layer_spec(config, sparse), te.layer_spec(config, sparse)
    assert places(theirs) == places(ours)
    assert theirs.module is ours.module
    if sparse:
        assert theirs.submodules.mlp.submodules.router is moe.ReplayRouter
        assert theirs.submodules.mlp.submodules.experts.module is ours.submodules.mlp.submodules.experts.module


class CountsByGroup(torch.optim.Optimizer):
    """As TransformerEngine's and Apex's Adam."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})


def test_steps_are_counted_where_the_optimizer_counts_them_and_offloaded_state_is_found_beside_the_copy() -> None:
    here, beside = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    copy = beside.detach().clone()
    hybrid = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
    hybrid.gpu_optimizer, hybrid.cpu_optimizers = CountsByGroup([here]), [torch.optim.AdamW([copy])]
    hybrid.inner_param_to_orig_param = {here: here, copy: beside}
    found = inside(hybrid)
    assert found[here].stepped is here and found[beside].stepped is copy
    assert found[here].counter is hybrid.gpu_optimizer.param_groups[0]
    assert found[beside].counter is found[beside].state is hybrid.cpu_optimizers[0].state[copy]
    plain = torch.optim.SGD([here], lr=0.1)
    assert inside(plain) == {here: replace(found[here], state=plain.state[here], counter=plain.state[here])}
