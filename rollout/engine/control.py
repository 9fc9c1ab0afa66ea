"""What an operator asks of the loop: pauses, memory, weights, versions. Every function here runs in the loop thread, between two steps.

A refusal is a value (`Outcome(False, why)`, HTTP 400); what would kill a real SGLang 0.5.23 raises Fatal (HTTP 500) and changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout.engine.scheduler import Scheduler
from rollout.engine.weights import Arrival, checksums, copy_stored_weights, copy_weights, equal_to_stored, load_checkpoint

log = logging.getLogger(__name__)

MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
STORE_FORMAT = "headrace_store"


class Fatal(Exception):
    """A call that a real SGLang 0.5.23 does not survive."""


@dataclass(frozen=True, slots=True)
class Outcome:
    success: bool
    message: str


class Control:
    """One engine's switches. `released` holds the memory tags given back; `session_open` says whether weights may be sent."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.released: set[str] = set()
        self.session_open = False

    def pause(self, mode: str) -> None:
        """ "in_place" only stops stepping. "retract" also sends running requests back to the queue: their KV is gone, their tokens stay."""
        scheduler = self.scheduler
        scheduler.paused = True
        if mode == "retract":
            for request in scheduler.running:
                request.num_retractions += 1
            scheduler.waiting.extendleft(reversed(scheduler.running))
            scheduler.running.clear()

    def resume_loop(self) -> None:
        self.scheduler.paused = False

    def slow_down(self, forward_sleep_s: float | None) -> None:
        self.scheduler.forward_sleep_s = forward_sleep_s or 0.0

    def flush(self) -> Outcome:
        """There is no cache across requests to flush (a push can never meet old entries); the refusal is SGLang's."""
        if self._idle():
            return Outcome(True, "")
        scheduler = self.scheduler
        log.info("flush refused: %d requests run and %d wait", len(scheduler.running), len(scheduler.waiting))
        return Outcome(False, "Flush cache failed.\n")

    def _idle(self) -> bool:
        scheduler = self.scheduler
        return not scheduler.running and (scheduler.paused or not scheduler.waiting)

    def release_memory(self, tags: list[str] | None) -> None:
        """Gives the KV cache's memory back to the system. Weights stay in memory: this engine plays a server without the memory saver."""
        if not self._idle():
            scheduler = self.scheduler
            raise fatal(
                f"/release_memory_occupation while {len(scheduler.running)} requests run and {len(scheduler.waiting)} wait; "
                "pause with mode abort or retract first"
            )
        tags = tags or list(MEMORY_TAGS)
        self.released.update(tags)
        if "kv_cache" in tags:
            self.scheduler.cache.release()

    def resume_memory(self, tags: list[str] | None) -> None:
        tags = tags or list(MEMORY_TAGS)
        held = [tag for tag in tags if tag not in self.released]
        if held:
            raise fatal(
                f"/resume_memory_occupation of {', '.join(held)}, which is not released; name only what is (no tags means all three)"
            )
        self.released.difference_update(tags)
        if "kv_cache" in tags:
            self.scheduler.cache.allocate()

    def begin_update(self) -> Outcome:
        if self.session_open:
            return Outcome(False, "a weight-update session is already open; call end_weight_update() first")
        self.session_open = True
        return Outcome(True, "Success")

    def end_update(self) -> Outcome:
        if not self.session_open:
            return Outcome(False, "no weight-update session is open; call begin_weight_update() first")
        self.session_open = False
        return Outcome(True, "Success")

    def update_from_store(self, entries: list[str], load_format: str | None, flush_cache: bool, weight_version: str | None) -> Outcome:
        if not self.session_open:
            return Outcome(False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        if load_format != STORE_FORMAT:
            return Outcome(
                False,
                f"load_format {load_format!r}: the embedded engine loads no pickles; put the tensors in the store and send "
                f'load_format "{STORE_FORMAT}" with the base64 of the store reference\'s JSON',
            )
        try:
            self._refuse_released_weights()
            copy_stored_weights(self.scheduler.model, entries)
        except ValueError as error:
            log.error("update_weights_from_tensor refused, nothing was copied: %s", error)
            return Outcome(False, str(error))
        return self._updated("Success", flush_cache, weight_version)

    def may_receive(self) -> Outcome:
        """Asked before anything is received from a group."""
        if not self.session_open:
            return Outcome(False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")
        return Outcome(True, "")

    def update_received(self, tensors: Mapping[str, Tensor], flush_cache: bool, weight_version: str | None) -> Outcome:
        try:
            self._refuse_released_weights()
            copy_weights(self.scheduler.model, [Arrival(name, tensor) for name, tensor in tensors.items()])
        except ValueError as error:
            log.error("update_weights_from_distributed refused, nothing was copied: %s", error)
            return Outcome(False, f"Failed to update parameter online: {error}")
        return self._updated("Succeeded to update parameter online.", flush_cache, weight_version)

    def update_from_disk(self, model_path: str, flush_cache: bool, weight_version: str | None) -> Outcome:
        try:
            self._refuse_released_weights()
            load_checkpoint(self.scheduler.model, Path(model_path))
        except ValueError as error:
            log.error("update_weights_from_disk refused, nothing was loaded: %s", error)
            return Outcome(False, f"Failed to get weights iterator: {error}")
        return self._updated("Succeeded to update model weights.", flush_cache, weight_version)

    def _refuse_released_weights(self) -> None:
        if "weights" in self.released:
            raise ValueError('the memory of the weights is released; call /resume_memory_occupation with tags ["weights"] first')

    def _updated(self, message: str, flush_cache: bool, weight_version: str | None) -> Outcome:
        """The weights are in. The version counts from this step on even if the flush that was asked for is refused, as in SGLang."""
        if weight_version is not None:
            self.set_version(weight_version)
        if flush_cache and not self._idle():
            return Outcome(
                False,
                "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                "Retract or finish them, then call /flush_cache.",
            )
        return Outcome(True, message)

    def set_version(self, version: str) -> None:
        self.scheduler.weight_version = version

    def checksums(self, skipped: list[str]) -> dict[str, str]:
        """Of all weights but those whose name holds one of the `skipped` strings."""
        return {name: value for name, value in checksums(self.scheduler.model).items() if not any(part in name for part in skipped)}

    def equal_to_stored(self, entries: list[str]) -> list[str]:
        return equal_to_stored(self.scheduler.model, entries)

    def weight(self, name: str, rows: int) -> list[Any]:
        """The first rows of a weight, as numbers. ValueError where SGLang has none to give: its Qwen models lack the method."""
        model = self.scheduler.model
        if model.config.architecture != "LlamaForCausalLM" or name not in model.weights:
            raise ValueError("Get parameter by name failed")
        return model.weights[name][:rows].float().tolist()


def fatal(call: str) -> Fatal:
    message = f"a real SGLang 0.5.23 dies of this call, so the embedded engine refuses it: {call}"
    log.error(message)
    return Fatal(message)
