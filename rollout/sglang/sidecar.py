"""Stands before one real SGLang, on its host: puts the routed experts of an answer into the store, and leaves a reference in their place.

    driver ──/generate, with a key──▶ sidecar ──return_routed_experts──▶ SGLang
           ◀──────── reference ─────         ◀──── megabytes, base64 ───
                                       └──▶ store

Everything else passes byte for byte, either way. With a command after `--` it starts the server itself, and both end together; without one
the server is somebody else's. Only the store that it was told of is written to, whatever a request says.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import ctypes
import json
import logging
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest
from yarl import URL

from rollout import extras
from rollout.extras import Place

log = logging.getLogger("headrace.sidecar")
MARK = b'"routed_experts"'
INFO = ("/server_info", "/get_server_info")
OF_ONE_CONNECTION = {
    "host",
    "accept-encoding",
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "te",
    "trailer",
    "upgrade",
}
AS_IT_IS = {"Accept-Encoding": "identity"}  # what is rewritten here must not come compressed
MOST_BODY_BYTES = 1 << 30
PR_SET_PDEATHSIG = 1


class Sidecar:
    """`layers` and `k` are the model's: SGLang sends the array without its shape."""

    def __init__(self, behind: str, store_location: str, layers: int, k: int) -> None:
        self._behind = behind
        self._location = store_location
        self._layers, self._k = layers, k
        # The caller says how long it waits. Bodies pass as they are.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False)

    async def close(self) -> None:
        await self._http.close()

    async def handle(self, request: BaseRequest) -> web.StreamResponse:
        body = await request.read()
        place = None
        if request.path == "/generate" and f'"{extras.REQUEST}"'.encode() in body:
            try:
                body, place = self._asked(body)
            except (orjson.JSONDecodeError, msgspec.ValidationError, TypeError) as error:
                return web.json_response({"error": {"message": f"{extras.REQUEST}: {error}"}}, status=400)
        try:
            async with self._http.request(
                request.method,
                URL(self._behind + request.raw_path, encoded=True),
                data=body or None,
                headers=_passing(request.headers) | AS_IT_IS,
                allow_redirects=False,
            ) as answer:
                if request.path in INFO and answer.status == 200:
                    return web.json_response(json.loads(await answer.read()) | {extras.STORED: True})
                if place is not None and answer.content_type == "application/json":
                    return web.Response(
                        body=await self._without(await answer.read(), place), status=answer.status, headers=_passing(answer.headers)
                    )
                return await self._passed(request, answer, place)
        except aiohttp.ClientConnectorError as error:
            return web.json_response({"error": {"message": f"the server behind {self._behind} does not listen: {error}"}}, status=503)

    def _asked(self, body: bytes) -> tuple[bytes, Place]:
        asked = orjson.loads(body)
        place = msgspec.convert(asked.pop(extras.REQUEST), Place)
        return orjson.dumps(asked | {"return_routed_experts": True}), place

    async def _passed(self, request: BaseRequest, answer: aiohttp.ClientResponse, place: Place | None) -> web.StreamResponse:
        """As it comes; of a stream the event that has them is another."""
        response = web.StreamResponse(status=answer.status, headers=_passing(answer.headers))
        await response.prepare(request)
        rest = b""
        async for data in answer.content.iter_any():
            if place is None:
                await response.write(data)
                continue
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                await response.write((await self._event(event, place)) + b"\n\n")
        if rest:
            await response.write(rest)
        await response.write_eof()
        return response

    async def _event(self, event: bytes, place: Place) -> bytes:
        if MARK not in event or not event.startswith(b"data:"):
            return event
        return b"data: " + await self._without(event[5:].strip(), place)

    async def _without(self, reply: bytes, place: Place) -> bytes:
        """A reply with the reference in place of the array."""
        answer = orjson.loads(reply)
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        coded = meta.pop("routed_experts", None) if isinstance(meta, dict) else None
        if meta is None or coded is None:
            return reply
        if (meta.get("finish_reason") or {}).get("type") != "abort":  # then its asker goes on elsewhere
            meta["routed_experts"] = await self._put(coded, place)
        return orjson.dumps(answer)

    async def _put(self, coded: str, place: Place) -> Any:
        if place.location != self._location:
            return {"error": f"this sidecar puts into {self._location} only; the request names {place.location}"}
        try:
            routes = np.frombuffer(base64.b64decode(coded, validate=True), "<i4").reshape(-1, self._layers, self._k)
        except (binascii.Error, ValueError, TypeError) as error:
            return {"error": f"the server's routed experts are no array of {self._layers} layers of {self._k}: {error}"}
        return await extras.answered(routes, place)

    def make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> BaseRequest:
        return BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=MOST_BODY_BYTES)


def _passing(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in OF_ONE_CONNECTION}


def experts_shape(model_path: Path) -> tuple[int, int]:
    """(layers, experts of a token). ValueError for a model without experts."""
    model = json.loads((model_path / "config.json").read_text())
    if "num_experts_per_tok" not in model:
        raise ValueError(f"{model_path} has no experts: serve it without a sidecar")
    return int(model["num_hidden_layers"]), int(model["num_experts_per_tok"])


async def serve(options: argparse.Namespace) -> int:
    """Until a signal (0), or until the server that it started has ended (its code)."""
    sidecar = Sidecar(f"http://{options.behind}", options.store, *experts_shape(options.model_path))
    # Killed with this process, or it would keep its port and the GPU.
    child = await asyncio.create_subprocess_exec(*options.command, preexec_fn=_die_with_parent) if options.command else None
    asked_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_end.set)
    # A handler is cancelled when its client goes away, which closes the connection behind it: that is what aborts the request.
    front = web.Server(sidecar.handle, request_factory=sidecar.make_request, access_log=None, handler_cancellation=True)
    runner = web.ServerRunner(front, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    log.info("before http://%s on http://%s:%d, into %s", options.behind, options.host, options.port, options.store)
    ends = [asyncio.ensure_future(asked_to_end.wait())] + ([] if child is None else [asyncio.ensure_future(child.wait())])
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    await runner.cleanup()
    await sidecar.close()
    if child is None or asked_to_end.is_set():
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()
        return 0
    log.error("the server ended with code %s", child.returncode)
    return child.returncode or 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rollout.sglang.sidecar", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "--behind", required=True, metavar="HOST:PORT", help="the SGLang server, started with --enable-return-routed-experts"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--store", required=True, metavar="LOCATION", help="the run's store: store.location of GET /v1/runs/RUN")
    parser.add_argument("--model-path", type=Path, required=True, help="for the number of layers, and of experts of a token")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: start this server too, and end with it")
    options = parser.parse_args(arguments)
    options.command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return options


def main() -> None:
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = parse_flags(sys.argv[1:])
    try:
        sys.exit(asyncio.run(serve(options)))
    except (ValueError, OSError) as error:
        print(f"rollout.sglang.sidecar: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
