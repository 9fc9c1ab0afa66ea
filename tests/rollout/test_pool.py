"""The pool under load, shut gates, replaced engines and impatient callers."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.answer import EngineError
from rollout.client import EngineClient, make_http
from rollout.pool import PREFERENCE, EnginePool
from rollout.version import Version


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def pool(clock):
    return EnginePool(clock)


@pytest.fixture
async def add(pool):
    async with make_http() as http:

        def add(engine_id="e0", incarnation=1, capacity=2, version=0, opened=True):
            slot = pool.register(engine_id, EngineClient(f"http://{engine_id}", http), incarnation, capacity)
            if opened:
                pool.open(slot, Version("run", 0, version, incarnation))
            return slot

        yield add


def spawn(pool, hold, *, deadline_s=5.0, log=None, **how):
    """A caller that keeps its slot until `hold` is set."""

    async def caller():
        async with pool.acquire(deadline_s, "test", **how) as lease:
            if log is not None:
                log.append(lease)
            await hold.wait()
            return lease

    return asyncio.create_task(caller())


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def says(running=0, waiting=0, used=0, max_running=16, kv_use=0.0):
    """A body of /v1/loads, as far as it is read."""
    rank = {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": used, "max_total_num_tokens": 4096}
    return {"loads": [rank | {"max_running_requests": max_running, "token_usage": kv_use}]}


async def test_requests_go_to_the_least_loaded_engine_and_never_above_its_capacity(pool, add):
    small, large = add("small", capacity=2), add("large", capacity=6)
    hold, log = asyncio.Event(), []
    tasks = [spawn(pool, hold, log=log) for _ in range(12)]
    await settle()
    assert (small.open_requests, large.open_requests) == (2, 6)
    assert len(log) == 8
    assert [lease.slot for lease in log[:4]].count(large) == 3, "load is measured against capacity"
    hold.set()
    await asyncio.gather(*tasks)
    assert (small.open_requests, large.open_requests) == (0, 0)
    assert small.served_requests + large.served_requests == 12


async def test_idle_engines_take_turns(pool, add):
    add("a"), add("b")
    seen = []
    for _ in range(4):
        async with pool.acquire(1.0, "test") as lease:
            seen.append(lease.slot.engine_id)
    assert seen == ["a", "b", "a", "b"]


async def test_callers_are_served_in_the_order_in_which_they_came(pool, add):
    add(capacity=1)
    order = []

    async def caller(number):
        async with pool.acquire(5.0, "test"):
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(caller(n) for n in range(50)))
    assert order == list(range(50))


async def test_H10_a_thousand_callers_and_a_gate_that_flickers_lose_no_wake_up(pool, add):
    slots = [add(f"e{n}", capacity=3, opened=False) for n in range(4)]
    chance = random.Random(7)
    done = 0

    async def caller():
        nonlocal done
        async with pool.acquire(20.0, "test") as lease:
            assert lease.slot.state == "open"
            assert lease.slot.open_requests <= lease.slot.capacity
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
        done += 1

    callers = [asyncio.create_task(caller()) for _ in range(1000)]
    quitters = [asyncio.create_task(caller()) for _ in range(200)]
    while done < 1000:
        slot = chance.choice(slots)
        if slot.state == "open":
            pool.shut(slot, "push")
        else:
            pool.open(slot, Version("run", 0, 0, 1))
        quitters.pop().cancel() if quitters else None
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*callers), 10)
    await settle()
    assert [slot.open_requests for slot in slots] == [0, 0, 0, 0]
    assert pool.gauges()["headrace_rollout_requests_waiting_count"] == 0


async def test_H10_a_caller_cancelled_in_the_moment_of_its_turn_gives_it_to_the_next(pool, add):
    slot = add(capacity=1)
    hold = asyncio.Event()
    first, second, third = (spawn(pool, hold) for _ in range(3))
    await settle()
    pool_second_got_it = slot.served_requests
    first.cancel()
    await asyncio.sleep(0)  # the first gives back, the second has the slot but has not run
    assert slot.served_requests == pool_second_got_it + 1
    second.cancel()
    await settle()
    assert (slot.open_requests, slot.served_requests) == (1, 3)
    hold.set()
    await asyncio.wait_for(third, 5)
    assert slot.open_requests == 0


async def test_L1_a_wait_has_a_deadline_and_says_what_was_in_the_way(pool, add):
    with pytest.raises(TimeoutError, match=r"first try: no engine was free within 0.02 s; no engine is registered"):
        async with pool.acquire(0.02, "first try"):
            pass
    slot = add(capacity=1)
    pool.shut(slot, "push of version 3")
    with pytest.raises(TimeoutError, match=r"e0 is shut \(push of version 3\)"):
        async with pool.acquire(0.02, "second try"):
            pass
    pool.open(slot, Version("run", 0, 3, 1))
    async with pool.acquire(1.0, "holder"):
        with pytest.raises(TimeoutError, match="1 of 1 engines are open, with 1 requests"):
            async with pool.acquire(0.02, "third try"):
                pass
    assert pool.gauges()["headrace_rollout_requests_waiting_count"] == 0
    assert slot.open_requests == 0


async def test_a_time_out_inside_the_lease_is_the_callers_own(pool, add):
    slot = add()
    with pytest.raises(TimeoutError, match="mine"):
        async with pool.acquire(1.0, "test"):
            raise TimeoutError("mine")
    assert slot.open_requests == 0


async def test_E7_no_caller_gets_an_engine_whose_gate_was_shut_before_it_ran(pool, add):
    slot = add(capacity=1)
    log, later, hold = [], [], asyncio.Event()
    tasks = spawn(pool, hold, log=log), spawn(pool, hold, log=later)
    pool.shut(slot, "push")  # nobody has run yet
    await settle()
    assert log == later == []
    pool.open(slot, Version("run", 0, 1, 1))  # hands over ...
    pool.shut(slot, "push again")  # ... and shuts before the caller runs
    await settle()
    assert log == later == []
    assert slot.open_requests == 0
    pool.open(slot, Version("run", 0, 2, 1))
    await settle()
    assert (len(log), later) == (1, []), "it has kept its place in the queue"
    hold.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 5)


async def test_E7_requests_that_are_open_stay_while_the_gate_is_shut(pool, add):
    slot = add()
    hold = asyncio.Event()
    task = spawn(pool, hold)
    await settle()
    pool.shut(slot, "push")
    assert slot.open_requests == 1
    hold.set()
    assert (await task).is_current()


async def test_L1_a_slots_clock_stands_still_while_its_gate_is_shut(pool, add, clock):
    slot = add()
    before = slot.clock()
    clock.now += 5
    assert slot.clock() - before == 5
    pool.shut(slot, "push")
    clock.now += 100
    assert slot.clock() - before == 5
    pool.open(slot, Version("run", 0, 1, 1))
    clock.now += 1
    assert slot.clock() - before == 6
    pool.shut(slot, "push")
    clock.now += 100
    pool.quarantine(slot, "never came back")
    clock.now += 2
    assert slot.clock() - before == 8, "a quarantined engine's requests must end"


async def test_busy_time_counts_once_however_many_requests_are_open(pool, add, clock):
    slot = add(capacity=4)
    one, two = asyncio.Event(), asyncio.Event()
    first, second = spawn(pool, one), spawn(pool, two)
    await settle()
    clock.now += 3
    one.set()
    await first
    clock.now += 2
    two.set()
    await second
    clock.now += 10
    assert slot.busy_s() == 5
    pool.gone(slot, "scaled down")
    assert pool.gauges()["headrace_rollout_busy_s"] == 5


async def test_E8_a_respawned_engine_is_a_new_slot_and_the_old_ones_answers_are_known(pool, add):
    old = add(incarnation=1)
    hold = asyncio.Event()
    task = spawn(pool, hold)
    await settle()
    new = add(incarnation=2, opened=False)
    assert old.state == "gone"
    assert pool.slots["e0"] is new
    assert new.state == "starting"
    assert pool.serving_version is None
    hold.set()
    lease = await task
    assert (lease.incarnation, lease.is_current()) == (1, False)
    assert new.open_requests == 0, "the old life's requests are not the new one's"
    with pytest.raises(ValueError, match="not newer"):
        add(incarnation=2)
    with pytest.raises(EngineError, match="incarnation 1, is gone: replaced by incarnation 2"):
        pool.shut(old, "late")


async def test_A5_an_engine_opens_only_with_a_version_verified_on_this_life_of_it(pool, add):
    slot = add(incarnation=2, opened=False)
    with pytest.raises(ValueError, match="verified on another one"):
        pool.open(slot, Version("run", 0, 5, 1))
    assert slot.state == "starting"


async def test_A5_serving_version_is_the_lowest_among_open_engines(pool, add):
    assert pool.serving_version is None
    behind, ahead = add("behind", version=3), add("ahead", version=4)
    assert pool.serving_version == 3
    pool.shut(behind, "push")
    assert pool.serving_version == 4
    pool.quarantine(behind, "checksums differ")
    assert behind.verified is None
    pool.shut(ahead, "push")
    assert pool.serving_version is None
    with pytest.raises(ValueError, match="cannot go from quarantined"):
        pool.open(behind, Version("run", 0, 4, 1))
    pool.shut(behind, "repair")
    pool.open(behind, Version("run", 0, 4, 1))
    assert pool.serving_version == 4


async def test_H1_with_no_engine_left_callers_wait_and_go_on_when_one_returns(pool, add):
    first = add(capacity=1)
    pool.gone(first, "killed")
    hold = asyncio.Event()
    tasks = [spawn(pool, hold) for _ in range(3)]
    await settle()
    assert pool.why() == "no engine is registered"
    add(incarnation=2, capacity=3)
    hold.set()
    leases = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert {lease.incarnation for lease in leases} == {2}


async def test_E13_a_request_that_failed_somewhere_goes_elsewhere_while_there_is_an_elsewhere(pool, add):
    bad, good = add("bad", capacity=4), add("good", capacity=1)
    hold, log = asyncio.Event(), []
    tasks = [spawn(pool, hold, log=log, avoid={"bad"}) for _ in range(2)]
    await settle()
    assert [lease.slot for lease in log] == [good], "the second waits for the good one"
    tasks.append(spawn(pool, hold, log=log))
    await settle()
    assert log[-1].slot is bad, "who waits for an engine of his own holds up nobody"
    pool.gone(good, "scaled down")
    await settle()
    assert [lease.slot for lease in log] == [good, bad, bad], "with no elsewhere left, it is tried again"
    hold.set()
    await asyncio.gather(*tasks)


async def test_requests_that_others_sent_to_an_engine_count_as_its_load(pool, add):
    shared, ours = add("shared", capacity=16), add("ours", capacity=16)
    shared.reported(says(running=6, waiting=2), 3.0)
    ours.reported(says(), 3.0)
    hold = asyncio.Event()
    tasks = [spawn(pool, hold) for _ in range(8)]
    await settle()
    assert (shared.open_requests, ours.open_requests) == (0, 8)
    tasks += [spawn(pool, hold) for _ in range(6)]
    await settle()
    assert (shared.open_requests, ours.open_requests) == (3, 11), "from there on both alike"
    hold.set()
    await asyncio.gather(*tasks)


async def test_a_report_that_gets_old_is_forgotten_little_by_little(pool, add, clock):
    shared, ours = add("shared", capacity=16), add("ours", capacity=16)
    shared.reported(says(running=8), 3.0)
    ours.reported(says(), 3.0)
    seen = []
    for passed_s in (0.0, 3.0, 1.5, 1.5):
        clock.now += passed_s
        seen.append(shared.score(clock.now) * 16)
    assert seen == [8, 8, 4, 0] and shared.load_age_s() == 6


async def test_a_report_that_counts_requests_of_ours_which_have_ended_since_takes_none_of_them_for_others(pool, add):
    slot = add(capacity=8)
    hold = asyncio.Event()
    tasks = [spawn(pool, hold) for _ in range(5)]
    await settle()
    hold.set()
    await asyncio.gather(*tasks)
    slot.reported(says(running=5), 3.0)  # some steps old
    assert slot.load.foreign == 0
    slot.reported(says(running=5), 3.0)
    assert slot.load.foreign == 5, "by now it would know"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20), st.floats(0, 1)), min_size=1, max_size=6), st.integers(1, 80))
def test_concurrency_is_bounded_and_equal_engines_are_dealt_evenly_whatever_they_report(engines, requests):
    """Engines of a capacity, foreign requests and memory in use; each number stands for two engines that are equal."""

    async def deal():
        pool = EnginePool(Clock())
        slots = []
        for number, (capacity, foreign, kv_use) in enumerate(engines):
            for twin in "ab":
                slot = pool.register(f"e{number}{twin}", None, 1, capacity)
                pool.open(slot, Version("run", 0, 0, 1))
                slot.reported(says(running=foreign, kv_use=kv_use), 3.0)
                slots.append(slot)
        hold = asyncio.Event()
        tasks = [spawn(pool, hold) for _ in range(requests)]
        await settle()
        assert all(slot.open_requests <= slot.capacity for slot in slots)
        assert sum(slot.open_requests for slot in slots) == min(requests, sum(slot.capacity for slot in slots)), "none waits beside room"
        assert all(abs(a.open_requests - b.open_requests) <= 1 for a, b in zip(slots[::2], slots[1::2], strict=True))
        hold.set()
        await asyncio.gather(*tasks)
        assert all(slot.open_requests == 0 for slot in slots)

    asyncio.run(deal())


async def test_a_request_goes_where_its_prefix_is_while_that_engine_is_little_more_loaded(pool, add):
    a, b = add("a", capacity=16), add("b", capacity=16)
    hold = asyncio.Event()
    tasks = [spawn(pool, hold, prefer=a) for _ in range(3)]
    await settle()
    assert (a.open_requests, b.open_requests) == (3, 0), "up to two sixteenths more than the other"
    tasks += [spawn(pool, hold, prefer=a)]
    await settle()
    assert (a.open_requests, b.open_requests) == (3, 1), "then the least loaded wins"
    assert (a.preferring_requests, a.preferred_requests) == (4, 3)
    hold.set()
    await asyncio.gather(*tasks)


async def test_nobody_waits_for_the_engine_it_prefers_while_another_has_room(pool, add):
    small, other = add("small", capacity=1), add("other", capacity=16)
    other.reported(says(running=1, max_running=1), 3.0)  # as loaded as can be
    hold = asyncio.Event()
    tasks = [spawn(pool, hold, prefer=small) for _ in range(2)]
    await settle()
    assert (small.open_requests, other.open_requests) == (1, 1)
    hold.set()
    await asyncio.gather(*tasks)


async def test_E13_an_engine_that_failed_a_request_does_not_get_it_again_for_holding_its_prefix(pool, add):
    failed, other = add("failed"), add("other")
    async with pool.acquire(1.0, "test", avoid=("failed",), prefer=failed) as lease:
        assert lease.slot is other
    async with pool.acquire(1.0, "test", prefer=failed) as lease:
        assert lease.slot is failed


async def test_E8_a_new_life_of_an_engine_holds_no_prefix_of_the_old_one(pool, add):
    add("other")
    old = add("e0")
    pool.gone(old, "killed")
    new = add("e0", incarnation=2)
    new.reported(says(running=1), 3.0)
    async with pool.acquire(1.0, "test", prefer=old) as lease:
        assert lease.slot.engine_id == "other"


async def test_32_siblings_of_4_samples_in_one_burst_leave_two_engines_as_even_as_the_preference_allows(pool, add):
    slots = add("a", capacity=24), add("b", capacity=24)
    for slot in slots:
        slot.reported(says(max_running=16), 3.0)
    allowed = PREFERENCE * 16 + 1
    hold, tasks = asyncio.Event(), []

    async def caller(first):
        async with pool.acquire(5.0, "test", prefer=first[0] if first else None) as lease:
            first.append(lease.slot)
            assert abs(slots[0].open_requests - slots[1].open_requests) <= allowed
            await hold.wait()

    for _ in range(4):
        first = []
        tasks += [asyncio.create_task(caller(first)) for _ in range(8)]
    await settle()
    assert abs(slots[0].open_requests - slots[1].open_requests) <= allowed
    assert sum(slot.open_requests for slot in slots) == 32
    assert sum(slot.preferred_requests for slot in slots) > 32 / 2, "more of them are together than chance would have it"
    hold.set()
    await asyncio.gather(*tasks)


async def test_E14_an_engine_is_silent_while_requests_are_open_and_nothing_comes(pool, add, clock):
    slot = add()
    clock.now += 100
    assert slot.silent_s() == 0, "without requests there is nothing to say"
    hold = asyncio.Event()
    tasks = [spawn(pool, hold) for _ in range(2)]
    await settle()
    clock.now += 7
    assert slot.silent_s() == 7
    slot.heard()
    clock.now += 2
    assert slot.silent_s() == 2, "a token of one request speaks for all: the others may wait behind it"
    pool.shut(slot, "push")
    clock.now += 50
    assert slot.silent_s() == 2, "nothing can come through a shut gate"
    pool.open(slot, Version("run", 0, 1, 1))
    clock.now += 1
    hold.set()
    await asyncio.gather(*tasks)
    clock.now += 50
    assert slot.silent_s() == 3


async def test_E14_a_request_that_gave_up_proves_nothing_in_its_engines_favour(pool, add, clock):
    """Else one request at a time could stall there for ever."""
    slot = add()
    for waited in (40, 80):
        async with pool.acquire(1.0, "test"):
            clock.now += 40
        clock.now += 1000
        assert slot.silent_s() == waited


async def test_E14_others_requests_that_go_on_are_progress_but_ours_alone_must_say_so_themselves(pool, add, clock):
    slot = add()
    hold = asyncio.Event()
    task = spawn(pool, hold)
    await settle()
    slot.reported(says(running=1, used=10), 3.0)
    clock.now += 5
    slot.reported(says(running=1, used=20), 3.0)
    assert slot.silent_s() == 5, "its loop turns, but no token of ours arrives"
    slot.reported(says(running=8, waiting=1, used=100), 3.0)
    clock.now += 5
    slot.reported(says(running=8, waiting=1, used=200), 3.0)
    assert slot.silent_s() == 0, "ours waits behind eight others"
    clock.now += 5
    slot.reported(says(running=8, waiting=1, used=200), 3.0)
    assert slot.silent_s() == 5, "and these stand still now"
    hold.set()
    await task


async def test_E16_an_engine_that_left_in_mid_push_is_handed_to_nobody_and_nobody_waits_for_it(pool, add):
    left = add("left", capacity=4)
    log, hold = [], asyncio.Event()
    tasks = [spawn(pool, hold, log=log, prefer=left) for _ in range(3)]
    pool.shut(left, "push")
    await settle()
    pool.open(left, Version("run", 0, 1, 1))  # hands over to all three ...
    pool.gone(left, "scaled down")  # ... and is gone before they run
    new = add("new", capacity=2)  # registered a moment ago
    await settle()
    assert [lease.slot for lease in log] == [new, new], "the third waits for room, not for the one that left"
    assert (left.open_requests, left.state, pool.why()) == (0, "gone", "1 of 1 engines are open, with 2 requests")
    hold.set()
    await asyncio.gather(*tasks)
    assert [lease.slot for lease in log] == [new] * 3


async def test_gauges_count_engines_by_state(pool, add):
    add("a"), add("b", opened=False), pool.shut(add("c"), "push")
    gauges = pool.gauges()
    assert gauges["headrace_rollout_engines_open_count"] == 1
    assert gauges["headrace_rollout_engines_starting_count"] == 1
    assert gauges["headrace_rollout_engines_shut_count"] == 1
    assert gauges["headrace_rollout_engines_quarantined_count"] == 0


async def test_L1_an_engine_knows_for_how_long_it_is_in_its_state_and_without_a_request(pool, add, clock):
    slot = add()
    clock.now += 3
    assert (slot.state_s(), slot.idle_s()) == (3, 3)
    async with pool.acquire(1.0, "test"):
        clock.now += 2
        assert (slot.state_s(), slot.idle_s()) == (5, 0)
    pool.shut(slot, "version 1 is being pushed")
    clock.now += 4
    assert (slot.state_s(), slot.idle_s()) == (4, 4)
