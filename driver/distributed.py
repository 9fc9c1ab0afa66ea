"""Weights to engines over the network: the courier beside the trainer broadcasts each bucket to the engine's ranks.

    for each bucket:   engine  /update_weights_from_distributed     both at once: the engine waits for the bytes,
                       courier /v1/send                             the courier for the engine

Each engine has a process group of its own, kept from push to push. It is made anew when the engine or the courier is another than before,
and after whatever failed or was interrupted in it: then the courier closes its side at once, so that an engine in the middle of a bucket
is told by its connection, and the engine is asked to leave before it joins the next one. Groups are made in the push, and so in a pause,
but only an engine without traffic yet needs one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ValidationError

from driver.checkpoint_files import TensorShapes, tensor_shapes
from driver.settings import RunConfig
from driver.snapshot import Snapshot
from driver.transport import Parcel, checked
from rollout.answer import EngineError
from rollout.client import BROKEN
from rollout.pool import EngineSlot
from store import Bundle
from trainer.courier_wire import Bucket, Done, ForgetRequest, GroupRequest, Opened, OpenRequest, SendRequest
from trainer.wire import WireRef

log = logging.getLogger("headrace.distributed")
Reply = TypeVar("Reply", bound=BaseModel)
CLOSE_S = 5.0  # calls that only tidy up


class Courier:
    """The driver's hold on the courier process, over its lives. A call that fails is an EngineError: the push is what suffers."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._url = ""
        self._incarnation = 0
        self._there = asyncio.Event()

    def attach(self, url: str, incarnation: int) -> None:
        self._url, self._incarnation = url, incarnation
        self._there.set()

    def detach(self) -> None:
        self._there.clear()

    async def life(self) -> int:
        """The incarnation that is ready now, or the next one. For as long as the push lets it wait."""
        await self._there.wait()
        return self._incarnation

    async def open(self, request: OpenRequest) -> Opened:
        return await self._call("open", request, Opened, CLOSE_S)

    async def join(self, group: str, deadline_s: float) -> None:
        await self._call("join", GroupRequest(group=group), Done, deadline_s)

    async def send(self, request: SendRequest, deadline_s: float) -> None:
        await self._call("send", request, Done, deadline_s)

    async def close(self, group: str) -> None:
        await self._call("close", GroupRequest(group=group), Done, CLOSE_S)

    async def forget(self, push: str) -> None:
        await self._call("forget", ForgetRequest(push=push), Done, CLOSE_S)

    async def _call(self, name: str, body: BaseModel, reply: type[Reply], deadline_s: float) -> Reply:
        url, headers = f"{self._url}/v1/{name}", {"content-type": "application/json"}
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._http.post(url, content=body.model_dump_json(), headers=headers)
        except TimeoutError:
            raise EngineError("infrastructure", f"the courier did not answer {name} within {deadline_s:g} s") from None
        except BROKEN as error:
            raise EngineError("infrastructure", f"the courier is lost: {type(error).__name__} {error}") from error
        try:
            if answer.status_code == 200:
                return reply.model_validate_json(answer.content)
            detail = answer.json()["detail"]
        except (ValidationError, ValueError, KeyError):
            raise EngineError("infrastructure", f"the courier's answer to {name} is not one: {answer.text[:200]}") from None
        raise EngineError("infrastructure", f"courier: {detail}", status=answer.status_code)


@dataclass(frozen=True)
class Load:
    """A bucket as both sides are told of it: the courier the objects and the order, the engine (name, dtype, shape) in that order."""

    bucket: Bucket
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Group:
    """One engine's group, and the lives of both sides that made it. Only an `intact` one is sent to."""

    name: str
    engine: int
    courier: int
    address: str = ""
    """Where the courier is, for the engine."""
    intact: bool = True


