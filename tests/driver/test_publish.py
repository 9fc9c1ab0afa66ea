"""Which snapshot is kept, and when the buckets of one go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from driver import publish
from driver.ledger import Ledger
from driver.measured import Measured
from driver.publish import Publisher
from driver.push import Outcome
from driver.snapshot import Snapshot, SnapshotGone
from driver.store_gate import StoreGate
from rollout.pool import EnginePool
from rollout.version import Version


class Store:
    def __init__(self) -> None:
        self.freed: list[str] = []

    def free(self, refs: Any) -> None:
        self.freed += [ref.key for ref in refs]


class Bell:
    def clear(self) -> None: ...

    async def wait(self, at_most_s: float) -> None:
        await asyncio.sleep(0.001)


def snapshot(version: int, epoch: int = 0) -> Snapshot:
    ref = {"key": f"run/weights/{epoch}/{version}/0", "size_bytes": 1, "location": "tmpfs:/nowhere"}
    return Snapshot("run", epoch, version, (ref,), {}, (), ())


@pytest.fixture
def parts():
    store, ledger, pool = Store(), Ledger(), EnginePool()
    ledger.trained_version = 9
    pushed: list[int] = []

    def apply(event: Any) -> None:
        ledger.apply(event)

    core = SimpleNamespace(gate=StoreGate(store), ledger=ledger, bell=Bell, ring=lambda: None, apply=apply, measured=Measured())  # type: ignore[arg-type]
    slot = pool.register("engine-0", SimpleNamespace(url="http://scripted"), 1, 4)  # type: ignore[arg-type]
    gate = asyncio.Event()
    gate.set()

    async def push_all(made: Snapshot) -> list[Outcome]:
        await gate.wait()
        if slot.state == "open":
            pool.shut(slot, "push")
        pool.open(slot, Version("run", made.epoch, made.version, 1))
        pushed.append(made.version)
        return [Outcome("engine-0", True, 0.1, 1e-6)]

    publisher = Publisher(core, pool, SimpleNamespace(push_all=push_all))  # type: ignore[arg-type]
    return publisher, store, ledger, pushed, gate


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - it looks at plain attributes
            await asyncio.sleep(0.001)


async def test_pending_pushes_coalesce_to_the_newest_and_each_old_one_is_freed_once(parts):
    publisher, store, ledger, pushed, gate = parts
    gate.clear()
    publisher.offer(snapshot(1))
    task = asyncio.create_task(publisher.run())
    await asyncio.sleep(0.01)  # 1 is being pushed
    publisher.offer(snapshot(2))
    publisher.offer(snapshot(3))
    assert store.freed == ["run/weights/0/2/0"], "2 was never pushed; 1 is in use"
    gate.set()
    await until(lambda: pushed == [1, 3])
    await until(lambda: len(store.freed) == 2)
    assert store.freed == ["run/weights/0/2/0", "run/weights/0/1/0"], "3 is kept for late joiners"
    assert ledger.serving_version == 3 and not publisher.pending and publisher.gap_max == 1e-6
    task.cancel()
    publisher.free_all()
    assert store.freed[2:] == ["run/weights/0/3/0"]


async def test_L2_the_same_version_made_twice_keeps_its_buckets(parts):
    """A trainer that died before its first push comes back and writes the same keys."""
    publisher, store, _, pushed, _ = parts
    publisher.offer(snapshot(0))
    publisher.offer(snapshot(0))
    assert store.freed == []
    task = asyncio.create_task(publisher.run())
    await until(lambda: pushed == [0])
    publisher.offer(snapshot(0))
    assert store.freed == []
    task.cancel()


async def test_A5_a_version_of_an_older_epoch_is_not_the_one_that_serves(parts):
    publisher, _, ledger, pushed, _ = parts
    ledger.epoch = 1
    publisher.offer(snapshot(4, epoch=0))
    task = asyncio.create_task(publisher.run())
    await until(lambda: pushed == [4])
    assert ledger.serving_version == 0
    publisher.offer(snapshot(3, epoch=1))
    await until(lambda: ledger.serving_version == 3)
    task.cancel()


async def test_L2_a_snapshot_that_is_gone_while_the_trainer_makes_it_anew_is_pushed_a_little_later(parts, monkeypatch):
    publisher, store, _, pushed, _ = parts
    monkeypatch.setattr(publish, "AGAIN_S", 0.001)
    push_all, tries = publisher._pusher.push_all, []

    async def gone_once(made: Snapshot) -> list[Outcome]:
        tries.append(made.version)
        if len(tries) == 1:
            raise SnapshotGone("freed")
        return await push_all(made)

    publisher._pusher.push_all = gone_once
    publisher.offer(snapshot(2))
    task = asyncio.create_task(publisher.run())
    await until(lambda: pushed == [2])
    assert tries == [2, 2] and store.freed == []
    task.cancel()
