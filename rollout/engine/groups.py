"""Process groups, the receiving side: SGLang's recipe for joining one, and its words for what goes wrong.

A real server joins and receives in its scheduler, which then does nothing else, for torch's half hour if need be. Here it is done in
threads beside the loop, one call after the other, and each is bounded: generation, health and the end of the process never wait for it.
"""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from rollout.engine.control import Outcome, fatal

T = TypeVar("T")
TIMEOUT = timedelta(seconds=120)  # longer than any sender's own


class Groups:
    """Those this engine is a member of, by name. Calls wait for each other, as in SGLang's scheduler."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}
        self._turn = asyncio.Lock()

    async def join(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> Outcome:
        if not name:
            raise fatal("/init_weights_update_group with an empty group_name; give one")
        async with self._turn:
            try:
                if name in self._groups:
                    raise ValueError("The specified group name has already been created, please use a different group name")
                self._groups[name] = await _in_thread(lambda: _join(address, port, rank, size, name, backend))
            except (RuntimeError, ValueError) as error:
                return Outcome(False, f"Failed to initialize custom process group: {error}.")
            return Outcome(True, "Succeeded to initialize custom process group.")

    async def leave(self, name: str) -> Outcome:
        async with self._turn:
            if self._groups.pop(name, None) is None:
                return Outcome(False, "The group to be destroyed does not exist.")
            return Outcome(True, "Succeeded to destroy custom process group.")

    async def receive(self, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]], flat: bool) -> dict[str, Tensor]:
        """One broadcast a tensor, or with `flat` one of all their bytes. ValueError in SGLang's words, whatever was wrong."""
        async with self._turn:
            try:
                if name not in self._groups:
                    raise ValueError(f"Group {name} not in {list(self._groups)}. Please call `init_weights_update_group` first.")
                kinds = [_dtype(dtype) for dtype in dtypes]
                return await _in_thread(lambda: (_receive_flat if flat else _receive_each)(self._groups[name], names, kinds, shapes))
            except (RuntimeError, ValueError) as error:
                raise ValueError(f"Failed to receive weights: {error}") from error


def _join(address: str, port: int, rank: int, size: int, name: str, backend: str) -> Any:
    """Blocks until all have joined. RuntimeError when they do not, ValueError for what this engine cannot join."""
    if backend == "nccl":
        raise ValueError("Distributed package doesn't have NCCL built in")
    if backend != "gloo":
        raise ValueError(f"Unknown backend type {backend}")
    store = TCPStore(address, port, size, False, TIMEOUT)
    keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=_own_address(address, port))]
    options._timeout = TIMEOUT
    return ProcessGroupGloo(keys, rank, size, options)


def _own_address(address: str, port: int) -> str:
    """Of this host, on the way to the sender, which must find it too: the host's name may mean another one, or none."""
    family, kind, protocol, _, peer = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"module 'torch' has no attribute '{name}'")
    return found


def _receive_each(group: Any, names: list[str], dtypes: list[torch.dtype], shapes: list[list[int]]) -> dict[str, Tensor]:
    received = {}
    for name, dtype, shape in zip(names, dtypes, shapes, strict=False):
        received[name] = torch.empty(shape, dtype=dtype)
        _broadcast(group, received[name])
    return received


def _receive_flat(group: Any, names: list[str], dtypes: list[torch.dtype], shapes: list[list[int]]) -> dict[str, Tensor]:
    places: list[tuple[str, torch.dtype, list[int], int, int]] = []
    end = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if min(shape, default=0) < 0:
            raise ValueError(f"Negative dimension in received tensor {name}: {torch.Size(shape)}")
        if end % dtype.itemsize:
            raise ValueError(f"Unaligned received tensor {name}: byte offset {end}, dtype {dtype}")
        start, end = end, end + math.prod(shape) * dtype.itemsize
        places.append((name, dtype, shape, start, end))
    if not places:
        raise ValueError("Cannot create empty tensor bucket")
    flat = torch.empty(end, dtype=torch.uint8)
    _broadcast(group, flat)
    return {name: flat[start:stop].view(dtype).reshape(shape) for name, dtype, shape, start, stop in places}


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()


async def _in_thread(action: Callable[[], T]) -> T:
    """In a thread that does not hold up the end of the process, as one of the event loop's own would."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = action()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="process group", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(future))
