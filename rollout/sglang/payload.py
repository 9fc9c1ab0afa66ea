"""What `/update_weights_from_tensor` of a real SGLang takes: a pickle that names tensors in shared memory. Written without torch.

SGLang unpickles with a list of allowed names (SafeUnpickler), so the pickle may call torch's own rebuild functions and the bucket's
classes, and nothing else. Those few calls are all this module can write; it reads no pickle. A bucket is one file of /dev/shm, laid out
as torch shares memory:

    0    int32     how many processes hold it: at 0 torch deletes it, so ours starts high
    64   the tensors' bytes, each at a multiple of 64

and the pickle says `{"flattened_tensor": uint8 tensor over the file, "metadata": [name, shape, dtype, start, end, size in bytes]}`.
"""

from __future__ import annotations

import base64
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEADER_BYTES = 64
ALIGNMENT_BYTES = 64
# torch adds one when a receiver maps the file and takes two away until it lets go, one of them for the sender.
HOLDERS = 2**30
REDUCTIONS = "torch.multiprocessing.reductions"
BUCKET_MODULE = "sglang.srt.weight_sync.tensor_bucket"


@dataclass(frozen=True)
class Placed:
    """One tensor's place in the file: `start` and `size_bytes` count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True)
class _Global:
    module: str
    name: str


@dataclass(frozen=True)
class _Call:
    function: _Global
    arguments: tuple[Any, ...]


def header() -> bytes:
    """The first HEADER_BYTES of the file."""
    return struct.pack("<i", HOLDERS).ljust(HEADER_BYTES, b"\0")


def place(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[list[Placed], int]:
    """Places for (name, dtype, shape, size in bytes), in this order, and the length of all of them in bytes, without the header."""
    placed, end = [], 0
    for name, dtype, shape, size_bytes in tensors:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        placed.append(Placed(name, dtype, shape, start, size_bytes))
        end = start + size_bytes
    return placed, end


def bucket_payload(shared_name: str, placed: Sequence[Placed], length_bytes: int, ranks: int = 1) -> list[str]:
    """`serialized_named_tensors` with `load_format: flattened_bucket`: the same entry for each tensor-parallel rank, each cuts its part.

    `shared_name` is the file's name in /dev/shm. It must stay there until the call is answered, and be this call's alone: a receiver
    that ends deletes, by torch's own watcher, every name it has opened.
    """
    handle = b"/" + shared_name.encode()
    untyped = _Global("torch", "UntypedStorage")
    # An empty manager: the receiver has its own look after what it has mapped.
    storage = _Call(_Global(REDUCTIONS, "rebuild_storage_filename"), (untyped, b"", handle, length_bytes))
    typed = _Call(_Global(REDUCTIONS, "rebuild_typed_storage"), (storage, _Global("torch", "uint8")))
    whole = (0, (length_bytes,), (1,), False)  # offset, shape, stride, requires_grad
    tensor = _Call(_Global(REDUCTIONS, "rebuild_tensor"), (_Global("torch", "Tensor"), typed, whole))
    bucket = {"flattened_tensor": tensor, "metadata": [_metadata(entry) for entry in placed]}
    return [base64.b64encode(b"\x80\x03" + _pickled(bucket) + pickle.STOP).decode()] * ranks


def _metadata(entry: Placed) -> _Call:
    shape = _Call(_Global("torch", "Size"), (entry.shape,))
    dtype = _Global("torch", entry.dtype)
    end = entry.start + entry.size_bytes
    return _Call(_Global(BUCKET_MODULE, "FlattenedTensorMetadata"), (entry.name, shape, dtype, entry.start, end, entry.size_bytes))


def _pickled(value: Any) -> bytes:
    """`value` in pickle's opcodes, protocol 3, without its frame. Only the types that occur here."""
    match value:
        case bool():
            return pickle.NEWTRUE if value else pickle.NEWFALSE
        case int():
            digits = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return pickle.LONG1 + bytes([len(digits)]) + digits
        case str():
            text = value.encode()
            return pickle.BINUNICODE + struct.pack("<I", len(text)) + text
        case bytes():
            return pickle.BINBYTES + struct.pack("<I", len(value)) + value
        case tuple():
            return pickle.MARK + b"".join(map(_pickled, value)) + pickle.TUPLE
        case list():
            return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_pickled, value)) + pickle.APPENDS
        case dict():
            items = b"".join(_pickled(key) + _pickled(item) for key, item in value.items())
            return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
        case _Global(module, name):
            return pickle.GLOBAL + f"{module}\n{name}\n".encode()
        case _Call(function, arguments):
            return _pickled(function) + _pickled(arguments) + pickle.REDUCE
    raise AssertionError(f"nothing here writes a {type(value).__name__}")
