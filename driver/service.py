"""REST: all that the command line can do, `curl` can do. One FastAPI app over the runs of this process; OpenAPI at /docs.

Paths are run-scoped (`/v1/runs/{run}/…`). Lists are paged, submits take an `Idempotency-Key`, errors are
`{"error": {"message": …}}` with what to do. A bearer token is asked for when the configuration has one, which it must beyond
loopback; `/health` and `/metrics` need none on loopback only.
"""

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Body, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as StarletteHTTPException

from driver import engine_facts, observe, service_datasets, service_plan, service_whatif, service_why
from driver.config import ConfigError, parse_config
from driver.datasets import DatasetError
from driver.feed import FeedError
from driver.ledger_db import LedgerError
from driver.run import Run
from driver.runs import Runs
from driver.service_bias import add_routes as add_bias_routes
from driver.service_evaluation import add_evaluation_routes
from driver.service_limits import add_routes as add_limit_routes
from driver.service_roles import add_role_routes
from driver.service_runs import add_routes as add_run_routes
from driver.service_schema import REFUSALS
from driver.service_words import in_words, known_parameters
from driver.settings import SECRETS
from rollout.address import NotAllowed

ENGINE_ANSWERS_S = 2.0


class EngineUrl(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str = Field(description="http://HOST:PORT; the host must be one of service.engine_hosts")


class _Metrics:
    """The run's gauges as Prometheus metrics, read when asked for."""

    def __init__(self, runs: dict[str, Run]) -> None:
        self._runs = runs

    def collect(self) -> list[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for run_id, run in self._runs.items():
            for name, value in observe.gauges(run).items():
                family = families.setdefault(name, GaugeMetricFamily(name, name.replace("_", " "), labels=["run_id"]))
                family.add_metric([run_id], value)
        return list(families.values())


def create_app(fleet: Runs, *, token: str | None, loopback: bool, shutdown: Callable[[], None]) -> FastAPI:
    """The app over these runs. `shutdown` asks the process to end in order."""
    runs = fleet.runs
    app = FastAPI(
        title="Headrace",
        version="0.1.0",
        summary="Asynchronous reinforcement learning of language models",
        responses=REFUSALS,
        dependencies=[Depends(known_parameters)],
    )
    registry = CollectorRegistry()
    registry.register(_Metrics(runs))

    def run_of(run: str) -> Run:
        if run in fleet.waiting:
            raise HTTPException(409, f"run {run!r} has not begun: {fleet.waiting[run]}")
        if run not in runs:
            raise HTTPException(404, f"there is no run {run!r}; runs here: {', '.join(runs) or 'none'}")
        return runs[run]

    RunDep = Annotated[Run, Depends(run_of)]

    @app.middleware("http")
    async def authorize(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        open_path = request.url.path == "/health" or (loopback and request.url.path == "/metrics")
        if token is not None and not open_path:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                what = "the token that was sent is not this service's" if given else "no token was sent, and this service wants one"
                how = "curl sends it as Authorization: Bearer TOKEN, the command line takes it from HEADRACE_TOKEN"
                return _error(401, f"{what} (service.token of its configuration): {how}")
        if not _same_site(request.headers.get("origin"), request.headers.get("host")):
            return _error(403, "a page of another site may not use this service")  # a browser on this machine reaches loopback too
        return await call_next(request)

    @app.exception_handler(StarletteHTTPException)
    async def on_http(request: Request, error: StarletteHTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404 and text == "Not Found":
            text = f"there is no {request.url.path}; see /docs"
        return _error(error.status_code, text)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return _error(422, in_words(error, request))

    @app.exception_handler(DatasetError)
    @app.exception_handler(FeedError)
    @app.exception_handler(ConfigError)
    async def on_refused(request: Request, error: ValueError) -> Response:
        return _error(400, str(error), line=getattr(error, "line", None))

    @app.exception_handler(LedgerError)
    async def on_ledger(request: Request, error: LedgerError) -> Response:
        return _error(503, str(error))

    # ---- all runs ------------------------------------------------------------------------------------------------------

    @app.get("/health", tags=["service"])
    async def health() -> dict[str, Any]:
        failed = {run_id: run.failure for run_id, run in runs.items() if run.failure}
        return {"ok": not failed, "pid": os.getpid(), "runs": {run_id: run.state for run_id, run in runs.items()}, "failed": failed}

    @app.get("/metrics", tags=["service"], response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.post("/v1/shutdown", tags=["service"], status_code=202)
    async def stop_service() -> dict[str, str]:
        """End the service in order: what is applied is saved, what is ready is kept for the next start."""
        asyncio.get_running_loop().call_later(0.1, shutdown)
        return {"status": "ending"}

    @app.post("/v1/config/check", tags=["service"])
    async def check_config(config: Annotated[dict[str, Any], Body()], base: str = ".") -> dict[str, Any]:
        """Check a configuration as `headrace config check` does; paths in it are relative to `base`."""
        return parse_config(config, Path(base)).model_dump(mode="json", exclude=SECRETS)

    @app.get("/v1/staleness", tags=["service"])
    async def all_staleness() -> dict[str, Any]:
        return {run_id: observe.staleness(run) for run_id, run in runs.items()}

    @app.get("/v1/queues", tags=["service"])
    async def all_queues() -> dict[str, Any]:
        return {run_id: observe.queues(run) for run_id, run in runs.items()}

    @app.get("/v1/engines", tags=["service"])
    async def all_engines() -> dict[str, Any]:
        return {run_id: engine_facts.engines(run) for run_id, run in runs.items()}

    @app.get("/v1/why", tags=["service"])
    async def all_why() -> dict[str, Any]:
        return {run_id: observe.why(run) for run_id, run in runs.items()}

    add_run_routes(app, fleet)
    add_evaluation_routes(app, run_of)

    # ---- one run -------------------------------------------------------------------------------------------------------

    @app.get("/v1/runs/{run}", tags=["runs"])
    async def status(run: RunDep) -> dict[str, Any]:
        return observe.status(run)

    @app.get("/v1/runs/{run}/staleness", tags=["runs"])
    async def run_staleness(run: RunDep) -> dict[str, Any]:
        return observe.staleness(run)

    @app.get("/v1/runs/{run}/queues", tags=["runs"])
    async def run_queues(run: RunDep) -> dict[str, Any]:
        return observe.queues(run)

    @app.get("/v1/runs/{run}/engines", tags=["runs"])
    async def run_engines(run: RunDep) -> list[dict[str, Any]]:
        return engine_facts.engines(run)

    @app.post("/v1/runs/{run}/engines", tags=["engines"], status_code=201)
    async def add_engine(run: RunDep, body: EngineUrl) -> dict[str, str]:
        """Use an engine that runs elsewhere, from now on and after restarts; it gets the current weights before its first request. The
        answer says whether it answered within two seconds; it is asked on anyhow."""
        try:
            engine_id = run.processes.outside.add(body.url)
        except NotAllowed as error:
            raise HTTPException(400, str(error)) from None
        await run.core.db.durable()
        state, reason = await run.processes.outside.heard(engine_id, ENGINE_ANSWERS_S)
        return {"run_id": run.core.run_id, "engine_id": engine_id, "state": state, "reason": reason}

    @app.delete("/v1/runs/{run}/engines/{engine_id}", tags=["engines"], status_code=202)
    async def remove_engine(run: RunDep, engine_id: str) -> dict[str, str]:
        """Send no more requests there; those that run there end there. One of the configuration comes back at the next start."""
        if not run.processes.outside.remove(engine_id):
            known = ", ".join(run.processes.outside.engines) or "none"
            raise HTTPException(404, f"no engine {engine_id!r} was started elsewhere; of those this run uses {known}")
        await run.core.db.durable()
        return {"run_id": run.core.run_id, "engine_id": engine_id}

    @app.get("/v1/runs/{run}/processes", tags=["runs"])
    async def processes(run: RunDep) -> list[dict[str, Any]]:
        """Every process of the run: role, state, incarnation, pid, address."""
        return await run.processes.shown()

    add_role_routes(app, run_of)

    @app.get("/v1/runs/{run}/why", tags=["runs"])
    async def run_why(run: RunDep) -> dict[str, Any]:
        return observe.why(run)

    @app.get("/v1/runs/{run}/batches", tags=["runs"])
    async def batches(run: RunDep, last: Annotated[int, Query(ge=1, le=1000)] = 20) -> list[dict[str, Any]]:
        """The newest batches' metrics, oldest first."""
        return list(run.history.recent)[-last:]

    @app.get("/v1/runs/{run}/trajectories", tags=["trajectories"])
    async def trajectories(
        run: RunDep,
        state: Annotated[str | None, Query(pattern="^(running|ready|consumed|finished)$")] = None,
        outcome: Annotated[str | None, Query(pattern="^(trained|evaluated|discarded)$")] = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = observe.PAGE_ROWS,
    ) -> dict[str, Any]:
        try:
            return observe.trajectories(run, state, outcome, after, limit)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None

    @app.get("/v1/runs/{run}/trajectories/{traj_uid}", tags=["trajectories"])
    async def trajectory(run: RunDep, traj_uid: str) -> dict[str, Any]:
        found = await asyncio.to_thread(observe.trajectory, run, traj_uid)
        if found is None:
            raise HTTPException(404, f"run {run.core.run_id} has no trajectory {traj_uid!r}; GET …/trajectories lists them")
        return found

    @app.post("/v1/runs/{run}/pause", tags=["runs"], status_code=202)
    async def pause(run: RunDep) -> dict[str, str]:
        """Send nothing new; what is in flight ends."""
        _not_ending(run)
        run.pause()
        await run.core.db.durable()  # what was accepted holds over a crash
        return {"run_id": run.core.run_id, "state": run.state}

    @app.post("/v1/runs/{run}/resume", tags=["runs"], status_code=202)
    async def resume(run: RunDep) -> dict[str, str]:
        """Go on after a pause."""
        _not_ending(run)
        run.resume()
        await run.core.db.durable()  # what was accepted holds over a crash
        return {"run_id": run.core.run_id, "state": run.state}

    @app.post("/v1/runs/{run}/drain", tags=["runs"], status_code=202)
    async def drain(run: RunDep) -> dict[str, str]:
        """No new samples; what is registered is finished and trained, then the run ends."""
        _not_ending(run)
        run.drain()
        await run.core.db.durable()  # what was accepted holds over a crash
        return {"run_id": run.core.run_id, "state": run.state}

    @app.post("/v1/runs/{run}/cancel", tags=["runs"], status_code=202)
    async def cancel(run: RunDep) -> dict[str, str]:
        """End the run after the batch in training; the rest is discarded, with that reason."""
        run.cancel()
        await run.core.db.durable()  # what was accepted holds over a crash
        return {"run_id": run.core.run_id, "state": run.state}

    @app.get("/v1/runs/{run}/logs/{role}", tags=["runs"], response_class=PlainTextResponse)
    async def logs(run: RunDep, role: str, lines: Annotated[int, Query(ge=1, le=10000)] = 100) -> PlainTextResponse:
        """The last lines of one role's log: driver, engine-0, trainer-0, reward-0 …"""
        known = sorted(p.stem for p in run.log_directory.glob("*.log"))
        if role not in known:
            raise HTTPException(404, f"there is no log {role!r}; logs here: {', '.join(known) or 'none'}")
        text = await asyncio.to_thread((run.log_directory / f"{role}.log").read_text, "utf-8", "replace")
        return PlainTextResponse("\n".join(text.splitlines()[-lines:]) + "\n")

    service_why.add_routes(app, runs, run_of)
    service_whatif.add_routes(app, runs, run_of)
    service_datasets.add_routes(app, run_of)
    service_plan.add_routes(app, RunDep)
    add_bias_routes(app, RunDep)
    add_limit_routes(app, RunDep)
    return app


def _not_ending(run: Run) -> None:
    """What was cancelled stays so, and says so."""
    if run.core.ending is not None and run.core.ledger.ended is None:
        raise HTTPException(409, f"run {run.core.run_id} is ending ({run.core.ending}), and ends behind the batch in training")


def _same_site(origin: str | None, host: str | None) -> bool:
    """Of a call without an origin nothing is known: browsers send one."""
    try:
        return origin is None or urlsplit(origin).netloc == host
    except ValueError:  # no URL at all
        return False


def _error(status: int, message: str, **more: Any) -> JSONResponse:
    return JSONResponse({"error": {"message": message, **{k: v for k, v in more.items() if v is not None}}}, status_code=status)
