"""The engine as the HTTP side sees it: requests in, replies out, and the operator's calls, all in one event loop.

It owns the gate, the live request ids and the version that /model_info shows. The loop thread announces news once a step; a request that
is behind simply finds more tokens at its next look, so a slow reader costs fewer chunks, not a longer queue.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from rollout import extras
from rollout.engine import protocol
from rollout.engine.config import ModelConfig
from rollout.engine.control import Control, Outcome
from rollout.engine.gate import Gate
from rollout.engine.groups import Groups
from rollout.engine.model import Model
from rollout.engine.protocol import DistributedUpdateBody, GenerateBody
from rollout.engine.replies import Sent, build_reply
from rollout.engine.request import Request
from rollout.engine.scheduler import Scheduler
from rollout.engine.settings import Settings
from rollout.engine.text import open_text
from rollout.engine.weights import TORCH_DTYPES, load_checkpoint

log = logging.getLogger(__name__)

T = TypeVar("T")

ABORT_AGAIN_S = 1.0
PAUSE_DEADLINE_S = 600.0
HEALTH_DEADLINE_S = 20.0
HEALTH_RID = "HEALTH_CHECK"


class RequestFailed(Exception):
    """A request that the loop ended with an HTTP status instead of an answer."""

    def __init__(self, message: str, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class Engine:
    """Make it inside a running event loop, then `start()`. `ended` is set when the loop thread failed."""

    def __init__(self, settings: Settings, config: ModelConfig) -> None:
        self.settings = settings
        self.config = config
        self.context_length = settings.context_length or config.max_positions
        self.model_path = str(settings.model_path)
        self.weight_version = settings.weight_version
        began_s = time.monotonic()
        self.gate = Gate()
        self.ended = asyncio.Event()
        self._live: dict[str, Request] = {}
        self._loop = asyncio.get_running_loop()
        self._text = None if settings.skip_tokenizer_init else open_text(settings.model_path)
        model = Model(config, TORCH_DTYPES[settings.dtype], self.context_length)
        load_checkpoint(model, settings.model_path)
        scheduler, control = (Scheduler, Control) if settings.paced is None else _paced(settings)
        self.scheduler = scheduler(model, settings, self.context_length, self._text, self._announce, self._loop_failed)
        self.control = control(self.scheduler)
        self.groups = Groups()
        self.startup_s = time.monotonic() - began_s
        self.limits = protocol.Limits(
            vocab_size=config.vocab_size,
            context_length=self.context_length,
            max_sequence=self.scheduler.max_sequence,
            max_prompt=self.scheduler.max_prompt,
            stream_interval=settings.stream_interval,
            deterministic=settings.deterministic,
            has_text=self._text is not None,
        )

    @property
    def ready(self) -> bool:
        return not self.gate.paused and not self.ended.is_set()

    def start(self) -> None:
        self.scheduler.start()

    async def call(self, action: Callable[[], T]) -> T:
        """Run `action` between two steps. Raises what it raises."""
        return await asyncio.wrap_future(self.scheduler.call(action))

    # Generation.

    @asynccontextmanager
    async def admitted(self, bodies: list[GenerateBody]) -> AsyncIterator[list[Request]]:
        """The requests, checked and handed to the loop, for as long as the block lasts; what is unfinished then is aborted."""
        requests = self._register(bodies)
        try:
            async with self.gate.reader():
                for request, body in zip(requests, bodies, strict=True):
                    protocol.complete(request, body, self._prompt(body), self.limits)
                for request in requests:
                    self.scheduler.submit(request)
                try:
                    yield requests
                finally:
                    for request in requests:
                        if request.finish is None:
                            self.scheduler.abort(request.rid)
        finally:
            for request in requests:
                del self._live[request.rid]

    def _register(self, bodies: list[GenerateBody]) -> list[Request]:
        """Take the ids before any wait, so that a duplicate is refused even while the first is held by a pause."""
        requests = [protocol.make_request(body) for body in bodies]
        for request in requests:
            if request.rid in self._live:
                raise ValueError(f"Duplicate request ID detected: {request.rid}")
        self._live.update((request.rid, request) for request in requests)
        return requests

    def _prompt(self, body: GenerateBody) -> list[Any]:
        if body.input_ids is not None:
            return list(body.input_ids)
        if body.text is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        if self._text is None:
            raise ValueError("text needs a tokenizer, and this engine runs without one; send input_ids")
        return self._text.encode(str(body.text))

    async def replies(self, request: Request, place: extras.Place | None = None) -> AsyncIterator[dict[str, Any]]:
        """A reply for each announcement, the last one with its finish_reason. What is to be put into a store then is there."""
        sent = Sent() if self.settings.incremental_streaming_output and request.stream else None
        while True:
            await request.news.wait()
            request.news.clear()
            reply = build_reply(request, self.weight_version, self._text, sent)
            if reply["meta_info"]["finish_reason"] is None:
                yield reply
                continue
            if request.routes is not None and (place is None or reply["meta_info"]["finish_reason"]["type"] != "abort"):
                reply["meta_info"]["routed_experts"] = await extras.answered(request.routes, place)
            yield reply
            return

    async def last_reply(self, request: Request, place: extras.Place | None = None) -> dict[str, Any]:
        """Raises RequestFailed when the request ended with an HTTP status."""
        async for reply in self.replies(request, place):
            last = reply
        finish = last["meta_info"]["finish_reason"]
        if finish["type"] == "abort" and (finish.get("status_code") or 0) >= 400:
            raise RequestFailed(finish["message"], finish["status_code"])
        return last

    def abort(self, rid: str, abort_all: bool) -> None:
        """Fire and forget. As in SGLang a request that a pause holds is only marked: it runs later, and cannot be aborted again."""
        if abort_all:
            self.scheduler.abort(None)
            return
        request = self._live.get(rid)
        if request is not None and not request.abort_sent:
            request.abort_sent = True
            self.scheduler.abort(rid)

    def _announce(self, requests: list[Request]) -> None:
        if requests:
            self._loop.call_soon_threadsafe(_wake, requests)

    def _loop_failed(self, error: BaseException) -> None:
        self._loop.call_soon_threadsafe(self.ended.set)

    async def answers_one_token(self) -> bool:
        """/health_generate: one token for a greedy request, within SGLang's 20 s. In a pause nobody is let in, so that is False."""
        body = GenerateBody(
            rid=f"{HEALTH_RID}_{time.time()}", input_ids=[0], sampling_params=protocol.SamplingParams(max_new_tokens=1, temperature=0.0)
        )
        try:
            async with asyncio.timeout(HEALTH_DEADLINE_S), self.admitted([body]) as (request,):
                await self.last_reply(request)
        except (TimeoutError, RequestFailed):
            return False
        return True

    # The operator's calls.

    async def pause(self, mode: str) -> None:
        self.gate.paused = True
        if mode != "abort":
            await self.call(lambda: self.control.pause(mode))
            return
        # The loop itself is not told of this pause: it is empty, and nobody is let in.
        until_s = time.monotonic() + PAUSE_DEADLINE_S
        while time.monotonic() < until_s:
            self.scheduler.abort(None)
            if await self.gate.empty(ABORT_AGAIN_S):
                return
        raise TimeoutError(
            f"{self.gate.readers} requests were not answered {PAUSE_DEADLINE_S:g} s after they were aborted; their clients do not read"
        )

    async def resume(self) -> None:
        await self.call(self.control.resume_loop)
        await self.gate.open()

    async def flush(self, wait_s: float) -> Outcome:
        """Tries until it succeeds or `wait_s` is over."""
        until_s = time.monotonic() + wait_s
        while True:
            outcome = await self.call(self.control.flush)
            if outcome.success or time.monotonic() >= until_s:
                return outcome
            await asyncio.sleep(0.02)

    async def update_weights(
        self, action: Callable[[], Outcome], weight_version: str | None, abort_all: bool, model_path: str | None = None
    ) -> Outcome:
        """In a pause at once; otherwise after the requests inside have ended, with new ones kept out."""
        async with self._alone(abort_all):
            outcome = await self.call(action)
        if outcome.success and model_path is not None:
            self.model_path = str(Path(model_path))
        return self._named(outcome, weight_version)

    async def update_from_group(self, body: DistributedUpdateBody) -> Outcome:
        """As `update_weights`, of what the group's first rank sends meanwhile."""
        async with self._alone(body.abort_all_requests):
            allowed = await self.call(self.control.may_receive)
            if not allowed.success:
                return allowed
            flat = body.load_format == "flattened_bucket"
            try:
                tensors = await self.groups.receive(body.group_name, body.names, body.dtypes, body.shapes, flat)
            except ValueError as error:
                log.error("%s", error)
                return Outcome(False, str(error))
            outcome = await self.call(lambda: self.control.update_received(tensors, body.flush_cache, body.weight_version))
        return self._named(outcome, body.weight_version)

    @asynccontextmanager
    async def _alone(self, abort_all: bool) -> AsyncIterator[None]:
        if abort_all:
            self.scheduler.abort(None)
        async with nullcontext() if self.gate.paused else self.gate.writer():
            yield

    def _named(self, outcome: Outcome, weight_version: str | None) -> Outcome:
        if not outcome.success or weight_version is None:
            return outcome
        self.weight_version = weight_version
        return Outcome(True, f"{outcome.message} Weight version updated to {weight_version}.")

    async def set_version(self, version: str, abort_all: bool) -> None:
        if abort_all:
            self.scheduler.abort(None)
        await self.call(lambda: self.control.set_version(version))
        self.weight_version = version


def _paced(settings: Settings) -> tuple[type[Scheduler], type[Control]]:
    from rollout.engine.paced import PacedControl, PacedScheduler

    return PacedScheduler, Control if settings.paced_pushes else PacedControl


def _wake(requests: list[Request]) -> None:
    for request in requests:
        request.news.set()
