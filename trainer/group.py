"""The ranks as one: process groups, and the few collectives the program itself needs.

Two groups span all ranks. The control group carries commands; its timeout is short, because rank 0 says something on it every few seconds.
The work group carries everything inside a command; its timeout is long, because ranks may have unequal shares.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from trainer import device
from trainer.spec import TrainerSpec

_FAULT_BYTES = 2048


class Refused(Exception):
    """A command that cannot be done, the same on every rank; nothing was changed. `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Spoiled(Refused):
    """A command that failed when something had been changed, the same on every rank: the weights here are of no version any more."""


class Group:
    """Join with torchrun's environment variables, or with the socket rank 0 inherited to hold the rendezvous."""

    def __init__(self, spec: TrainerSpec, rendezvous_fd: int | None = None) -> None:
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])
        if self.size != spec.world_size:
            raise ValueError(f"WORLD_SIZE is {self.size}, but the spec's tp·pp·cp·dp is {spec.world_size}: start that many ranks")
        self.device = device.here()
        backend = device.backend(self.device)
        timeout = timedelta(seconds=spec.work_timeout_s)
        if rendezvous_fd is None:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                self.size,
                is_master=self.rank == 0,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=rendezvous_fd if self.rank == 0 else None,
            )
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.control_timeout_s))
        parallel_state.initialize_model_parallel(
            spec.tp,
            spec.pp,
            context_parallel_size=spec.cp,
            expert_model_parallel_size=spec.ep,
            expert_tensor_parallel_size=1,  # an expert is whole on its rank
            distributed_timeout_minutes=max(1, int(spec.work_timeout_s // 60)),
        )
        torch.manual_seed(spec.seed)
        model_parallel_cuda_manual_seed(spec.seed)
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.tp_rank = parallel_state.get_tensor_model_parallel_rank()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.cp_rank = parallel_state.get_context_parallel_rank()
        self.last_stage = parallel_state.is_pipeline_last_stage()
        self.speaks = self.last_stage and self.tp_rank == 0
        """Whether this rank's tokens count in a sum over all ranks: tensor-parallel ranks and pipeline stages hold the same tokens."""
        indices = torch.zeros(self.size, dtype=torch.int64)
        indices[self.rank] = self.dp_rank
        dist.all_reduce(indices)
        replicas = [
            dist.new_group((indices == index).nonzero()[:, 0].tolist(), timeout=timeout, backend="gloo") for index in range(spec.dp)
        ]
        self._replica = replicas[self.dp_rank]

    def send(self, command: dict[str, Any] | None) -> None:
        """Rank 0 only. None is a sign of life."""
        data = b"" if command is None else json.dumps(command).encode()
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._control)
        if data:
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=self._control)

    def receive(self) -> dict[str, Any] | None:
        """Other ranks. Raises RuntimeError when rank 0 is gone, or silent for longer than the control timeout."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0, group=self._control)
        if not int(length):
            return None
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        command: dict[str, Any] = json.loads(data.numpy().tobytes())
        return command

    def agree(self, fault: tuple[int, str] | None = None) -> None:
        """Wait for all ranks. When any brings a fault, every rank raises the same Refused, the first rank's."""
        status = torch.zeros(self.size, dtype=torch.int64)
        if fault:
            status[self.rank] = fault[0]
        dist.all_reduce(status)
        if not status.any():
            return
        first = int(status.nonzero()[0])
        text = torch.zeros(_FAULT_BYTES, dtype=torch.uint8)
        if self.rank == first and fault:
            data = fault[1].encode()[:_FAULT_BYTES]
            text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(text, first)
        raise Refused(int(status[first]), text.numpy().tobytes().rstrip(b"\0").decode(errors="replace"))

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Over the ranks that speak; the result is on all."""
        value = value if self.speaks else torch.zeros_like(value)
        dist.all_reduce(value)
        return value

    def sum_in_replica(self, value: torch.Tensor) -> torch.Tensor:
        """Over the ranks that speak among those with this data-parallel index: they hold the same rows, each its own tokens of them."""
        value = value if self.speaks else torch.zeros_like(value)
        dist.all_reduce(value, group=self._replica)
        return value

    def maximum(self, value: torch.Tensor) -> torch.Tensor:
        """Over the ranks that speak; the result is on all."""
        value = value if self.speaks else torch.full_like(value, -torch.inf)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return value
