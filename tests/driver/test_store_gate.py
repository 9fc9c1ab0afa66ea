"""The driver's loops do not stand still for a store that is reached over the network, and while it is away they wait in words."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from driver.store_gate import StoreGate, moved
from store import INLINE, EmbeddedStore, Ref, Unavailable

COLUMNS = {"x": np.zeros(3)}


class Elsewhere(EmbeddedStore):
    """Its calls take as long as `held` is, and fail while `away`."""

    away = False

    def __init__(self, root: Path) -> None:
        super().__init__(root, 1 << 20)
        self.held = threading.Event()
        self.held.set()

    def put(self, key, columns):
        self.held.wait(30)
        if self.away:
            raise Unavailable("no route")
        return super().put(key, columns)

    def free(self, refs):
        self.held.wait(30)
        if self.away:
            raise Unavailable("no route")
        super().free(refs)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Elsewhere]:
    made = Elsewhere(tmp_path / "store")
    yield made
    made.held.set()


@pytest.fixture
def gate(store: Elsewhere) -> Iterator[StoreGate]:
    made = StoreGate(store, elsewhere=True)
    yield made
    made.close()


async def test_L1_the_loop_goes_on_while_a_put_takes_its_time(store, gate):
    store.held.clear()
    putting = asyncio.create_task(gate.put("a", COLUMNS))
    for _ in range(5):
        await asyncio.sleep(0.001)  # would hang here
    assert not putting.done()
    store.held.set()
    assert (await putting).key == "a"


async def test_B2_a_put_that_meets_a_store_that_is_away_waits_and_is_made_again_and_nothing_is_lost(store, gate):
    told = asyncio.Event()
    gate.on_doubt = told.set
    store.away = True
    putting = asyncio.create_task(gate.put("a", COLUMNS))
    await told.wait()
    assert gate.reason == "no route", "whoever watches is told"
    other = asyncio.create_task(gate.put("b", COLUMNS))
    await asyncio.sleep(0.01)
    store.away = False
    assert not other.done(), "it is not tried while the gate is shut"
    gate.open()
    await asyncio.gather(putting, other)
    assert sorted(store.keys()) == ["a~1", "b"]


async def test_W8_a_put_whose_answer_was_lost_leaves_no_object_behind(store, gate, monkeypatch):
    put, lost = store.put, []

    def answer_is_lost(key, columns):
        ref = put(key, columns)
        if not lost:
            lost.append(key)
            raise Unavailable("connection reset")
        return ref

    monkeypatch.setattr(store, "put", answer_is_lost)
    gate.on_doubt = gate.open
    ref = await gate.put("a", COLUMNS)
    await gate.settle(30)
    assert store.keys() == [ref.key] == ["a~1"] and lost == ["a"]


async def test_W8_what_was_put_for_somebody_who_is_cancelled_meanwhile_is_freed(store, gate):
    store.held.clear()
    putting = asyncio.create_task(gate.put("a", COLUMNS))
    await asyncio.sleep(0.01)
    putting.cancel()
    await asyncio.wait([putting])
    store.held.set()
    await asyncio.to_thread(gate._puts.shutdown)
    await gate.settle(30)
    assert store.keys() == []


async def test_W8_frees_do_not_wait_and_those_left_undone_are_done_when_it_is_back(store, gate):
    ref = await gate.put("a", COLUMNS)
    store.away = True
    gate.free([ref])
    await gate.settle(30)
    assert store.keys() == ["a"]
    store.away = False
    gate.open()
    await gate.settle(30)
    assert store.keys() == []


async def test_A2_after_a_loss_a_free_of_before_does_not_take_what_was_put_since_under_the_same_key(store, gate):
    """Rows come back from the snapshot under their keys, and the trainer makes a version anew under its own."""
    ref = await gate.put("a", COLUMNS)
    store.away = True
    gate.free([ref])
    await gate.settle(30)
    store.away = False
    gate.lost()
    gate.open()
    await gate.settle(30)
    assert store.keys() == ["a"]


async def test_rows_are_read_before_they_are_freed(store, gate):
    ref = await gate.put("a", COLUMNS)
    seen: list[list[str]] = []
    gate.behind(lambda: seen.append(store.keys()))
    gate.free([ref])
    await gate.settle(30)
    assert seen == [["a"]] and store.keys() == []


def test_embedded_every_call_is_made_at_once(store):
    gate = StoreGate(store)
    gate.free([store.put("a", COLUMNS)])
    assert store.keys() == [] and gate.stats().objects == 0


def test_a_reference_is_moved_to_where_the_store_is_now_unless_the_object_rides_in_it():
    ref = Ref("k", 8, "tmpfs:/a").to_wire()
    assert moved(ref, "mooncake:h:1/r?http=2")["location"] == "mooncake:h:1/r?http=2" and ref["location"] == "tmpfs:/a"
    small = {**ref, "location": INLINE, "inline": "AAAA"}
    assert moved(small, "tmpfs:/b") is small
