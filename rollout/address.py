"""Addresses of engines: what is taken as one, and where engines may be added from outside."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
USUAL_PORTS = {"http": 80, "https": 443}
NAME = re.compile(rf"{LABEL}(\.{LABEL})*")


def is_loopback(host: str) -> bool:
    """Of a name other than localhost nothing is asked: it is not."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class NotAllowed(ValueError):
    """A URL that is not taken. A sentence for the user."""


def engine_id_of(url: str) -> str:
    """The address is the name: the same over restarts of the driver, and one engine is never in a run twice."""
    netloc = urlsplit(checked_url(url)).netloc
    return f"127.0.0.1{netloc.removeprefix('localhost')}" if netloc.partition(":")[0] == "localhost" else netloc


def checked_url(url: str) -> str:
    """Normal form of an engine's URL: scheme, host and port. Raises NotAllowed."""
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise NotAllowed(f"{url!r} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise NotAllowed(f"{url!r} is not the address of an engine; write it like http://10.0.0.5:30000")
    if port == 0 or not _can_be_asked(host):
        raise NotAllowed(f"{url!r} is not the address of an engine: nobody can be asked there; write it like http://10.0.0.5:30000")
    if parts.username or parts.password:
        raise NotAllowed(f"the engine URL for {host} carries a password; set rollout.engine_api_key instead")
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise NotAllowed(f"{url!r} has a path; give the address alone, like {parts.scheme}://{host}:{port or 30000}")
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}" + (f":{port}" if port not in (None, USUAL_PORTS[parts.scheme]) else "")


def _can_be_asked(host: str) -> bool:
    if ":" in host or not host.strip("0123456789."):
        try:
            return bool(ipaddress.ip_address(host.partition("%")[0]))
        except ValueError:
            return False
    return NAME.fullmatch(host) is not None


def bare_host(url: str) -> str:
    """HOST or HOST:PORT of what was written as a URL."""
    return url.partition("://")[2].partition("/")[0] or url.partition("/")[0]


def _folded(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host


def allowed_host(url: str, hosts: list[str]) -> None:
    """`hosts` are names or addresses, with a port or without; *.name stands for every host below. Raises NotAllowed."""
    parts = urlsplit(checked_url(url))
    host = _folded(parts.hostname or "")
    for pattern in hosts:
        name, _, port = pattern.rpartition(":") if pattern.count(":") == 1 or "]:" in pattern else (pattern, "", "")
        name = _folded(name.strip("[]").lower())
        fits = host.endswith(name[1:]) if name.startswith("*.") else host == name
        if fits and (not port or str(parts.port or USUAL_PORTS[parts.scheme]) == port):
            return
    allowed = ", ".join(hosts) or "none"
    raise NotAllowed(
        f"engines may not be added at {parts.netloc}: service.engine_hosts allows {allowed}; add {parts.hostname} there and start again"
    )
