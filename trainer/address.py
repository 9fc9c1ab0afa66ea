"""Which of this host's addresses another one reaches. Light: no torch."""

from __future__ import annotations

import ipaddress
import socket


def address_towards(host: str) -> str:
    """This host's address on the way to `host`. Nothing is sent: UDP's connect only asks the routes. Raises OSError."""
    try:
        if host == "localhost" or ipaddress.ip_address(host).is_loopback:
            return "::1" if ":" in host else "127.0.0.1"
    except ValueError:
        pass  # a name
    family, kind, protocol, _, peer = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
