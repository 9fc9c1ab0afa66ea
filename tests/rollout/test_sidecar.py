"""The sidecar of a real SGLang, before a server that answers as SGLang does: the array goes into the store, everything else passes."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from aiohttp import web

from rollout.answer import EventSplitter
from rollout.capabilities import capabilities_of
from rollout.client import EngineClient, make_http
from rollout.sglang import launch
from rollout.sglang.sidecar import parse_flags
from rollout.sglang.spec import SglangSpec
from store import EmbeddedStore, Ref, default_root
from store.schema import validate

LAYERS, CHOSEN = 2, 2
ROUTES = (np.arange(5 * LAYERS * CHOSEN).reshape(5, LAYERS, CHOSEN) * 13 % 256).astype("<i4")  # of a prompt of 4 and an answer of 2
SAMPLING = {"max_new_tokens": 2}
READY_S = 60.0


class Behind:
    """SGLang's answers to a request of four tokens, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.finish: dict[str, Any] = {"type": "length", "length": 2}
        self.holds = asyncio.Event()
        self.let_go = asyncio.Event()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        last = self._reply(2, body.get("return_routed_experts"))
        if not body.get("stream"):
            return web.json_response(last)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + orjson.dumps(self._reply(1, False)) + b"\n\n")
        if self.holds.is_set():
            try:
                await asyncio.sleep(READY_S)
            except asyncio.CancelledError:
                self.let_go.set()
                raise
        whole = b"data: " + orjson.dumps(last) + b"\n\ndata: [DONE]\n\n"
        for start in range(0, len(whole), 100):  # as a network may cut it
            await response.write(whole[start : start + 100])
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    def _reply(self, tokens: int, routes: Any) -> dict[str, Any]:
        pairs = [[-0.5, 7, None]] * tokens
        meta: dict[str, Any] = {"finish_reason": None, "completion_tokens": tokens, "weight_version": "v", "output_token_logprobs": pairs}
        if tokens == 2:
            meta |= {"finish_reason": self.finish, "weight_versions": [{"version": "v", "start": 0, "end": 2}]}
        if routes:
            meta["routed_experts"] = base64.b64encode(ROUTES.tobytes()).decode()
        return {"output_ids": [7] * tokens, "meta_info": meta}

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "enable_return_routed_experts": True})

    async def other(self, request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response({"path": request.raw_path, "key": request.headers.get("authorization"), "bytes": len(body)}, status=418)


@pytest.fixture
async def behind() -> AsyncIterator[tuple[Behind, str]]:
    server, app = Behind(), web.Application(client_max_size=1 << 26)
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/server_info", server.info)
    app.router.add_route("*", "/{rest:.*}", server.other)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield server, f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
def store() -> Any:
    made = EmbeddedStore(default_root(f"test-{uuid.uuid4().hex[:12]}"), 1 << 20)
    yield made
    made.remove()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS, "num_experts_per_tok": CHOSEN}))
    return tmp_path


