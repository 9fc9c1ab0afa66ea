"""What the driver says to the courier and to an engine, and that neither waits for the other when it has failed (E4, E10)."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from driver.distributed import Courier, DistributedTransport
from driver.snapshot import PushImpossible, Snapshot
from driver.transport import SHARED_MEMORY
from rollout.answer import EngineError
from rollout.capabilities import capabilities_of
from rollout.client import make_http
from rollout.pool import EnginePool, EngineSlot
from store import Column, EmbeddedStore
from trainer.courier_wire import Opened, OpenRequest, SendRequest

SHAPES = {"half.weight": (3,), "wide.weight": (2, 3), "last.weight": (5,)}


@pytest.fixture
def snapshot():
    store = EmbeddedStore(SHARED_MEMORY / f"headrace-test-{os.getpid()}-distributed", 1 << 20)
    half = Column(np.array([0x3F80, 0xC000, 0x4040], np.uint16), "bfloat16")
    first = store.put("r/weights/0/3/0", {"half.weight": half, "wide.weight": np.zeros((2, 3), np.float32)})
    last = store.put("r/weights/0/3/1", {"last.weight": np.ones(5, np.float32)})
    yield Snapshot("r", 0, 3, (first.to_wire(), last.to_wire()), {}, (), ())
    store.remove()


class Script:
    """Notes each call of one side; one that is named in `fail` fails, one in `hang` never ends."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.fail: set[str] = set()
        self.hang: set[str] = set()

    async def note(self, name: str, *told: Any) -> None:
        self.calls.append((name, *told))
        await asyncio.sleep(0)
        if name in self.fail:
            self.fail.discard(name)
            raise EngineError("infrastructure", f"{name} failed")
        if name in self.hang:
            await asyncio.Event().wait()

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


class ScriptedCourier(Script):
    incarnation = 1

    async def life(self) -> int:
        await self.note("life")
        return self.incarnation

    async def open(self, request: OpenRequest) -> Opened:
        await self.note("open", request)
        return Opened(address="10.0.0.1", port=4242, backend="gloo")

    async def join(self, group: str, deadline_s: float) -> None:
        await self.note("join", group)

    async def send(self, request: SendRequest, deadline_s: float) -> None:
        await self.note("send", request)

    async def close(self, group: str) -> None:
        await self.note("close", group)

    async def forget(self, push: str) -> None:
        await self.note("forget", push)


class ScriptedEngine(Script):
    url = "http://[fd00::7]:30000"
    on_this_host = False

    async def join_group(self, address: str, port: int, name: str, *, size: int, backend: str, deadline_s: float) -> None:
        await self.note("join", address, port, name, size, backend)

    async def leave_group(self, name: str) -> bool:
        await self.note("leave", name)
        return False

    async def update_from_group(self, name: str, tensors: Any, *, deadline_s: float) -> None:
        await self.note("update", name, tensors)


class Lab:
    def __init__(self) -> None:
        self.courier, self.engine, self.pool = ScriptedCourier(), ScriptedEngine(), EnginePool()
        self.transport = DistributedTransport(self.courier, SHAPES, run_id="run", deadline_s=30.0)  # type: ignore[arg-type]
        self.slot = self.register(1)

    def register(self, incarnation: int) -> EngineSlot:
        found = capabilities_of({"version": "0.5.23", "tp_size": 2, "device": "cuda"}, {})
        self.slot = self.pool.register("engine-0", self.engine, incarnation, 4, found)  # type: ignore[arg-type]
        return self.slot

    async def push(self, snapshot: Snapshot) -> None:
        async with asyncio.timeout(10), self.transport.prepared(snapshot) as parcel:
            await parcel.send(self.slot)

    @property
    def group(self) -> str:
        return self.transport.groups["engine-0"].name

    def clear(self) -> None:
        self.courier.calls.clear()
        self.engine.calls.clear()


@pytest.fixture
def lab() -> Lab:
    return Lab()


