"""Small objects ride in the message that names them: an object of a few hundred bytes costs a store more than it is worth.

    put_small ──Ref with all of its bytes──▶ whoever holds the Ref opens it; it is gone when the last Ref is

The encoding is that of a stored object and so are the key and the lease, so what reads rows need not know where they were. Nothing is to
be freed. What such a Ref must survive, its owner writes down with it: the driver's ledger keeps the rows' Refs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from store.base import Column, Lease, Ref, Store, Value
from store.format import encode, lease_over
from store.opening import open_store

INLINE = "inline:"


def riding(key: str, columns: Mapping[str, Value], most_bytes: int) -> Ref | None:
    """A Ref with the whole object in it; None for one that has more bytes than this, encoded. 0: none has so few."""
    arrays = (column.data if isinstance(column, Column) else column for column in columns.values())
    if sum(array.nbytes for array in arrays) < most_bytes:
        head, placed, length_bytes = encode(columns)
        if length_bytes <= most_bytes:
            encoded = bytearray(length_bytes)
            encoded[: len(head)] = head
            for offset, array in placed:
                encoded[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8).data
            return Ref(key, 0, INLINE, bytes(encoded))
    return None


def put_small(store: Store, key: str, columns: Mapping[str, Value], most_bytes: int) -> Ref:
    """As `store.put`, but for what rides."""
    return riding(key, columns, most_bytes) or store.put(key, columns)


def open_ref(ref: Ref, columns: Iterable[str] | None = None, *, store: Store | None = None) -> Lease:
    """Wherever it is: in the Ref, in `store`, or in the store that the Ref names. Raises what `Store.open` does."""
    if ref.inline is not None:
        return lease_over(ref, ref.inline, f"the object {ref.key!r} in its reference", columns)
    return (open_store(ref.location) if store is None else store).open(ref, columns)


def in_store(refs: Iterable[Ref]) -> list[Ref]:
    """Those that a store holds: what its owner has to free."""
    return [ref for ref in refs if ref.inline is None]
