"""Where the ranks compute: on CUDA, with Megatron as it is, or on the CPU, under the shim of `trainer/cpu.py`. Decided once a process.

    parent:  choose(spec) ─▶ install(device) ─▶ import Megatron ─▶ fork ─▶  rank:  enter() ─▶ here()

CUDA does not survive a fork. So the parent asks NVML how many GPUs there are, which initialises nothing, and `untouched` says whether an
import did all the same. No GPU was at hand when this was written: the half that needs one is unchecked.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from trainer import cpu

if TYPE_CHECKING:
    from trainer.spec import TrainerSpec

Record = TypeVar("Record")

_ON_CPU: dict[str, Any] = {
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}
_ON_CUDA: dict[str, Any] = {
    "use_cpu_initialization": False,
    "persist_layer_norm": False,  # neither our norms nor TransformerEngine's have it
    "bias_activation_fusion": True,
    "bias_dropout_fusion": True,
    "masked_softmax_fusion": False,  # no attention here has Megatron's softmax
}


def choose(spec: TrainerSpec) -> torch.device:
    """CUDA when there is a GPU for every rank of this machine, unless the spec wants the CPU. Initialises nothing.

    Raises ValueError when the spec asks for what is not there.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", spec.world_size))  # torchrun says how many of them are here
    gpus = 0 if spec.device == "cpu" else gpu_count()
    if spec.device == "cuda" and gpus < ranks:
        build = "" if torch.version.cuda else f" (this torch, {torch.__version__}, is built without CUDA: install one with it)"
        raise ValueError(
            f"device cuda needs a GPU for each rank: torch sees {gpus} here{build}, and there are {ranks} ranks (tp·pp·cp·dp). "
            "Show it more GPUs (CUDA_VISIBLE_DEVICES), choose a smaller layout, or set device to cpu"
        )
    if gpus >= ranks:
        return torch.device("cuda")
    if spec.optimizer_offload:
        raise ValueError(
            f"optimizer_offload is {spec.optimizer_offload:g}, but the trainer computes on the CPU (torch sees {gpus} GPUs for {ranks} "
            "ranks): there is nothing to offload to. Set it to 0"
        )
    return torch.device("cpu")


def gpu_count() -> int:
    """As torch would see them. By NVML, and so without initialising CUDA."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the same for `is_available`, which Megatron's imports ask
    return torch.cuda.device_count()


def install(device: torch.device, tp: int = 1) -> None:
    """Before Megatron is imported, in the process that forks the ranks."""
    if device.type == "cpu":
        cpu.install()
        return
    assert not cpu.installed(), "this process has Megatron on the CPU"
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if tp > 1:
        # Megatron starts a collective and then the matrix product that hides it: they must begin in that order.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    cpu.fill_gap_of_the_router()


def untouched() -> None:
    """Raises RuntimeError when CUDA was initialised in this process, whose forks could then not use it."""
    if not cpu.installed() and torch.cuda.is_initialized():
        raise RuntimeError(
            "an import has initialised CUDA in the process that forks the ranks, and they could not use it after that. Start them one by "
            "one instead: torchrun --nproc-per-node=RANKS --max-restarts=0 -m trainer.rank --spec FILE"
        )


def enter() -> torch.device:
    """In the main thread of each rank, once, before anything is computed."""
    if cpu.installed():
        cpu.enter_mode()
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    return here()


def here() -> torch.device:
    """Where this rank's model is."""
    return torch.device("cpu") if cpu.installed() else torch.device("cuda", torch.cuda.current_device())


def backend(device: torch.device) -> str:
    """Of the process groups. Megatron's tensors go by NCCL; this program's own few numbers stay on the CPU, and go by gloo."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def settings(device: torch.device) -> dict[str, Any]:
    """What Megatron's configuration says of the device."""
    if device.type == "cpu":
        return _ON_CPU
    # Megatron's own linears take their gradient's sum from a kernel of Apex; without it they would refuse to be made.
    return {**_ON_CUDA, "gradient_accumulation_fusion": importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None}


def moved(record: Record, device: torch.device) -> Record:
    """A dataclass with each tensor in it, however deep, on `device`. The copies wait for nothing. On the CPU it is the record itself."""
    if device.type == "cpu":
        return record
    assert is_dataclass(record) and not isinstance(record, type)
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: _moved(value, device) for name, value in values.items()})


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return moved(value, device) if is_dataclass(value) else value


def tensor(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Of a list of numbers; unlike with torch's `device=`, the way to a GPU waits for nothing."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
