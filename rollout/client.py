"""SGLang's HTTP API for one engine, and nothing else: tokens in, tokens out, every call with a time-out.

`generate` streams. Its time-out is on progress, not on length: it gives up when no new token came for `stall_s` seconds of the
caller's clock, and a clock that stands still (the pool's, while the engine's gate is shut) holds it back for as long. What arrived
before a failure travels on the EngineError, so nothing that was sampled is lost. Only calls that change nothing are tried again here.
"""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from errno import ECONNREFUSED
from http.cookiejar import CookieJar, DefaultCookiePolicy
from socket import gaierror
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import aiohttp
import httpx
import orjson
from httpx_aiohttp import AiohttpTransport, HttpxAiohttpClient
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from rollout.address import is_loopback
from rollout.answer import Answer, EngineError, EventSplitter, Generation, check_log_probs, error_text, malformed, refusal
from rollout.capabilities import Capabilities, capabilities_of
from rollout.extras import REQUEST

Clock = Callable[[], float]
OnTokens = Callable[[list[int], list[float], str], None]
PauseMode = Literal["abort", "retract", "in_place"]

OPEN_TO_API_KEY = ("/generate", "/model_info", "/server_info", "/v1/loads", "/health")
INFO_S = 5.0  # reads of state
CONTROL_S = 30.0  # pauses, flushes, versions
WEIGHTS_S = 120.0  # memory and weights

# What a broken connection or answer looks like through httpx over aiohttp; a few aiohttp errors (a malformed status line) pass unmapped.
# RequestError has those of decompressing too, UnicodeError the names that the resolver cannot encode.
BROKEN = (httpx.RequestError, httpx.StreamError, aiohttp.ClientError, OSError, UnicodeError)


class EngineHttp(HttpxAiohttpClient):
    """The client that all engines share: httpx over aiohttp. Close it with `aclose()`."""

    def __init__(self, limits: httpx.Limits) -> None:
        """Proxies named in the environment are not for engines. What one sets as a cookie is not sent to the others on its host."""
        self._direct = AiohttpTransport(limits=limits, trust_env=False)
        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        super().__init__(transport=self._direct, timeout=None, trust_env=False, cookies=no_cookies)

    @asynccontextmanager
    async def posted(self, url: httpx.URL, body: bytes, headers: httpx.Headers) -> AsyncIterator[httpx.Response]:
        """An answer still on its way, as it is sent: nothing is decompressed, no time-out but the caller's.

        The request goes to the transport itself. `stream` would first look for redirects, cookies, authentication and hooks, none of which
        an engine has, and that took half of a request's time in this process (benchmarks/README.md).
        """
        request = httpx.Request("POST", url, stream=httpx.ByteStream(body))
        request.headers = headers
        request.read()
        response = await self._direct.handle_async_request(request)
        try:
            yield response
        finally:
            await response.aclose()


def make_http(limits: httpx.Limits | None = None) -> EngineHttp:
    """Connections are unlimited unless said otherwise (0 is aiohttp's word for that; None would mean its default of 100): the pool
    bounds requests. Idle ones go after 3 s, before a server's usual 5 s, so that a request seldom meets a closing connection.
    """
    return EngineHttp(limits or httpx.Limits(max_connections=0, keepalive_expiry=3.0))


def ref_payload(ref: Mapping[str, Any], ranks: int = 1) -> list[str]:
    """`serialized_named_tensors` for the load format `headrace_store`: each rank gets the store's Ref, as JSON, never a pickle."""
    return [base64.b64encode(orjson.dumps(dict(ref))).decode()] * ranks


