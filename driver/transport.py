"""How a snapshot's bytes get into an engine: chosen by what each engine is and where.

    store    the engine maps the store's objects itself                        the embedded engine on this host
    tensor   a file of /dev/shm as torch shares memory; the call names it      SGLang on this host
    disk     a checkpoint directory, which the engine reads                    any engine that sees RUN_DIR
    distributed  broadcasts from the trainer's host (`driver/distributed.py`)  any engine

What can be made ready before a gate is shut is made ready before (`prepared`), once for all engines: the pause pays for none of it.
SGLang passes over a name it does not know and dies of a shape that does not fit, so both are compared with the engine's own
checkpoint before anything is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from driver.checkpoint_files import TensorShapes, link_beside, tensor_shapes, write_safetensors
from driver.settings import RunConfig
from driver.snapshot import PushImpossible, Snapshot, SnapshotGone
from rollout.answer import EngineError
from rollout.capabilities import Capabilities
from rollout.client import EngineClient, ref_payload
from rollout.pool import EngineSlot
from rollout.sglang.payload import HEADER_BYTES, Placed, bucket_payload, header, place
from store import Lease, Ref, StoreError, open_store

SHARED_MEMORY = Path("/dev/shm")  # where torch looks for a name

Name = Literal["store", "tensor", "disk", "distributed"]


class Parcel(Protocol):
    """A snapshot, ready to be sent. `in_session`: between begin_weight_update and end_weight_update."""

    in_session: bool

    async def send(self, slot: EngineSlot) -> None:
        """All of it to one engine. May be called again, after a failure and for each engine. Raises EngineError."""


class Transport(Protocol):
    def prepared(self, snapshot: Snapshot) -> AbstractAsyncContextManager[Parcel]:
        """What was made for the push is gone afterwards. Raises SnapshotGone, PushImpossible."""
        ...

    def sweep(self) -> None:
        """Take away what a killed driver left. Before the first push and after the last."""


# ---- store -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreParcel:
    buckets: tuple[Mapping[str, object], ...]
    in_session = True

    async def send(self, slot: EngineSlot) -> None:
        for bucket in self.buckets:
            await slot.client.update_from_tensor(ref_payload(bucket))


class StoreTransport:
    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot) -> AsyncIterator[Parcel]:
        yield StoreParcel(snapshot.buckets)

    def sweep(self) -> None:
        pass


# ---- shared memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedBucket:
    path: Path
    placed: tuple[Placed, ...]
    length_bytes: int


@dataclass(frozen=True)
class SharedParcel:
    buckets: tuple[SharedBucket, ...]
    in_session = True

    async def send(self, slot: EngineSlot) -> None:
        """Each call has a name of its own for the same bytes: an engine that is killed takes the names it knew with it."""
        ranks = 1 if slot.capabilities is None else slot.capabilities.tensor_parallel
        for bucket in self.buckets:
            link = bucket.path.with_name(f"{bucket.path.name}@{secrets.token_hex(4)}")
            os.link(bucket.path, link)
            try:
                payload = bucket_payload(link.name, bucket.placed, bucket.length_bytes, ranks)
                await slot.client.update_from_tensor(payload, load_format="flattened_bucket")
            finally:
                link.unlink(missing_ok=True)


class SharedMemoryTransport:
    """`owner` tells the files of one run from those of others."""

    def __init__(self, owner: Path, shapes: TensorShapes) -> None:
        self.prefix = f"headrace-push-{hashlib.blake2b(str(owner).encode(), digest_size=8).hexdigest()}"
        self._shapes = shapes

    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot) -> AsyncIterator[Parcel]:
        buckets: list[SharedBucket] = []
        try:
            refuse_unless_same(self._shapes, await asyncio.to_thread(_shapes_of, snapshot))
            for wire in snapshot.buckets:
                path = SHARED_MEMORY / f"{self.prefix}@{snapshot.epoch}.{snapshot.version}.{len(buckets)}.{secrets.token_hex(4)}"
                buckets.append(await asyncio.to_thread(_share, wire, path))
            yield SharedParcel(tuple(buckets))
        finally:
            for bucket in buckets:
                bucket.path.unlink(missing_ok=True)

    def sweep(self) -> None:
        for path in SHARED_MEMORY.glob(f"{self.prefix}@*"):
            path.unlink(missing_ok=True)


def _share(wire: Mapping[str, object], path: Path) -> SharedBucket:
    """Copy one bucket of the store into a file that torch can map."""
    with opened(wire) as lease:
        placed, length_bytes = place([(name, lease.dtypes[name], column.shape, column.nbytes) for name, column in lease.items()])
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, HEADER_BYTES + length_bytes)  # a full file system says so here, not by SIGBUS later
            os.pwrite(handle, header(), 0)
            for entry in placed:
                _write_all(handle, _raw(lease[entry.name]), HEADER_BYTES + entry.start)
        except OSError as error:
            path.unlink()
            raise PushImpossible(
                f"a copy of the weights ({length_bytes:,} bytes) does not fit in {SHARED_MEMORY}: {error.strerror}; "
                "enlarge it (Docker: --shm-size), or set push.transport: disk"
            ) from error
        finally:
            os.close(handle)
    return SharedBucket(path, tuple(placed), length_bytes)


# ---- disk ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskParcel:
    directory: Path
    in_session = False

    async def send(self, slot: EngineSlot) -> None:
        await slot.client.update_from_disk(str(self.directory))


class DiskTransport:
    """A checkpoint directory for each push: the snapshot's tensors beside the files of `model_path` that say what model it is."""

    def __init__(self, directory: Path, model_path: Path, shapes: TensorShapes) -> None:
        self._directory = directory
        self._model_path = model_path
        self._shapes = shapes

    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot) -> AsyncIterator[Parcel]:
        directory = self._directory / f"{snapshot.epoch}-{snapshot.version}"
        try:
            refuse_unless_same(self._shapes, await asyncio.to_thread(_shapes_of, snapshot))
            await asyncio.to_thread(self._write, snapshot, directory)
            yield DiskParcel(directory)
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _write(self, snapshot: Snapshot, directory: Path) -> None:
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            link_beside(self._model_path, directory)
            for number, wire in enumerate(snapshot.buckets):
                with opened(wire) as lease:
                    write_safetensors(directory / f"bucket-{number:05d}.safetensors", lease, lease.dtypes)
        except OSError as error:
            raise PushImpossible(f"the weights can not be written to {directory}: {error.strerror}; make room there") from error

    def sweep(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


# ---- which one, and what they share ---------------------------------------------------------------------------------------------------


class Transports:
    """All of a run's. Each is made when the first engine needs it; `wanted` is push.transport, for engines where it fits."""

    def __init__(self, wanted: Name | Literal["auto"], makers: Mapping[Name, Callable[[], Transport]]) -> None:
        self._wanted = wanted
        self._makers = makers
        self._made: dict[Name, Transport] = {}

    @classmethod
    def of(cls, config: RunConfig, distributed: Callable[[], Transport]) -> Transports:
        path = config.model.path
        makers: dict[Name, Callable[[], Transport]] = {
            "store": StoreTransport,
            "tensor": lambda: SharedMemoryTransport(config.store_directory, tensor_shapes(path)),
            "disk": lambda: DiskTransport(config.directory / "push", path, tensor_shapes(path)),
            "distributed": distributed,
        }
        return cls(config.push.transport, makers)

    def name_for(self, client: EngineClient, capabilities: Capabilities | None) -> Name:
        """EngineError `configuration` when the one that is configured is not for this engine."""
        embedded = capabilities is None or capabilities.embedded
        here: list[Name] = ["store" if embedded else "tensor"] if client.on_this_host else []
        fitting: list[Name] = [*here, "distributed", "disk"]
        if self._wanted == "auto":
            return fitting[0]
        if self._wanted not in fitting:
            what = "an embedded engine" if embedded else "SGLang"
            where = "on this host" if client.on_this_host else "on another host"
            raise EngineError(
                "configuration",
                f"push.transport {self._wanted} is not for {what} {where} ({client.url}); take auto, or {' or '.join(fitting)}",
            )
        return self._wanted

    def get(self, name: Name) -> Transport:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot, slots: Iterable[EngineSlot]) -> AsyncIterator[dict[str, Parcel]]:
        """A parcel for each engine, by engine_id; engines of one transport share it. Raises SnapshotGone, PushImpossible."""
        names = {slot.engine_id: self.name_for(slot.client, slot.capabilities) for slot in slots}
        async with AsyncExitStack() as stack:
            parcels = {name: await stack.enter_async_context(self.get(name).prepared(snapshot)) for name in sorted(set(names.values()))}
            yield {engine_id: parcels[name] for engine_id, name in names.items()}

    def sweep(self) -> None:
        """Take away what a killed driver left. Before the first push and after the last."""
        for name in self._makers:
            self.get(name).sweep()


