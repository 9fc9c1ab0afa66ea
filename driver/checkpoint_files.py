"""A Hugging Face checkpoint's files without torch: which tensors it holds, and what a new one begins with.

safetensors: 8 bytes, the length of the header; the header, JSON, `{name: {dtype, shape, data_offsets}}`; the tensors' bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path

from store import TensorForm

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


def safetensors_head(tensors: Iterable[tuple[str, TensorForm, int]]) -> tuple[bytes, dict[str, int]]:
    """What such a file begins with, and where in it each tensor begins, for (name, form, size in bytes)."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, form, size_bytes in tensors:
        entries[name] = {"dtype": DTYPE_NAMES[form.dtype], "shape": form.shape, "data_offsets": (end, end + size_bytes)}
        begins[name] = end
        end += size_bytes
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    head = struct.pack("<Q", len(text)) + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def link_beside(model_path: Path, directory: Path) -> None:
    """Links in `directory` to every file of a checkpoint that is not its weights."""
    weights = {path for pattern in WEIGHT_FILES for path in model_path.glob(pattern)}
    for path in model_path.iterdir():
        if path.is_file() and path not in weights:
            (directory / path.name).symlink_to(path.absolute())
