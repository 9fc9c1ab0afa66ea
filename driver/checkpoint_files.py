"""A Hugging Face checkpoint's files without torch: which tensors it holds, and a new one beside its other files.

safetensors: 8 bytes, the length of the header; the header, JSON, `{name: {dtype, shape, data_offsets}}`; the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

TensorShapes = dict[str, tuple[int, ...]]
DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin")


def tensor_shapes(directory: Path) -> TensorShapes:
    """Name → shape of every tensor in a checkpoint's safetensors files; only their headers are read."""
    found: TensorShapes = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (length_bytes,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length_bytes))
        found |= {name: tuple(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
    return found


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray], dtypes: Mapping[str, str]) -> None:
    """`dtypes` by name; bfloat16 comes as uint16, of which the bytes are the same."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": tensor.shape, "data_offsets": (end, end + tensor.nbytes)}
        end += tensor.nbytes
    head = json.dumps(entries).encode()
    head = head.ljust(-(-len(head) // 8) * 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def link_beside(model_path: Path, directory: Path) -> None:
    """Links in `directory` to every file of a checkpoint that is not its weights."""
    weights = {path for pattern in WEIGHT_FILES for path in model_path.glob(pattern)}
    for path in model_path.iterdir():
        if path.is_file() and path not in weights:
            (directory / path.name).symlink_to(path.absolute())
