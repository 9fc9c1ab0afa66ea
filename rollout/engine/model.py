"""The forward pass, by hand: a decoder-only transformer in a few dozen torch calls, over a KV cache of one row a running request.

Parameters live in fused tensors (q, k and v in one, gate and up in one), and `Model.weights` maps each Hugging Face name to a view of
its part: what is copied into a view is what the next step computes with, and there is no second copy to go stale.

Running requests occupy the rows 0 … n−1 of the cache without gaps, so a decode step reads `[:n]` of it in place, gathering nothing. The
cache starts as zeros, not as whatever memory held: attention multiplies masked values by an exact 0, and 0 × NaN would still be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rollout.engine.config import ModelConfig
from rollout.engine.experts import Experts, Routes

KEY, VALUE = 0, 1


class KVCache:
    """`data` is [2, layers, rows, kv_heads, max_tokens, head_dim], or None while its memory is released."""

    def __init__(self, config: ModelConfig, rows: int, max_tokens: int, dtype: torch.dtype, *, keep_routes: bool = False) -> None:
        experts = config.experts
        self.routes = Routes(rows, max_tokens, config.layers, experts.k, experts.experts) if experts and keep_routes else None
        self.shape = (2, config.layers, rows, config.kv_heads, max_tokens, config.head_dim)
        self.dtype = dtype
        self.data: Tensor | None = None
        self.allocate()

    @property
    def size_bytes(self) -> int:
        return 0 if self.data is None else self.data.numel() * self.data.element_size()

    def allocate(self) -> None:
        """Zero pages cost nothing until they are touched, so a generous context is free until it is used."""
        self.data = torch.zeros(self.shape, dtype=self.dtype)
        if self.routes is not None:
            self.routes.allocate()

    def release(self) -> None:
        self.data = None
        if self.routes is not None:
            self.routes.release()

    def routes_of(self, rows: slice) -> Tensor | None:
        return None if self.routes is None or self.routes.data is None else self.routes.data[rows]

    def move(self, sources: list[int], targets: list[int], tokens: int) -> None:
        """Rows `sources` take the places `targets`, which close the gaps that finished requests left."""
        assert self.data is not None
        self.data[:, :, targets, :, :tokens] = self.data[:, :, sources, :, :tokens]
        if self.routes is not None:
            self.routes.move(sources, targets, tokens)

    def clear(self, row: int) -> None:
        """After numbers that are not finite: the row's next owner must not multiply them by 0."""
        assert self.data is not None
        self.data[:, :, row] = 0


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 kv_heads) head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [hidden, heads head_dim]
    out_bias: Tensor | None
    mlp_norm: Tensor
    mlp: Dense | Experts


@dataclass(slots=True)
class Dense:
    gate_up: Tensor  # [2 intermediate, hidden]
    down: Tensor  # [hidden, intermediate]

    def __call__(self, x: Tensor) -> tuple[Tensor, None]:
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down), None


