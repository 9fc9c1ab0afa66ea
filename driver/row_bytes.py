"""What a trajectory may take up in the store: what a reservation counts (B2)."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from store import occupied_bytes
from store.schema import fields_of
from trainer.layout import expert_count

SPANS = 64  # versions that sampled one row, and turns with tokens given between them
ANSWERS = 2  # whose routing lies in the store at once: a turn's goes when the next one's has come


@lru_cache(maxsize=16)
def trajectory_bytes(tokens: int, routed_model: Path | None = None) -> int:
    """Of one leaf of `tokens` tokens: its objects with their headers. `routed_model`: the checkpoint whose routing comes with the rows."""
    sizes: dict[str | int, int] = {"N": 1, "N + 1": 2, "T": tokens, "U": tokens - 1, "Q": tokens - 1, "K": SPANS}
    routing = 0
    if routed_model is not None:
        model = json.loads((routed_model / "config.json").read_text())
        sizes |= {"L": model["num_hidden_layers"], "E": model["num_experts_per_tok"]}
        dtype = "uint8" if (expert_count(model) or 0) <= 256 else "uint16"
        routing = ANSWERS * _object_bytes("extras", sizes, dtype)
    return _object_bytes("rollout", sizes) + _object_bytes("reward", sizes) + routing


def _object_bytes(hop: str, sizes: dict[str | int, int], dtype: str | None = None) -> int:
    fields = [field for field in fields_of(hop) if not field.optional]
    return occupied_bytes({f.name: (dtype or f.dtype, tuple(int(sizes.get(size, size)) for size in f.shape)) for f in fields})
