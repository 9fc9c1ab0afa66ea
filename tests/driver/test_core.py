"""The bells: no loop misses a change of state, whenever it comes."""

from __future__ import annotations

import asyncio
import random

from driver.core import Bell, Core


def core_with(bells: int) -> tuple[Core, list[Bell]]:
    core = object.__new__(Core)  # its bells alone
    core.bells = []
    return core, [core.bell() for _ in range(bells)]


async def test_H10_a_ring_between_the_look_and_the_wait_of_a_thousand_loops_is_not_lost() -> None:
    core, bells = core_with(1000)
    for bell in bells:
        bell.clear()
    core.ring()  # each has looked, and none waits yet
    async with asyncio.timeout(10):
        await asyncio.gather(*(bell.wait(60) for bell in bells))


async def test_H10_a_thousand_loops_see_the_last_of_many_changes_whatever_their_turn_is() -> None:
    core, bells = core_with(1000)
    state, wanted = 0, 200
    rng = random.Random(0)

    async def loop(bell: Bell) -> None:
        while True:
            bell.clear()
            if state == wanted:
                return
            await bell.wait(60)
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)

    loops = [asyncio.create_task(loop(bell)) for bell in bells]
    async with asyncio.timeout(30):
        while state < wanted:
            state += 1
            core.ring()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await asyncio.gather(*loops)


async def test_a_loop_that_nobody_rings_looks_at_the_clock_in_time() -> None:
    _, (bell,) = core_with(1)
    await bell.wait(0.01)
