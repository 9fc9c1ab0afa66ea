"""The watch asks every engine, is held up by none, and finds the one that is silent."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from driver.core import Core
from driver.engine_watch import EngineWatch
from driver.lost_time import LostTime
from rollout.answer import EngineError
from rollout.pool import EnginePool
from rollout.version import Version

STALL_S = 60.0


class ScriptedEngine:
    """Says what it was told to when asked for its load; the last word again and again."""

    url = "http://scripted"

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.asked = 0

    async def loads(self) -> dict[str, Any]:
        self.asked += 1
        step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if isinstance(step, Exception):
            raise step
        if step is None:
            await asyncio.sleep(3600)
        return {"loads": [step]}


def running(count: int) -> dict[str, Any]:
    return {
        "num_running_reqs": count,
        "num_waiting_reqs": 0,
        "num_used_tokens": 10 * count,
        "max_total_num_tokens": 4096,
        "max_running_requests": 8,
        "token_usage": 0.0,
    }


class Lab:
    def __init__(self) -> None:
        self.now = 1000.0
        self.pool = EnginePool(lambda: self.now)
        self.core: Any = SimpleNamespace(waits={}, lost_time=LostTime())
        self.core.waiting = partial(Core.waiting, self.core)
        self.replaced: list[tuple[str, str]] = []
        self.watch = EngineWatch(self.core, self.pool, interval_s=0.01, stall_s=STALL_S, replace=self.replace)

    async def replace(self, slot: Any, reason: str) -> None:
        self.replaced.append((slot.engine_id, reason))

    def add(self, engine_id: str, engine: ScriptedEngine, incarnation: int = 1) -> Any:
        slot = self.pool.register(engine_id, engine, incarnation, 4)  # type: ignore[arg-type]
        self.pool.open(slot, Version("run", 0, 0, incarnation))
        return slot

    @asynccontextmanager
    async def watching(self):
        task = asyncio.create_task(self.watch.run())
        yield
        assert not task.done(), f"nothing that an engine does ends it, not even {task.exception()!r}"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def lab() -> Lab:
    return Lab()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_each_engine_is_asked_again_and_again_and_one_that_never_answers_holds_up_no_other(lab):
    quiet, well = ScriptedEngine(None), ScriptedEngine(running(1), running(2))
    lab.add("quiet", quiet), lab.add("well", well)
    async with lab.watching():
        await until(lambda: well.asked >= 5)
    assert quiet.asked == 1, "nor is it asked twice at once"
    assert lab.pool.slots["well"].load.running == 2 and lab.pool.slots["quiet"].load is None


@pytest.mark.parametrize("failure", [EngineError("infrastructure", "connection reset"), {"num_running_reqs": "many"}])
async def test_a_failure_leaves_the_last_load_which_grows_old(lab, failure):
    engine = ScriptedEngine(running(3), failure)
    slot = lab.add("e0", engine)
    async with lab.watching():
        await until(lambda: engine.asked >= 2)
        lab.now += 7
        await until(lambda: engine.asked >= 4)
    assert slot.load.running == 3 and slot.load_age_s() == 7
    assert slot.state == "open" and lab.replaced == [], "how loaded it is, it need not say"


async def test_an_engine_that_came_meanwhile_is_asked_too_and_one_that_left_no_more(lab):
    first, second = ScriptedEngine(running(0)), ScriptedEngine(running(0))
    slot = lab.add("e0", first)
    async with lab.watching():
        await until(lambda: first.asked)
        lab.add("e1", second)
        await until(lambda: second.asked)
        lab.pool.gone(slot, "scaled down")
        asked = first.asked
        at = second.asked
        await until(lambda: second.asked >= at + 3)
        assert first.asked <= asked + 1
        lab.pool.gone(lab.pool.slots["e1"], "scaled down")
        await asyncio.sleep(0.05)  # nobody is there


async def test_E14_an_engine_that_is_silent_for_stall_s_is_quarantined_replaced_and_named_until_its_next_life_is_open(lab):
    slot = lab.add("e0", ScriptedEngine(running(1)))
    async with lab.watching(), lab.pool.acquire(1.0, "test"):
        await until(lambda: slot.load)
        lab.now += STALL_S - 0.5
        await asyncio.sleep(0.05)
        assert slot.state == "open"
        lab.now += 1
        await until(lambda: lab.replaced)
        assert lab.replaced == [("e0", slot.reason)] and slot.state == "quarantined"
        told = "it hangs: no token and no answer in 60.5 s while requests were open, 1 of them now (rollout.stall_s is 60)"
        assert slot.reason == told
        assert lab.core.waits["engine e0"].reason == f"e0 is out of use: {told}"
        assert lab.pool.why() == f"no engine is open: e0 is quarantined ({told})"
        await asyncio.sleep(0.05)
        assert len(lab.replaced) == 1
        lab.pool.gone(slot, "killed")
        lab.add("e0", ScriptedEngine(running(0)), incarnation=2)
        await until(lambda: not lab.core.waits)


async def test_E14_an_engine_is_left_alone_while_it_is_slow_or_idle_or_its_gate_is_shut(lab):
    slow, idle, shut = (lab.add(name, ScriptedEngine(running(1))) for name in ("slow", "idle", "shut"))
    async with lab.pool.acquire(1.0, "test"), lab.pool.acquire(1.0, "test", avoid=("slow", "idle")) as behind:
        assert behind.slot is shut and slow.open_requests == 1
        lab.pool.shut(shut, "push")
        async with lab.watching():
            for _ in range(5):
                lab.now += STALL_S - 1
                slow.heard()  # one token a minute
                await asyncio.sleep(0.05)
    assert (slow.state, idle.state, shut.state, lab.replaced) == ("open", "open", "shut", [])


async def test_E14_the_last_request_that_gave_up_is_enough(lab):
    """With one request at a time nothing is open when the engine has been silent for too long."""
    slot = lab.add("e0", ScriptedEngine(running(0)))
    async with lab.watching():
        async with lab.pool.acquire(1.0, "test"):
            lab.now += STALL_S
        await until(lambda: lab.replaced)
    assert "0 of them now" in slot.reason


async def test_E14_behind_a_router_no_engine_is_blamed_for_a_silence_that_may_be_anothers(lab):
    lab.watch = EngineWatch(lab.core, lab.pool, interval_s=0.01, stall_s=None, replace=lab.replace)
    engine = ScriptedEngine(running(1))
    slot = lab.add("e0", engine)
    async with lab.watching(), lab.pool.acquire(1.0, "test"):
        lab.now += 100 * STALL_S
        await until(lambda: engine.asked >= 3)
    assert slot.state == "open" and lab.replaced == [] and slot.load is not None
