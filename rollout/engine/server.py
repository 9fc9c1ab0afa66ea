"""SGLang 0.5.23's HTTP routes over one Engine.

aiohttp's server rather than FastAPI: a streamed answer of four chunks costs it 70 µs of this process's time (uvicorn with h11: 185), and
it cancels a handler when its client goes away, which is exactly how a request is aborted. Bodies are msgspec structs.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
import orjson
from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.web_request import BaseRequest

from rollout.engine import info, protocol
from rollout.engine.contract import contract_error
from rollout.engine.control import STORE_FORMAT, Fatal, Outcome
from rollout.engine.engine import Engine, RequestFailed
from rollout.engine.protocol import GenerateBody, SamplingParams
from rollout.engine.replies import rejection
from rollout.extras import Place

log = logging.getLogger(__name__)

Handler = Callable[[BaseRequest], Coroutine[Any, Any, web.StreamResponse]]
Body = TypeVar("Body")

DONE = b"data: [DONE]\n\n"
FLUSHED = "Cache flushed.\nThe embedded engine keeps no cache across requests, so there was nothing to drop.\n"
MOST_BODY_BYTES = 64 * 2**20


class Server:
    """`handle` is an aiohttp low-level handler: routes by a table, keys by SGLang's two levels, errors in SGLang's envelopes."""

    stream_class = web.StreamResponse

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._generate_decoder = msgspec.json.Decoder(GenerateBody)
        self._operating: set[asyncio.Future[web.StreamResponse]] = set()
        self._routes: dict[str, tuple[str, bool, Handler]] = {}
        for paths, methods, admin, handler in (
            ("/generate", "POST PUT", False, self._generate),
            ("/model_info /get_model_info", "GET", False, self._model_info),
            ("/server_info /get_server_info", "GET", False, self._server_info),
            ("/v1/loads", "GET", False, self._loads),
            ("/health", "GET", False, self._health),
            ("/health_generate", "GET", False, self._health_generate),
            ("/ready", "GET", False, self._ready),
            ("/abort_request", "POST", True, self._abort),
            ("/pause_generation", "POST", True, self._pause),
            ("/continue_generation", "POST", True, self._continue),
            ("/flush_cache", "GET POST", True, self._flush),
            ("/release_memory_occupation", "GET POST", True, self._release),
            ("/resume_memory_occupation", "GET POST", True, self._resume),
            ("/begin_weight_update", "POST", True, self._begin),
            ("/end_weight_update", "POST", True, self._end),
            ("/update_weights_from_tensor", "POST", True, self._update_from_tensor),
            ("/update_weights_from_disk", "POST", True, self._update_from_disk),
            ("/update_weight_version", "POST", True, self._update_version),
            ("/update_weights_from_distributed", "POST", True, self._update_from_group),
            ("/init_weights_update_group", "POST", True, self._init_group),
            ("/destroy_weights_update_group", "POST", True, self._destroy_group),
            ("/get_weights_by_name", "GET POST", True, self._weight),
            ("/weights_checker", "GET POST", True, self._checker),
            ("/slow_down", "GET POST", True, self._slow_down),
        ):
            self.add_route(paths, methods, admin, handler)

    def add_route(self, paths: str, methods: str, admin: bool, handler: Handler) -> None:
        for path in paths.split():
            self._routes[path] = (methods, admin, handler)

    @property
    def paths(self) -> set[str]:
        return set(self._routes)

    async def handle(self, request: BaseRequest) -> web.StreamResponse:
        route = self._routes.get(request.path)
        if route is None:
            return _json({"detail": "Not Found"}, 404)
        methods, admin, handler = route
        if not self._may(request, admin):
            return _json({"error": "Unauthorized"}, 401)
        if request.method not in methods.split():
            return _json({"detail": "Method Not Allowed"}, 405)
        try:
            if admin:
                return await self._to_its_end(handler(request))
            return await handler(request)
        except (msgspec.DecodeError, web.HTTPRequestEntityTooLarge) as error:
            return _invalid(str(error))
        except RequestFailed as error:
            return _failed(error) if error.status_code != 400 else _refused(error)
        except ValueError as error:
            return _refused(error)
        except (Fatal, TimeoutError) as error:
            return _json({"error": {"message": str(error)}}, 500)

    async def _to_its_end(self, answering: Coroutine[Any, Any, web.StreamResponse]) -> web.StreamResponse:
        """An operator's call is not half done because its client gave up waiting: only generation ends with the connection."""
        task = asyncio.ensure_future(answering)
        self._operating.add(task)
        task.add_done_callback(self._operating.discard)
        return await asyncio.shield(task)

    def make_request(self, message: RawRequestMessage, payload: Any, protocol: Any, writer: Any, task: Any) -> BaseRequest:
        """aiohttp's own, but with room for a long batch of prompts."""
        return BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=MOST_BODY_BYTES)

    def _may(self, request: BaseRequest, admin: bool) -> bool:
        """SGLang's rules: probes are open; operator calls want the admin key if there is one, else the API key; the rest the API key."""
        if request.path.startswith(("/health", "/ready", "/metrics")) or request.method == "OPTIONS":
            return True
        settings = self.engine.settings
        wanted = (settings.admin_api_key if admin else None) or settings.api_key
        if not wanted:
            return True
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and secrets.compare_digest(key.encode(), wanted.encode())

    # Generation.

    async def _generate(self, request: BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = self._generate_decoder.decode(raw)
        except msgspec.ValidationError as error:
            told = contract_error(error, orjson.loads(raw), SamplingParams.__struct_fields__)
            return _invalid(str(error)) if told is None else _json({"error": told}, 400)
        if body.stream:
            return await self._stream(request, body)
        bodies, batch = protocol.split_batch(body)
        async with self.engine.admitted(bodies) as requests:
            replies = await asyncio.gather(*(self.engine.last_reply(one, body.headrace_extras) for one in requests))
        return _json(replies if batch else replies[0])

    async def _stream(self, request: BaseRequest, body: GenerateBody) -> web.StreamResponse:
        """Server-sent events. What is wrong with the request is an event too: the headers say 200 before anything is checked."""
        response = self.stream_class(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            bodies, batch = protocol.split_batch(body)
            async with self.engine.admitted(bodies) as requests:
                if batch:
                    await asyncio.gather(*(self._send(response, one, index) for index, one in enumerate(requests)))
                else:
                    await self._send(response, requests[0], None, body.headrace_extras)
        except protocol.Rejected as error:
            await response.write(_event(rejection(error)))
        except ValueError as error:
            log.error("streamed request refused: %s", error)
            problem = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
            await response.write(_event({"error": problem}))
        except ConnectionError:
            return response  # the client went away; `admitted` has aborted what it asked for
        await response.write_eof(DONE)
        return response

    async def _send(self, response: web.StreamResponse, request: Any, index: int | None, place: Place | None = None) -> None:
        async for reply in self.engine.replies(request, place):
            if index is not None:
                reply["index"] = index
            await response.write(_event(reply))

    # Reading.

    async def _model_info(self, request: BaseRequest) -> web.Response:
        return _json(info.model_info(self.engine))

    async def _server_info(self, request: BaseRequest) -> web.Response:
        return _json(info.server_info(self.engine))

    async def _loads(self, request: BaseRequest) -> web.Response:
        rank, form = request.query.get("dp_rank"), request.query.get("format", "json")
        if rank is not None and not rank.lstrip("-").isdecimal():
            return _invalid(f"dp_rank must be a whole number, got {rank!r}")
        if form == "prometheus":
            return _refused(ValueError("the embedded engine gives its loads as JSON only; leave out format=prometheus"))
        try:
            return _json(info.loads(self.engine, request.query.get("include"), None if rank is None else int(rank)))
        except ValueError:
            return web.Response(text="Internal Server Error", status=500)  # SGLang's answer to a section it does not know

    async def _health(self, request: BaseRequest) -> web.Response:
        """At once, like a server with SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0: alive is one question, making tokens another."""
        return web.Response(status=503 if self.engine.ended.is_set() else 200)

    async def _health_generate(self, request: BaseRequest) -> web.Response:
        return web.Response(status=200 if await self.engine.answers_one_token() else 503)

    async def _ready(self, request: BaseRequest) -> web.Response:
        return web.Response(status=200 if self.engine.ready else 503)

    async def _checker(self, request: BaseRequest) -> web.Response:
        raw = await request.read()
        body = msgspec.json.decode(raw, type=protocol.CheckerBody) if raw else protocol.CheckerBody()
        if body.action in ("snapshot", "reset_tensors", "compare"):
            return _outcome(Outcome(False, f"action {body.action!r}: the embedded engine does only checksum"))
        if body.action == STORE_FORMAT:
            equal = await self.engine.call(lambda: self.engine.control.equal_to_stored(body.serialized_buckets))
            return _json({"success": True, "message": "Success.", "equal": equal})
        if body.action != "checksum":
            return _outcome(Outcome(False, f"Unsupported action={body.action!r}"))
        skipped = body.skip_tensor_list or []
        return _json(info.checksum_report(await self.engine.call(lambda: self.engine.control.checksums(skipped))))

    async def _weight(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.NameBody)
        return _json(await self.engine.call(lambda: self.engine.control.weight(body.name, body.truncate_size)))

    # The operator's calls.

    async def _abort(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.AbortBody)
        self.engine.abort(body.rid or "", body.abort_all)
        return web.Response()

    async def _pause(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.PauseBody)
        await self.engine.pause(body.mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: BaseRequest) -> web.Response:
        await _body(request, protocol.ContinueBody)
        await self.engine.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: BaseRequest) -> web.Response:
        try:
            wait_s = float(request.query.get("timeout", "0"))
        except ValueError:
            return _invalid(f"timeout must be a number of seconds, got {request.query['timeout']!r}")
        outcome = await self.engine.flush(wait_s)
        return web.Response(text=FLUSHED) if outcome.success else web.Response(text=outcome.message, status=400)

    async def _release(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.MemoryBody)
        await self.engine.call(lambda: self.engine.control.release_memory(body.tags))
        return _json(None)

    async def _resume(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.MemoryBody)
        await self.engine.call(lambda: self.engine.control.resume_memory(body.tags))
        return _json(None)

    async def _begin(self, request: BaseRequest) -> web.Response:
        await _body(request, protocol.BeginBody)
        return _outcome(await self.engine.call(lambda: self.engine.control.begin_update()))

    async def _end(self, request: BaseRequest) -> web.Response:
        await _body(request, protocol.EndBody)
        return _outcome(await self.engine.call(self.engine.control.end_update))

    async def _update_from_tensor(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.TensorUpdateBody)

        def update() -> Outcome:
            return self.engine.control.update_from_store(
                body.serialized_named_tensors, body.load_format, body.flush_cache, body.weight_version
            )

        return _outcome(await self.engine.update_weights(update, body.weight_version, body.abort_all_requests))

    async def _update_from_disk(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.DiskUpdateBody)

        def update() -> Outcome:
            return self.engine.control.update_from_disk(body.model_path, body.flush_cache, body.weight_version)

        return _outcome(
            await self.engine.update_weights(update, body.weight_version, body.abort_all_requests, body.model_path), num_paused_requests=0
        )

    async def _update_from_group(self, request: BaseRequest) -> web.Response:
        return _outcome(await self.engine.update_from_group(await _body(request, protocol.DistributedUpdateBody)))

    async def _init_group(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.GroupBody)
        group = (body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name, body.backend)
        return _outcome(await self.engine.groups.join(*group))

    async def _destroy_group(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.DestroyGroupBody)
        return _outcome(await self.engine.groups.leave(body.group_name))

    async def _update_version(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.VersionBody)
        await self.engine.set_version(body.new_version, body.abort_all_requests)
        return _json({"success": True, "message": f"Weight version updated to {body.new_version}", "new_version": body.new_version})

    async def _slow_down(self, request: BaseRequest) -> web.Response:
        body = await _body(request, protocol.SlowDownBody)
        await self.engine.call(lambda: self.engine.control.slow_down(body.forward_sleep_time))
        return _json(None)


async def _body(request: BaseRequest, kind: type[Body]) -> Body:
    """Control calls want a body, `{}` at least: an empty one is refused, as by SGLang."""
    return msgspec.json.decode(await request.read(), type=kind)


def _event(reply: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(reply) + b"\n\n"


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def _outcome(outcome: Outcome, **more: Any) -> web.Response:
    return _json({"success": outcome.success, "message": outcome.message} | more, 200 if outcome.success else 400)


def _envelope(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": code}


def _invalid(message: str) -> web.Response:
    return _json(_envelope(message, HTTPStatus.BAD_REQUEST.phrase, 400), 400)


def _refused(error: Exception) -> web.Response:
    log.error("request refused: %s", error)
    return _json({"error": {"message": str(error)}}, 400)


def _failed(error: RequestFailed) -> web.Response:
    return _json(_envelope(str(error), str(error.status_code), error.status_code), error.status_code)
