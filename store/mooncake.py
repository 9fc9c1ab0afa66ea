"""The store of many hosts, on Mooncake: one master that knows where every object lies, and on each host a process that holds bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from store import parking
from store.base import Lease, Ref, StoreStats, Unavailable, Value

SCHEME = "mooncake:"
_LOCATION = re.compile(r"mooncake:(?P<host>[^/:]+|\[[^]/]+\]):(?P<port>\d+)/(?P<name>[A-Za-z0-9._-]+)\?http=(?P<http_port>\d+)")


@dataclass(frozen=True, slots=True)
class Address:
    """A location, taken apart."""

    host: str
    port: int
    name: str
    http_port: int

    @classmethod
    def of(cls, location: str) -> Address:
        found = _LOCATION.fullmatch(location)
        if found is None:
            raise ValueError(f"unknown store location {location!r}; it must be mooncake:HOST:PORT/NAME?http=HTTP_PORT")
        return cls(found["host"], int(found["port"]), found["name"], int(found["http_port"]))


def mooncake_location(host: str, port: int, name: str, http_port: int) -> str:
    """Raises ValueError for a name that cannot be one."""
    location = f"{SCHEME}{host}:{port}/{name}?http={http_port}"
    Address.of(location)
    return location


class MooncakeStore:
    """Attaches to the store at `location` with its first verb. Raises ValueError for what is no location."""

    def __init__(self, location: str) -> None:
        self._address = Address.of(location)
        self._location = location

    @property
    def location(self) -> str:
        return self._location

    def put(self, key: str, columns: Mapping[str, Value]) -> Ref:
        self._unavailable()

    def put_encoded(self, key: str, encoded: bytes) -> Ref:
        self._unavailable()

    def open(self, ref: Ref, columns: Iterable[str] | None = None) -> Lease:
        self._unavailable()

    def encoded(self, ref: Ref) -> bytes:
        self._unavailable()

    def free(self, refs: Iterable[Ref]) -> None:
        self._unavailable()

    def room_bytes(self) -> int:
        self._unavailable()

    def stats(self) -> StoreStats:
        self._unavailable()

    def gauges(self) -> dict[str, float]:
        self._unavailable()

    def keys(self) -> list[str]:
        self._unavailable()

    def ref(self, key: str) -> Ref:
        self._unavailable()

    def parts(self) -> frozenset[str]:
        self._unavailable()

    def claim(self) -> None:
        self._unavailable()

    def park(self, directory: Path) -> int:
        return parking.park(self, directory)

    def unpark(self, directory: Path) -> int:
        return parking.unpark(self, directory)

    def remove(self) -> None:
        self._unavailable()

    def close(self) -> None:
        pass

    def _unavailable(self) -> NoReturn:
        raise Unavailable("stores on Mooncake can be named, and not yet be used; take an embedded one (tmpfs:DIRECTORY)")
