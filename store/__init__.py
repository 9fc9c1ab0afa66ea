"""Typed columns by key: put once, read without copying, gone when the last reader lets go.

Embedded, the bytes lie in files under /dev/shm. The interface is that of `store.base.Store`, so that a store of many hosts can take over.
"""

from store.base import Column, Damaged, Exists, Full, Gone, Lease, Ref, Store, StoreError, StoreStats, Unavailable, Value
from store.embedded import EmbeddedStore, default_root, open_store
from store.format import occupied_bytes
from store.inline import INLINE, in_store, open_ref, put_small
from store.pieces import Bundle, Piece, TensorForm

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
    "occupied_bytes",
    "open_ref",
    "open_store",
    "put_small",
]
