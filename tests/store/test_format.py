"""Bytes that are not an object of this version are an error, never an array."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from store import Damaged, EmbeddedStore, Unavailable, Value
from store.base import SCHEMA_VERSION

COLUMNS: dict[str, Value] = {"a": np.arange(1000, dtype=np.int64), "b": np.float32(1)}


def newer(data: bytearray) -> bytearray:
    struct.pack_into("<I", data, 8, 3)
    return data


def newer_schema(data: bytearray) -> bytearray:
    struct.pack_into("<I", data, 28, SCHEMA_VERSION + 1)
    return data


def no_schema(data: bytearray) -> bytearray:
    struct.pack_into("<I", data, 28, 0)
    return data


def table_changed(data: bytearray) -> bytearray:
    data[40] ^= 1
    return data


def reaching_out(data: bytearray) -> bytearray:
    length = struct.unpack_from("<I", data, 12)[0]
    table = bytes(data[32 : 32 + length]).replace(b"1000", b"9000")
    data[32 : 32 + length] = table
    struct.pack_into("<I", data, 24, zlib.crc32(table))
    return data


DAMAGE: dict[str, tuple[Callable[[bytearray], bytes | bytearray], str]] = {
    "foreign": (lambda data: b"PK\3\4" + data[4:], "not an object of this store"),
    "newer": (newer, "format version 3, this program reads 1 to 2; use the release"),
    "newer schema": (newer_schema, "schema version 3, this program reads 1 to 2; use the release"),
    "no schema": (no_schema, "schema version 0"),
    "cut short": (lambda data: data[:-1], "cut short"),
    "cut in the table": (lambda data: data[:50], "cut short"),
    "cut in the preamble": (lambda data: data[:20], "too short"),
    "longer": (lambda data: data + b"x", "cut short or overwritten"),
    "empty": (lambda data: b"", "is empty"),
    "table changed": (table_changed, "checksum"),
    "column past the end": (reaching_out, "past the end"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_object_is_named_and_never_read(store: EmbeddedStore, root: Path, kind: str) -> None:
    ref = store.put("k", COLUMNS)
    path = root / "objects" / "k"
    damage, said = DAMAGE[kind]
    path.write_bytes(damage(bytearray(path.read_bytes())))
    with pytest.raises(Damaged, match=said) as caught:
        store.open(ref)
    assert isinstance(caught.value, Unavailable)


def test_the_table_is_json_that_a_person_can_read(store: EmbeddedStore, root: Path) -> None:
    store.put("k", COLUMNS)
    data = (root / "objects" / "k").read_bytes()
    length = struct.unpack_from("<I", data, 12)[0]
    table = msgspec.json.decode(data[32 : 32 + length])
    assert [(entry["name"], entry["dtype"], entry["shape"]) for entry in table] == [("a", "int64", [1000]), ("b", "float32", [])]
    assert all(entry["offset"] % 64 == 0 for entry in table)
