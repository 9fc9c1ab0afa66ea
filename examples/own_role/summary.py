"""A role of your own: it reads the metrics of every batch and publishes a summary of the last ones.

    headrace up examples/own_role/config.yaml          then: headrace streams, or GET /v1/runs/own-role/streams

It runs in a process of its own. What it keeps in `role.state` and what it publishes are on disk together with the fact that a batch was
read: kill it whenever you like, and every batch counts once.
"""

from __future__ import annotations

from typing import Any


class Summary:
    def __init__(self, role: Any) -> None:
        self.role = role
        self.last = role.params.get("last", 20)

    def handle(self, stream: str, batch: dict[str, Any]) -> dict[str, Any]:
        seen = self.role.state or {"batches": 0, "rewards": []}
        rewards = [*seen["rewards"], batch["reward_mean"]][-self.last :]
        self.role.state = {"batches": seen["batches"] + 1, "rewards": rewards}
        mean = sum(rewards) / len(rewards)
        return {"summary": {"batches": seen["batches"] + 1, "newest": batch["batch_id"], "reward_mean": mean}}