async def started(behind: str, store: EmbeddedStore, model: Path, *command: str) -> tuple[asyncio.subprocess.Process, str]:
    port = free_port()
    flags = ["--behind", behind, "--port", str(port), "--store", store.location, "--model-path", str(model)]
    more = ["--", *command] if command else []
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "rollout.sglang.sidecar", *flags, *more)
    url = f"http://127.0.0.1:{port}"
    async with asyncio.timeout(READY_S), httpx.AsyncClient(trust_env=False) as http:
        while True:
            try:
                await http.get(f"{url}/health")
                return process, url
            except httpx.TransportError:
                assert process.returncode is None
                await asyncio.sleep(0.05)


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_the_array_goes_into_the_store_and_everything_else_passes(
    behind: tuple[Behind, str], store: EmbeddedStore, model: Path
) -> None:
    server, address = behind
    process, url = await started(address, store, model)
    try:
        async with make_http() as http, httpx.AsyncClient(trust_env=False, timeout=20) as plain:
            client = EngineClient(url, http)
            found = capabilities_of(await client.server_info(), {})
            assert found.routed_experts and found.stores_extras
            for stream in (True, False):
                place = {"location": store.location, "key": f"run/extras/{stream}"}
                made = await client.generate([1, 2, 3, 4], SAMPLING, "r", stall_s=20.0, stream=stream, extras=place)
                said = made.meta["routed_experts"]
                assert made.output_ids == [7, 7] and said["shape"] == [5, LAYERS, CHOSEN] and len(orjson.dumps(said)) < 300
                with store.open(Ref.from_wire(said)) as lease:
                    validate("extras", lease)
                    assert lease["routed_experts"].dtype == np.uint8 and np.array_equal(lease["routed_experts"], ROUTES)
                assert "headrace_extras" not in server.asked[-1] and server.asked[-1]["return_routed_experts"] is True
            elsewhere = {"location": "tmpfs:/dev/shm/another", "key": "k"}
            made = await client.generate([1, 2, 3, 4], SAMPLING, "r", stall_s=20.0, extras=elsewhere)
            assert "puts into" in made.meta["routed_experts"]["error"], "a request does not choose where files are written"
            assert "routed_experts" not in (await client.generate([1, 2, 3, 4], SAMPLING, "r", stall_s=20.0)).meta
            server.finish = {"type": "abort", "message": "Aborted", "status_code": None}
            made = await client.generate([1, 2, 3, 4], {"max_new_tokens": 3}, "r", stall_s=20.0, extras=place | {"key": "k"})
            assert made.finish_reason == "abort" and "routed_experts" not in made.meta and len(store.keys()) == 2
            passed = await plain.post(f"{url}/any/path?a=1&b=%2F", content=b"x" * (1 << 21), headers={"authorization": "Bearer k"})
            assert passed.status_code == 418 and passed.json() == {"path": "/any/path?a=1&b=%2F", "key": "Bearer k", "bytes": 1 << 21}
            wrong = await plain.post(f"{url}/generate", json={"input_ids": [1], "headrace_extras": {"key": 5}})
            assert wrong.status_code == 400 and "headrace_extras" in wrong.text
    finally:
        process.terminate()
        assert await process.wait() == 0


async def test_a_client_that_goes_away_is_seen_behind(behind: tuple[Behind, str], store: EmbeddedStore, model: Path) -> None:
    """Which is what aborts a request."""
    server, address = behind
    server.holds.set()
    process, url = await started(address, store, model)
    try:
        body = {"input_ids": [1], "stream": True, "headrace_extras": {"location": store.location, "key": "k"}}
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http, http.stream("POST", f"{url}/generate", json=body) as response:
            events = EventSplitter()
            async for data in response.aiter_raw():
                if events.feed(data):
                    break
        async with asyncio.timeout(READY_S):
            await server.let_go.wait()
        assert store.keys() == []
    finally:
        process.terminate()
        await process.wait()


async def test_it_ends_with_the_server_that_it_started_and_the_server_with_it(store: EmbeddedStore, model: Path, tmp_path: Path) -> None:
    socket_path = str(tmp_path / "alive")
    serving = f"import socket, time; s = socket.socket(socket.AF_UNIX); s.connect({socket_path!r}); time.sleep(600)"
    connected: asyncio.Future[asyncio.StreamReader] = asyncio.get_running_loop().create_future()
    listener = await asyncio.start_unix_server(lambda reader, writer: connected.set_result(reader), socket_path)
    process, url = await started("127.0.0.1:9", store, model, sys.executable, "-c", serving)
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"{url}/health")).status_code == 503, "the server is not there yet"
    async with asyncio.timeout(READY_S):
        alive = await connected
        process.kill()
        await process.wait()
        assert await alive.read() == b"", "the kernel closed it: the server was killed with its parent"
    listener.close()
    flags = ["--behind", "127.0.0.1:9", "--port", str(free_port()), "--store", store.location, "--model-path", str(model), "--"]
    ends = [sys.executable, "-c", "raise SystemExit(7)"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "rollout.sglang.sidecar", *flags, *ends)
    assert await process.wait() == 7


def test_the_driver_starts_it_before_the_server_whose_environment_it_keeps_to_itself(model: Path) -> None:
    spec = SglangSpec(python=Path("/opt/sglang/bin/python"), device="cuda")
    server = launch.Server(model, 5002, 0, 64, 4, 4, 0, "float32", routed_experts=True)
    command = launch.behind_sidecar(spec, server, 5001, "tmpfs:/dev/shm/s", 1)
    assert command[1:4] == ["-P", "-m", "rollout.sglang.sidecar"]
    told = parse_flags(command[4:])
    assert (told.port, told.behind, told.store, told.model_path) == (5001, "127.0.0.1:5002", "tmpfs:/dev/shm/s", model)
    assert told.command[:2] == ["env", "PYTHONPATH="] and "--enable-return-routed-experts" in told.command
    assert told.command[told.command.index("--port") + 1] == "5002"
