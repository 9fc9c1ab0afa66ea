"""Which layouts fit a model, from its config.json alone: the driver asks before anything starts, the ranks again before they load.

Not asked: context-parallel ranks take any sequence (padded), data-parallel ranks any plan, and the vocabulary is padded to the
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def misfit(
    model: Mapping[str, Any], tp: int, pp: int, cp: int = 1, dp: int = 1, ep: int = 1, *, routing_replay: bool = False
) -> str | None:
    """Why this model cannot be split so, in a sentence with the remedy; None when it can.

    A number that config.json does not name is not judged: whether the model is supported at all is the ranks' question.
    """
    for name, key, parts in (("num_attention_heads", "tp", tp), ("intermediate_size", "tp", tp), ("num_hidden_layers", "pp", pp)):
        size = model.get(name)
        if size is not None and size % parts:
            return f"the model's {name} ({size}) does not divide by {key} ({parts}): choose a {key} that divides it"
    groups = model.get("num_key_value_heads")
    if groups and groups % tp and tp % groups:
        return f"the model's num_key_value_heads ({groups}) is neither a multiple nor a divisor of tp ({tp}): choose another tp"
    return _misfit_of_experts(expert_count(model), tp, ep, routing_replay) or uneven_experts(tp, cp, dp, ep)


def _misfit_of_experts(experts: int | None, tp: int, ep: int, routing_replay: bool) -> str | None:
    if experts is None:
        if ep > 1:
            return f"ep ({ep}) splits experts, and the model has none: leave ep at 1"
        return "routing_replay needs a model with experts, and this one has none: leave it off" if routing_replay else None
    if experts % ep:
        return f"the model's experts ({experts}) do not divide by ep ({ep}): choose an ep that divides them"
    # Each tensor-parallel rank must have experts that the others have not: Megatron 0.16 sums the gradient norm over them.
    if ep % tp:
        return f"with experts, ep ({ep}) must be a multiple of tp ({tp}): raise ep to one, or lower tp"
    return None


def uneven_experts(tp: int, cp: int, dp: int, ep: int) -> str | None:
    """Why experts cannot be split over `ep` ranks, which are ranks of one pipeline stage; None when they can."""
    ranks = tp * cp * dp
    if ranks % ep:
        return f"ep ({ep}) does not divide tp x cp x dp ({ranks}): experts are split over these ranks, choose an ep that divides them"
    return None


def expert_count(model: Mapping[str, Any]) -> int | None:
    """None for a dense model. transformers 5 writes the number under another name than 4."""
    count: int | None = model.get("num_local_experts", model.get("num_experts"))
    return count


def sparse_layers(model: Mapping[str, Any]) -> list[bool]:
    """Of each layer: whether it has experts (Qwen's rule: every `decoder_sparse_step`th, but those in `mlp_only_layers`)."""
    layers = range(model["num_hidden_layers"])
    if expert_count(model) is None:
        return [False for _ in layers]
    step, dense = model.get("decoder_sparse_step", 1), model.get("mlp_only_layers") or ()
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def sequence_unit(tp: int, cp: int) -> int:
    """Each sequence of a micro-batch is padded to a multiple of this: context-parallel ranks take two equal pieces each."""
    return 2 * cp * tp if cp > 1 else tp


def even_micro_batches(ep: int) -> bool:
    """Whether all data-parallel ranks need as many micro-batches: ranks that share experts meet in every layer of each. Pipeline stages
    are of one replica and have the same ones anyhow; data-parallel ranks without experts meet at the step's end only."""
    return ep > 1


def misplaced(tp: int, sequence_parallel: bool, distributed_optimizer: bool, optimizer: str) -> str | None:
    """Which switch has nothing to switch, in a sentence with the remedy."""
    if sequence_parallel and tp == 1:
        return "sequence_parallel splits over the tensor-parallel ranks, and tp is 1: raise tp, or leave sequence_parallel out"
    if distributed_optimizer and optimizer != "adam":
        return f"distributed_optimizer works with adam only, not with {optimizer}: change one of them"
    return None


def nothing_to_offload(device: str, optimizer_offload: float) -> str | None:
    """Why the optimizer's state cannot go to the host's memory, in a sentence with the remedy."""
    if device == "cpu" and optimizer_offload:
        return f"optimizer_offload is {optimizer_offload:g}, and on the CPU there is nothing to offload to: set it to 0, or device to cuda"
    return None
