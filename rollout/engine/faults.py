"""Faults on command: an engine that fails at the very call, and the very chunk, that a script names.

    [{"fault": "die", "call": "/update_weights_from_tensor", "after": 2},
     {"fault": "hang", "call": "/generate", "chunks": 3, "times": null}]

Every fault names the path of a call. It lets `after` of these calls pass and takes the next `times` of them (null: all that follow); when
several are due, the first in the list has the call. `chunks` puts it inside a streamed answer, so many chunks in; without, it comes before
the first byte. With `done` the call has its effect and only its answer is lost.

The server knows nothing of this. `Faults.handle` stands before its `handle`, and only where the engine was started with --faults FILE or
--allow-faults; the second also opens /faults: GET tells the script and how often each fault struck, POST replaces it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import orjson
from aiohttp import web
from aiohttp.web_request import BaseRequest

if TYPE_CHECKING:
    from rollout.engine.server import Server  # which imports torch; scripts are checked before that

log = logging.getLogger(__name__)

Handle = Callable[[BaseRequest], Awaitable[web.StreamResponse]]
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

TAKEN = "fault"  # the key of a request under which its fault lies


class Fault(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="fault"):
    """What every fault has. `answer` stands for the server's handler, `event` sees each chunk from `first_chunk` on."""

    call: str
    after: Count = 0
    times: Annotated[int, msgspec.Meta(ge=1)] | None = 1

    @property
    def first_chunk(self) -> int:
        return 0

    async def answer(self, request: BaseRequest, handle: Handle) -> web.StreamResponse:
        return await handle(request)

    async def event(self, stream: FaultyStream, data: bytes) -> bytes:
        return data


class Alteration(Fault, kw_only=True, frozen=True):
    """Calls are answered, but not with what the server said."""

    chunks: Count = 0

    @property
    def first_chunk(self) -> int:
        return self.chunks

    async def answer(self, request: BaseRequest, handle: Handle) -> web.StreamResponse:
        answer = await handle(request)
        if answer.prepared or not isinstance(answer, web.Response) or not isinstance(answer.body, bytes):
            return answer
        return web.Response(body=await self.altered(answer.body), status=answer.status, content_type=answer.content_type)

    async def event(self, stream: FaultyStream, data: bytes) -> bytes:
        return b"data: " + await self.altered(data.removeprefix(b"data: ").strip()) + b"\n\n"

    async def altered(self, body: bytes) -> bytes:
        return _changed(body, self.change)

    def change(self, reply: dict[str, Any]) -> None:
        """In place."""


class Slow(Alteration, tag="slow", kw_only=True, frozen=True):
    """The answer comes `seconds` late, and each chunk of a stream `seconds` after the one before."""

    seconds: Seconds

    async def altered(self, body: bytes) -> bytes:
        await asyncio.sleep(self.seconds)
        return body


