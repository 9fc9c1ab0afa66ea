"""What the engine says about itself: the bodies of /model_info, /server_info, /v1/loads and /weights_checker."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rollout.engine.engine import Engine
from rollout.engine.weights import overall_checksum
from rollout.extras import STORED

SGLANG_VERSION = "0.5.23"  # whose API this is
LOAD_SECTIONS = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
NO_DISAGGREGATION = (
    *("prefill_bootstrap_queue_reqs", "prefill_inflight_queue_reqs", "decode_prealloc_queue_reqs", "decode_transfer_queue_reqs"),
    *("decode_retracted_queue_reqs", "kv_transfer_speed_gb_s", "kv_transfer_latency_ms"),
)
GB = 1e9


def model_info(engine: Engine) -> dict[str, Any]:
    return {
        "model_path": engine.model_path,
        "served_model_name": engine.model_path,
        "tokenizer_path": str(engine.settings.model_path),
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": engine.weight_version,
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": engine.config.model_type,
        "architectures": [engine.config.architecture],
        "embedding": {"enabled": False},
    }


def server_info(engine: Engine) -> dict[str, Any]:
    """The flags the engine started with (secrets apart), as SGLang flattens them; `weight_version` here is the one of the start."""
    settings = engine.settings
    scheduler, memory = engine.scheduler, _memory(engine)
    flags = asdict(settings) | {
        "model_path": str(settings.model_path),
        "faults": None if settings.faults is None else str(settings.faults),
        "paced_lengths": None if settings.paced_lengths is None else str(settings.paced_lengths),
        "api_key": bool(settings.api_key),
        "admin_api_key": bool(settings.admin_api_key),
    }
    return flags | {
        "embedded": True,
        "computes_nothing": settings.paced is not None,
        "seeded_sampling": "sampling_seed is always honoured: noise is a hash of (seed, absolute position, token id)",
        "context_length": engine.context_length,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_return_routed_experts": settings.enable_return_routed_experts,
        STORED: settings.enable_return_routed_experts,
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "status": "ready",
        "max_total_num_tokens": scheduler.max_total_tokens,
        "max_req_input_len": scheduler.max_prompt,
        "startup_time": {"scheduler_e2e": engine.startup_s},
        "internal_states": [
            {
                "effective_max_running_requests_per_dp": settings.max_running_requests,
                "last_gen_throughput": scheduler.loads.get("tokens_per_s", 0.0),
                "memory_usage": {
                    "weight": memory["weight_gb"],
                    "kvcache": memory["kv_cache_gb"],
                    "token_capacity": memory["token_capacity"],
                    "graph": {},
                },
                "world_size": 1,
            }
        ],
        "version": SGLANG_VERSION,
        "frontend": "python",
    }


def loads(engine: Engine, include: str | None, dp_rank: int | None = None) -> dict[str, Any]:
    """ValueError for a section that does not exist."""
    sections = {part.strip() for part in include.split(",")} if include else {"all"}
    strange = sorted(sections - LOAD_SECTIONS)
    if strange:
        raise ValueError(f"Invalid include options: {strange}. Valid options: {sorted(LOAD_SECTIONS)}")
    now, seen, most = datetime.now(UTC).isoformat(), engine.scheduler.loads, engine.scheduler.max_total_tokens
    load: dict[str, Any] = {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": seen.get("running", 0),
        "num_waiting_reqs": seen.get("waiting", 0),
        "num_waiting_uncached_tokens": seen.get("waiting_tokens", 0),
        "num_used_tokens": seen.get("used_tokens", 0),
        "num_total_tokens": seen.get("used_tokens", 0) + seen.get("waiting_tokens", 0),
        "num_active_tokens": seen.get("used_tokens", 0),
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": most,
        "max_running_requests": engine.settings.max_running_requests,
        "token_usage": round(seen.get("used_tokens", 0) / most, 4),
        "gen_throughput": round(seen.get("tokens_per_s", 0.0), 2),
        "cache_hit_rate": 0.0,
        "utilization": round(seen.get("reserved_tokens", 0) / most, 4),
        "total_prefill_uncached_tokens": seen.get("prefilled_tokens", 0),
        "total_prefill_busy_us": 0,
        "decode_moments": [0.0] * 6,
    }
    if sections & {"all", "memory"}:
        load["memory"] = _memory(engine)
    if sections & {"all", "queues"}:
        load["queues"] = {
            "waiting": seen.get("waiting", 0),
            "grammar": 0,
            "paused": 0,
            "retracted": seen.get("retracted", 0),
            "prealloc_ready": 0,
        }
    if sections & {"all", "disagg"}:
        load["disaggregation"] = {"mode": "null"} | dict.fromkeys(NO_DISAGGREGATION, 0)
    ranks = [load] if dp_rank in (None, 0) else []
    return {"timestamp": now, "version": SGLANG_VERSION, "accelerator": None, "num_accelerators": 1, "loads": ranks}


def _memory(engine: Engine) -> dict[str, Any]:
    weights = sum(tensor.numel() * tensor.element_size() for tensor in engine.scheduler.model.weights.values())
    return {
        "weight_gb": round(weights / GB, 6),
        "kv_cache_gb": round(engine.scheduler.cache.size_bytes / GB, 6),
        "graph_gb": 0.0,
        "token_capacity": engine.scheduler.max_total_tokens,
    }


def checksum_report(sums: dict[str, str]) -> dict[str, Any]:
    """Unlike SGLang's, the names are the checkpoint's (not fused) and the sums are sha256s of the bytes: a trainer can compute them."""
    overall = overall_checksum(sums)
    place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
    return {
        "success": True,
        "message": "Success.",
        "ranks": [{"checksums": sums, "per_gpu_checksum": overall, "parallelism_info": [place]}],
        "per_engine_checksum": hashlib.sha256(overall.encode()).hexdigest(),
    }
