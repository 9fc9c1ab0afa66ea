"""The process that gives one host's memory to a Mooncake store; on one host it also runs the master.

    python -m store.mooncake_owner --location mooncake:HOST:PORT/NAME?http=HTTP_PORT --capacity-bytes N --port HEALTH_PORT [--master]

It lives long and does little, so that no crash of a worker takes an object along. It ends when its master does (exit code 3), at once:
memory that one master gave out must not be given out again by the next while somebody still reads or writes it under the first. Whoever
supervises it starts it anew, with new memory. `GET /health` answers 200 once the memory is there for others.
"""

from __future__ import annotations

import argparse
import ctypes
import http.server
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from store.base import StoreError, Unavailable
from store.mooncake import PART_BYTES, PUT_DISCARD_S, SPARE, Address, part_name
from store.mooncake_client import CONNECT_S, LIBRARIES, Client, Place, installed, is_reachable
from store.mooncake_read import LEASE_S
from store.mooncake_segment import LEAST_BYTES, Segment

MASTER_LOST = 3
START_S = 60.0
OWNER_LOST_S = 30  # the master gives up an owner that has not called for so long
STALLED_S = 15.0
BEAT_S = 1.0
PUT_RELEASE_S = 600
GRAIN_BYTES = 16 << 10
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m store.mooncake_owner", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--location", required=True)
    parser.add_argument("--capacity-bytes", type=int, required=True, help="what this host gives; 0: only the master runs here")
    parser.add_argument("--port", type=int, required=True, help="where this process answers /health")
    parser.add_argument("--host", default="127.0.0.1", help="the address under which other hosts reach this one")
    parser.add_argument("--master", action="store_true", help="run the master too, on one host")
    parser.add_argument(
        "--put-release-s",
        type=int,
        default=PUT_RELEASE_S,
        help="after so long the master gives out the bytes of a put that never ended; a writer that was stopped for longer, and then goes "
        "on, would write into another's",
    )
    arguments = parser.parse_args()
    try:
        return Owner(arguments).run()
    except (StoreError, ValueError) as error:
        print(f"mooncake owner: {error}", flush=True)
        return 1


