"""What every store promises, whatever holds the bytes.

A key is written once and never changes. A read is the whole object or an error, never a part and never None. `free` takes the key away
at once; the bytes go when the last view of them does, or when the process that holds it dies.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

SCHEMA_VERSION = 2
"""Of the fields in store/schema.py. Every object carries that of the program which wrote it; 1 is from before the rows of a trajectory
lay in one object."""


class StoreError(Exception):
    """Anything a store refuses or cannot do."""


class Exists(StoreError):
    """The key is taken: objects are written once."""


class Full(StoreError):
    """The object would not fit. Nothing was written."""


class Gone(StoreError):
    """No such object: it was freed, or never put."""


class Unavailable(StoreError):
    """The store itself cannot be used just now."""


class Damaged(Unavailable):
    """The bytes are not an object of this version of the store (foreign, cut short, newer)."""


@dataclass(frozen=True, slots=True)
class Ref:
    """Names one object. `size_bytes` is what it takes up in the store, the unit of `StoreStats.used_bytes`.

    A small object may ride along: then `inline` is all of it, encoded, and no store holds any of it (`store.inline`).
    """

    key: str
    size_bytes: int
    location: str
    inline: bytes | None = None

    def to_wire(self) -> dict[str, Any]:
        wire: dict[str, Any] = {"key": self.key, "size_bytes": self.size_bytes, "location": self.location}
        return wire if self.inline is None else wire | {"inline": base64.b64encode(self.inline).decode()}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Ref:
        try:
            inline = wire.get("inline")
            carried = None if inline is None else base64.b64decode(inline, validate=True)
            return cls(str(wire["key"]), int(wire["size_bytes"]), str(wire["location"]), carried)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a reference to a stored object: {wire!r}; it needs key, size_bytes and location") from error


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """An array with the name of its dtype, for the one dtype numpy lacks: bfloat16, its bits held as uint16."""

    data: np.ndarray
    dtype: str


Value = np.ndarray | np.generic | Column


@dataclass(frozen=True, slots=True)
class StoreStats:
    """`pending_frees` were freed and are still read; the oldest waits for `oldest_pending_s` (its reader is older than that). `spare_bytes`
    are not in use and not given back: a put that needs them has them."""

    objects: int
    used_bytes: int
    capacity_bytes: int
    pending_frees: int = 0
    oldest_pending_s: float = 0.0
    spare_bytes: int = 0


class Lease(Mapping[str, np.ndarray]):
    """Read-only views of one object's columns. `dtypes` names each column's dtype (bfloat16 is viewed as uint16), `schema` is the version
    of the fields by which it was written.

    The views hold the memory, not the lease: one kept past `close` (or past `free`) is still safe, and its bytes still count.
    """

    def __init__(self, ref: Ref, views: dict[str, np.ndarray], dtypes: dict[str, str], schema: int = SCHEMA_VERSION) -> None:
        self.ref = ref
        self.schema = schema
        self.dtypes: Mapping[str, str] = dtypes
        self._views: dict[str, np.ndarray] | None = views

    def _open_views(self) -> dict[str, np.ndarray]:
        if self._views is None:
            raise ValueError(f"the lease of {self.ref.key!r} is closed; take the columns before closing it, or open it again")
        return self._views

    def __getitem__(self, name: str) -> np.ndarray:
        return self._open_views()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open_views())

    def __len__(self) -> int:
        return len(self._open_views())

    def close(self) -> None:
        self._views = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Store(Protocol):
    """The verbs. Any process may put and open; the owner of the objects claims, frees, parks and removes."""

    @property
    def location(self) -> str:
        """What a `Ref` names, and `open_store` attaches to. It outlives the processes that hold the bytes."""
        ...

    def put(self, key: str, columns: Mapping[str, Value]) -> Ref:
        """Raises Exists, Full, Unavailable; ValueError for a key or a column that cannot be stored."""
        ...

    def put_encoded(self, key: str, encoded: bytes) -> Ref:
        """Publish bytes that already are an object, from `encoded`. Raises Damaged besides what `put` does."""
        ...

    def open(self, ref: Ref, columns: Iterable[str] | None = None) -> Lease:
        """Raises Gone, Unavailable, Damaged; ValueError for a column the object does not have."""
        ...

    def encoded(self, ref: Ref) -> bytes:
        """The object's bytes as they lie in the store. Raises Gone, Unavailable."""
        ...

    def free(self, refs: Iterable[Ref]) -> None:
        """Idempotent. Raises Unavailable."""
        ...

    def room_bytes(self) -> int:
        """What is not in use of the capacity. Raises Unavailable."""
        ...

    def stats(self) -> StoreStats:
        """Counts the objects: a scan."""
        ...

    def gauges(self) -> dict[str, float]: ...

    def keys(self) -> list[str]:
        """Every published key, in no order: what a restarted owner compares with its own account. A scan."""
        ...

    def ref(self, key: str) -> Ref:
        """The reference of a published object. Raises Gone, Unavailable."""
        ...

    def parts(self) -> frozenset[str]:
        """The pieces of memory that the objects lie in. One that was there before and is missing has taken its objects with it, for ever.
        Raises Unavailable."""
        ...

    def claim(self) -> None:
        """Be the one owner, for as long as this process lives or until `remove`. Raises ValueError when another process is."""
        ...

    def park(self, directory: Path) -> int:
        """Moves every object to `directory` on disk, all or nothing; returns how many."""
        ...

    def unpark(self, directory: Path) -> int:
        """Moves parked objects back; returns how many were missing here. Nothing parked is not an error."""
        ...

    def remove(self) -> None:
        """Take every object away, and close. By the owner, when no one will put again; views that readers hold stay safe."""
        ...

    def close(self) -> None:
        """This process is done with it; what it put stays."""
        ...
