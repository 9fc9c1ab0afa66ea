"""One version of the weights on its way to the engines, and what a push may say about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.version import Version


@dataclass(frozen=True)
class Snapshot:
    """An immutable copy of version `version` in the store, outside the trainer's processes."""

    run_id: str
    epoch: int
    version: int
    buckets: tuple[dict[str, Any], ...]
    checksums: dict[str, str]  # HF tensor name -> sha256 of its bytes
    canary_ids: tuple[int, ...]
    canary_log_probs: tuple[float, ...]

    def label(self, life: int) -> Version:
        """What the engine is told to call these weights; a respawned engine no longer says it, and no other engine does."""
        return Version(self.run_id, self.epoch, self.version, life)


class PushRefused(RuntimeError):
    """The engine answered, and what it holds is not the snapshot."""


class MadeTokens(PushRefused):
    """It was refused when it ran again: what it made carries the version's name, so that name is not given to this engine a second time."""


class SnapshotGone(RuntimeError):
    """The snapshot's bytes are not in the store: a trainer that came back is making the version anew."""


class PushImpossible(RuntimeError):
    """No engine could take this snapshot. A sentence for the user."""
