"""A router in front of the engines (sglang-router 0.3, its successor smg): which workers it has, and the requests it passes on.

Requests go to the router's address, and it chooses the engine. What an operator asks of an engine it does not pass on, so pauses, weights
and versions go to the engines themselves.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import orjson

from rollout.answer import EngineError, malformed
from rollout.client import BROKEN, EngineClient, EngineHttp

ANSWER_S = 5.0


@dataclass(frozen=True)
class Worker:
    worker_id: str
    url: str
    healthy: bool


class RouterClient:
    """`engine` is what requests are sent through. Raises EngineError."""

    def __init__(self, url: str, http: EngineHttp, api_key: str | None = None, *, vocab_size: int | None = None) -> None:
        self.url = url.rstrip("/")
        self.engine = EngineClient(url, http, api_key, vocab_size=vocab_size)
        self._http = http
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def workers(self) -> list[Worker]:
        reply = await self._call("GET", "/workers", None)
        found = reply.get("workers") if isinstance(reply, dict) else None
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise malformed("/workers has no list of workers; check that router_url is that of sglang-router 0.3 or smg 1")
        return [Worker(str(one.get("id")), str(one.get("url")).rstrip("/"), bool(one.get("is_healthy"))) for one in found]

    async def add(self, url: str, api_key: str | None) -> None:
        """Done in the background there: look at `workers` for the end of it."""
        await self._call("POST", "/workers", {"url": url, "worker_type": "regular"} | ({"api_key": api_key} if api_key else {}))

    async def remove(self, worker_id: str) -> None:
        await self._call("DELETE", f"/workers/{worker_id}", None)

    async def _call(self, method: str, path: str, body: dict[str, str] | None) -> object:
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await self._http.request(method, self.url + path, json=body, headers=self._headers)
        except TimeoutError as late:
            raise EngineError("infrastructure", f"the router {self.url}{path} gave no answer in {ANSWER_S:g} s") from late
        except BROKEN as problem:
            raise EngineError(
                "infrastructure", f"the router {self.url} can not be reached ({type(problem).__name__} {problem})"
            ) from problem
        if reply.status_code >= 300:
            raise EngineError("infrastructure", f"the router {self.url}{path} answered {reply.status_code}: {reply.text[:200]}")
        try:
            return orjson.loads(reply.content)
        except orjson.JSONDecodeError:
            return None  # who reads it says what was expected
