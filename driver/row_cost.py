"""What a row costs to train, from the model's shape: the work by which rows are balanced. No torch here: config.json is enough.

Counted are the multiplications of the forward pass (the backward pass is twice as many of each kind):

    layers     every token     attention's projections, and the MLP or the experts that one token goes to, with the router
    attention  pairs of tokens  scores and their weighted sum, causal: half of all pairs
    head       trained tokens  the output layer, which is computed for tokens in the loss alone

Work is in tokens: 1 is what a trained token costs without attention to others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.layout import expert_count, sparse_layers


@dataclass(frozen=True)
class RowCost:
    """`head` is the output layer's share of a trained token, `attention` the work of a pair of tokens. As it stands: tokens alone."""

    head: float = 0.0
    attention: float = 0.0

    def work(self, length: int, trained: int) -> float:
        return (1.0 - self.head) * length + self.head * trained + self.attention * length * length

    @classmethod
    def of_model(cls, model: Mapping[str, Any]) -> RowCost:
        """Of a Hugging Face config.json. One that does not name a dense model's sizes costs its tokens alone."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        if any(not model.get(name) for name in names):
            return cls()
        hidden, layers, heads, _, vocabulary = (int(model[name]) for name in names)
        head_size = int(model.get("head_dim") or hidden // heads)
        groups = int(model.get("num_key_value_heads") or heads)
        projections = hidden * head_size * (2 * heads + 2 * groups)
        sparse = sum(sparse_layers(model))
        every = layers * projections + (layers - sparse) * _mlp(hidden, model["intermediate_size"])
        if sparse:
            every += sparse * _experts(model, hidden)
        one = every + hidden * vocabulary
        return cls(head=hidden * vocabulary / one, attention=layers * heads * head_size / one)


TOKENS = RowCost()


def _mlp(hidden: int, inner: int) -> int:
    """Gate, up and down."""
    return 3 * hidden * inner


def _experts(model: Mapping[str, Any], hidden: int) -> int:
    """Those that one token goes to, the shared one, and the router."""
    chosen = int(model.get("num_experts_per_tok") or 1)
    inner = int(model.get("moe_intermediate_size") or model["intermediate_size"])
    return (
        chosen * _mlp(hidden, inner)
        + _mlp(hidden, int(model.get("shared_expert_intermediate_size") or 0))
        + hidden * (expert_count(model) or 0)
    )
