"""Where the engine sent a row's tokens, as the row brings it and as a pack of rows needs it. No Megatron here.

A row's routes are SGLang's `routed_experts`: for each token that was fed to the model, from some first one on to the one before the last
(which nothing comes after), the experts it went to in each layer. [at most R, layers, k] for R + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.layout import sparse_layers

LIVE = -1
"""In place of an expert's number: the router chooses."""


@dataclass(frozen=True)
class Routing:
    """What a row's `routed_experts` must be for this model."""

    experts: int
    k: int
    sparse: tuple[bool, ...]
    """of each layer: whether it has experts"""

    @classmethod
    def of(cls, hf_config: Any) -> Routing:
        return cls(hf_config.num_experts, hf_config.num_experts_per_tok, tuple(sparse_layers(hf_config.to_dict())))

    def fault(self, routes: np.ndarray, positions: int) -> str | None:
        """What is wrong with the routes of a row of so many response positions, in words that follow the row's name."""
        if routes.ndim != 3 or len(routes) > positions or routes.shape[1:] != (len(self.sparse), self.k):
            return f"has routed experts of shape {routes.shape}, not [at most {positions}, {len(self.sparse)}, {self.k}]"
        chosen = np.sort(routes[:, np.array(self.sparse)], axis=-1)  # an engine writes anything for dense layers
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.experts):
            return f"has a routed expert outside the model's {self.experts}"
        if (chosen[..., 1:] == chosen[..., :-1]).any():
            return "routes a token to the same expert twice"
        return None


def packed_routes(routes: Sequence[np.ndarray | None], lengths: Sequence[int], held: Sequence[np.ndarray]) -> torch.Tensor | None:
    """[t, layers, k] int32 of a pack whose rows have so many tokens, and of whose padded positions this rank holds `held`."""
    known = next((array for array in routes if array is not None), None)
    if known is None:
        return None
    parts = []
    for array, length, positions in zip(routes, lengths, held, strict=True):
        part = np.full((len(positions), *known.shape[1:]), LIVE, dtype=np.int32)
        if array is not None:
            row = positions - (length - 1 - len(array))
            inside = (row >= 0) & (row < len(array))
            part[inside] = array[row[inside]]
        parts.append(part)
    return torch.from_numpy(np.concatenate(parts))
