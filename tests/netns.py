"""Several hosts on one machine: network namespaces on a bridge, each with a /dev/shm of its own, so that nothing but the network is shared.

Needs root and iproute2. A host can be cut off and let back; what runs there goes on, as behind a cable that was pulled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Network:
    """`address(0)` is where the test itself is; hosts are 1 to `count`."""

    def __init__(self, count: int) -> None:
        number = os.getpid() % 65536  # another run of the same test has another one
        self._name = f"hr{number:x}"
        self._prefix = f"10.{64 + number % 128}.{number // 256}"
        self.count = count

    def address(self, host: int) -> str:
        return f"{self._prefix}.{host + 1}"

    def namespace(self, host: int) -> str:
        return f"{self._name}h{host}"

    @property
    def _hub(self) -> str:
        return f"{self._name}hub"

    def build(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "bridge", "up")
        _ip("link", "add", f"{self._name}", "type", "veth", "peer", "name", "port0", "netns", self._hub)
        _ip("addr", "add", f"{self.address(0)}/24", "dev", self._name)
        _ip("link", "set", self._name, "up")
        self._plug(0)
        for host in range(1, self.count + 1):
            name = self.namespace(host)
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self._hub)
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            self._plug(host)

    def _plug(self, host: int) -> None:
        _ip("-n", self._hub, "link", "set", f"port{host}", "master", "bridge")
        _ip("-n", self._hub, "link", "set", f"port{host}", "up")

    def on(self, host: int, argv: list[str]) -> list[str]:
        """The command, to be run on that host. It becomes the process itself: its pid is the one that is started."""
        own_memory = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(host), "unshare", "--mount", "sh", "-c", own_memory, "sh", *argv]

    def cut(self, host: int) -> None:
        """No packet comes or goes any more, and nobody is told."""
        _ip("-n", self._hub, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", self._hub, "link", "set", f"port{host}", "up")

    def remove(self) -> None:
        for name in (self._hub, *(self.namespace(host) for host in range(1, self.count + 1))):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", self._name], capture_output=True, check=False)


@contextmanager
def hosts(count: int) -> Iterator[Network]:
    """Skips the test where there can be none."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    network = Network(count)
    try:
        try:
            network.build()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine has no network namespaces: {error.stderr.decode().strip()}")
        yield network
    finally:
        network.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
