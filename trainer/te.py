"""TransformerEngine's modules in the decoder layers, for GPUs that have it: the other way to fill the seam of `trainer/layers.py`.

The parameters have the same names, so checkpoints move. Rotary embedding is Megatron's own here, fused; attention is TransformerEngine's on
packed sequences. The padding behind a sequence counts as part of it, which no token before it can see. Unchecked: it needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from trainer import moe
from trainer.spec import TrainerSpec

POSITIONS: dict[str, Any] = {"position_embedding_type": "rope"}
SETTINGS: dict[str, Any] = {"apply_rope_fusion": True}


def wanted(spec: TrainerSpec, device: torch.device) -> bool:
    """Where it is installed, on CUDA and in bf16: its attention kernels for packed sequences are of 16 bits."""
    return spec.transformer_engine == "auto" and device.type == "cuda" and spec.dtype == "bfloat16" and transformer_engine.HAVE_TE


def layer_spec(config: Any, sparse: bool = False) -> ModuleSpec:
    """One decoder layer, dense or with experts, as Megatron puts it together; the router is ours, for its replay."""
    made: ModuleSpec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if sparse else None, moe_grouped_gemm=sparse, qk_layernorm=config.qk_layernorm
    )
    if sparse:
        made.module = moe.MoETransformerLayer
        made.submodules.mlp.submodules.router = moe.ReplayRouter
    return made


def block_spec(config: Any, sparse: list[bool]) -> TransformerBlockSubmodules:
    """The decoder layers of a pipeline stage; `sparse` says of each whether it has experts."""
    return TransformerBlockSubmodules(layer_specs=[layer_spec(config, each) for each in sparse], layer_norm=transformer_engine.TENorm)
