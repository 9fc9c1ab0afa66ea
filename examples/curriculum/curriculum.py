"""A curriculum in ten lines: most weight where half of the answers are right, little where nothing or everything is.

curriculum: {function: "examples/curriculum/curriculum.py:weights", every_batches: 5, params: {least: 0.05}}
"""

from __future__ import annotations

from typing import Any


def weights(state: dict[str, Any]) -> dict[str, float]:
    """New weights by dataset id; `state` is described in `driver/curriculum.py`."""
    least = state["params"].get("least", 0.05)
    made = {}
    for dataset_id, dataset in state["datasets"].items():
        rate = dataset["recent"]["pass_rate"]
        made[dataset_id] = 1.0 if rate is None else max(least, 4 * rate * (1 - rate))  # nothing known yet: find out
    return made
