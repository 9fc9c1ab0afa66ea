"""Engines of somebody else's, each behind a proxy that can be cut, for tests that kill them at a chosen moment.

The driver knows the proxy's address only, so an engine that is started anew comes back under the same one, whatever port it has. The proxy
reads the first line of every request that passes, and so can fire at the k-th call of a path: between two buckets, before the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx

from driver.life import CHILD, free_port
from rollout.sglang import launch
from rollout.sglang.spec import SglangSpec

BASE = Path(__file__).parents[1] / "examples/sort_digits/base"
CONTEXT = 256
CHUNK_BYTES = 1 << 16


class Proxy:
    """TCP, byte for byte. `port` is the address of the engine behind it, and may change."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.behind = 0
        self._loop = loop
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._refusing = False
        self._armed: tuple[str, int, Callable[[], None]] | None = None
        self.on_request: Callable[[object, bytes], None] | None = None  # (connection, what came from the driver)
        self.on_reply: Callable[[object, bytes], None] | None = None
        self.port = free_port()
        self._server: asyncio.Server = self._await(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self.url = f"http://127.0.0.1:{self.port}"
        self.engine_id = f"127.0.0.1:{self.port}"

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def arm(self, path: str, count: int, fire: Callable[[], None]) -> None:
        """Call `fire` when the `count`-th request for `path` from now on has come and before it goes on."""
        self._armed = (path, count, fire)

    def disarm(self) -> bool:
        """False when it has fired."""
        waiting, self._armed = self._armed is not None, None
        return waiting

    def cut(self, for_s: float) -> None:
        """All connections are reset, and new ones for a while. From any thread."""
        self._loop.call_soon_threadsafe(self._cut, for_s)

    def _cut(self, for_s: float) -> None:
        self._refusing = True
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()
        self._loop.call_later(for_s, setattr, self, "_refusing", False)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.behind)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, back)
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back, lambda data: self._look(pair, data)))
                group.create_task(self._pump(there, writer, lambda data: self.on_reply and self.on_reply(pair, data)))
        except* OSError:
            pass
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, look: Callable[[bytes], object]) -> None:
        while data := await source.read(CHUNK_BYTES):
            look(data)
            sink.write(data)
            await sink.drain()
        with contextlib.suppress(OSError):
            sink.write_eof()

    def _look(self, connection: object, data: bytes) -> None:
        if self.on_request is not None:
            self.on_request(connection, data)
        if self._armed is None:
            return
        path, count, fire = self._armed
        if data.partition(b"\r\n")[0].find(f" {path} ".encode()) < 0:
            return
        self._armed = (path, count - 1, fire) if count > 1 else None
        if count <= 1:
            fire()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)


class Engine:
    """One engine and its proxy. `spec` is that of a real SGLang, or None for the embedded engine."""

    def __init__(self, directory: Path, loop: asyncio.AbstractEventLoop, spec: SglangSpec | None, slow_s: float) -> None:
        self.proxy = Proxy(loop)
        self.spec = spec
        self.slow_s = slow_s
        self.lives = 0
        self._log_path = directory / f"engine-{self.proxy.port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """A new life, on another port, behind the same address."""
        self.lives += 1
        port = free_port()
        environment = dict(os.environ)
        if self.spec is None:
            flags = ["--model-path", str(BASE), "--port", str(port), "--context-length", str(CONTEXT), "--stream-interval", "4"]
            argv = [sys.executable, "-P", "-m", "rollout.engine", *flags]
        else:
            argv = launch.command(self.spec, launch.Server(BASE, port, 0, CONTEXT, 32, 4, 0, "float32"))
            environment |= launch.environment(self.spec, 1)
        command = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), *argv]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.port = self.proxy.behind = port

    def wait(self, deadline_s: float) -> None:
        """Until it answers; then it is made slow, so that requests are long enough to be cut."""
        until = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if self.ask("/health").status_code == 200:
                    break
            assert time.monotonic() < until, self._log_path.read_text()[-3000:]
            time.sleep(0.1)
        httpx.post(self.direct + "/slow_down", json={"forward_sleep_time": self.slow_s}, trust_env=False, timeout=10)

    @property
    def direct(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str) -> httpx.Response:
        return httpx.get(self.direct + path, trust_env=False, timeout=10)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self.signal(signal.SIGKILL)
        self._process.wait(30)

    def close(self) -> None:
        self.kill()
        self.proxy.close()


@contextlib.contextmanager
def fleet(directory: Path, count: int, spec: SglangSpec | None, slow_s: float) -> Iterator[list[Engine]]:
    """Engines, ended with the block. Real ones start in parallel."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    engines: list[Engine] = []
    try:
        for _ in range(count):
            engines.append(Engine(directory, loop, spec, slow_s))
        yield engines
    finally:
        for engine in engines:
            engine.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
