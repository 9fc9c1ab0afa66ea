"""Megatron-core's GPTModel from a Hugging Face checkpoint, without TransformerEngine.

What a decoder layer is made of is in `trainer/layers.py`; here is how mbridge is brought to build and load the model, and what trains it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.safetensor_io import SafeTensorIO
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from transformers import AutoConfig

from trainer import device, layers, moe, te
from trainer.group import Group
from trainer.layers import ValueHead
from trainer.layout import expert_count, misfit, sparse_layers
from trainer.spec import TrainerSpec
from trainer.wanted import Wanted

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types whose bridge and layer specification are tested."""

_CPU = torch.device("cpu")
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

VALUE_HEAD = "value_head.weight"
_DENSE_IN_SPARSE = {
    "mlp.linear_fc1.weight": [f"model.layers.{{layer_number}}.mlp.{name}_proj.weight" for name in ("gate", "up")],
    "mlp.linear_fc1.layer_norm_weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    "mlp.linear_fc2.weight": ["model.layers.{layer_number}.mlp.down_proj.weight"],
}
"""The names of a dense layer, which mbridge lacks for models that have experts in others."""


@lru_cache(maxsize=16)
def bridge_class(model_type: str, value_head: bool = False, parts: ModuleType = layers, on: torch.device = _CPU) -> type:
    """mbridge's class for this model type, with what it lacks on a CPU and with transformers 5. Layers are made of `parts`."""
    if model_type not in SUPPORTED:
        raise ValueError(f"model type {model_type!r} is not supported; supported are {', '.join(SUPPORTED)}")
    upstream: Any = _MODEL_REGISTRY[model_type]

    class OwnBridge(upstream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Upstream writes the tied mapping into a dict of the class, where a later untied model would find it.
            self._DIRECT_MAPPING = dict(upstream._DIRECT_MAPPING)
            self._MLP_MAPPING = upstream._MLP_MAPPING | (_DENSE_IN_SPARSE if "mlp.router.weight" in upstream._MLP_MAPPING else {})
            super().__init__(*args, **kwargs)

        def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> Any:
            if "moe_router_pre_softmax" in kwargs:  # softmax over the chosen experts is the same as over all, normalised
                kwargs["moe_router_pre_softmax"] = not self.hf_config.norm_topk_prob
            config = super()._build_base_config(text_config_key, **{**kwargs, **device.settings(on), **parts.SETTINGS})
            config.rotary_base = rope_theta(self.hf_config)
            return config

        def _adjust_mapping_for_shared_weights(self) -> None:
            if value_head:
                self._DIRECT_MAPPING["output_layer.weight"] = VALUE_HEAD
            elif self.hf_config.tie_word_embeddings:
                self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

        def _weight_to_hf_format(self, mcore_weights_name: str, mcore_weights: torch.Tensor) -> Any:
            if value_head and mcore_weights_name == "output_layer.weight":  # no vocabulary, no padding
                return [VALUE_HEAD], [mcore_weights]
            return super()._weight_to_hf_format(mcore_weights_name, mcore_weights)

        def _weight_to_mcore_format(self, mcore_weights_name: str, hf_weights: list[torch.Tensor]) -> Any:
            if value_head and mcore_weights_name == "output_layer.weight":
                return hf_weights[0]
            return super()._weight_to_mcore_format(mcore_weights_name, hf_weights)

        def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
            first = get_transformer_layer_offset(self.config, vp_stage=vp_stage)
            here = slice(first, first + get_num_layers_to_build(self.config, vp_stage=vp_stage))
            return parts.block_spec(self.config, sparse_layers(self.hf_config.to_dict())[here])

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return {
                "vocab_size": self.hf_config.vocab_size,
                "max_sequence_length": self.hf_config.max_position_embeddings,
                "rotary_base": self.config.rotary_base,
                **parts.POSITIONS,
            }

    return OwnBridge


def rope_theta(hf_config: Any) -> float:
    """The base of plain rotary embeddings. Raises ValueError for a scaled kind, which would be silently wrong."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not supported yet: the trainer computes plain rotary embeddings only")
    theta = parameters.get("rope_theta", getattr(hf_config, "rope_theta", None))
    if theta is None:
        raise ValueError("the model's config.json names no rope_theta")
    return float(theta)


def read_config(model_path: Path) -> Any:
    """The Hugging Face configuration of a local checkpoint. Raises ValueError with a remedy."""
    if not (model_path / "config.json").is_file():
        raise ValueError(f"{model_path} holds no config.json: give the directory of a Hugging Face checkpoint on this machine")
    if not any(model_path.glob("*.safetensors")):
        raise ValueError(f"{model_path} holds no *.safetensors: save the model with safe serialization")
    try:
        config = AutoConfig.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ValueError(f"{model_path}/config.json cannot be read: {error}") from error
    bridge_class(config.model_type)
    rope_theta(config)
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported: the trainer computes silu only")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise ValueError("sliding-window attention is not supported: every layer must have full attention")
    if expert_count(config.to_dict()) and config.norm_topk_prob and config.num_experts_per_tok == 1:
        raise ValueError("one expert a token with norm_topk_prob is not supported: its weight is always 1, and the router learns nothing")
    return config


@dataclass(frozen=True)
class Frozen:
    """A model that is only asked, never trained, and so not wrapped for data parallelism."""

    chunk: Any
    wanted: Wanted
    replays: bool = False


@dataclass
class Model:
    """A loaded model with its optimizer. `chunk` is wrapped for data parallelism."""

    companions: dict[str, bytes]
    """config.json and the tokenizer's files, held because the directory they came from may be pruned (a checkpoint resumed from)."""
    hf_config: Any
    bridge: Any
    chunk: Any
    wanted: Wanted
    optimizer: Any
    replays: bool = True
    reference: Frozen | None = None
    """loaded only when the loss has a KL penalty"""
    critic: Model | None = None

    def set_learning_rate(self, lr: float, weight_decay: float) -> None:
        """Megatron leaves both to its scheduler, `wd_mult` (0 for norms and biases) included; we have none."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay * group["wd_mult"]

    def gradient_norm(self) -> float:
        """Before the clip, over all parameters wherever they are. Ends the backward: call it before `optimizer.step()`."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def zero_gradients(self) -> None:
        """Both, always: the fp32 optimizer makes `grad` an alias of `main_grad`, and the next backward would add to it twice."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()


def build(spec: TrainerSpec, group: Group, model_path: Path, *, value_head: bool = False) -> Model:
    """A model to be trained. All ranks together. Raises Refused for one that cannot be loaded."""
    hf_config, bridge, module = load_module(spec, group, model_path, value_head=value_head)
    ddp = DistributedDataParallelConfig(
        overlap_grad_reduce=False,
        average_in_collective=False,
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=spec.distributed_optimizer,
    )
    chunk = DistributedDataParallel(config=bridge.config, ddp_config=ddp, module=in_dtype(spec, bridge, module))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=spec.optimizer.kind,
            lr=0.0,
            sgd_momentum=spec.optimizer.momentum,
            weight_decay=spec.optimizer.weight_decay,
            adam_beta1=spec.optimizer.betas[0],
            adam_beta2=spec.optimizer.betas[1],
            adam_eps=spec.optimizer.eps,
            clip_grad=spec.optimizer.grad_clip,
            params_dtype=bridge.dtype,
            bf16=bridge.dtype is torch.bfloat16,
            use_distributed_optimizer=spec.distributed_optimizer,
            optimizer_cpu_offload=spec.optimizer_offload > 0.0,
            optimizer_offload_fraction=spec.optimizer_offload,
        ),
        [chunk],
    )
    if spec.optimizer.kind == "adam":
        for parameters in optimizer.param_groups:
            parameters["fused"] = True  # torch's own, on a CPU too: one pass over the weights where the default makes ten
    return Model(read_companions(model_path), hf_config, bridge, chunk, Wanted(module), optimizer, replays=not value_head)


def load_module(spec: TrainerSpec, group: Group, model_path: Path, *, value_head: bool = False) -> tuple[Any, Any, torch.nn.Module]:
    """(Hugging Face configuration, bridge, this rank's part of the model with its weights). All ranks together. Raises Refused.

    With `value_head` the output layer is a `ValueHead`, read from the checkpoint if it has one (`value_head.weight`), and else zero.
    """
    fault = None
    try:
        hf_config = read_config(model_path)
        if why := misfit(hf_config.to_dict(), **spec.layout, routing_replay=spec.routing_replay):
            raise ValueError(why)
    except ValueError as error:
        fault = (400, str(error))
    group.agree(fault)
    dtype = torch.bfloat16 if spec.dtype == "bfloat16" else torch.float32
    parts = te if te.wanted(spec, group.device) else layers
    bridge = bridge_class(hf_config.model_type, value_head, parts, torch.device(group.device.type))(
        hf_config, dtype=dtype, make_vocab_size_divisible_by=spec.tp
    )
    bridge.set_extra_args(sequence_parallel=spec.sequence_parallel, **_RECOMPUTE[spec.recompute])
    config = bridge.config
    config.calculate_per_token_loss = True
    if config.num_moe_experts:
        config.sequence_parallel = spec.tp > 1  # Megatron's experts demand it, whatever the spec says
    config.finalize_model_grads_func = finalize_model_grads
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = bridge._model_provider([])(first, last)
    head = None
    if value_head:
        model.share_embeddings_and_output_weights = False
        if last:
            head = ValueHead(config)
            model.output_layer = head if has_value_head(model_path) else torch.nn.Identity()
    model.to(group.device)
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    unmatched = _unmatched_tensors(bridge, model, model_path)
    group.agree((400, f"{model_path} is not what its config.json says: {unmatched}") if unmatched else None)
    with torch.no_grad():
        bridge.load_weights([model], str(model_path))
    if head is not None:
        model.output_layer = head.to(group.device)
        set_defaults_if_not_set_tensor_model_parallel_attributes(head.weight)
    return hf_config, bridge, model


def in_dtype(spec: TrainerSpec, bridge: Any, module: torch.nn.Module) -> torch.nn.Module:
    """The module as it is run: in bf16 Megatron casts what goes in and comes out."""
    return Float16Module(bridge.config, module) if spec.dtype == "bfloat16" else module


def _unmatched_tensors(bridge: Any, model: torch.nn.Module, model_path: Path) -> str | None:
    """Which tensors this rank would look for in vain, or would leave out (a bias that no parameter takes), if any. All ranks together.

    Found here, because inside the load it would leave other ranks waiting, or be silent.
    """
    there = set(SafeTensorIO(str(model_path)).load_hf_weight_names())
    local = bridge._weight_name_mapping_mcore_local_to_global(model).values()
    wanted = {name for parameter in local for name in bridge._weight_name_mapping_mcore_to_hf(parameter)}
    # A stage has some of the layers only, and a rank some of the experts.
    of_all: list[set[str]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_all, wanted)
    if missing := sorted(wanted - there):
        return f"it lacks {', '.join(missing[:5])}"
    taken = set().union(*of_all, bridge._DIRECT_MAPPING.values(), {"lm_head.weight"})
    surplus = sorted(name for name in there - taken if not name.endswith("inv_freq"))
    return f"nothing takes {', '.join(surplus[:5])}" if surplus else None


def has_value_head(model_path: Path) -> bool:
    return VALUE_HEAD in SafeTensorIO(str(model_path)).load_hf_weight_names()


def packing(padded_lengths: list[int], cp_size: int = 1, routes: torch.Tensor | None = None) -> PackedSeqParams:
    """Positions restart in every sequence. `padded_lengths` are whole, not the context-parallel shares.

    To TransformerEngine's attention the padding is part of its sequence; for context-parallel ranks it asks for the padded lengths apart.
    """
    ends = torch.tensor([0, *padded_lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = max(padded_lengths)
    return moe.RoutedPacking(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends if cp_size > 1 else None,
        cu_seqlens_kv_padded=ends if cp_size > 1 else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(padded_lengths),
        routes=routes,
    )


def read_companions(model_path: Path) -> dict[str, bytes]:
    """What a checkpoint needs besides the weights, so that transformers loads it."""
    return {
        path.name: path.read_bytes() for path in sorted(model_path.iterdir()) if path.name == "config.json" or _is_tokenizer_file(path.name)
    }


def _is_tokenizer_file(name: str) -> bool:
    return bool(re.fullmatch(r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config).*", name))
