"""What a checkpoint's config.json says about the model, or a sentence that says why this engine cannot run it.

Only what the forward pass in `rollout.engine.model` computes is accepted: a setting that would be silently ignored (a rope scaling, a
sliding window, another activation) is a ValueError, because wrong numbers are worse than none. No torch here, so a wrong path is
reported before anything slow is imported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The mixture that some layers have in place of an MLP."""

    experts: int
    k: int
    intermediate_size: int
    normalized: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer with RMSNorm, rotary positions, grouped queries and a gated SiLU MLP, or experts."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    experts: ExpertsConfig | None
    eos_ids: frozenset[int]


def read_config(directory: Path) -> ModelConfig:
    """ValueError, with what to do, for a directory that is missing, is no checkpoint, or holds a model this engine does not compute."""
    raw = _read_json(directory / "config.json", directory)
    architecture = (raw.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{directory} holds a {architecture}, which the embedded engine does not compute; "
            f"give it one of {', '.join(ARCHITECTURES)}, or serve this model with SGLang"
        )
    if not any(directory.glob("*.safetensors")):
        raise ValueError(f"{directory} has no *.safetensors file; save the checkpoint with safe serialization")
    heads = int(raw["num_attention_heads"])
    _refuse_what_is_not_computed(raw, directory)
    attention_bias = bool(raw.get("attention_bias", False))
    qwen2 = architecture == "Qwen2ForCausalLM"
    return ModelConfig(
        architecture=architecture,
        model_type=str(raw.get("model_type", "")),
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        layers=int(raw["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(raw),
        max_positions=int(raw.get("max_position_embeddings", 2048)),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        qkv_bias=qwen2 or attention_bias,
        out_bias=not qwen2 and attention_bias,
        experts=_experts(raw) if architecture == "Qwen3MoeForCausalLM" else None,
        eos_ids=_eos_ids(raw, directory),
    )


def _experts(raw: dict[str, Any]) -> ExpertsConfig:
    """Every `decoder_sparse_step`th layer has some, but those in `mlp_only_layers`. transformers 5 has another name for their number."""
    step, dense = int(raw.get("decoder_sparse_step", 1)), set(raw.get("mlp_only_layers") or ())
    layers = range(int(raw["num_hidden_layers"]))
    return ExpertsConfig(
        experts=int(raw["num_local_experts"] if "num_local_experts" in raw else raw["num_experts"]),
        k=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalized=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(layer for layer in layers if layer not in dense and (layer + 1) % step == 0),
    )


def _read_json(path: Path, directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise ValueError(f"there is no model directory {directory}; give --model-path a Hugging Face checkpoint directory")
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{directory} has no {path.name}, so it is not a Hugging Face checkpoint; give --model-path one that is") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); save the checkpoint again") from None


def _refuse_what_is_not_computed(raw: dict[str, Any], directory: Path) -> None:
    # transformers 5 keeps everything about rope in rope_parameters, 4 had rope_scaling beside rope_theta.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    settings = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "rope_type": (rope_type, "default"),
        "partial_rotary_factor": (rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)), 1.0),
        "use_sliding_window": (bool(raw.get("use_sliding_window", False)), False),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), False),
        "quantization_config": (raw.get("quantization_config"), None),
    }
    for name, (value, computed) in settings.items():
        if value != computed:
            raise ValueError(
                f"{directory} says {name} = {value!r}; the embedded engine computes only {computed!r}. "
                "Use another checkpoint, or serve this one with SGLang"
            )


def _rope_theta(raw: dict[str, Any]) -> float:
    rope = raw.get("rope_parameters") or {}
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)


def _eos_ids(raw: dict[str, Any], directory: Path) -> frozenset[int]:
    """All ids that end a text: those of config.json and of generation_config.json together, as SGLang takes them."""
    found: set[int] = set()
    sources = [raw]
    if (directory / "generation_config.json").is_file():
        sources.append(_read_json(directory / "generation_config.json", directory))
    for source in sources:
        eos = source.get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    return frozenset(found)
