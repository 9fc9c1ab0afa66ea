"""Our own torch modules where TransformerEngine's would stand, under the same parameter names, so that mbridge's mappings (and
checkpoints) fit both.

Attention works on packed sequences (`thd`): rows of one length that stand next to each other are one batched call, so `rows.py` sorts them
by length and nothing is padded. It turns queries and keys itself, so the model has no rotary embedding of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from trainer import moe
from trainer.fused import rms_norm, rotated, rotation, zigzag

POSITIONS: dict[str, Any] = {"position_embedding_type": "none"}
"""What GPTModel is told of positions: PackedAttention turns queries and keys."""
SETTINGS: dict[str, Any] = {"apply_rope_fusion": False}


class RMSNorm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the linear after it as one module, as TransformerEngine has it: `layer_norm_weight` beside `weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon), *args, **kwargs)


class ValueHead(torch.nn.Module):
    """One number a token, [n, b, hidden] -> [n, b, 1], in the place of the output layer. Begins at zero: the first values are 0.

    `Wanted` gathers the tokens for it under sequence parallelism, as it does for the output layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return F.linear(hidden.float(), self.weight.float()), None


class _GatherCP(torch.autograd.Function):
    """[s, ...] on each rank -> [cp, s, ...] on all. The gather of torch.distributed.nn has a wrong backward in gloo subgroups."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        gathered = x.new_empty((group.size(), *x.shape))
        dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()].clone(), None


class PackedAttention(torch.nn.Module):
    """Rotary embedding and causal attention inside each sequence of a pack; grouped-query heads."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, *, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__()
        self.cp_group = pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()
        self.dimension, self.rotary_base = config.kv_channels, config.rotary_base

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *,
        packed_seq_params: moe.RoutedPacking,
        **_: Any,
    ) -> torch.Tensor:
        """query [t, heads, dim], key and value [t, groups, dim] -> [t, heads * dim]; t is this rank's share of the pack."""
        lengths = packed_seq_params.lengths
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        cos, sin = rotation(lengths, cp_size, cp_rank, self.dimension, self.rotary_base, query.device)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        # Split, not sliced: the backward of a slice is as wide as the pack.
        groups = runs(lengths)
        shares = [count * length // cp_size for length, count in groups]
        gathered = _GatherCP.apply(torch.stack([key, value], dim=1), self.cp_group) if cp_size > 1 else None
        parts = zip(key.split(shares), value.split(shares), strict=True) if gathered is None else gathered.split(shares, dim=1)
        outputs = []
        for (length, count), q, part in zip(groups, query.split(shares), parts, strict=True):
            q = q.unflatten(0, (count, length // cp_size)).transpose(1, 2)
            if gathered is None:
                k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in part)
                mask = None
            else:
                where = [torch.from_numpy(zigzag(length, cp_size, rank)).to(q.device) for rank in range(cp_size)]
                both = part.unflatten(1, (count, length // cp_size))  # [cp, count, length/cp, 2, groups, dim]
                k, v = both.permute(3, 1, 4, 0, 2, 5).flatten(3, 4).unbind(0)
                mask = where[cp_rank][:, None] >= torch.cat(where)[None, :]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            outputs.append(out.transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(outputs)


def runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(length, how many in a row) for each stretch of equal lengths."""
    found: list[tuple[int, int]] = []
    for length in lengths:
        if found and found[-1][0] == length:
            found[-1] = (length, found[-1][1] + 1)
        else:
            found.append((length, 1))
    return found


def layer_spec(config: Any, sparse: bool = False) -> ModuleSpec:
    """One decoder layer, dense or with experts; the norms sit inside the linears that follow them, but for the one before experts."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=NormColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=moe.MoETransformerLayer if sparse else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm if sparse else IdentityOp,
            mlp=moe.mlp_spec() if sparse else ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def block_spec(config: Any, sparse: list[bool]) -> TransformerBlockSubmodules:
    """The decoder layers of a pipeline stage; `sparse` says of each whether it has experts."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config, each) for each in sparse], layer_norm=RMSNorm)