class Model:
    """Weights start undefined; `rollout.engine.weights.load_checkpoint` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, max_tokens: int) -> None:
        self.config = config
        self.dtype = dtype
        self.weights: dict[str, Tensor] = {}
        self._embedding = self._named("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._layer(index) for index in range(config.layers)]
        self._norm = self._named("model.norm.weight", config.hidden_size)
        self._head = self._embedding if config.tied else self._named("lm_head.weight", config.vocab_size, config.hidden_size)
        self._cos, self._sin = self._rotations(max_tokens)

    def _named(self, name: str, *shape: int) -> Tensor:
        self.weights[name] = torch.empty(shape, dtype=self.dtype)
        return self.weights[name]

    def _fused(self, names: list[str], rows: list[int], *width: int) -> Tensor:
        whole = torch.empty((sum(rows), *width), dtype=self.dtype)
        self.weights.update(zip(names, whole.split(rows), strict=True))
        return whole

    def _layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        attention, hidden = f"{prefix}.self_attn", config.hidden_size
        heads_width = config.heads * config.head_dim
        rows = [heads_width, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
        parts = ("q_proj", "k_proj", "v_proj")
        return Layer(
            attention_norm=self._named(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused([f"{attention}.{part}.weight" for part in parts], rows, hidden),
            qkv_bias=self._fused([f"{attention}.{part}.bias" for part in parts], rows) if config.qkv_bias else None,
            q_norm=self._named(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._named(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
            out=self._named(f"{attention}.o_proj.weight", hidden, heads_width),
            out_bias=self._named(f"{attention}.o_proj.bias", hidden) if config.out_bias else None,
            mlp_norm=self._named(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=self._experts(f"{prefix}.mlp") if config.experts and index in config.experts.layers else self._mlp(f"{prefix}.mlp"),
        )

    def _mlp(self, prefix: str, width: int | None = None) -> Dense:
        hidden, width = self.config.hidden_size, width or self.config.intermediate_size
        return Dense(
            gate_up=self._fused([f"{prefix}.{part}.weight" for part in ("gate_proj", "up_proj")], [width] * 2, hidden),
            down=self._named(f"{prefix}.down_proj.weight", hidden, width),
        )

    def _experts(self, prefix: str) -> Experts:
        experts = self.config.experts
        assert experts is not None
        router = self._named(f"{prefix}.gate.weight", experts.experts, self.config.hidden_size)
        each = [self._mlp(f"{prefix}.experts.{number}", experts.intermediate_size) for number in range(experts.experts)]
        return Experts(router, [one.gate_up for one in each], [one.down for one in each], experts.k, experts.normalized)

    def _rotations(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin, each [positions, head_dim], the two halves alike."""
        dim = self.config.head_dim
        frequencies = 1.0 / self.config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
        angles = torch.outer(torch.arange(positions).float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def decode(self, cache: Tensor, tokens: Tensor, positions: Tensor, routes: Tensor | None = None) -> Tensor:
        """One token for each row. `cache` [2, layers, B, kv_heads, max, head_dim], `tokens` and `positions` [B] → hidden [B, hidden].

        `routes` [B, max, layers, k] is told which experts the tokens went to.
        """
        config, batch = self.config, tokens.shape[0]
        group = config.heads // config.kv_heads
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        rows = torch.arange(batch)
        seen = int(positions.max()) + 1
        # A row sees its own tokens and nothing of what a longer neighbour made the view reach over.
        bias = torch.zeros(batch, 1, 1, seen, dtype=self.dtype)
        bias.masked_fill_(torch.arange(seen) > positions.view(batch, 1, 1, 1), float("-inf"))
        x = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, cos, sin)  # [B, heads, head_dim]
            keys, values = cache[KEY, index], cache[VALUE, index]
            keys[rows, :, positions] = k
            values[rows, :, positions] = v
            # The queries that share a kv head stand where attention expects a query's length: no key is repeated.
            q = q.reshape(batch, config.kv_heads, group, config.head_dim)
            attended = F.scaled_dot_product_attention(q, keys[:, :, :seen], values[:, :, :seen], attn_mask=bias)
            x, chosen = self._finish(layer, x, attended.reshape(batch, -1))
            if routes is not None and chosen is not None:
                routes[rows, positions, index] = chosen.to(routes.dtype)
        return F.rms_norm(x, (config.hidden_size,), self._norm, config.norm_eps)

    def prefill(self, cache: Tensor, tokens: Tensor, routes: Tensor | None = None) -> Tensor:
        """Whole sequences from position 0, right-padded. `cache` and `routes` as in decode, `tokens` [B, L] → hidden [B, L, hidden].

        Padding needs no mask: with causal attention only padding looks at padding, and decode overwrites or masks what it leaves.
        """
        config = self.config
        batch, length = tokens.shape
        cos, sin = self._cos[:length].unsqueeze(1), self._sin[:length].unsqueeze(1)
        x = self._embedding[tokens]
        for index, layer in enumerate(self._layers):
            q, k, v = self._qkv(layer, x, cos, sin)  # [B, L, heads, head_dim]
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            cache[KEY, index, :, :, :length] = k
            cache[VALUE, index, :, :, :length] = v
            grouped = config.heads != config.kv_heads
            attended = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=grouped)
            x, chosen = self._finish(layer, x, attended.transpose(1, 2).reshape(batch, length, -1))
            if routes is not None and chosen is not None:
                routes[:, :length, index] = chosen.view(batch, length, -1).to(routes.dtype)
        return F.rms_norm(x, (config.hidden_size,), self._norm, config.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] → [N, vocab], in float32 whatever the model computes in."""
        return F.linear(hidden, self._head).float()

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        normed = F.rms_norm(x, (config.hidden_size,), layer.attention_norm, config.norm_eps)
        heads = F.linear(normed, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split((config.heads, config.kv_heads, config.kv_heads), dim=-2)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = F.rms_norm(q, (config.head_dim,), layer.q_norm, config.norm_eps)
            k = F.rms_norm(k, (config.head_dim,), layer.k_norm, config.norm_eps)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def _finish(self, layer: Layer, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor | None]:
        """x after the layer, and the experts of each of its tokens [t, k] where it has some."""
        x = x + F.linear(attended, layer.out, layer.out_bias)
        normed = F.rms_norm(x, (self.config.hidden_size,), layer.mlp_norm, self.config.norm_eps)
        made, chosen = layer.mlp(normed.flatten(0, -2))
        return x + made.view_as(x), chosen


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the rotate-half form: x [..., heads, head_dim], cos and sin broadcast over the heads."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
