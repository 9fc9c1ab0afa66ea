"""B1, and what a push leaves behind: nothing but what an engine may still come to."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from safetensors.torch import load_file

from driver.agreement import EachTensor
from driver.checkpoint_files import tensor_shapes
from driver.snapshot import PushImpossible, PushRefused, Snapshot, SnapshotGone
from driver.transport import SHARED_MEMORY, DiskTransport, SharedMemoryTransport, StoreTransport, Transports
from rollout.answer import EngineError
from rollout.capabilities import capabilities_of
from rollout.client import EngineClient, make_http
from rollout.pool import EngineSlot
from rollout.sglang.payload import HEADER_BYTES
from store import Column, EmbeddedStore, Ref, TensorForm
from store.pieces import cut

TENSORS: dict[str, Any] = {
    "a.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": Column(np.array([0x3F80, 0xC000, 0x4040], np.uint16), "bfloat16"),
    "c.weight": np.ones(5, np.float32),
}
SHAPES = {"a.weight": (2, 3), "b.weight": (3,), "c.weight": (5,)}


@pytest.fixture
def store():
    made = EmbeddedStore(SHARED_MEMORY / f"headrace-test-{os.getpid()}-transport", 1 << 20)
    yield made
    made.remove()


@pytest.fixture
def snapshot(store) -> Snapshot:
    refs = [store.put(f"r/weights/0/3/{i}", dict(part)) for i, part in enumerate((list(TENSORS.items())[:2], list(TENSORS.items())[2:]))]
    sums = {name: hashlib.sha256((t.data if isinstance(t, Column) else t).tobytes()).hexdigest() for name, t in TENSORS.items()}
    return Snapshot("r", 0, 3, tuple(ref.to_wire() for ref in refs), sums, (), ())


class Listening:
    """An engine that notes which names of shared memory there are while it is called."""

    def __init__(self, transport: SharedMemoryTransport, fail: BaseException | None = None) -> None:
        self.transport = transport
        self.fail = fail
        self.calls: list[tuple[str | None, list[Path]]] = []
        self.directory: dict[str, np.ndarray] = {}

    async def update_from_tensor(self, tensors: list[str], *, load_format: str | None = None) -> None:
        self.calls.append((load_format, files(self.transport)))
        if self.fail is not None:
            raise self.fail


def slot_of(engine: Any) -> EngineSlot:
    return EngineSlot("engine-0", engine, 1, 8, time.monotonic)


def files(transport: SharedMemoryTransport) -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"{transport.prefix}@*"))


@pytest.fixture
def shared(tmp_path):
    return SharedMemoryTransport(tmp_path, SHAPES)


async def test_B1_a_bucket_is_copied_once_and_each_call_has_a_name_of_its_own(shared, snapshot):
    engines = [Listening(shared), Listening(shared)]
    async with shared.prepared(snapshot) as parcel:
        first, second = files(shared)
        assert first.read_bytes()[HEADER_BYTES:][:24] == TENSORS["a.weight"].tobytes()
        assert first.read_bytes()[HEADER_BYTES + 64 :] == TENSORS["b.weight"].data.tobytes()
        for engine in engines:
            await parcel.send(slot_of(engine))
        assert files(shared) == [first, second]
    names = {path for engine in engines for _, seen in engine.calls for path in seen} - {first, second}
    assert len(names) == 4, "a killed engine deletes the names it knew, and they are no other engine's"
    assert {load_format for engine in engines for load_format, _ in engine.calls} == {"flattened_bucket"}
    assert files(shared) == []


async def test_a_call_that_is_refused_leaves_no_name_behind(shared, snapshot):
    async with shared.prepared(snapshot) as parcel:
        with pytest.raises(EngineError):
            await parcel.send(slot_of(Listening(shared, fail=EngineError("infrastructure", "refused", status=400))))
        assert len(files(shared)) == 2
    assert files(shared) == []


@pytest.mark.parametrize("end", [EngineError("infrastructure", "reset"), asyncio.CancelledError()])
async def test_L3_the_name_of_a_call_that_nobody_saw_answered_stays_until_a_later_one_is(shared, snapshot, end):
    """The server may come to it yet, and dies of a name that is gone: seen on 0.5.23, at the end of a run in the middle of a push."""
    with pytest.raises(type(end)):
        async with shared.prepared(snapshot) as parcel:
            await parcel.send(slot_of(Listening(shared, fail=end)))
    (kept,) = files(shared)
    assert kept.stat().st_size > HEADER_BYTES, "with its bytes, though the bucket's own name is gone"
    async with shared.prepared(snapshot) as parcel:
        await parcel.send(slot_of(Listening(shared)))
    assert files(shared) == []


async def test_what_a_killed_driver_left_is_swept_and_only_that(shared, tmp_path):
    other = SharedMemoryTransport(tmp_path / "other", SHAPES)
    for transport in (shared, other):
        (SHARED_MEMORY / f"{transport.prefix}@0.1.0.aa").touch()
    shared.sweep()
    assert files(shared) == [] and len(files(other)) == 1
    other.sweep()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"d.weight": (1,)}, "1 tensors of the snapshot are missing for the engines' checkpoint, the first is d.weight"),
        ({"c.weight": None}, "1 tensors of the snapshot are not in the engines' checkpoint, the first is c.weight"),
        ({"a.weight": (3, 2)}, r"a.weight is \[2, 3\] in the snapshot and \[3, 2\]"),
        ({"lm_head.weight": (2, 3)}, None),  # tied
    ],
)
async def test_names_and_shapes_are_compared_before_anything_is_sent(tmp_path, snapshot, change, words):
    shapes = {name: shape for name, shape in (SHAPES | change).items() if shape is not None}
    every = (SharedMemoryTransport(tmp_path, shapes), DiskTransport(tmp_path / "push", tmp_path, shapes), StoreTransport(shapes))
    for transport in every:
        if words is None:
            async with transport.prepared(snapshot):
                continue
        with pytest.raises(PushImpossible, match=words):
            async with transport.prepared(snapshot):
                pass
    assert files(SharedMemoryTransport(tmp_path, shapes)) == []


async def test_a_bucket_that_is_gone_or_does_not_fit_is_said(shared, snapshot, store, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(PushImpossible, match=r"does not fit in /dev/shm.*push\.transport: disk"):
        patched.setattr(os, "posix_fallocate", full)
        async with shared.prepared(snapshot):
            pass
    assert files(shared) == []
    store.free([Ref.from_wire(bucket) for bucket in snapshot.buckets])
    with pytest.raises(SnapshotGone, match="can not be read"):
        async with shared.prepared(snapshot):
            pass


async def test_the_disk_gets_a_whole_checkpoint_for_as_long_as_the_push(tmp_path, snapshot):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"a.weight": TENSORS["a.weight"]}, model / "model.safetensors")
    transport = DiskTransport(tmp_path / "push", model, SHAPES)

    class Reading:
        async def update_from_disk(self, path: str) -> None:
            directory = Path(path)
            assert (directory / "config.json").read_text() == "{}" and not (directory / "model.safetensors").exists()
            assert tensor_shapes(directory) == SHAPES
            first, second = (load_file(directory / f"bucket-0000{i}.safetensors") for i in range(2))
            assert first["b.weight"].tolist() == [1.0, -2.0, 3.0] and second["c.weight"].tolist() == [1.0] * 5

    async with transport.prepared(snapshot) as parcel:
        assert not parcel.in_session
        await parcel.send(slot_of(Reading()))
    assert not any((tmp_path / "push").iterdir())
    transport.sweep()
    assert not (tmp_path / "push").exists()


@pytest.mark.parametrize(
    ("embedded", "url", "expected"),
    [
        (True, "http://127.0.0.1:1", "store"),
        (False, "http://127.0.0.1:1", "tensor"),
        (False, "http://[::1]:1", "tensor"),
        (True, "http://engines.example:1", "distributed"),
        (False, "http://10.0.0.7:1", "distributed"),
    ],
)
async def test_each_engine_gets_its_weights_by_what_it_is_and_where(embedded, url, expected):
    async with make_http() as http:
        asked = (EngineClient(url, http), capabilities_of({"version": "0.5.23", "embedded": embedded}, {}))
        makers = {"store": StoreTransport, "tensor": StoreTransport, "distributed": StoreTransport, "disk": StoreTransport}
        assert Transports("auto", makers).name_for(*asked) == expected
        for anywhere in ("distributed", "disk"):
            assert Transports(anywhere, makers).name_for(*asked) == anywhere
        other = "tensor" if expected == "store" else "store"
        with pytest.raises(EngineError, match=f"push.transport {other} is not for .*take auto"):
            Transports(other, makers).name_for(*asked)


@pytest.mark.parametrize("tensors", [1, 2])
async def test_E10_a_tensor_of_three_buckets_is_whole_in_shared_memory_and_on_disk(tmp_path, store, tensors):
    """Alone, and with another behind it."""
    large, small = np.arange(30, dtype=np.float32).reshape(5, 6), np.ones(4, np.float32)
    columns = [dict([part]) for part in cut("large", large, 40)] + [{"small": small}] * (tensors - 1)
    refs = [store.put(f"r/weights/0/4/{i}", part) for i, part in enumerate(columns)]
    forms = {"large": TensorForm("float32", (5, 6)), "small": TensorForm("float32", (4,))}
    cut_up = Snapshot("r", 0, 4, tuple(ref.to_wire() for ref in refs), {}, (), (), forms)
    shapes = {name: forms[name].shape for name in list(forms)[:tensors]}
    shared = SharedMemoryTransport(tmp_path, shapes)
    async with shared.prepared(cut_up) as parcel:
        assert [[entry.shape for entry in bucket.placed] for bucket in parcel.buckets] == [[shape] for shape in shapes.values()]
        assert parcel.buckets[0].path.read_bytes()[HEADER_BYTES:] == large.tobytes()
        engine = Listening(shared)
        await parcel.send(slot_of(engine))
        assert len(engine.calls) == tensors
    (tmp_path / "model").mkdir()
    async with DiskTransport(tmp_path / "push", tmp_path / "model", shapes).prepared(cut_up) as parcel:
        written = [load_file(path) for path in sorted(parcel.directory.glob("*.safetensors"))]
        assert [list(file) for file in written] == [[name] for name in shapes] and np.array_equal(written[0]["large"].numpy(), large)
    with pytest.raises(PushImpossible, match=r"not whole: .*end before element 20"):
        async with StoreTransport(shapes).prepared(replace(cut_up, buckets=cut_up.buckets[:2])):
            pass


async def test_E3_a_weight_that_is_equal_to_the_store_has_the_stores_own_sum_and_no_other(snapshot):
    class Comparing:
        def __init__(self) -> None:
            self.equal = list(SHAPES)

        async def equal_to_stored(self, refs: Any) -> list[str]:
            assert tuple(refs) == snapshot.buckets
            return self.equal

    engine, agreement = Comparing(), EachTensor()
    async with StoreTransport(SHAPES).prepared(snapshot) as parcel:
        agreement.check(snapshot, await parcel.held(slot_of(engine)))
        engine.equal = ["a.weight", "c.weight"]
        with pytest.raises(PushRefused, match=r"1 of 2 tensors are not the snapshot's, the first is b.weight"):
            agreement.check(snapshot, await parcel.held(slot_of(engine)))


async def test_E3_bytes_in_the_store_that_are_not_what_the_trainer_summed_are_found(snapshot):
    class Equal:
        async def equal_to_stored(self, refs: Any) -> list[str]:
            return list(SHAPES)

    other = replace(snapshot, checksums=snapshot.checksums | {"c.weight": "0" * 64})
    async with StoreTransport(SHAPES).prepared(other) as parcel:
        with pytest.raises(PushRefused, match=r"the first is c.weight"):
            EachTensor().check(other, await parcel.held(slot_of(Equal())))
