"""The bytes of one object: a fixed preamble, the column table, then each column on a 64-byte boundary.

    preamble (32 bytes)  magic · format version · table length · object length · CRC-32 of the table · schema version
    table                msgspec JSON: [{name, dtype, shape, offset}, …]
    columns              little-endian, C order; what lies in the gaps is nobody's, and may be of an older object in the same file

`read_table` accepts nothing it cannot vouch for: another magic, a newer version of the format or of the schema, a length that is not the
file's, a table that does not match its checksum, or a column that reaches past the end is `Damaged`, never an array of the wrong bytes.
Format 1 had no schema version; what it holds is of schema 1.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from store.base import SCHEMA_VERSION, Column, Damaged, Lease, Ref, Value

MAGIC = b"HEADRACE"
VERSION = 2
ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
NAME_LIMIT_BYTES = 255
_PREAMBLE = struct.Struct("<8sIIQII")
_PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
_NUMPY_OF = {name: np.dtype(name).newbyteorder("<") for name in _PLAIN} | {"bfloat16": np.dtype("<u2")}


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where one column lies: `offset` counts from the start of the object."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _NUMPY_OF[self.dtype].itemsize


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Entry]).decode


def aligned(size_bytes: int, to: int = ALIGNMENT_BYTES) -> int:
    return -(-size_bytes // to) * to


def quoted(key: str) -> str:
    """A key as a name without spaces, slashes or a leading dot; `urllib.parse.unquote` gives it back. Raises ValueError."""
    if not isinstance(key, str) or not key:
        raise ValueError(f"a key must be a non-empty string, not {key!r}")
    name = quote(key, safe="")
    if name.startswith("."):
        name = "%2E" + name[1:]
    if len(name) > NAME_LIMIT_BYTES:
        raise ValueError(f"the key {key[:60]!r}… is {len(name)} bytes long once quoted, {NAME_LIMIT_BYTES} are allowed; shorten it")
    return name


def encode(columns: Mapping[str, Value]) -> tuple[bytes, list[tuple[int, np.ndarray]], int]:
    """The head (preamble and table), each column's array with its offset, and the object's length in bytes."""
    arrays: dict[str, tuple[str, np.ndarray]] = {}
    for name, column in columns.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"a column's name must be a non-empty string, not {name!r}")
        arrays[name] = _typed(name, column)
    return _lay_out(arrays)


def occupied_bytes(fields: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """What an object with these columns, each (dtype, shape), would take up in a store: what a reservation must count.

    Offsets and lengths are digits in the table, so a table for the largest shapes is never shorter than that of the object which lands.
    """
    entries = {}
    for name, (dtype, shape) in fields.items():
        if dtype not in _NUMPY_OF:
            raise ValueError(f"column {name!r} has dtype {dtype!r}; use one of {', '.join(_NUMPY_OF)}")
        entries[name] = (dtype, np.broadcast_to(np.zeros((), _NUMPY_OF[dtype]), shape))
    return aligned(_lay_out(entries)[2], PAGE_BYTES)


def head_bytes(buffer: Any) -> int:
    """How many of an object's first bytes `read_table` looks at; what is no object is as long as its preamble."""
    magic, _, table_bytes, _, _, _ = _PREAMBLE.unpack_from(buffer)
    return _PREAMBLE.size + (table_bytes if magic == MAGIC else 0)


