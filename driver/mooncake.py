"""A run's store by Mooncake: where it is, which process holds this host's part of it, and what must be so before anything starts.

    driver, engines, ranks ──tcp──▶ owner of this host (its segment; the master as its child) ◀──tcp── owners and readers on other hosts

The location stands in every reference, so the ports of a run's own master are chosen once and kept in RUN_DIR/store.json.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from driver.life import free_port, is_free
from driver.settings import RunConfig
from store import Unavailable, mooncake_location
from store.mooncake_client import installed
from trainer.address import address_towards

SHARED_MEMORY = Path("/dev/shm")
HTTP_PORT = 9003  # mooncake_master's own
ROOM = 1.25  # what an owner takes of shared memory for each byte it gives
PORTS = "store.json"


@dataclass(frozen=True)
class Place:
    """`address`: this host's. `master`: the run starts it, here."""

    location: str
    address: str
    master: bool
    gives_bytes: int

    def owner(self, port: int) -> list[str]:
        """The flags of `store.mooncake_owner` here."""
        flags = {"--location": self.location, "--port": port, "--capacity-bytes": self.gives_bytes, "--host": self.address}
        return [str(part) for flag in flags.items() for part in flag] + ["--master"] * self.master


def place_of(config: RunConfig) -> Place:
    """Ports that were not configured are the same in each life of the run, unless somebody else has them now."""
    mooncake, address = config.store.mooncake, _address(config)
    if mooncake.master is not None:
        host, _, port = mooncake.master.rpartition(":")
        location = mooncake_location(host, int(port), config.run_id, mooncake.http_port or HTTP_PORT)
    else:
        rpc, http = _ports(config.directory / PORTS, mooncake.port, mooncake.http_port)
        location = mooncake_location(address, rpc, config.run_id, http)
    return Place(location, address, mooncake.master is None, gives_bytes(config))


def _address(config: RunConfig) -> str:
    """Raises OSError where no route leads to the other hosts."""
    return config.store.mooncake.address or (address_towards(config.hosts[0]) if config.hosts else "127.0.0.1")


def gives_bytes(config: RunConfig) -> int:
    """What this host gives; 0 when all memory is other hosts'."""
    asked = config.store.mooncake.segment_bytes
    return config.store.capacity_bytes if asked is None else asked


def room_bytes(gives: int) -> int:
    """Of shared memory that an owner takes for so much."""
    return int(gives * ROOM)


def starts_owner(config: RunConfig) -> bool:
    """Whether a process of the run's own holds a part of the store, or its master."""
    return config.store.mooncake.master is None or gives_bytes(config) > 0


def _ports(path: Path, *configured: int | None) -> list[int]:
    try:
        kept = [int(port) for port in json.loads(path.read_text())["ports"]]
    except (OSError, ValueError, KeyError, TypeError):
        kept = [0, 0]
    ports = [want or (had if had and is_free(had) else free_port()) for want, had in zip(configured, kept, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"ports": ports}))
    return ports


def absent() -> list[str]:
    """What of Mooncake is not installed here, with the remedy."""
    try:
        installed()
    except Unavailable as error:
        return [str(error)]
    return []


def lacking(config: RunConfig) -> list[str]:
    """What a run by Mooncake needs and this host has not, each with the remedy. Nothing is started."""
    found = absent()
    for host in config.hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            found.append(f"hosts: {host} is not known here ({error}): write its address, or add it to /etc/hosts")
    if found:
        return found
    mooncake = config.store.mooncake
    if mooncake.address is not None and not _is_ours(mooncake.address):
        found.append(f"store.mooncake.address {mooncake.address} is none of this host's: see `ip address`, or leave it out")
    try:
        if config.hosts and _address(config).startswith("127."):
            found.append("the other hosts can not reach 127.0.0.1: set store.mooncake.address to this host's address on their network")
    except OSError as error:
        found.append(f"there is no route to {config.hosts[0]} ({error.strerror}): set store.mooncake.address to this host's address")
    if mooncake.master is None:
        taken = [port for port in (mooncake.port, mooncake.http_port) if port is not None and not is_free(port)]
        found += [f"store.mooncake: port {port} is taken: end what uses it, or leave it out for a free one" for port in taken]
    else:
        found += _silent(mooncake.master)
    return [*found, *_no_room(room_bytes(gives_bytes(config)))]


def _no_room(needed: int) -> list[str]:
    facts = os.statvfs(SHARED_MEMORY)
    free = facts.f_bavail * facts.f_frsize
    if free >= needed:
        return []
    return [
        f"{SHARED_MEMORY} has {free / 2**30:.1f} GiB free, this host's part takes {needed / 2**30:.1f}: enlarge it (Docker: --shm-size), "
        "or lower store.capacity_bytes"
    ]


def _is_ours(address: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _silent(master: str) -> list[str]:
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except OSError as error:
        return [f"store.mooncake.master {master} does not answer ({error}): start it, or leave it out and the run starts its own"]
    return []
