"""From a location to its store.

tmpfs:DIRECTORY                          the store of one host
mooncake:HOST:PORT/NAME?http=HTTP_PORT   that of many: the master's two ports, and whose objects they are
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from store import embedded, mooncake
from store.base import Store


@lru_cache(maxsize=64)
def open_store(location: str) -> Store:
    """The store at a `Ref.location`; one object per process and location. Raises Unavailable, ValueError."""
    if location.startswith(embedded.SCHEME):
        return embedded.EmbeddedStore(Path(location.removeprefix(embedded.SCHEME)))
    if location.startswith(mooncake.SCHEME):
        return mooncake.MooncakeStore(location)
    raise ValueError(f"unknown store location {location!r}; it must begin with {embedded.SCHEME!r} or {mooncake.SCHEME!r}")
