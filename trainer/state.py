"""The optimizer's state under Hugging Face's names, whatever the layout: out as the weights go out, in as the weights come in.

What the optimizer keeps beside a parameter (Adam's two moments, SGD's momentum, and the fp32 weights when the model's are bf16) has the
parameter's shape, so mbridge's mapping of the weights fits it: split heads and fused gates, layers of other stages, a padded vocabulary
(its rows beyond the vocabulary have no gradient: their state is 0, and comes back as 0). The distributed optimizer keeps a part of
each parameter; the parts are put together over the data-parallel ranks, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.util import unwrap_model
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from safetensors import SafetensorError, safe_open

from trainer.export import hf_tensors
from trainer.model import Model

WEIGHTS = "weights"
"""Not state of the optimizer proper, but what it steps: the fp32 weights that the model's bf16 ones are rounded from."""
SLOTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True)
class Inner:
    """How torch's optimizer inside Megatron's keeps one tensor."""

    stepped: torch.Tensor | None = None
    """The tensor; or its copy in the host's memory, when its state is offloaded and it is stepped there."""
    state: dict[str, Any] = field(default_factory=dict)
    counter: dict[str, Any] = field(default_factory=dict)
    """Where "step" is counted: in the state; or, by TransformerEngine's and Apex's Adam, in the group of parameters."""


def inside(optimizer: Any) -> dict[torch.Tensor, Inner]:
    """By the tensor that was given to it. With state offloaded it is one optimizer for the GPU and several for the CPU."""
    hybrid = isinstance(optimizer, HybridDeviceOptimizer)
    found = {}
    for each in optimizer.sub_optimizers if hybrid else [optimizer]:
        by_group = not isinstance(each, torch.optim.Adam | torch.optim.AdamW | torch.optim.SGD)
        for group in each.param_groups:
            for stepped in group["params"]:
                given = optimizer.inner_param_to_orig_param[stepped] if hybrid else stepped
                state = each.state[stepped]
                found[given] = Inner(stepped, state, group if by_group else state)
    return found


@dataclass(frozen=True)
class Held:
    """What the optimizer has of one parameter on this rank."""

    tensor: torch.Tensor | None
    """What it steps: the parameter, its fp32 copy, or `part` of either, flat. None: all parts are other ranks'."""
    inner: Inner
    part: slice
    """Of the flat parameter."""
    group: Any
    """The ranks that have the other parts; None when there are none."""

    @property
    def state(self) -> dict[str, Any]:
        return self.inner.state

    def value(self, slot: str) -> torch.Tensor | None:
        return self.tensor if slot == WEIGHTS else self.state.get(slot)


def held_parameters(optimizer: Any) -> dict[torch.nn.Parameter, Held]:
    """Every parameter of this rank's model."""
    found: dict[torch.nn.Parameter, Held] = {}
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if each.is_stub_optimizer:
            continue
        inner = inside(each.optimizer)
        if isinstance(each, DistributedOptimizer):
            parameters = chain(*each.model_fp32_groups, *each.model_float16_groups)
            parts = chain(*each.shard_fp32_groups, *each.shard_fp32_from_float16_groups)
            for buffer in each.buffers:
                found |= {parameter: Held(None, Inner(), slice(0, 0), each.data_parallel_group) for parameter in buffer.param_index_map}
            for parameter, tensor in zip(parameters, parts, strict=True):
                place = each._get_model_param_range_map(parameter)["param"]
                found[parameter] = Held(tensor, inner[tensor], slice(place.start, place.end), each.data_parallel_group)
            continue
        pairs = [(parameter, parameter) for group in each.param_groups for parameter in group["params"]]
        if isinstance(each, Float16OptimizerWithFloat16Params):
            pairs = list(zip(chain(*each.float16_groups), chain(*each.fp32_from_float16_groups), strict=True))
            pairs += [(parameter, parameter) for parameter in chain(*each.fp32_from_fp32_groups)]
        for parameter, tensor in pairs:
            found[parameter] = Held(tensor, inner[tensor], slice(0, parameter.numel()), None)
    return found


