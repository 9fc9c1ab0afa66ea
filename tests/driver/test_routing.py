"""A router's workers are the engines with verified weights, and nothing is sent where nobody answers for the tokens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from driver.routing import Routing
from driver.turns import Way
from rollout.answer import EngineError, Prefix
from rollout.pool import EnginePool
from rollout.router import Worker
from rollout.version import Version


class ScriptedRouter:
    url = "http://router"

    def __init__(self) -> None:
        self.there: dict[str, Worker] = {}
        self.fault: EngineError | None = None

    async def workers(self) -> list[Worker]:
        if self.fault is not None:
            raise self.fault
        return list(self.there.values())

    async def add(self, url: str, api_key: str | None) -> None:
        self.there[url] = Worker(f"id-{url}", url, True)

    async def remove(self, worker_id: str) -> None:
        self.there = {url: worker for url, worker in self.there.items() if worker.worker_id != worker_id}


@pytest.fixture
def parts():
    pool, router = EnginePool(), ScriptedRouter()
    urls = ["http://a", "http://b"]
    slots = [pool.register(url, SimpleNamespace(url=url), 1, 4) for url in urls]  # type: ignore[arg-type]
    core = SimpleNamespace(ring=lambda: None)
    return pool, router, slots, Routing(core, pool, router, None, lambda: urls)  # type: ignore[arg-type]


async def test_A5_only_engines_with_verified_weights_are_workers(parts):
    pool, router, (first, second), routing = parts
    assert "none of the 0 engines" in await routing._look()
    pool.open(first, Version("r", 0, 0, 1))
    assert await routing._look() is not None, "it was only just told"
    assert await routing._look() is None and set(router.there) == {"http://a"}
    pool.open(second, Version("r", 0, 0, 1))
    pool.shut(first, "push")
    await routing._look()
    assert set(router.there) == {"http://a", "http://b"}, "one that is being pushed to is paused, not gone"
    pool.quarantine(first, "lies")
    await routing._look()
    assert set(router.there) == {"http://b"}
    pool.gone(second, "died")
    assert await routing._look() is not None and not router.there


async def test_E16_an_engine_that_is_sent_away_leaves_its_router_at_once_and_alone(parts):
    pool, router, slots, routing = parts
    for slot in slots:
        pool.open(slot, Version("r", 0, 0, 1))
    await routing._look()
    await routing.without("http://a")
    assert set(router.there) == {"http://b"}
    router.fault = EngineError("infrastructure", "the router can not be reached")
    await routing.without("http://b")  # its own loop will see to that


async def test_a_worker_that_nobody_knows_is_named_and_left_alone(parts):
    pool, router, (first, _), routing = parts
    pool.open(first, Version("r", 0, 0, 1))
    router.there["http://c"] = Worker("c", "http://c", True)
    await routing._look()
    assert "not of this run (http://c)" in await routing._look() and "http://c" in router.there


async def test_L1_a_router_that_does_not_answer_is_waited_for_with_the_reason(parts):
    pool, router, (first, _), routing = parts
    pool.open(first, Version("r", 0, 0, 1))
    router.fault = EngineError("infrastructure", "the router can not be reached")
    looking = asyncio.create_task(routing.run())
    try:
        with pytest.raises(TimeoutError, match=r"no router within .*can not be reached"):
            await routing.usable(0.05)
    finally:
        looking.cancel()


@pytest.mark.parametrize(("first", "kept"), [("r/0/1/1", 2), ("r/0/2/2", 0)])
def test_V5_a_broken_answer_through_a_router_keeps_tokens_of_what_was_served_when_it_was_asked(first, kept):
    """A first chunk with a version that no engine served then may hold tokens from before it."""
    way = Way(None, None, None, frozenset({"r/0/1/1", "r/0/1/2"}))  # type: ignore[arg-type]
    assert len(way.sure(Prefix([1, 2], [-1.0, -1.0], [(first, 0, 2)])).output_ids) == kept


def test_the_pools_clock_stands_still_while_any_gate_is_shut():
    now = 0.0
    pool = EnginePool(monotonic=lambda: now)
    first, second = (pool.register(f"e{i}", SimpleNamespace(url=""), 1, 4) for i in range(2))  # type: ignore[arg-type]
    for slot in (first, second):
        pool.open(slot, Version("r", 0, 0, 1))
    now = 1.0
    pool.shut(first, "push")
    now = 5.0
    pool.open(first, Version("r", 0, 1, 1))
    pool.shut(second, "push")
    now = 7.0
    assert pool.clock() == 1.0
    pool.gone(second, "died")
    now = 9.0
    assert pool.clock() == 3.0
