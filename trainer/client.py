"""The driver's hold on a trainer: one typed method per call, each with a deadline. Light: httpx only.

`TrainerRefused` is an answer (the trainer is well and says no); `TrainerLost` is none (the connection broke, was refused or timed out):
look at `/health`, and when the incarnation has grown, resume.
"""

from __future__ import annotations

from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from trainer.wire import (
    Health,
    Loaded,
    LoadRequest,
    Logprobs,
    LogprobsRequest,
    MiniBatch,
    PlanRow,
    ResumeRequest,
    Saved,
    SaveRequest,
    Snapshot,
    SnapshotRequest,
    Stopped,
    StopRequest,
    TrainReport,
    TrainRequest,
)

Reply = TypeVar("Reply", bound=BaseModel)


class TrainerLost(Exception):
    """No answer came. Whether the command was done is not known."""


class TrainerRefused(Exception):
    """The trainer answered no. Nothing was changed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class TrainerClient:
    """`http` is shared and stays the caller's; `url` is like http://127.0.0.1:9000."""

    def __init__(self, url: str, http: httpx.AsyncClient, token: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._http = http
        self._headers = {"authorization": f"Bearer {token}"} if token else {}

    async def health(self, deadline_s: float = 5.0) -> Health:
        return await self._call("GET", "/health", None, Health, deadline_s)

    async def load(self, model_path: str | None = None, deadline_s: float = 300.0) -> Loaded:
        return await self._call("POST", "/v1/load", LoadRequest(model_path=model_path), Loaded, deadline_s)

    async def resume(self, path: str, deadline_s: float = 300.0) -> Loaded:
        return await self._call("POST", "/v1/resume", ResumeRequest(path=path), Loaded, deadline_s)

    async def train(
        self, batch_id: int, epoch: int, lr: float, mini_batches: list[MiniBatch], deadline_s: float = 1800.0, critic_lr: float = 0.0
    ) -> TrainReport:
        request = TrainRequest(batch_id=batch_id, epoch=epoch, lr=lr, critic_lr=critic_lr, mini_batches=mini_batches)
        return await self._call("POST", "/v1/train", request, TrainReport, deadline_s)

    async def logprobs(self, rows: list[PlanRow], deadline_s: float = 300.0) -> Logprobs:
        return await self._call("POST", "/v1/logprobs", LogprobsRequest(rows=rows), Logprobs, deadline_s)

    async def snapshot(self, epoch: int, version: int, bucket_bytes: int, canary_ids: list[int], deadline_s: float = 300.0) -> Snapshot:
        request = SnapshotRequest(epoch=epoch, version=version, bucket_bytes=bucket_bytes, canary_ids=canary_ids)
        return await self._call("POST", "/v1/snapshot", request, Snapshot, deadline_s)

    async def save(self, directory: str, keep_last: int | None = None, deadline_s: float = 600.0) -> Saved:
        return await self._call("POST", "/v1/save", SaveRequest(directory=directory, keep_last=keep_last), Saved, deadline_s)

    async def stop(self, deadline_s: float = 30.0) -> Stopped:
        return await self._call("POST", "/v1/stop", StopRequest(), Stopped, deadline_s)

    async def _call(self, method: str, path: str, body: BaseModel | None, reply: type[Reply], deadline_s: float) -> Reply:
        headers = dict(self._headers)
        content = None
        if body is not None:
            headers["content-type"] = "application/json"
            content = body.model_dump_json()
        try:
            answer = await self._http.request(method, self._url + path, content=content, headers=headers, timeout=deadline_s)
        except httpx.TransportError as error:
            raise TrainerLost(f"{method} {path}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code != 200:
            raise TrainerRefused(answer.status_code, _message(answer))
        try:
            return reply.model_validate_json(answer.content)
        except ValidationError as error:
            raise TrainerLost(f"{method} {path}: the answer is not a {reply.__name__}: {error}") from error


def _message(answer: httpx.Response) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
    return str(detail)
