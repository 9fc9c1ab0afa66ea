"""Weights in and out: checkpoints from disk, buckets from the store, checksums of what is loaded.

Everything that arrives is checked whole before the first byte is copied, so a refused call changes nothing. SGLang 0.5.23 dies of a
wrong shape; here it is a ValueError. A name the model does not have is passed over with a warning, as SGLang does: comparing the sets
of names is the sender's job.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import hashlib
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rollout.engine.config import read_config
from rollout.engine.model import Model
from store import Lease, Ref, StoreError, open_store
from store.pieces import pieces

log = logging.getLogger(__name__)

# The store's views are read-only and torch knows no such tensor. Nothing here writes to one.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

# Four times as fast as a sha256, and without a second array, which numpy's and torch's comparisons make.
memcmp = ctypes.CDLL(None).memcmp
memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A whole weight, or (`start` is a number) its elements from there on, flat."""

    name: str
    tensor: Tensor
    start: int | None = None


def load_checkpoint(model: Model, directory: Path) -> None:
    """Fill every weight from the safetensors files of `directory`. ValueError when they do not fit this model; then nothing changed."""
    config = read_config(directory)
    if config.architecture != model.config.architecture:
        raise ValueError(
            f"{directory} holds a {config.architecture}, the engine runs a {model.config.architecture}; start another engine for it"
        )
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    missing = sorted(model.weights.keys() - tensors.keys())
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} weights of a {config.architecture}, the first is {missing[0]}; save it whole")
    # A checkpoint may be stored in another dtype than the engine computes in, and may repeat a tied head.
    copy_weights(model, [Arrival(name, tensors[name].to(model.dtype)) for name in model.weights])


def copy_weights(model: Model, arrivals: Iterable[Arrival]) -> None:
    """Copy each into the weight of its name, all or nothing. ValueError for a shape, range or dtype that does not fit."""
    copies: list[tuple[Tensor, Tensor]] = []
    for arrival in arrivals:
        weight = model.weights.get(arrival.name)
        if weight is None:
            log.warning("weight update: the model has no parameter %r; SGLang passes it over, and so does this engine", arrival.name)
        else:
            copies.append((_target(arrival, weight), arrival.tensor))
    for target, tensor in copies:
        assert target.is_contiguous(), "what is copied would go into a copy"
        np.copyto(_raw(target), _raw(tensor))  # the C library's copy, faster than torch's for large ones


def _target(arrival: Arrival, weight: Tensor) -> Tensor:
    """What of the weight the tensor replaces."""
    tensor, start = arrival.tensor, arrival.start
    if start is None:
        if tensor.shape == weight.shape and tensor.dtype == weight.dtype:
            return weight
        what = _words(tensor)
    else:
        end = start + tensor.numel()
        if tensor.dtype == weight.dtype and end <= weight.numel():
            return weight.view(-1)[start:end]
        what = f"elements {start} to {end} of a {str(tensor.dtype).removeprefix('torch.')}"
    raise ValueError(f"{arrival.name} arrived as {what}, the engine holds {_words(weight)}; nothing was copied. Send what it holds")


def copy_stored_weights(model: Model, entries: list[str]) -> None:
    """`entries`: one base64 JSON of a store Ref a rank, so exactly one here. Raises ValueError, for what the store says too."""
    if len(entries) != 1:
        raise ValueError(
            f"serialized_named_tensors has {len(entries)} entries; this engine is one rank and takes one, the base64 of a store reference"
        )
    with _bucket(entries[0]) as lease:
        copy_weights(model, _arrivals(lease))


def equal_to_stored(model: Model, entries: list[str]) -> list[str]:
    """The weights that are, byte for byte and to their last one, what lies in these buckets. Raises ValueError as `copy_stored_weights`."""
    seen: dict[str, int] = {}  # name → elements from the first on that are equal
    for entry in entries:
        with _bucket(entry) as lease:
            for arrival in _arrivals(lease):
                weight = model.weights.get(arrival.name)
                if weight is None or seen.get(arrival.name, 0) != (arrival.start or 0):
                    continue
                held, stored = _raw(_target(arrival, weight)), _raw(arrival.tensor)
                if memcmp(held.ctypes.data, stored.ctypes.data, stored.nbytes) == 0:
                    seen[arrival.name] = (arrival.start or 0) + arrival.tensor.numel()
    return [name for name, elements in seen.items() if elements == model.weights[name].numel()]


@contextmanager
def _bucket(entry: str) -> Iterator[Lease]:
    """The object that a base64 JSON of a Ref names. ValueError for what is none, cannot be read, or is damaged."""
    try:
        wire = json.loads(base64.b64decode(entry, validate=True))
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{entry[:60]!r} is not base64 of a store reference's JSON ({error})") from error
    ref = Ref.from_wire(wire)
    try:
        with open_store(ref.location).open(ref) as lease:
            yield lease
    except StoreError as error:
        raise ValueError(
            f"the bucket {ref.key!r} cannot be read ({type(error).__name__}: {error}); put it again and send the new reference"
        ) from error


def _arrivals(lease: Lease) -> list[Arrival]:
    return [Arrival(piece.name, _tensor(piece.data, piece.dtype), piece.start) for piece in pieces(lease)]


def _tensor(column: np.ndarray, dtype: str) -> Tensor:
    """A tensor over the column's own memory, which copy_ reads once."""
    tensor = torch.from_numpy(column)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def checksums(model: Model) -> dict[str, str]:
    """Hugging Face name → sha256 of the weight's contiguous bytes, in the dtype it is held in."""
    return {name: hashlib.sha256(_raw(tensor).data).hexdigest() for name, tensor in model.weights.items()}


def overall_checksum(sums: Mapping[str, str]) -> str:
    """SGLang's: of all names and sums, each pair as one string."""
    return hashlib.sha256("".join(f"{name}{sums[name]}" for name in sorted(sums)).encode()).hexdigest()


def _raw(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.uint8).numpy()


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
