"""A mixture of experts in place of an MLP, and where its tokens went: Qwen3-MoE's router and experts, one expert after the other.

A token goes to the `k` experts of the highest probability, weighed by it (over their sum, where the checkpoint says so). Which those were
is what `return_routed_experts` tells: `Routes` keeps it for every position of the KV cache, and moves, and is released, with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(slots=True)
class Experts:
    router: Tensor  # [experts, hidden]
    gate_up: list[Tensor]  # by expert [2 intermediate, hidden]
    down: list[Tensor]  # by expert [hidden, intermediate]
    k: int
    normalized: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [t, hidden] → what the experts make of it [t, hidden], and which they were [t, k]."""
        probabilities = F.softmax(F.linear(x, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.k, dim=-1)
        if self.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, place = torch.where(chosen == expert)
            gate, up = F.linear(x[tokens], self.gate_up[expert]).chunk(2, dim=-1)
            out.index_add_(0, tokens, F.linear(F.silu(gate) * up, self.down[expert]) * weights[tokens, place, None])
        return out, chosen


class Routes:
    """`data` is [rows, max_tokens, layers, k], or None while the cache's memory is released. A dense layer's are 0."""

    def __init__(self, rows: int, max_tokens: int, layers: int, k: int, experts: int) -> None:
        self._shape = (rows, max_tokens, layers, k)
        self._dtype = torch.uint8 if experts <= 256 else torch.int32
        self.data: Tensor | None = None
        self.allocate()

    def allocate(self) -> None:
        self.data = torch.zeros(self._shape, dtype=self._dtype)

    def release(self) -> None:
        self.data = None

    def move(self, sources: list[int], targets: list[int], tokens: int) -> None:
        assert self.data is not None
        self.data[targets, :tokens] = self.data[sources, :tokens]

    def of(self, row: int, start: int, end: int) -> np.ndarray:
        """A copy of a row's positions: the row is another request's soon."""
        assert self.data is not None
        return self.data[row, start:end].numpy().copy()