class EngineClient:
    """One engine at one URL. Raises EngineError, and nothing else, when an answer does not come or cannot be believed."""

    def __init__(
        self, url: str, http: EngineHttp, api_key: str | None = None, *, admin_key: str | None = None, vocab_size: int | None = None
    ) -> None:
        """With both keys a server takes the admin key for an operator's calls alone, and the API key for all others."""
        self.url = url.rstrip("/")
        self.on_this_host = is_loopback(urlsplit(self.url).hostname or "")
        self.vocab_size = vocab_size
        self._http = http
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._admin_headers = self._headers | ({"authorization": f"Bearer {admin_key}"} if admin_key else {})
        self._generate_url = httpx.URL(f"{self.url}/generate")
        # With an encoding, or httpx would look for it at each access.
        self._generate_headers = httpx.Headers({**self._headers, "accept-encoding": "identity"}, encoding="ascii")

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
        rid: str,
        *,
        stall_s: float,
        stream: bool = True,
        clock: Clock = time.monotonic,
        version: str | None = None,
        extras: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Sample a continuation of `input_ids`; `sampling` is SGLang's sampling_params, `version` what the engine serves now.

        `extras` is where its routed experts are to be put (`rollout.extras`): the answer's meta then has the reference.
        `on_tokens(ids, log_probs, version)` hears of the new tokens of each chunk. Unstreamed, `stall_s` bounds the whole answer.
        """
        body = {"input_ids": list(input_ids), "sampling_params": dict(sampling), "rid": rid, "return_logprob": True, "stream": stream}
        if extras is not None:
            body |= {"return_routed_experts": True, REQUEST: dict(extras)}
        answer = Answer(len(input_ids), max_new_tokens=sampling.get("max_new_tokens"), vocab_size=self.vocab_size, version=version)
        try:
            async with Progress(stall_s, clock) as progress, aclosing(self._payloads(body, stream)) as payloads:
                async for payload in payloads:
                    ids, log_probs, version = answer.fold(payload)
                    if ids:
                        progress.made()
                        if on_tokens is not None:
                            on_tokens(ids, log_probs, version)
        except EngineError as error:
            if answer.generation is not None:
                return answer.generation  # whole before the connection broke
            error.prefix = answer.prefix
            raise
        except TimeoutError as error:
            raise EngineError("infrastructure", f"{self.url}: no new token in {stall_s:g} s", prefix=answer.prefix) from error
        if answer.generation is None:
            raise EngineError("infrastructure", f"{self.url}: the answer ended before it was complete", prefix=answer.prefix)
        return answer.generation

    async def _payloads(self, body: dict[str, Any], stream: bool) -> AsyncGenerator[bytes, None]:
        """The JSON chunks of one /generate call."""
        try:
            async with self._http.posted(self._generate_url, orjson.dumps(body), self._generate_headers) as response:
                if response.status_code != 200:
                    raise refusal(response.status_code, error_text(await response.aread()))
                if not stream:
                    yield await response.aread()
                    return
                events = EventSplitter()
                assert isinstance(response.stream, httpx.AsyncByteStream)
                async for data in response.stream:
                    for payload in events.feed(data):
                        if payload != b"[DONE]":
                            yield payload
        except BROKEN as error:
            raise self._broken(error) from error

    def _broken(self, error: BaseException) -> EngineError:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ConnectionRefusedError) or getattr(cause, "errno", None) == ECONNREFUSED:
                return EngineError("infrastructure", f"connection refused: nothing listens at {self.url}")
            if isinstance(cause, gaierror):
                return EngineError("infrastructure", f"{self.url}: no address is known for this name ({cause.strerror})")
            cause = cause.__cause__ or cause.__context__
        return EngineError("infrastructure", f"{self.url}: connection failed ({type(error).__name__} {error})")

    async def score_sequence(self, input_ids: Sequence[int], *, deadline_s: float = CONTROL_S) -> list[float]:
        """Log-probs at temperature 1 of the tokens 1.. of `input_ids`, each given those before it; nothing is sampled."""
        body = {"input_ids": list(input_ids), "return_logprob": True, "logprob_start_len": 0}
        try:
            reply = await self._post("/generate", body | {"sampling_params": {"max_new_tokens": 0, "temperature": 1.0}}, deadline_s)
        except EngineError as error:
            if error.status != 400:
                raise
            # Some servers want to sample at least one token.
            reply = await self._post("/generate", body | {"sampling_params": {"max_new_tokens": 1, "temperature": 1.0}}, deadline_s)
        meta = reply.get("meta_info") if isinstance(reply, dict) else None
        pairs = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
        if not isinstance(pairs, list) or [pair[1] if isinstance(pair, list) and len(pair) > 1 else None for pair in pairs] != list(
            input_ids
        ):
            raise malformed("input_token_logprobs do not speak of the tokens sent")
        log_probs = [pair[0] for pair in pairs[1:]]
        check_log_probs(log_probs)
        return log_probs

    async def abort(self, rid: str) -> None:
        """Ask for the end of one request. Fire and forget; the request answers with what it has."""
        await self._post("/abort_request", {"rid": rid}, CONTROL_S)

    async def abort_all(self) -> None:
        """Ask for the end of all requests, whoever sent them; each answers with what it has."""
        await self._post("/abort_request", {"abort_all": True}, CONTROL_S)

    async def pause(self, mode: PauseMode, *, deadline_s: float = CONTROL_S) -> None:
        await self._post("/pause_generation", {"mode": mode}, deadline_s)

    async def continue_generation(self, *, deadline_s: float = CONTROL_S) -> None:
        await self._post("/continue_generation", {}, deadline_s)

    async def is_paused(self) -> bool:
        """A server that starts or ends says the same as one that is paused."""
        try:
            await self._call("GET", "/ready", None, INFO_S)
        except EngineError as error:
            if error.status == 503:
                return True
            raise
        return False

    async def release(self, tags: Sequence[str], *, deadline_s: float = WEIGHTS_S) -> None:
        """Give back memory. Real engines die of this call unless they are paused and idle, and of a `resume` of what they hold."""
        await self._post("/release_memory_occupation", {"tags": list(tags)}, deadline_s)

    async def resume(self, tags: Sequence[str], *, deadline_s: float = WEIGHTS_S) -> None:
        await self._post("/resume_memory_occupation", {"tags": list(tags)}, deadline_s)

    async def begin_update(self, *, deadline_s: float = CONTROL_S) -> None:
        await self._post("/begin_weight_update", {"selector": "all"}, deadline_s)

    async def end_update(self, *, deadline_s: float = WEIGHTS_S) -> None:
        await self._post("/end_weight_update", {}, deadline_s)

    async def update_from_tensor(
        self,
        tensors: Sequence[str],
        *,
        load_format: str | None = "headrace_store",
        flush_cache: bool = False,
        deadline_s: float = WEIGHTS_S,
    ) -> None:
        """One bucket of weights; `tensors` has one entry a tensor-parallel rank (`ref_payload` makes them)."""
        body = {"serialized_named_tensors": list(tensors), "load_format": load_format, "flush_cache": flush_cache}
        await self._post("/update_weights_from_tensor", body | {"abort_all_requests": False}, deadline_s)

    async def join_group(self, address: str, port: int, name: str, *, size: int, backend: str, deadline_s: float = WEIGHTS_S) -> None:
        """Become ranks 1 … of a process group; the server does nothing else until its rank 0, at `address`, and all others are there."""
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": size}
        await self._post("/init_weights_update_group", body | {"group_name": name, "backend": backend}, deadline_s)

    async def leave_group(self, name: str, *, deadline_s: float = CONTROL_S) -> bool:
        """False when the server knows no such group."""
        try:
            await self._post("/destroy_weights_update_group", {"group_name": name}, deadline_s)
        except EngineError as error:
            if error.status == 400:
                return False
            raise
        return True

    async def update_from_group(
        self,
        name: str,
        tensors: Sequence[tuple[str, str, Sequence[int]]],
        *,
        flush_cache: bool = False,
        deadline_s: float = WEIGHTS_S,
    ) -> None:
        """One bucket, of (name, dtype, shape), that rank 0 of the group sends meanwhile: all their bytes in this order, without a gap.

        A tensor must start at a multiple of its dtype's size, so wide dtypes come first.
        """
        names, dtypes, shapes = zip(*tensors, strict=True)
        bucket = {"names": names, "dtypes": dtypes, "shapes": shapes, "load_format": "flattened_bucket"}
        body = bucket | {"group_name": name, "flush_cache": flush_cache, "abort_all_requests": False}
        await self._post("/update_weights_from_distributed", body, deadline_s)

    async def update_from_disk(self, model_path: str, *, flush_cache: bool = False, deadline_s: float = WEIGHTS_S) -> None:
        body = {"model_path": model_path, "flush_cache": flush_cache, "abort_all_requests": False}
        await self._post("/update_weights_from_disk", body, deadline_s)

    async def flush(self, *, deadline_s: float = CONTROL_S) -> bool:
        """Empty the prefix cache. False when the engine says that it cannot now: an answer, not a failure."""
        try:
            await self._call("POST", "/flush_cache", None, deadline_s)
        except EngineError as error:
            if error.status == 400:
                return False
            raise
        return True

    async def set_version(self, version: str, *, deadline_s: float = CONTROL_S) -> None:
        """Name the weights. The server's own default would abort every running request; ours never does."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False}, deadline_s)

    async def model_info(self) -> dict[str, Any]:
        return await self._read("/model_info")

    async def says_version(self, *, deadline_s: float) -> str | None:
        """The name of its weights, asked once: the shortest question that its HTTP side answers from what it knows."""
        reply = await self._call("GET", "/model_info", None, deadline_s)
        return reply.get("weight_version") if isinstance(reply, dict) else None

    async def server_info(self) -> dict[str, Any]:
        return await self._read("/server_info")

    async def capabilities(self) -> Capabilities:
        """EngineError `configuration` for a server that a run cannot use."""
        found = capabilities_of(await self.server_info(), await self.model_info())
        found.demand_usable(self.url)
        return found

    async def freeze_gc(self) -> None:
        """Python's collector in the server skips what lives now. A push empties the cache, and SGLang then collects: 0.4 s, else 5 ms."""
        await self._call("POST", "/freeze_gc", None, CONTROL_S)

    async def loads(self) -> Any:
        """Tried once: who asks does so again and again."""
        return await self._call("GET", "/v1/loads?include=core", None, INFO_S)

    async def health(self) -> dict[str, Any]:
        """What /health says; a real SGLang server says nothing, which is an empty dict."""
        return await self._read("/health")

    async def checksums(self) -> dict[str, Any]:
        """`per_engine_checksum` and, for each rank, the checksums by tensor name."""
        return await self._again("POST", "/weights_checker", {"action": "checksum"}, WEIGHTS_S)

    async def equal_to_stored(self, refs: Iterable[Mapping[str, Any]]) -> list[str]:
        """Names of the weights that are, byte for byte, what lies in these buckets of the store. The embedded engine's alone."""
        body = {"action": "headrace_store", "serialized_buckets": [entry for ref in refs for entry in ref_payload(ref)]}
        equal = (await self._again("POST", "/weights_checker", body, WEIGHTS_S)).get("equal")
        if not isinstance(equal, list):
            raise malformed("the engine does not say which weights are those of the store")
        return equal

    async def _read(self, path: str) -> dict[str, Any]:
        return await self._again("GET", path, None, INFO_S)

    async def _again(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        """For calls that change nothing: three tries."""
        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, EngineError) and error.kind == "infrastructure"),
            stop=stop_after_attempt(3),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            reraise=True,
        )
        reply: Any = await retrying(self._call, method, path, body, deadline_s)
        if not isinstance(reply, (dict, type(None))):
            raise malformed("not one JSON object")
        return reply or {}

    async def _post(self, path: str, body: Mapping[str, Any], deadline_s: float) -> Any:
        return await self._call("POST", path, body, deadline_s)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        content = None if body is None else orjson.dumps(body)
        headers = self._headers if path.partition("?")[0] in OPEN_TO_API_KEY else self._admin_headers
        try:
            async with asyncio.timeout(deadline_s):
                response = await self._http.request(method, self.url + path, content=content, headers=headers)
        except TimeoutError as late:
            raise EngineError("infrastructure", f"{self.url}{path}: no answer in {deadline_s:g} s") from late
        except BROKEN as problem:
            raise self._broken(problem) from problem
        if response.status_code != 200:
            error = refusal(response.status_code, f"{path}: {error_text(response.content)}")
            if error.kind == "data" and path != "/generate":
                error.kind = "infrastructure"  # no prompt is to blame for a refused control call
            raise error
        if not response.headers.get("content-type", "").startswith("application/json") or not response.content:
            return None
        try:
            return orjson.loads(response.content)
        except orjson.JSONDecodeError as garbled:
            raise malformed(f"{path}: not JSON ({garbled})") from garbled


class Progress:
    """Ends the block with TimeoutError when `made()` was not called for `stall_s` seconds of `clock`.

    The clock may stand still, so real time only says when to look again. One timer a request, however many tokens it makes.
    """

    def __init__(self, stall_s: float, clock: Clock) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._limit = asyncio.timeout(None)

    def made(self) -> None:
        self._made_at_s = self._clock()

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._loop = asyncio.get_running_loop()
        self.made()
        self._look()
        return self

    def _look(self) -> None:
        left_s = self._made_at_s + self._stall_s - self._clock()
        if left_s <= 0:
            self._limit.reschedule(self._loop.time())
        else:
            # The lower bound keeps a clock that stopped just before the end from being asked all the time.
            self._timer = self._loop.call_later(max(left_s, self._stall_s / 20), self._look)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(kind, error, trace)
