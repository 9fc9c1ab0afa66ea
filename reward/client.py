"""The driver's side of the reward service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import msgspec

from reward.wire import Health, Job, Result, ScoreReply, ScoreRequest, Workers

_encode = msgspec.json.Encoder().encode
_decode_reply = msgspec.json.Decoder(ScoreReply).decode
_decode_health = msgspec.json.Decoder(Health).decode


class RewardUnavailable(Exception):
    """The service gave no answer that can be used. Asking again, perhaps of its next incarnation, is safe: scoring changes nothing."""


class RewardClient:
    """`http` is the caller's, and stays open."""

    def __init__(self, url: str, http: httpx.AsyncClient, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})

    async def score(self, jobs: Sequence[Job], deadline_s: float) -> list[Result]:
        """One result for each job, in any order. Raises RewardUnavailable."""
        body = await self._call("POST", "/v1/score", deadline_s, _encode(ScoreRequest(list(jobs))))
        try:
            results = _decode_reply(body).results
        except msgspec.MsgspecError as error:
            raise RewardUnavailable(f"the reward service at {self._url} gave an answer that cannot be read: {error}") from error
        if sorted(result.leaf_id for result in results) != sorted(job.leaf_id for job in jobs):
            raise RewardUnavailable(f"the reward service at {self._url} answered for other leaves than it was asked")
        return results

    async def resize(self, workers: int, deadline_s: float = 5.0) -> None:
        """So many workers from now on. Raises RewardUnavailable."""
        await self._call("POST", "/v1/workers", deadline_s, _encode(Workers(workers)))

    async def health(self, deadline_s: float = 5.0) -> Health:
        """Raises RewardUnavailable."""
        body = await self._call("GET", "/health", deadline_s)
        try:
            return _decode_health(body)
        except msgspec.MsgspecError as error:
            raise RewardUnavailable(f"{self._url} is not a reward service: {error}") from error

    async def _call(self, method: str, path: str, deadline_s: float, content: bytes | None = None) -> bytes:
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._http.request(method, self._url + path, content=content, headers=self._headers, timeout=None)
        except TimeoutError as error:
            raise RewardUnavailable(f"the reward service at {self._url} did not answer within {deadline_s:g} s") from error
        except httpx.HTTPError as error:
            raise RewardUnavailable(
                f"the reward service at {self._url} cannot be reached: {type(error).__name__} {error}".rstrip()
            ) from error
        if reply.status_code != 200:
            raise RewardUnavailable(f"the reward service at {self._url} answered {reply.status_code}: {reply.text[:500]}")
        return reply.content