def steps_taken(model: Model) -> int | None:
    """How many steps the state is from: Adam's count, 0 where the kind keeps none; None before the first step. All ranks together."""
    held = held_parameters(model.optimizer).values()
    counts = {int(mine.inner.counter.get("step", 0)) for mine in held if any(slot in mine.state for slot in chain(*SLOTS.values()))}
    assert len(counts) < 2, f"parameters with different step counts: {counts}"
    count = torch.tensor(max(counts, default=-1))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)  # with the distributed optimizer a rank may have no part of anything
    return None if count < 0 else int(count)


def state_tensors(model: Model, slot: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 tensor, as `hf_tensors` has the weights. All ranks together, to the end."""
    held = held_parameters(model.optimizer)
    return hf_tensors(model, lambda parameter: _whole(parameter, held[parameter], slot))


def load_state(model: Model, directory: Path, slot: str) -> None:
    """This rank's parts of one slot, from files of any layout. Raises ValueError, in words, or OSError; no collectives."""
    held = held_parameters(model.optimizer)
    for parameter, tensor in _own_parameters(model, directory):
        mine = held[parameter]
        if slot == WEIGHTS and parameter.dtype == torch.float32:
            parameter.data.copy_(tensor)  # what the optimizer steps is this memory
        elif mine.tensor is not None:
            piece = tensor.reshape(-1)[mine.part].view(mine.tensor.shape)
            if slot == WEIGHTS:
                mine.tensor.data.copy_(piece)
            else:
                assert mine.inner.stepped is not None
                mine.state[slot] = piece.to(mine.inner.stepped.device, copy=True)
        if slot == WEIGHTS and mine.inner.stepped is not mine.tensor:
            assert mine.inner.stepped is not None and mine.tensor is not None
            mine.inner.stepped.data.copy_(mine.tensor)


def set_steps(model: Model, steps: int) -> None:
    """Each parameter its own tensor, beside it: AdamW counts in place, and a shared one would count once a parameter."""
    for inner in (mine.inner for mine in held_parameters(model.optimizer).values()):
        if "exp_avg" in inner.state:
            assert inner.stepped is not None
            own = inner.counter is inner.state
            inner.counter["step"] = torch.tensor(float(steps), device=inner.stepped.device) if own else steps


def _whole(parameter: torch.nn.Parameter, mine: Held, slot: str) -> torch.Tensor:
    value = mine.value(slot)
    if mine.group is None:
        assert value is not None
        return value.detach().view(parameter.shape).to(parameter.device)
    flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    if value is not None:
        flat[mine.part] = value.detach().view(-1)
    # Each element is on one rank and 0 on the others. Summed as integers, it comes out bit for bit, a negative zero too.
    dist.all_reduce(flat.view(torch.int32), group=mine.group)
    return flat.view(parameter.shape)


def _own_parameters(model: Model, directory: Path) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Each parameter of this rank and its fp32 values: Hugging Face's tensors merged and split as mbridge does for the weights."""
    bridge = copy(model.bridge)
    bridge.dtype = torch.float32  # it casts to this
    files = _Files(directory)
    module = unwrap_model(model.chunk)
    hf_names: Mapping[str, str] = bridge._weight_name_mapping_mcore_local_to_global(module)
    for name, parameter in module.named_parameters():
        given = [files.tensor(hf_name) for hf_name in bridge._weight_name_mapping_mcore_to_hf(hf_names[name])]
        whole = bridge._weight_to_mcore_format(name, given)
        expert = ".mlp.experts.linear_fc" in name
        size, rank = (bridge.mpu.etp_size, bridge.mpu.etp_rank) if expert else (bridge.mpu.tp_size, bridge.mpu.tp_rank)
        split = bridge._weight_split_across_tp(name, whole, parameter, size)[rank]
        if split.shape != parameter.shape:
            raise ValueError(f"{directory} is of another model: {name} is {list(split.shape)} there and {list(parameter.shape)} here")
        yield parameter, split


class _Files:
    """The tensors of a directory by name. Raises ValueError with the remedy."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._where: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with self._opened(path) as file:
                self._where |= dict.fromkeys(file.keys(), path)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise ValueError(f"{self._directory} lacks {name}: it is damaged, or of another model. Use an older checkpoint")
        with self._opened(self._where[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def _opened(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt", device="cpu")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}. Use an older checkpoint") from error