class Owner:
    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.capacity_bytes <= 0 and not arguments.master:
            raise ValueError("a process that gives no memory and runs no master has nothing to do; give it --capacity-bytes or --master")
        installed()
        self._arguments = arguments
        self._address = Address.of(arguments.location)
        self._health = Health(arguments.port)
        self._segment: Segment | None = None
        self._asked_to_end, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def run(self) -> int:
        """Until it is asked to end (0), or the master is gone (3)."""
        arguments, address = self._arguments, self._address
        master = run_master(address, arguments.put_release_s) if arguments.master else None
        watched = self._connect(master)
        client = Client(address.host, address.port, arguments.host)
        if arguments.capacity_bytes > 0:
            self._mount(client, arguments.capacity_bytes)
        self._health.ready = True
        print(f"mooncake owner: {arguments.capacity_bytes} bytes for {address.master}", flush=True)
        while True:
            before = time.clock_gettime(time.CLOCK_BOOTTIME)
            found, _, _ = select.select([watched.fileno(), self._asked_to_end], [], [], BEAT_S)
            if self._asked_to_end in found:
                return self._end(client, master)
            # What follows is before Mooncake's own threads find a master again, and give it this memory a second time.
            if watched.fileno() in found and not _is_open(watched):
                self._give_up(f"the master at {address.master} is gone, and every object with it")
            if (stalled_s := time.clock_gettime(time.CLOCK_BOOTTIME) - before) > STALLED_S:
                self._give_up(f"this process was stopped for {stalled_s:.0f} s, and the master gives up what it holds")

    def _end(self, client: Client, master: subprocess.Popen[bytes] | None) -> int:
        if self._segment is not None:
            self._segment.remove()
        if master is None:
            client.close()
            return 0
        master.terminate()
        master.wait(10)
        os._exit(0)  # the client would look for its master first

    def _give_up(self, reason: str) -> NoReturn:
        if self._segment is not None:
            self._segment.give_up()
        print(f"mooncake owner: {reason}", flush=True)
        os._exit(MASTER_LOST)

    def _connect(self, master: subprocess.Popen[bytes] | None) -> socket.socket:
        """A connection to the master that carries nothing: it ends when the master does."""
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            if master is not None and (code := master.poll()) is not None:
                raise Unavailable(f"the master ended with code {code}; is another one at {self._address.master}?")
            try:
                return socket.create_connection((self._address.host.strip("[]"), self._address.port), CONNECT_S)
            except OSError:
                time.sleep(0.02)
        raise Unavailable(f"no master at {self._address.master} within {START_S:g} s")

    def _mount(self, client: Client, capacity_bytes: int) -> None:
        wanted = max(capacity_bytes, LEAST_BYTES)
        size_bytes = -(-wanted // GRAIN_BYTES) * GRAIN_BYTES * SPARE[0] // SPARE[1]
        self._segment = Segment(size_bytes)
        bare = client.local()
        mounted = bare.mount_segment(str(self._segment.path), size_bytes)
        if mounted["ret"] != 0:
            raise Unavailable(f"the master at {self._address.master} would not take {size_bytes} bytes (code {mounted['ret']})")
        self._segment.publish(self._mark(client, bare.get_hostname()).endpoint, bare.get_hostname(), self._address.master)

    def _mark(self, client: Client, segment: str) -> Place:
        """Put this owner's own object, which says to all that it is another than before, and to itself how it is reached."""
        name, base = part_name(segment), self._segment.base() if self._segment is not None else 0
        with client.staging() as buffer:
            buffer[:PART_BYTES] = np.frombuffer(uuid.uuid4().hex.encode(), np.uint8)
            for step in (
                lambda: client.put_start(name, PART_BYTES, segment),
                lambda: min(0, client.write(name, buffer[:PART_BYTES], 0)),
                lambda: client.put_end(name),
            ):
                if (code := step()) != 0:
                    raise Unavailable(f"cannot put into the memory just given (code {code})")
        place = client.find(name)
        if isinstance(place, int) or not 0 <= place.address - base < (self._segment.size_bytes if self._segment else 0):
            raise Unavailable("what was put into this host's memory lies elsewhere; is there room in it?")
        return place


def run_master(address: Address, put_release_s: int = PUT_RELEASE_S) -> subprocess.Popen[bytes]:
    """Dies with this process."""
    if is_reachable(address.host, address.port):
        raise Unavailable(f"something listens at {address.master} already; end it, or choose other ports for the store")
    package = importlib.util.find_spec("mooncake")
    assert package is not None and package.submodule_search_locations
    program = Path(package.submodule_search_locations[0]) / "mooncake_master"
    program.chmod(program.stat().st_mode | 0o111) if not os.access(program, os.X_OK) else None
    host = address.host.strip("[]")
    command = [
        str(program),
        f"--rpc_address={host}",
        f"--rpc_port={address.port}",
        f"--metrics_host={host}",
        f"--metrics_port={address.http_port}",
        f"--default_kv_lease_ttl={int(1000 * LEASE_S)}",
        f"--put_start_discard_timeout_sec={PUT_DISCARD_S:.0f}",
        f"--put_start_release_timeout_sec={put_release_s}",
        f"--client_ttl={OWNER_LOST_S}",
        "--eviction_high_watermark_ratio=1.0",
        "--enable_metric_reporting=false",
        "--logtostderr=1",
        "--minloglevel=2",
    ]
    parent = os.getpid()

    def die_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    libraries = os.pathsep.join(filter(None, [str(LIBRARIES), os.environ.get("LD_LIBRARY_PATH")]))
    return subprocess.Popen(command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, preexec_fn=die_with_parent)


def _is_open(watched: socket.socket) -> bool:
    try:
        return watched.recv(4096) != b""
    except OSError:
        return False


class Health:
    """Answers 200 when `ready`, from a thread of its own."""

    def __init__(self, port: int) -> None:
        self.ready = False
        health = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = json.dumps({"status": "ok" if health.ready else "starting"}).encode()
                self.send_response(200 if health.ready else 503)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Nobody needs a line a second."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, name="health", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
