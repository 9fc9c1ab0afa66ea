"""The HTTP side: `GET /health`, `POST /v1/score`, and `POST /v1/workers`, the number of them from now on."""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
from fastapi import Depends, FastAPI, Header, HTTPException, Request, Response

from reward.pool import WorkerPool
from reward.spec import RewardSpec
from reward.wire import Health, ScoreReply, ScoreRequest, Workers

_decode = msgspec.json.Decoder(ScoreRequest).decode
_decode_workers = msgspec.json.Decoder(Workers).decode
_encode = msgspec.json.Encoder().encode


def create_app(spec: RewardSpec, pool: WorkerPool) -> FastAPI:
    def authorised(authorization: Annotated[str, Header()] = "") -> None:
        if spec.token and not hmac.compare_digest(authorization.encode(), f"Bearer {spec.token}".encode()):
            raise HTTPException(401, "send the service's token as `Authorization: Bearer TOKEN`")

    app = FastAPI(title="Headrace reward", dependencies=[Depends(authorised)], openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        return _json(Health("reward", spec.incarnation, pool.progress, pool.busy_workers, pool.queued, pool.workers))

    @app.post("/v1/workers")
    async def workers(request: Request) -> Response:
        try:
            count = _decode_workers(await request.body()).count
        except msgspec.MsgspecError as error:
            raise HTTPException(422, f"not a number of workers: {error}") from error
        pool.resize(count)
        return _json(Workers(pool.workers))

    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        try:
            jobs = _decode(await request.body()).jobs
        except msgspec.MsgspecError as error:
            raise HTTPException(422, f"not a list of jobs: {error}") from error
        if len({job.leaf_id for job in jobs}) != len(jobs):
            raise HTTPException(422, "two jobs have the same leaf_id; results go home by it, so it must be unique within a call")
        return _json(ScoreReply(await pool.score(jobs)))

    return app


def _json(message: msgspec.Struct) -> Response:
    return Response(_encode(message), media_type="application/json")