def opened(wire: Mapping[str, object]) -> Lease:
    ref = Ref.from_wire(dict(wire))
    try:
        return open_store(ref.location).open(ref)
    except StoreError as error:
        raise SnapshotGone(f"the snapshot's bucket {ref.key} can not be read: {error}") from error


def _shapes_of(snapshot: Snapshot) -> TensorShapes:
    found: TensorShapes = {}
    for wire in snapshot.buckets:
        with opened(wire) as lease:
            found |= {name: column.shape for name, column in lease.items()}
    return found


def refuse_unless_same(expected: TensorShapes, found: TensorShapes) -> None:
    """An output matrix that is tied to the embedding may be named or not."""
    names = (expected.keys() ^ found.keys()) - {"lm_head.weight"}
    if names:
        which = "are not in" if names & found.keys() else "are missing for"
        raise PushImpossible(f"{len(names)} tensors of the snapshot {which} the engines' checkpoint, the first is {min(names)}")
    wrong = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if wrong:
        name = wrong[0]
        raise PushImpossible(f"{name} is {list(found[name])} in the snapshot and {list(expected[name])} in the engines' checkpoint")


def _raw(column: np.ndarray) -> memoryview:
    return np.ascontiguousarray(column).reshape(-1).view(np.uint8).data


def _write_all(handle: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written
