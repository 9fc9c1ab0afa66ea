"""How a snapshot's bytes get into an engine: chosen by what each engine is and where.

    store    the engine maps the store's objects itself                        the embedded engine on this host
    tensor   a file of /dev/shm as torch shares memory; the call names it      SGLang on this host
    disk     a checkpoint directory, which the engine reads                    any engine that sees RUN_DIR
    distributed  broadcasts from the trainer's host (`driver/distributed.py`)  any engine

What can be made ready before a gate is shut is made ready before (`prepared`), once for all engines: the pause pays for none of it.
An engine passes over a name it does not know, and SGLang dies of a shape that does not fit, so both are compared with the engines' own
checkpoint before anything is sent. SGLang takes whole tensors only: the parts of one that was cut are joined in its file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from driver.checkpoint_files import TensorShapes, link_beside, safetensors_head, tensor_shapes
from driver.settings import RunConfig
from driver.snapshot import PushImpossible, Snapshot, SnapshotGone
from rollout.answer import EngineError
from rollout.capabilities import Capabilities
from rollout.client import EngineClient, ref_payload
from rollout.pool import EngineSlot
from rollout.sglang.payload import HEADER_BYTES, Placed, bucket_payload, header, place
from store import Bundle, StoreError
from store.pieces import digests, write_whole

SHARED_MEMORY = Path("/dev/shm")  # where torch looks for a name
HASHING_THREADS = min(4, os.cpu_count() or 1)

Name = Literal["store", "tensor", "disk", "distributed"]


class Parcel(Protocol):
    """A snapshot, ready to be sent. `in_session`: between begin_weight_update and end_weight_update."""

    in_session: bool

    async def send(self, slot: EngineSlot) -> None:
        """All of it to one engine. May be called again, after a failure and for each engine. Raises EngineError."""

    async def held(self, slot: EngineSlot) -> dict[str, Any]:
        """What the engine holds now, as /weights_checker says it: checksums, for `driver.agreement`. Raises EngineError."""
        return await slot.client.checksums()


class Transport(Protocol):
    def prepared(self, snapshot: Snapshot) -> AbstractAsyncContextManager[Parcel]:
        """What was made for the push is gone afterwards. Raises SnapshotGone, PushImpossible."""
        ...

    def sweep(self) -> None:
        """Take away what a killed driver left. Before the first push and after the last."""


# ---- store -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoreParcel(Parcel):
    """`sums` are those of the bytes in the store, taken before the gate was shut; None where nobody took them."""

    buckets: tuple[Mapping[str, object], ...]
    sums: Mapping[str, str] | None
    in_session = True

    async def send(self, slot: EngineSlot) -> None:
        for bucket in self.buckets:
            await slot.client.update_from_tensor(ref_payload(bucket))

    async def held(self, slot: EngineSlot) -> dict[str, Any]:
        """A weight that is byte for byte the store's has the store's sum: comparing takes a quarter of the time of a sha256."""
        if self.sums is None:
            return await slot.client.checksums()
        equal = await slot.client.equal_to_stored(self.buckets)
        return {"ranks": [{"checksums": {name: self.sums.get(name, "unknown") for name in equal}}]}


class StoreTransport:
    """`shapes` are those of the engines' checkpoint; None where nobody knows them."""

    def __init__(self, shapes: TensorShapes | None = None) -> None:
        self._shapes = shapes

    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot) -> AsyncIterator[Parcel]:
        if self._shapes is None:
            yield StoreParcel(snapshot.buckets, None)
            return
        bundles = await asyncio.to_thread(checked, snapshot, self._shapes)
        yield StoreParcel(snapshot.buckets, await asyncio.to_thread(_sums, bundles))

    def sweep(self) -> None:
        pass


# ---- shared memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedBucket:
    path: Path
    placed: tuple[Placed, ...]
    length_bytes: int


def _sums(bundles: list[Bundle]) -> dict[str, str]:
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        try:
            return {name: digest for found in threads.map(digests, bundles) for name, digest in found.items()}
        except StoreError as error:
            raise SnapshotGone(f"the snapshot's buckets can not be read: {error}") from error


