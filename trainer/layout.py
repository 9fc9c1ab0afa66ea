"""Which layouts fit a model, from its config.json alone: the driver asks before anything starts, the ranks again before they load.

Not asked: context-parallel ranks take any sequence (padded), data-parallel ranks any plan, and the vocabulary is padded to the
tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def misfit(model: Mapping[str, Any], tp: int, pp: int) -> str | None:
    """Why this model cannot be split so, in a sentence with the remedy; None when it can."""
    heads = model["num_attention_heads"]
    groups = model.get("num_key_value_heads") or heads
    for name, size in (("num_attention_heads", heads), ("intermediate_size", model["intermediate_size"])):
        if size % tp:
            return f"the model's {name} ({size}) does not divide by tp ({tp}): choose a tp that divides it"
    if groups % tp and tp % groups:
        return f"the model's num_key_value_heads ({groups}) is neither a multiple nor a divisor of tp ({tp}): choose another tp"
    layers = model["num_hidden_layers"]
    if layers % pp:
        return f"the model's num_hidden_layers ({layers}) does not divide by pp ({pp}): choose a pp that divides it"
    return None
