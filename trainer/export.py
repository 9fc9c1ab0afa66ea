"""The weights on their way out, under Hugging Face's names.

Pipeline: every rank drains mbridge's generator (each tensor is a collective) → rank 0 checks that a tensor is finite → tensors gather in a
bucket until the next would not fit → the bucket becomes one object of the store. A tensor larger than a bucket is cut into parts, which
have buckets of their own. What a bucket holds is a copy: the trainer may go on.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from mbridge.core.util import unwrap_model

from store import Column, Exists, Ref, StoreError, open_store
from store.pieces import cut
from trainer.group import Group
from trainer.model import Model
from trainer.wire import TensorFacts, WireRef


def hf_tensors(model: Model, instead: Callable[[torch.nn.Parameter], torch.Tensor] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and contiguous tensor, each name once (a tied embedding is one). All ranks together, to the end.

    Of the weights, or of what `instead` gives for each parameter, in its shape. A tensor may share memory with the weights: use it
    before the next step.
    """
    seen = set()
    module = unwrap_model(model.chunk)
    with torch.no_grad():
        for name, tensor in model.bridge.export_weights([module if instead is None else _StandIn(module, instead)]):
            if name not in seen:
                seen.add(name)
                yield name, tensor.detach().contiguous()


class _StandIn:
    """A model as mbridge's export sees it, with another tensor in each parameter's place.

    The parameters themselves are left alone: to give one data of another dtype would cut it off from the hooks that gather its gradient.
    """

    def __init__(self, module: Any, instead: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        self._module, self._instead = module, instead
        self.decoder = module.decoder

    def state_dict(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._module.state_dict()
        return state

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Walked twice by mbridge, first for the names alone: with collectives in `instead`, they run twice."""
        for name, parameter in self._module.named_parameters():
            tensor = self._instead(parameter).view(parameter.shape)  # an object of its own, for the attributes
            for attribute in ("tensor_model_parallel", "partition_dim"):
                setattr(tensor, attribute, getattr(parameter, attribute))
            yield name, tensor


def write_buckets(
    model: Model, group: Group, store_location: str, key_prefix: str, bucket_bytes: int
) -> tuple[list[WireRef], dict[str, TensorFacts]]:
    """Buckets of at most `bucket_bytes` each (`store/pieces.py` says what lies in them); keys `key_prefix/0`, `/1`, ...

    Written by rank 0; the other ranks return nothing. Raises Refused on all ranks when a tensor is not finite or the store will not take
    a bucket; what was written before that is freed.
    """
    writer = _Buckets(store_location, key_prefix, bucket_bytes) if group.rank == 0 else None
    for name, tensor in hf_tensors(model):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.flush()
    group.agree(writer.fault if writer is not None else None)
    return ([WireRef.of(ref) for ref in writer.refs], writer.facts) if writer is not None else ([], {})


class _Buckets:
    """A fault is kept, not raised: the generator must be drained on every rank before all can refuse together."""

    def __init__(self, location: str, key_prefix: str, bucket_bytes: int) -> None:
        self._location, self._key_prefix, self._bucket_bytes = location, key_prefix, bucket_bytes
        self._columns: dict[str, np.ndarray | Column] = {}
        self._used = 0
        self.refs: list[Ref] = []
        self.facts: dict[str, TensorFacts] = {}
        self.fault: tuple[int, str] | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.fault:
            return
        # NaN and infinity show in the extremes: one pass and no array of answers, six times as fast as isfinite.
        if not all(math.isfinite(extreme) for extreme in torch.aminmax(tensor)):
            return self._fail(409, f"the weights are not finite: {name} holds NaN or infinity. Resume from the last checkpoint")
        if self._columns and self._used + tensor.nbytes > self._bucket_bytes:
            self.flush()
        column, dtype = as_column(tensor)
        data = column.data if isinstance(column, Column) else column
        digest = hashlib.sha256(data.data).hexdigest()
        self.facts[name] = TensorFacts(shape=list(tensor.shape), dtype=dtype, sha256=digest)
        if tensor.nbytes <= self._bucket_bytes:
            self._columns[name] = column
            self._used += tensor.nbytes
            return
        for part_name, part in cut(name, column, self._bucket_bytes):
            self._columns[part_name] = part
            self.flush()

    def flush(self) -> None:
        if self.fault or not self._columns:
            return
        key = f"{self._key_prefix}/{len(self.refs)}"
        try:
            self.refs.append(self._put(key))
        except StoreError as error:
            self._fail(507, f"the store would not take {key}: {error}")
        self._columns, self._used = {}, 0

    def _put(self, key: str) -> Ref:
        store = open_store(self._location)
        try:
            return store.put(key, self._columns)
        except Exists:
            # From an earlier attempt at the same snapshot, whose end nobody saw.
            store.free([Ref(key, 0, self._location)])
            return store.put(key, self._columns)

    def _fail(self, status: int, message: str) -> None:
        self.fault = (status, message)
        if self.refs:
            open_store(self._location).free(self.refs)


def as_column(tensor: torch.Tensor) -> tuple[np.ndarray | Column, str]:
    """A tensor as the store takes it, and its dtype's name."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        return Column(tensor.view(torch.uint16).numpy(), "bfloat16"), "bfloat16"
    return tensor.numpy(), str(tensor.dtype).removeprefix("torch.")