async def test_L3_both_sides_are_told_the_same_bytes_in_the_same_order_wide_dtypes_first(lab, snapshot):
    await lab.push(snapshot)
    assert lab.courier.names() == ["life", "open", "join", "send", "send", "forget"]
    opened = lab.courier.calls[1][1]
    assert (opened.size, opened.engine_device, opened.engine_host, opened.address) == (3, "cuda", "fd00::7", None)
    assert lab.engine.calls[0] == ("join", "10.0.0.1", 4242, lab.group, 3, "gloo")
    tensors = [list(call[2]) for call in lab.engine.calls[1:]]
    assert tensors == [[("wide.weight", "float32", (2, 3)), ("half.weight", "bfloat16", (3,))], [("last.weight", "float32", (5,))]]
    first, last = (call[1] for call in lab.courier.calls[3:5])
    assert first.bucket.names == ["wide.weight", "half.weight"] and first.then == last.bucket and last.then is None
    assert [ref.key for ref in first.bucket.refs] == ["r/weights/0/3/0"]
    assert lab.courier.calls[-1] == ("forget", first.push), "the courier keeps nothing of a push that is over"


async def test_L3_a_group_is_kept_until_one_of_the_two_is_another(lab, snapshot):
    await lab.push(snapshot)
    first = lab.group
    lab.clear()
    await lab.push(replace(snapshot, version=4))
    assert lab.group == first and lab.engine.names() == ["update", "update"]
    lab.register(2)
    await lab.push(snapshot)
    second = lab.group
    assert second != first and ("close", first) in lab.courier.calls and ("leave", first) in lab.engine.calls
    lab.courier.incarnation = 2
    await lab.push(snapshot)
    assert len({first, second, lab.group}) == 3 and all(name.startswith("headrace-run-engine-0-") for name in (first, second, lab.group))


@pytest.mark.parametrize(
    ("side", "call"), [("engine", "join"), ("engine", "update"), ("courier", "open"), ("courier", "join"), ("courier", "send")]
)
async def test_E4_when_one_side_fails_the_other_is_not_waited_for_and_the_group_is_made_anew(lab, snapshot, side, call):
    failing, other = (lab.engine, lab.courier) if side == "engine" else (lab.courier, lab.engine)
    failing.fail = {call}
    other.hang = {{"update": "send", "send": "update"}.get(call, call)}
    with pytest.raises(EngineError, match=f"{call} failed"):
        await lab.push(snapshot)
    failed = lab.group
    assert ("close", failed) in lab.courier.calls, "so that an engine that waits for bytes is told"
    other.hang = set()
    lab.clear()
    await lab.push(snapshot)
    assert lab.engine.names() == ["leave", "join", "update", "update"] and lab.engine.calls[0] == ("leave", failed)
    assert lab.group != failed


async def test_E6_a_push_that_is_given_up_in_mid_bucket_ends_the_group(lab, snapshot):
    lab.engine.hang = {"update"}
    lab.courier.hang = {"send"}
    pushing = asyncio.create_task(lab.push(snapshot))
    while "send" not in lab.courier.names():  # noqa: ASYNC110 - the scripts step with the loop
        await asyncio.sleep(0)
    pushing.cancel()
    with suppress(asyncio.CancelledError):
        await pushing
    assert lab.courier.calls[-2:] == [("close", lab.group), ("forget", lab.courier.calls[-1][1])]
    assert not lab.transport.groups["engine-0"].intact


async def test_E10_E11_names_and_shapes_are_compared_before_anybody_is_told_anything(lab, snapshot):
    lab.transport._shapes = SHAPES | {"wide.weight": (3, 2)}
    with pytest.raises(PushImpossible, match=r"wide.weight is \[2, 3\] in the snapshot and \[3, 2\]"):
        await lab.push(snapshot)
    assert lab.courier.calls == [] and lab.engine.calls == []


async def test_E5_a_push_waits_for_the_courier_s_next_life():
    async with make_http() as http:
        courier = Courier(http)
        courier.attach("http://127.0.0.1:1", 1)
        assert await courier.life() == 1
        courier.detach()
        waiting = asyncio.create_task(courier.life())
        await asyncio.sleep(0)
        assert not waiting.done()
        courier.attach("http://127.0.0.1:1", 2)
        assert await waiting == 2
        with pytest.raises(EngineError, match="the courier is lost"):
            await courier.close("g")
