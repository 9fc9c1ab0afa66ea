"""Does an engine hold the snapshot? Asked after its last bucket and before it may call the weights by the new version (A5).

The embedded engine names its tensors as the snapshot does, so each is compared with the trainer's own checksum. A real SGLang fuses
tensors (q, k and v are one), sums each with a hash of its own, and gives one sum over all: that is compared between engines and between
versions. Engines that passed with the same weights must agree, and a sum that stood for other weights means that the push had no effect,
however small the step was. That the weights are the trainer's is for the log-probs of the fixed sequence to say: every engine computes
them.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

from driver.snapshot import PushRefused, Snapshot
from rollout.capabilities import Capabilities

REMEMBERED = 1000


class Agreement(Protocol):
    def check(self, snapshot: Snapshot, reply: dict[str, Any]) -> None:
        """`reply` is what /weights_checker said. Raises PushRefused."""

    def passed(self, snapshot: Snapshot, reply: dict[str, Any]) -> None:
        """The engine has passed every other check. Raises PushRefused when it disagrees with one that did so meanwhile."""


class EachTensor:
    """Tensor by tensor, with the trainer's checksums."""

    def check(self, snapshot: Snapshot, reply: dict[str, Any]) -> None:
        for rank in reply.get("ranks", [{}]):
            held: dict[str, str] = rank.get("checksums", {})
            wrong = sorted(name for name in snapshot.checksums.keys() | held.keys() if held.get(name) != snapshot.checksums.get(name))
            if wrong:
                raise PushRefused(f"{len(wrong)} of {len(held)} tensors are not the snapshot's, the first is {wrong[0]}")

    def passed(self, snapshot: Snapshot, reply: dict[str, Any]) -> None:
        pass


class WholeEngine:
    """One sum an engine, among engines of one layout."""

    def __init__(self) -> None:
        self._sum_of: dict[str, str] = {}  # digest of a snapshot's checksums → the engines' sum, the oldest first
        self._weights_of: dict[str, str] = {}  # and back

    def check(self, snapshot: Snapshot, reply: dict[str, Any]) -> None:
        held = reply.get("per_engine_checksum")
        if not isinstance(held, str) or not held:
            raise PushRefused("the engine gave no checksum of its weights")
        weights = _digest(snapshot)
        expected = self._sum_of.get(weights, held)
        if held != expected:
            raise PushRefused(f"the engine's weights sum to {held[:16]}, those of the engines with the same version to {expected[:16]}")
        if self._weights_of.get(held, weights) != weights:
            raise PushRefused(f"the engine still holds other weights: it held {held[:16]} before this push, for a version that differs")

    def passed(self, snapshot: Snapshot, reply: dict[str, Any]) -> None:
        self.check(snapshot, reply)
        weights, held = _digest(snapshot), str(reply["per_engine_checksum"])
        self._sum_of[weights], self._weights_of[held] = held, weights
        if len(self._sum_of) > REMEMBERED:
            oldest = next(iter(self._sum_of))
            del self._weights_of[self._sum_of.pop(oldest)]


class Agreements:
    """Which an engine's sums are held to: real servers of one layout share one."""

    def __init__(self) -> None:
        self._each_tensor = EachTensor()
        self._whole: dict[tuple[int, int], WholeEngine] = {}

    def of(self, capabilities: Capabilities | None) -> Agreement:
        if capabilities is None or capabilities.embedded:
            return self._each_tensor
        return self._whole.setdefault((capabilities.tensor_parallel, capabilities.expert_parallel), WholeEngine())


def _digest(snapshot: Snapshot) -> str:
    """The same for two versions exactly when all their tensors are the same bytes."""
    lines = (f"{name}={snapshot.checksums[name]}\n" for name in sorted(snapshot.checksums))
    return hashlib.sha256("".join(lines).encode()).hexdigest()