class Truncate(Alteration, tag="truncate", kw_only=True, frozen=True):
    """The answer ends in the middle of its JSON, as if that were all of it."""

    async def altered(self, body: bytes) -> bytes:
        return body[: len(body) // 2]

    async def event(self, stream: FaultyStream, data: bytes) -> bytes:
        await stream.end(data[: len(data) // 2])


class LogProbMissing(Alteration, tag="log_prob_missing", kw_only=True, frozen=True):
    """One log-prob less than there are tokens."""

    def change(self, reply: dict[str, Any]) -> None:
        reply["meta_info"]["output_token_logprobs"] = reply["meta_info"].get("output_token_logprobs", [])[:-1]


class LieVersion(Alteration, tag="lie_version", kw_only=True, frozen=True):
    """/model_info, or the chunks and spans of an answer, name `version` and not that of the weights."""

    version: str

    def change(self, reply: dict[str, Any]) -> None:
        told = reply.get("meta_info", reply)
        told["weight_version"] = self.version
        for span in told.get("weight_versions", []):
            span["version"] = self.version


class Break(Fault, kw_only=True, frozen=True):
    """No answer, or none to the end."""

    chunks: Count | None = None
    done: bool = False

    def __post_init__(self) -> None:
        if self.done and self.chunks is not None:
            raise ValueError("done and chunks exclude each other: a stream that began has done what it was asked")

    @property
    def first_chunk(self) -> int:
        return 0 if self.chunks is None else self.chunks

    async def answer(self, request: BaseRequest, handle: Handle) -> web.StreamResponse:
        if self.done or self.chunks is not None:
            answer = await handle(request)
            if answer.prepared:
                return answer
        else:
            await request.read()
        return await self.strike(request)

    async def strike(self, request: BaseRequest) -> web.StreamResponse:
        raise NotImplementedError

    async def event(self, stream: FaultyStream, data: bytes) -> bytes:
        if self.chunks is not None:
            await self.strike(stream.request)
            raise ConnectionResetError("scripted")
        return data


class Hang(Break, tag="hang", kw_only=True, frozen=True):
    """Says no more, for as long as its client waits. /health goes on answering, unless it is the call."""

    async def strike(self, request: BaseRequest) -> web.StreamResponse:
        return await asyncio.get_running_loop().create_future()


class Status(Break, tag="status", kw_only=True, frozen=True):
    """An HTTP status for an answer; in a stream, SGLang's error event."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    message: str = "scripted fault"

    async def strike(self, request: BaseRequest) -> web.StreamResponse:
        return web.Response(body=self._body(), status=self.status, content_type="application/json")

    async def event(self, stream: FaultyStream, data: bytes) -> bytes:
        if self.chunks is not None:
            await stream.end(b"data: " + self._body() + b"\n\n")
        return data

    def _body(self) -> bytes:
        return orjson.dumps({"error": {"message": self.message, "code": self.status}})


class Reset(Break, tag="reset", kw_only=True, frozen=True):
    """The connection is reset."""

    async def strike(self, request: BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if transport is not None:
            # Aborting alone would end the connection in order, as far as TCP can tell.
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        return web.Response()


class Die(Break, tag="die", kw_only=True, frozen=True):
    """The process kills itself, as the kernel would when memory is short."""

    async def strike(self, request: BaseRequest) -> web.StreamResponse:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


class Drop(Fault, tag="drop", kw_only=True, frozen=True):
    """Says that it is done, and does nothing."""

    async def answer(self, request: BaseRequest, handle: Handle) -> web.StreamResponse:
        await request.read()
        return web.json_response({"success": True, "message": "Success"})


AnyFault = Slow | Truncate | LogProbMissing | LieVersion | Hang | Status | Reset | Die | Drop
KINDS = {kind.__struct_config__.tag: kind for kind in AnyFault.__args__}


def read_script(text: bytes) -> list[AnyFault]:
    """ValueError for what is no script, with the place and what there is."""
    try:
        entries = msgspec.json.decode(text, type=list[dict[str, Any]])
    except msgspec.DecodeError as error:
        raise ValueError(f"a fault script is a JSON list of objects: {error}") from error
    return [_fault(number, entry) for number, entry in enumerate(entries)]


def _fault(number: int, entry: dict[str, Any]) -> AnyFault:
    kind = KINDS.get(str(entry.get("fault")))
    if kind is None:
        raise ValueError(f"fault {number}: there is no fault {entry.get('fault')!r}; there are {', '.join(KINDS)}")
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        keys = ", ".join(kind.__struct_fields__)
        raise ValueError(f"fault {number}: {error}; the keys of {entry['fault']} are {keys}") from error


def read_script_file(path: Path) -> list[AnyFault]:
    try:
        return read_script(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"--faults {path}: {error}") from error


class Scripted(msgspec.Struct):
    """A fault with the calls it has seen and those it took."""

    fault: AnyFault
    calls: int = 0
    struck: int = 0

    def due(self) -> bool:
        """Counts one call; whether this fault has it."""
        self.calls += 1
        since = self.calls - self.fault.after
        return since > 0 and (self.fault.times is None or since <= self.fault.times)


class FaultyStream(web.StreamResponse):
    """A streamed answer whose chunks pass through the request's fault."""

    request: BaseRequest
    _events = 0

    async def prepare(self, request: BaseRequest) -> Any:
        self.request = request
        return await super().prepare(request)

    async def write(self, data: Any) -> None:
        fault: Fault | None = self.request.get(TAKEN)
        if fault is not None and self._events >= fault.first_chunk:
            data = await fault.event(self, data)
        self._events += 1
        await super().write(data)

    async def end(self, data: bytes) -> NoReturn:
        """This chunk, then the stream's orderly end."""
        await super().write(data)
        await self.write_eof()
        raise ConnectionResetError("scripted")


class Faults:
    """`handle` is an aiohttp low-level handler before the server's. ValueError for a script with a call that the server does not know."""

    def __init__(self, server: Server, script: Sequence[AnyFault], by_http: bool) -> None:
        self._server = server
        self._script: list[Scripted] = []
        server.stream_class = FaultyStream
        if by_http:
            server.add_route("/faults", "GET POST", admin=True, handler=self._faults)
        self._replace(script)
        log.warning("this engine fails on command: %d faults are scripted%s", len(script), ", more by POST /faults" if by_http else "")

    async def handle(self, request: BaseRequest) -> web.StreamResponse:
        fault = self._take(request.path)
        if fault is None:
            return await self._server.handle(request)
        log.warning("scripted fault: %s", fault)
        request[TAKEN] = fault
        return await fault.answer(request, self._server.handle)

    def _take(self, path: str) -> AnyFault | None:
        due = [scripted for scripted in self._script if scripted.fault.call == path and scripted.due()]
        if not due:
            return None
        due[0].struck += 1
        return due[0].fault

    def _replace(self, script: Sequence[AnyFault]) -> None:
        strange = sorted({fault.call for fault in script} - self._server.paths)
        if strange:
            raise ValueError(f"no call of this server is {strange[0]!r}; its calls are {', '.join(sorted(self._server.paths))}")
        self._script = [Scripted(fault) for fault in script]

    async def _faults(self, request: BaseRequest) -> web.Response:
        if request.method == "POST":
            self._replace(read_script(await request.read()))
        return web.Response(body=msgspec.json.encode(self._script), content_type="application/json")


def _changed(body: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    reply = orjson.loads(body)
    change(reply)
    return orjson.dumps(reply)
