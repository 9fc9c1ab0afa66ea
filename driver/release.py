"""The release of the KV cache in a push, and whether it gave memory back: a step that had no effect is reported as skipped, never as done.

A server without the memory saver keeps its cache and says 200. One with it is believed when the GPU memory of its processes, as nvidia-smi
tells it, falls by at least a tenth of what the server says its cache takes. The embedded engine gives its cache back to the system.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from typing import Any

import psutil

from rollout.pool import EngineSlot

LEAST_SHARE = 0.1  # of the cache: less than that is noise beside what loading weights takes
SMI_S = 5.0
SMI = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
MIB = 1 << 20
GIB = 1 << 30


class Unknown(Exception):
    """The question has no answer here; says why."""


class Release:
    """One push's. Made before the gate is shut: what was used before is asked once, whatever the attempts."""

    def __init__(self, slot: EngineSlot, skipped: str | None, before_bytes: int = 0, cache_bytes: int = 0) -> None:
        self._slot = slot
        self._skipped = skipped
        self._before_bytes = before_bytes
        self._cache_bytes = cache_bytes

    @classmethod
    async def of(cls, slot: EngineSlot) -> Release:
        """Raises EngineError."""
        capabilities = slot.capabilities
        if capabilities is None or capabilities.embedded:
            return cls(slot, None)
        if not capabilities.memory_saver:
            return cls(slot, "release: SGLang was started without --enable-memory-saver, its KV cache stays in memory")
        try:
            return cls(slot, None, await gpu_bytes(_pid(slot)), _cache_bytes(await slot.client.server_info()))
        except Unknown as unknown:
            return cls(slot, f"release: could not be checked, {unknown}")

    async def do(self) -> str | None:
        """Release; the reason when that counts as skipped. Legal in a pause, twice in a row too. Raises EngineError."""
        await self._slot.client.release(["kv_cache"])
        if self._skipped is not None or not self._cache_bytes:
            return self._skipped
        try:
            fell_bytes = self._before_bytes - await gpu_bytes(_pid(self._slot))
        except Unknown as unknown:
            return f"release: could not be checked, {unknown}"
        if fell_bytes >= LEAST_SHARE * self._cache_bytes:
            return None
        return f"release: memory did not fall by a tenth of the {self._cache_bytes / GIB:.2f} GiB that the KV cache takes"


def _pid(slot: EngineSlot) -> int:
    if not slot.client.on_this_host:
        raise Unknown("the engine is on another host")
    if slot.pid is None:
        raise Unknown("the engine was not started here, and its processes are not known")
    return slot.pid


async def gpu_bytes(pid: int) -> int:
    """What the process and its descendants hold on all GPUs. Raises Unknown, within seconds."""
    try:
        parent = psutil.Process(pid)
        family = {pid, *(child.pid for child in parent.children(recursive=True))}
    except psutil.Error as error:
        raise Unknown(f"process {pid} is gone") from error
    used = [size_bytes for owner, size_bytes in await _used_by_process() if owner in family]
    if not used:
        # In a container nvidia-smi tells the host's process ids, or none.
        raise Unknown("nvidia-smi lists no process of this engine")
    return sum(used)


async def _used_by_process() -> list[tuple[int, int]]:
    """(process id, bytes) for each process on each GPU."""
    try:
        smi = await asyncio.create_subprocess_exec(*SMI, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    except OSError as error:
        raise Unknown(f"nvidia-smi can not be run ({error.strerror})") from error
    try:
        async with asyncio.timeout(SMI_S):
            said, _ = await smi.communicate()
    except TimeoutError as error:
        raise Unknown(f"nvidia-smi gave no answer in {SMI_S:g} s") from error
    finally:
        if smi.returncode is None:
            smi.kill()
            await smi.wait()
    if smi.returncode:
        raise Unknown(f"nvidia-smi ended with exit code {smi.returncode}")
    try:
        rows = [line.split(",") for line in said.decode().splitlines() if line.strip()]
        return [(int(pid), int(used_mib) * MIB) for pid, used_mib in rows]
    except ValueError as error:  # "[N/A]", where the driver may not say
        raise Unknown("nvidia-smi does not tell the memory of processes") from error


def _cache_bytes(server_info: dict[str, Any]) -> int:
    """Of one GPU, by what /server_info says; at least what the GPUs of a server hold together."""
    try:
        cache_bytes = int(sum(float(state["memory_usage"]["kvcache"]) for state in server_info["internal_states"]) * GIB)
    except (KeyError, TypeError, ValueError) as error:
        raise Unknown("the engine does not say how much memory its KV cache takes") from error
    if cache_bytes <= 0:
        raise Unknown("the engine does not say how much memory its KV cache takes")
    return cache_bytes
