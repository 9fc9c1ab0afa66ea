"""Another S or P while the run goes on: what it does to those who live, that it is kept, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from driver.batcher import Candidate, choose, feasible
from driver.events import VersionServed
from driver.limits import Limits, load_limits
from driver.service import create_app
from tests.driver.test_holds import Engine, Lab


@given(st.dictionaries(st.integers(0, 6), st.integers(1, 9), max_size=5), st.integers(0, 3), st.integers(1, 9), st.integers(1, 9))
def test_A4_L0_a_smaller_P_shrinks_as_far_as_what_lives_allows_and_its_batch_goes(live, batch, before, wanted):
    assume(feasible(live, batch, before))
    now = Limits(0, wanted).samples_now(live, batch)
    assert wanted <= now <= max(wanted, before) and feasible(live, batch, now)
    candidates = [Candidate(uid, d, True) for uid, d in enumerate(Counter(live).elements())]
    if now > wanted:
        assert len(candidates) >= now, "L0: there are as many as the batch needs"
        assert not feasible(live, batch, now - 1), "or a smaller one would do"
    if len(candidates) >= now:
        taken = choose(candidates, batch, now).uids
        assert taken is not None and len(taken) == now
        left = Counter(c.deadline_batch for c in candidates if c.uid not in taken)
        assert Limits(0, wanted).samples_now(left, batch + 1) <= now


@pytest.fixture
async def lab(tmp_path):
    made = Lab(tmp_path, "staleness.bound=1", "batch.samples=2", "stop.batches=20")
    yield made
    await made.close()


async def put(lab: Lab, **body: int) -> tuple[int, dict]:
    runs = {"sort-digits": SimpleNamespace(core=lab.core)}
    app = create_app(SimpleNamespace(runs=runs, waiting={}), token=None, loopback=True, shutdown=lambda: None)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        async with asyncio.timeout(10):
            reply = await http.put("/v1/runs/sort-digits/staleness", json=body)
    return reply.status_code, reply.json()


async def test_A4_a_lower_S_and_a_smaller_P_apply_to_what_is_registered_later(lab):
    await lab.start(Engine(slow=set()), rows=20)
    ledger = lab.core.ledger
    await lab.until(lambda: ledger.next_uid == 4 and not any(s.waiting for s in ledger.live()), "all that S = 1 and P = 2 let in")
    assert await put(lab, bound=0, samples=1) == (200, {"run_id": "sort-digits", "bound": 0, "samples": 1, "samples_now": 2})
    assert {s.deadline_batch for s in ledger.live()} == {1}, "deadlines are stored"
    assert len(lab.holds.look(short_allowed=False) or ()) == 2, "four live samples need two batches of two to be in time"
    lab.take()
    lab.take()
    assert max(ledger.staleness) == 1 and lab.core.samples_per_batch == 1
    lab.core.apply(VersionServed(version=2))
    await lab.until(lambda: ledger.next_uid == 5 and not any(s.waiting for s in ledger.live()), "one sample, for the batch at hand")
    assert ledger.live_by_deadline == {2: 1}


async def test_a_change_holds_over_a_restart_until_the_configuration_says_something_else(lab):
    assert (await put(lab, bound=3))[0] == 200
    assert load_limits(lab.db, Limits(1, 2)) == Limits(3, 2)
    assert load_limits(lab.db, Limits(1, 4)) == Limits(1, 4), "the file was changed since"


async def test_O1_what_could_not_have_been_configured_is_refused_and_changes_nothing(lab):
    status, reply = await put(lab, bound=100_000)
    assert status == 400 and "store.capacity_bytes" in reply["error"]["message"]
    assert (await put(lab, samples=0))[0] == 422 and (await put(lab, bund=1))[0] == 422
    assert lab.core.limits == Limits(1, 2)
    lab.core.ledger.ended = "all batches trained"
    assert (await put(lab, bound=2))[0] == 409


async def test_a_smaller_P_after_some_batches_still_registers_for_those_that_are_left(tmp_path):
    """It was counted in samples taken: with a P halved in the middle of a run, all seemed to be there, and nothing came any more."""
    lab = Lab(tmp_path, "staleness.bound=1", "batch.samples=2", "stop.batches=4")
    try:
        await lab.start(Engine(slow=set()), rows=20)
        ledger = lab.core.ledger
        await lab.until(lambda: ledger.next_uid == 4 and not any(s.waiting for s in ledger.live()), "two batches of two")
        lab.take()
        lab.take()
        await put(lab, samples=1)
        lab.core.apply(VersionServed(version=2))
        await lab.until(lambda: ledger.next_uid == 6, "two batches of one are left")
    finally:
        await lab.close()