def read_table(buffer: Any, size_bytes: int, source: str) -> list[Entry]:
    """The column table of the object in `buffer`, whose file is `size_bytes` long. Raises Damaged, naming `source`."""
    if size_bytes < _PREAMBLE.size:
        raise Damaged(f"{source} is {size_bytes} bytes long, too short to be a stored object")
    magic, version, table_bytes, object_bytes, checksum, schema = _PREAMBLE.unpack_from(buffer)
    if magic != MAGIC:
        raise Damaged(f"{source} is not an object of this store (it begins with {bytes(magic)!r}); remove it")
    if not 1 <= version <= VERSION:
        raise Damaged(f"{source} has format version {version}, this program reads 1 to {VERSION}; use the release that wrote it")
    if schema > SCHEMA_VERSION or (schema == 0) != (version == 1):
        raise Damaged(f"{source} has schema version {schema}, this program reads 1 to {SCHEMA_VERSION}; use the release that wrote it")
    if object_bytes != size_bytes or _PREAMBLE.size + table_bytes > size_bytes:
        raise Damaged(f"{source} is {size_bytes} bytes long but was written with {object_bytes}: it is cut short or overwritten")
    table = bytes(buffer[_PREAMBLE.size : _PREAMBLE.size + table_bytes])
    if zlib.crc32(table) != checksum:
        raise Damaged(f"the column table of {source} does not match its checksum")
    try:
        entries = _decode(table)
    except msgspec.MsgspecError as error:
        raise Damaged(f"the column table of {source} cannot be read: {error}") from error
    for entry in entries:
        if entry.dtype not in _NUMPY_OF:
            raise Damaged(f"column {entry.name!r} of {source} has the unknown dtype {entry.dtype!r}")
        if min(entry.shape, default=0) < 0 or entry.offset < 0 or entry.offset + entry.size_bytes > size_bytes:
            raise Damaged(f"column {entry.name!r} of {source} reaches past the end of the object")
    return entries


def schema_version(buffer: Any) -> int:
    """Of an object whose table `read_table` has read."""
    schema: int = _PREAMBLE.unpack_from(buffer)[-1]
    return schema or 1


def view(entry: Entry, buffer: Any) -> np.ndarray:
    """The column as an array over `buffer`, which it keeps alive; read-only when the buffer is."""
    return np.ndarray(entry.shape, _NUMPY_OF[entry.dtype], buffer=buffer, offset=entry.offset)


def lease_over(ref: Ref, buffer: Any, source: str, columns: Iterable[str] | None) -> Lease:
    """The object that fills `buffer`, as a lease of these of its columns. Raises Damaged; ValueError for one that it does not have."""
    entries = {entry.name: entry for entry in read_table(buffer, len(buffer), source)}
    names = list(entries) if columns is None else list(columns)
    missing = [name for name in names if name not in entries]
    if missing:
        raise ValueError(f"{ref.key!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(entries) or 'none'}")
    views = {name: view(entries[name], buffer) for name in names}
    return Lease(ref, views, {name: entries[name].dtype for name in names}, schema_version(buffer))


def _typed(name: str, column: Value) -> tuple[str, np.ndarray]:
    array = column.data if isinstance(column, Column) else column
    if not isinstance(array, np.ndarray | np.generic):
        raise ValueError(f"column {name!r} must be a numpy array, not {type(array).__name__}")
    dtype = column.dtype if isinstance(column, Column) else array.dtype.name
    if dtype not in _NUMPY_OF:
        raise ValueError(f"column {name!r} has dtype {dtype}, which cannot be stored; use one of {', '.join(_NUMPY_OF)}")
    expected = _NUMPY_OF[dtype]
    if array.dtype.newbyteorder("<") != expected:
        raise ValueError(f"column {name!r} is tagged {dtype} but its data is {array.dtype}; it must be {expected.name}")
    return dtype, np.asarray(array, dtype=expected, order="C")


def _lay_out(arrays: Mapping[str, tuple[str, np.ndarray]]) -> tuple[bytes, list[tuple[int, np.ndarray]], int]:
    # The table's length moves the offsets and the offsets' digits move its length: leave room for the widest digits, then fill in.
    widest = [Entry(name, dtype, array.shape, 10**12) for name, (dtype, array) in arrays.items()]
    cursor = end = aligned(_PREAMBLE.size + len(_encode(widest)))
    entries, placed = [], []
    for name, (dtype, array) in arrays.items():
        entries.append(Entry(name, dtype, array.shape, cursor))
        placed.append((cursor, array))
        end = cursor + array.nbytes
        cursor = aligned(end)
    table = _encode(entries)
    head = _PREAMBLE.pack(MAGIC, VERSION, len(table), end, zlib.crc32(table), SCHEMA_VERSION) + table
    return head, placed, end
