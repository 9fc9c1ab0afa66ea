"""Which layouts fit a model, from its config.json alone: the driver asks before anything starts, the ranks again before they load.

Not asked: context-parallel ranks take any sequence (padded), data-parallel ranks any plan, and the vocabulary is padded to the
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def misfit(model: Mapping[str, Any], tp: int, pp: int) -> str | None:
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
    return None


def misplaced(tp: int, sequence_parallel: bool, distributed_optimizer: bool, optimizer: str) -> str | None:
    """Which switch has nothing to switch, in a sentence with the remedy."""
    if sequence_parallel and tp == 1:
        return "sequence_parallel splits over the tensor-parallel ranks, and tp is 1: raise tp, or leave sequence_parallel out"
    if distributed_optimizer and optimizer != "adam":
        return f"distributed_optimizer works with adam only, not with {optimizer}: change one of them"
    return None
