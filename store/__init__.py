"""Typed columns by key: put once, read without copying, gone when the last reader lets go.

The interface is `store.base.Store`. Embedded, the bytes lie in files under /dev/shm of one host; with Mooncake, in the memory of many.
"""

from store.base import Column, Damaged, Exists, Full, Gone, Lease, Ref, Store, StoreError, StoreStats, Unavailable, Value
from store.embedded import EmbeddedStore
from store.format import occupied_bytes
from store.inline import INLINE, in_store, open_ref, put_small, riding
from store.mooncake import MooncakeStore, mooncake_location
from store.opening import open_store
from store.pieces import Bundle, Piece, TensorForm
from store.places import LeftOver, default_root, left_over

__all__ = [
    "INLINE",
    "Bundle",
    "Column",
    "Damaged",
    "EmbeddedStore",
    "Exists",
    "Full",
    "Gone",
    "Lease",
    "LeftOver",
    "MooncakeStore",
    "Piece",
    "Ref",
    "Store",
    "StoreError",
    "StoreStats",
    "TensorForm",
    "Unavailable",
    "Value",
    "default_root",
    "in_store",
    "left_over",
    "mooncake_location",
    "occupied_bytes",
    "open_ref",
    "open_store",
    "put_small",
    "riding",
]
