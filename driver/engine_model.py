"""Has a server of somebody else's the run's model? What it says is compared before anything is sent; the rest shows at its first push."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from driver.snapshot import PushRefused
from rollout.answer import EngineError
from rollout.client import EngineClient
from rollout.pool import EngineSlot

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


async def same_model(client: EngineClient, expected: dict[str, Any], model_path: Path) -> None:
    """SGLang dies of a tensor whose shape does not fit, so what can be asked is asked. Raises EngineError."""
    said = await client.model_info()
    found = {name: said.get(name) for name in ("architectures", "model_type")}
    if client.on_this_host:
        found |= await asyncio.to_thread(_sizes, str(said.get("model_path")))
    for name, value in found.items():
        if value is not None and expected.get(name) is not None and value != expected[name]:
            raise EngineError(
                "configuration",
                f"this server has another model than model.path: its /model_info names {said.get('model_path')!r}, with {name} {value}, "
                f"and the run trains one with {expected[name]}; start it with --model-path {model_path}",
            )


def _sizes(model_path: str) -> dict[str, Any]:
    """Of a checkpoint on this machine; empty when it is not there."""
    try:
        facts = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return {name: facts.get(name) for name in SIZES} if isinstance(facts, dict) else {}


async def perhaps_another_model(slot: EngineSlot, model_path: Path) -> str:
    """What may be behind the failure of a server's first push, once weights were sent; empty when that says nothing of its model."""
    error = slot.push_error
    try:
        said = f"says {(await slot.client.model_info()).get('model_path')!r}"
    except EngineError:
        said = "does not answer any more"
    remedy = f"(its /model_info {said}); start it with --model-path {model_path}"
    if isinstance(error, PushRefused) or (isinstance(error, EngineError) and error.status is not None):
        return f"; this server seems to have another model than model.path {remedy}"
    if isinstance(error, EngineError):
        return f"; a server dies of the push when its model is another than model.path {remedy}"
    return ""