@dataclass(frozen=True)
class SharedParcel(Parcel):
    """`unanswered`: by engine_id, the names of calls whose answer nobody saw."""

    buckets: tuple[SharedBucket, ...]
    unanswered: dict[str, list[Path]]
    in_session = True

    async def send(self, slot: EngineSlot) -> None:
        """Each call has a name of its own for the same bytes: an engine that is killed takes the names it knew with it.

        The name of a call that was cut off, or given up, stays until the engine has answered later ones: SGLang may come to it yet, and
        dies of a name that is gone.
        """
        ranks = 1 if slot.capabilities is None else slot.capabilities.tensor_parallel
        for bucket in self.buckets:
            link = bucket.path.with_name(f"{bucket.path.name}@{secrets.token_hex(4)}")
            os.link(bucket.path, link)
            names = self.unanswered.setdefault(slot.engine_id, [])
            names.append(link)
            try:
                payload = bucket_payload(link.name, bucket.placed, bucket.length_bytes, ranks)
                await slot.client.update_from_tensor(payload, load_format="flattened_bucket")
            except EngineError as error:
                if error.status is not None:
                    names.remove(link)
                    link.unlink(missing_ok=True)
                raise
            for name in names:  # it does one call after the other
                name.unlink(missing_ok=True)
            names.clear()


class SharedMemoryTransport:
    """`owner` tells the files of one run from those of others."""

    def __init__(self, owner: Path, shapes: TensorShapes) -> None:
        self.prefix = f"headrace-push-{hashlib.blake2b(str(owner).encode(), digest_size=8).hexdigest()}"
        self._shapes = shapes
        self._unanswered: dict[str, list[Path]] = {}

    @asynccontextmanager
    async def prepared(self, snapshot: Snapshot) -> AsyncIterator[Parcel]:
        buckets: list[SharedBucket] = []
        try:
            for bundle in await asyncio.to_thread(checked, snapshot, self._shapes):
                path = SHARED_MEMORY / f"{self.prefix}@{snapshot.epoch}.{snapshot.version}.{len(buckets)}.{secrets.token_hex(4)}"
                buckets.append(await asyncio.to_thread(_share, bundle, path))
            yield SharedParcel(tuple(buckets), self._unanswered)
        finally:
            for bucket in buckets:
                bucket.path.unlink(missing_ok=True)

    def sweep(self) -> None:
        for path in SHARED_MEMORY.glob(f"{self.prefix}@*"):
            path.unlink(missing_ok=True)


def _share(bundle: Bundle, path: Path) -> SharedBucket:
    """Copy a bucket of the store, or those of one tensor, into a file that torch can map."""
    placed, length_bytes = place([(name, form.dtype, form.shape, size_bytes) for name, form, size_bytes in bundle.tensors])
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, HEADER_BYTES + length_bytes)  # a full file system says so here, not by SIGBUS later
        os.pwrite(handle, header(), 0)
        write_whole(bundle, handle, {entry.name: HEADER_BYTES + entry.start for entry in placed})
    except (OSError, StoreError) as error:
        path.unlink()
        if isinstance(error, StoreError):
            raise SnapshotGone(f"the snapshot's buckets can not be read: {error}") from error
        raise PushImpossible(
            f"a copy of the weights ({length_bytes:,} bytes) does not fit in {SHARED_MEMORY}: {error.strerror}; "
            "enlarge it (Docker: --shm-size), or set push.transport: disk"
        ) from error
    finally:
        os.close(handle)
    return SharedBucket(path, tuple(placed), length_bytes)


# ---- disk ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DiskParcel(Parcel):
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
            bundles = await asyncio.to_thread(checked, snapshot, self._shapes)
            await asyncio.to_thread(self._write, bundles, directory)
            yield DiskParcel(directory)
        finally:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _write(self, bundles: list[Bundle], directory: Path) -> None:
        try:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            link_beside(self._model_path, directory)
            for number, bundle in enumerate(bundles):
                head, offsets = safetensors_head(bundle.tensors)
                with (directory / f"bucket-{number:05d}.safetensors").open("wb", buffering=0) as file:
                    file.write(head)
                    write_whole(bundle, file.fileno(), offsets)
        except StoreError as error:
            raise SnapshotGone(f"the snapshot's buckets can not be read: {error}") from error
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
            "store": lambda: StoreTransport(tensor_shapes(path)),
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


def checked(snapshot: Snapshot, expected: TensorShapes) -> list[Bundle]:
    """Its buckets, if they hold the tensors of the engines' checkpoint. Raises SnapshotGone, PushImpossible."""
    bundles = snapshot.bundles()
    refuse_unless_same(expected, {name: form.shape for bundle in bundles for name, form, _ in bundle.tensors})
    return bundles


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
