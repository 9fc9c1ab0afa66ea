"""The courier: sends weights to engines by broadcasts, each engine in a process group of its own. Beside the trainer, on its host.

    driver ──HTTP: open, join, send, close──▶ courier ══gloo or NCCL══▶ engine 0's ranks
      └────HTTP: the same in SGLang's words──▶ engine 0  ══▶ engine 1's ranks …

`python -P -m trainer.courier --spec FILE`. It holds no weights of its own and imports no Megatron: a snapshot's buckets are read from the
store, each once for all engines, the next while this one is sent. Losing it loses nothing but the pushes under way.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from concurrent.futures import Future
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI

from trainer.address import address_towards
from trainer.broadcast import SendingGroup, Stage
from trainer.courier_wire import (
    Bucket,
    CourierHealth,
    CourierSpec,
    Done,
    ForgetRequest,
    GroupRequest,
    Opened,
    OpenRequest,
    SendRequest,
)
from trainer.device import gpu_count
from trainer.main import die_with_parent
from trainer.server import Refusal, listen, say_in_words

UNUSABLE = 2


class Courier:
    """All groups. Its methods run on the event loop; what blocks is done in the groups' threads."""

    def __init__(self, incarnation: int, device: torch.device) -> None:
        self._incarnation = incarnation
        self._device = device
        self._stage = Stage(device)
        self._groups: dict[str, SendingGroup] = {}
        self._progress = 0

    def health(self) -> CourierHealth:
        return CourierHealth(incarnation=self._incarnation, groups=len(self._groups), progress=self._progress)

    def open(self, request: OpenRequest) -> Opened:
        if request.group in self._groups:
            raise Refusal(409, f"the group {request.group} is open already; give another name")
        backend = self._backend(request)
        try:
            address = request.address or address_towards(request.engine_host)
            group = SendingGroup(request.group, request.size, backend, address, request.timeout_s)
        except OSError as error:
            where = request.address or f"towards {request.engine_host}"
            raise Refusal(400, f"the courier can not listen {where} ({error}); set push.address to an address of this host") from None
        self._groups[request.group] = group
        return Opened(address=address, port=group.port, backend=backend)

    def _backend(self, request: OpenRequest) -> str:
        here = self._device.type == "cuda"
        both = here and request.engine_device.startswith("cuda")
        if request.backend == "nccl" and not both:
            where = "the engine computes" if here else "the trainer computes"
            raise Refusal(400, f"push.backend nccl needs a GPU at both ends, and {where} on the CPU; leave it at auto")
        # Gloo would take a bucket that lies on a GPU, but through the host's memory: then it may as well lie there.
        return ("nccl" if both else "gloo") if request.backend == "auto" else request.backend

    async def join(self, request: GroupRequest) -> Done:
        """Answers when the engine has joined."""
        await self._done(request.group, self._group(request.group).joined, "the engine did not join")
        return Done()

    async def send(self, request: SendRequest) -> Done:
        """Answers when the engine's ranks have the bytes, or when it is clear that they will not: the group has ended then."""
        group = self._group(request.group)
        staged = self._staged(request.push, request.bucket)
        if request.then is not None:
            self._staged(request.push, request.then)
        await self._done(request.group, group.send(staged), f"bucket {request.bucket.number} was not sent")
        self._progress += 1
        return Done()

    def close(self, request: GroupRequest) -> Done:
        """Idempotent. What the group's thread is in the middle of ends with the engine's connection, or the group's time-out."""
        group = self._groups.pop(request.group, None)
        if group is not None:
            group.close()
        return Done()

    def forget(self, request: ForgetRequest) -> Done:
        self._stage.forget(request.push)
        return Done()

    def _group(self, name: str) -> SendingGroup:
        try:
            return self._groups[name]
        except KeyError:
            raise Refusal(404, f"there is no group {name}: it failed, or another courier made it; open one") from None

    def _staged(self, push: str, bucket: Bucket) -> Future[torch.Tensor]:
        return self._stage.get(push, bucket.number, [wire.ref() for wire in bucket.refs], bucket.names)

    async def _done(self, name: str, future: Future[None], what: str) -> None:
        try:
            await asyncio.wrap_future(future)
        except Exception as error:  # torch has many; whatever it was, the group has ended
            self.close(GroupRequest(group=name))
            print(f"courier: {name}: {what}: {error}", flush=True)
            raise Refusal(502, f"{what}: {error}") from None


def build_app(courier: Courier) -> FastAPI:
    app = FastAPI(title="Headrace courier")
    say_in_words(app)

    @app.get("/health")
    async def health() -> CourierHealth:
        return courier.health()

    @app.post("/v1/open")
    async def open_group(body: OpenRequest) -> Opened:
        return courier.open(body)

    @app.post("/v1/join")
    async def join(body: GroupRequest) -> Done:
        return await courier.join(body)

    @app.post("/v1/send")
    async def send(body: SendRequest) -> Done:
        return await courier.send(body)

    @app.post("/v1/close")
    async def close(body: GroupRequest) -> Done:
        return courier.close(body)

    @app.post("/v1/forget")
    async def forget(body: ForgetRequest) -> Done:
        return courier.forget(body)

    return app


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The courier: broadcasts a snapshot's buckets to engines.")
    parser.add_argument("--spec", type=Path, required=True)
    path = parser.parse_args(arguments).spec
    if "HEADRACE_PARENT_PID" in os.environ:
        die_with_parent(int(os.environ["HEADRACE_PARENT_PID"]))
    try:
        spec = CourierSpec.read(path)
        listener = listen("127.0.0.1", spec.port)
    except ValueError as error:
        print(f"courier: {error}", flush=True)
        return UNUSABLE
    cuda = spec.device != "cpu" and gpu_count() >= spec.ranks  # as the trainer decides
    courier = Courier(spec.incarnation, torch.device("cuda" if cuda else "cpu"))
    config = uvicorn.Config(build_app(courier), log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a group's thread may wait for an engine, and there is nothing left to tidy
