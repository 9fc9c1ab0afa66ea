"""Rank 0's HTTP side. It computes nothing: a command goes to the main thread, which alone does collectives, and its answer comes back.

`/health` is answered here at once, whatever the main thread is doing.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import queue
import socket
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from trainer.wire import REQUESTS, Health, problems_in_words


class Refusal(Exception):
    """How a refused command comes back to the HTTP side."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass
class Command:
    name: str
    body: BaseModel
    answer: Future[BaseModel] = field(default_factory=Future)


@dataclass
class Desk:
    """What both threads see. Commands wait in line; the main thread alone writes the numbers."""

    incarnation: int
    world_size: int
    commands: queue.SimpleQueue[Command] = field(default_factory=queue.SimpleQueue)
    progress: int = 0
    trained_version: int = 0
    loaded: bool = False
    busy: bool = False

    def advanced(self) -> None:
        self.progress += 1

    def health(self) -> Health:
        state = "busy" if self.busy or not self.commands.empty() else "idle" if self.loaded else "empty"
        return Health(
            role="trainer",
            incarnation=self.incarnation,
            state=state,
            progress=self.progress,
            trained_version=self.trained_version,
            world_size=self.world_size,
        )


def say_in_words(app: FastAPI) -> None:
    """What was wrong with a call, as `{"detail": sentence}`."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse({"detail": problems_in_words(list(error.errors()))}, 422)

    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> Response:
        return JSONResponse({"detail": error.message}, error.status)


def build_app(desk: Desk, token: str | None) -> FastAPI:
    async def authorize(request: Request) -> None:
        given = request.headers.get("authorization", "")
        if token is not None and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, "this trainer wants the header: Authorization: Bearer TOKEN")

    app = FastAPI(title="Headrace trainer", dependencies=[Depends(authorize)])
    say_in_words(app)

    @app.get("/health")
    async def health() -> Health:
        return desk.health()

    for name, model in REQUESTS.items():
        app.post(f"/v1/{name}", name=name)(_route(desk, name, model))
    return app


def _route(desk: Desk, name: str, model: type[BaseModel]) -> Callable[..., Awaitable[Response]]:
    async def call(body: Any) -> Response:
        command = Command(name, body)
        desk.commands.put(command)
        reply = await asyncio.wrap_future(command.answer)
        return Response(reply.model_dump_json(), media_type="application/json")

    call.__annotations__["body"] = model
    return call


class Server:
    """uvicorn in a thread of its own, on a socket that already listens."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2))
        self._listener = listener
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            if not self._server.should_exit:
                # Without its HTTP side the rank would idle for ever, deaf; the supervisor forks a new group.
                traceback.print_exc()
                print("trainer: the HTTP thread ended by itself", flush=True)
                os._exit(1)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float) -> None:
        """Let answers under way go out, then end."""
        self._server.should_exit = True
        self._thread.join(deadline_s)


def listen(host: str, port: int) -> socket.socket:
    """Raises ValueError with a remedy when the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"the trainer cannot listen on {host}:{port}: {error.strerror}. Choose another port, or end what uses it"
        ) from error
    listener.listen(128)
    return listener
