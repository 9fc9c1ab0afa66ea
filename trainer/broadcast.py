"""The sending side of a process group: this process is rank 0, the tensor-parallel ranks of one engine are 1, 2, …

The engine is told an address and a name, and joins with torch's own recipe (a TCPStore at the address, keys under the name). The store
listens on a port that the system chose, on that one address, before anybody is told. What blocks (joining, sending) is done in a thread
of the group's own, and ends with the group's time-out at the latest. The first thing that fails ends the group: its sockets close, and
an engine that waits for bytes is told so by the kernel instead of by torch's half hour.
"""

from __future__ import annotations

import socket
import warnings
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from store import Ref, open_store
from store.pieces import pieces

T = TypeVar("T")
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # the store's views; nothing here writes to one
KEPT = 3  # staged buckets: the one that is sent, the next, and one for engines that are behind


def process_group(backend: str, store: Any, name: str, rank: int, size: int, address: str, timeout_s: float) -> Any:
    """Joins; blocks until all have. The keys in `store` are those that torch's own helper uses, so a server of any kind may be the peer.

    Raises RuntimeError (torch's DistError among them) when somebody does not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    prefix = PrefixStore(f"{name}/", PrefixStore(name, store))
    if backend == "gloo":
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return ProcessGroupGloo(PrefixStore("cpu/", prefix), rank, size, options)
    # Unchecked: it needs a GPU at both ends.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    return ProcessGroupNCCL(PrefixStore("cuda/", prefix), rank, size, options)


# The store's views are read-only and torch knows no such tensor. Nothing here writes to one.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """From rank 0 to all. Blocks until it is done, the group's time-out, or a peer that is gone (RuntimeError)."""
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()  # NCCL's wait is the stream's, not ours


class SendingGroup:
    """One engine's group. `joined` and what `send` returns are futures; all of it may be called from one thread that must not block."""

    def __init__(self, name: str, size: int, backend: str, address: str, timeout_s: float) -> None:
        """Listens. `size` counts this process. Raises OSError when `address` is not one of this host's."""
        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.name = name
        self.port: int = listener.getsockname()[1]
        self._timeout_s = timeout_s
        self._group: Any = None
        self._ended = self._closed = False
        self._store: TCPStore | None = None
        self._thread = ThreadPoolExecutor(1, name)
        self.joined = self._thread.submit(self._guarded, lambda: self._join(listener, size, backend, address))

    def send(self, staged: Future[torch.Tensor]) -> Future[None]:
        """Broadcast these bytes as soon as they are there. An error of theirs, too, ends the group. RuntimeError after `close`."""
        return self._thread.submit(self._guarded, lambda: broadcast(self._group, staged.result(self._timeout_s)))

    def close(self) -> None:
        """Ends the group, after what its thread is doing. Idempotent."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._end)
            self._thread.shutdown(wait=False)

    # ---- in the group's thread ------------------------------------------------------------------------------------------

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            if self._ended:
                raise RuntimeError("the group has ended")
            return action()
        except Exception as error:
            reason = str(error) or type(error).__name__
        self._end()
        raise RuntimeError(reason)  # not the first: whoever keeps that one keeps its frames, and with them the group and its sockets

    def _join(self, listener: socket.socket, size: int, backend: str, address: str) -> None:
        timeout = timedelta(seconds=self._timeout_s)
        handle = listener.detach()  # which is the store's from here on
        self._store = TCPStore(address, self.port, None, True, timeout, wait_for_workers=False, master_listen_fd=handle)
        self._group = process_group(backend, self._store, self.name, 0, size, address, self._timeout_s)

    def _end(self) -> None:
        """Nobody else holds the group or the store, so this closes their sockets."""
        self._ended = True
        group, self._group, self._store = self._group, None, None
        if group is not None and group.name() == "nccl":
            group.abort()


class Stage:
    """Buckets of the store as they are sent: flat, on the device. Made in one thread, ahead of the sending, once for all engines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, "stage")
        self._made: OrderedDict[tuple[str, int], Future[torch.Tensor]] = OrderedDict()

    def get(self, push: str, number: int, refs: list[Ref], names: list[str]) -> Future[torch.Tensor]:
        """Bucket `number` of a push, a uint8 tensor [bytes]. It holds a StoreError when the store has it no longer."""
        key = (push, number)
        if key not in self._made:
            self._made[key] = self._thread.submit(self._stage, refs, names)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        return self._made[key]

    def forget(self, push: str) -> None:
        for key in [key for key in self._made if key[0] == push]:
            del self._made[key]

    def _stage(self, refs: list[Ref], names: list[str]) -> torch.Tensor:
        with ExitStack() as stack:
            parts = [torch.from_numpy(part) for part in tensor_bytes(refs, names, stack)]
            on_cuda = self._device.type == "cuda"
            flat = torch.empty(sum(len(part) for part in parts), dtype=torch.uint8, pin_memory=on_cuda)
            torch.cat(parts, out=flat)
        if not on_cuda:
            return flat
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):  # unchecked: it needs a GPU
            sent = flat.to(self._device, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        return sent


def tensor_bytes(refs: list[Ref], names: list[str], stack: ExitStack) -> list[np.ndarray]:
    """The bytes of the named tensors in this order, uint8, as views of the store's objects `refs`, valid while `stack` is open.

    One that was cut is several views in a row.
    """
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for ref in refs:
        for piece in pieces(stack.enter_context(open_store(ref.location).open(ref))):
            found[piece.name].append(np.ascontiguousarray(piece.data).reshape(-1).view(np.uint8))
    return [part for name in names for part in found[name]]