class DistributedTransport:
    """`deadline_s` bounds the joining of a group and each bucket, on both sides; the push itself bounds the whole."""

    def __init__(
        self,
        courier: Courier,
        shapes: TensorShapes,
        *,
        run_id: str,
        deadline_s: float,
        backend: Literal["auto", "gloo", "nccl"] = "auto",
        address: str | None = None,
    ) -> None:
        self.courier = courier
        self.groups: dict[str, Group] = {}  # by engine_id
        self._shapes = shapes
        self._run_id = run_id
        self._deadline_s = deadline_s
        self._backend = backend
        self._address = address

    @classmethod
    def of(cls, config: RunConfig, courier: Courier) -> DistributedTransport:
        push = config.push
        shapes = tensor_shapes(config.model.path)
        return cls(courier, shapes, run_id=config.run_id, deadline_s=push.deadline_s, backend=push.backend, address=push.address)

    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot) -> AsyncIterator[DistributedParcel]:
        loads = loads_of(await asyncio.to_thread(checked, snapshot, self._shapes))
        parcel = DistributedParcel(self, f"{snapshot.epoch}.{snapshot.version}.{secrets.token_hex(4)}", loads)
        try:
            yield parcel
        finally:
            await _quietly(self.courier.forget(parcel.push))

    def sweep(self) -> None:
        """Nothing of it outlives the processes."""

    async def send(self, slot: EngineSlot, push: str, loads: list[Load]) -> None:
        group = await self._group(slot)
        whole = False
        try:
            for number, load in enumerate(loads):
                then = loads[number + 1].bucket if number + 1 < len(loads) else None
                request = SendRequest(group=group.name, push=push, bucket=load.bucket, then=then)
                await _both(
                    slot.client.update_from_group(group.name, load.tensors, deadline_s=self._deadline_s),
                    self.courier.send(request, self._deadline_s),
                )
            whole = True
        finally:
            if not whole:
                await self._spoil(slot.engine_id, group)

    async def _group(self, slot: EngineSlot) -> Group:
        life = await self.courier.life()
        old = self.groups.get(slot.engine_id)
        if old is not None and (old.engine, old.courier, old.intact) == (slot.incarnation, life, True):
            return old
        if old is not None:
            await _quietly(self.courier.close(old.name))
            await slot.client.leave_group(old.name)  # which a process started anew knows nothing of, and says so
            del self.groups[slot.engine_id]
        return await self._join(slot, life)

    async def _join(self, slot: EngineSlot, life: int) -> Group:
        """Nobody else's name or port: of this run, this life, and this attempt; the port is the system's choice."""
        found = slot.capabilities
        size = 1 + (1 if found is None else found.tensor_parallel)
        name = f"headrace-{self._run_id}-{slot.engine_id}-{slot.incarnation}-{secrets.token_hex(4)}"
        group = self.groups[slot.engine_id] = Group(name, slot.incarnation, life)
        whole = False
        try:
            opened = await self.courier.open(
                OpenRequest(
                    group=name,
                    size=size,
                    backend=self._backend,
                    engine_device="cpu" if found is None else found.device,
                    address=self._address,
                    engine_host=urlsplit(slot.url).hostname or "localhost",
                    timeout_s=self._deadline_s,
                )
            )
            group = self.groups[slot.engine_id] = replace(group, address=opened.address)
            joining = slot.client.join_group(
                opened.address, opened.port, name, size=size, backend=opened.backend, deadline_s=self._deadline_s
            )
            await _both(joining, self.courier.join(name, self._deadline_s))
            whole = True
        finally:
            if not whole:
                await self._spoil(slot.engine_id, group)
        log.info("%s joined %s at %s port %d (%s)", slot.engine_id, name, opened.address, opened.port, opened.backend)
        return group

    async def _spoil(self, engine_id: str, group: Group) -> None:
        """Also when the push was cancelled: an engine in the middle of a bucket must not wait for the rest of it."""
        if self.groups.get(engine_id) == group:
            self.groups[engine_id] = replace(group, intact=False)
        await _quietly(self.courier.close(group.name))


@dataclass(frozen=True)
class DistributedParcel(Parcel):
    transport: DistributedTransport
    push: str
    loads: list[Load]
    in_session = True

    async def send(self, slot: EngineSlot) -> None:
        await self.transport.send(slot, self.push, self.loads)


def loads_of(bundles: Iterable[Bundle]) -> list[Load]:
    """Whole tensors, for SGLang takes no parts. Wide dtypes first, so that each tensor in a flat bucket is aligned."""
    loads = []
    for number, bundle in enumerate(bundles):
        tensors = sorted(bundle.tensors, key=lambda told: -(told[2] // max(1, told[1].elements)))
        bucket = Bucket(number=number, refs=[WireRef.of(ref) for ref in bundle.refs], names=[name for name, _, _ in tensors])
        loads.append(Load(bucket, tuple((name, form.dtype, form.shape) for name, form, _ in tensors)))
    return loads


async def _both(engine: Coroutine[Any, Any, None], courier: Coroutine[Any, Any, None]) -> None:
    """Both at once; the first that fails is raised, and the other is not waited for."""
    tasks = [asyncio.create_task(engine), asyncio.create_task(courier)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    """What only tidies up: a courier that is gone has closed everything."""
    try:
        await call
    except EngineError as error:
        log.debug("%s", error)
