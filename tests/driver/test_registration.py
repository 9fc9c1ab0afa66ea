"""An engine that is ready is asked what it can do before the pool gets it."""

import asyncio
import os
import threading
from types import SimpleNamespace

import psutil
import pytest

from driver.launcher import Died, Quarantined, Ready, StartFailed
from driver.processes import Processes
from driver.transport import Transports
from rollout.answer import EngineError
from rollout.capabilities import capabilities_of
from rollout.client import EngineClient
from rollout.pool import EnginePool

CURRENT = capabilities_of({"version": "0.5.23"}, {})
READY = Ready("engine", 0, 3, "http://127.0.0.1:1")


class Process:
    state = "ready"
    incarnation = 3
    pid = 4242

    def __init__(self):
        self.killed = []

    def kill(self, reason):
        self.killed.append(reason)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """Processes of a run with one engine, whose answer about its capabilities is `answer` (or raised)."""
    queued, disk = [], []

    async def durable():
        disk.extend(queued)
        queued.clear()

    db = SimpleNamespace(query=lambda *_: [], write=queued.extend, durable=durable)
    core = SimpleNamespace(ring=lambda: None, db=db)
    rollout, reward = SimpleNamespace(max_open_requests=4, engines=1), SimpleNamespace(workers=1)
    config = SimpleNamespace(directory=tmp_path, rollout=rollout, reward=reward, roles={}, evaluation=None)
    run = SimpleNamespace(core=core, config=config, http=None, tokenizer=SimpleNamespace(vocab_size=10), pool=EnginePool())
    run.transports = Transports("auto", {})
    lab = SimpleNamespace(processes=Processes(run), pool=run.pool, process=Process(), answer=CURRENT, frozen=0, disk=disk)
    lab.processes._launcher = SimpleNamespace(processes={"engine-0": lab.process})

    async def capabilities(_client):
        await asyncio.sleep(0)
        if isinstance(lab.answer, Exception):
            raise lab.answer
        return lab.answer

    async def ready():
        lab.processes._lost = asyncio.get_running_loop().create_future()
        lab.processes._on_event(READY)
        assert not lab.pool.slots, "nothing is registered before it was asked"
        await asyncio.gather(*lab.processes._asking, return_exceptions=True)
        await asyncio.sleep(0)
        return lab.processes._lost

    async def freeze_gc(_client):
        lab.frozen += 1

    monkeypatch.setattr(EngineClient, "capabilities", capabilities)
    monkeypatch.setattr(EngineClient, "freeze_gc", freeze_gc)
    lab.ready = ready
    return lab


async def test_an_engine_registers_with_what_it_can_do(lab):
    assert not (await lab.ready()).done()
    slot = lab.pool.slots["engine-0"]
    assert (slot.incarnation, slot.capacity, slot.capabilities, slot.pid) == (3, 4, CURRENT, 4242)
    assert slot.life == 1, "the first life of any engine of this run"
    assert lab.frozen == 1, "or every push waits for the server's garbage collector"


async def test_A5_the_number_in_an_engines_versions_is_on_disk_before_anybody_can_be_told_it(lab):
    await lab.ready()
    assert lab.pool.slots and [(row.values["name"], row.values["value"]) for row in lab.disk] == [("incarnation/all engines", b"1")]


async def test_the_embedded_engine_has_no_collector_to_freeze(lab):
    lab.answer = capabilities_of({"version": "0.5.23", "embedded": True}, {})
    await lab.ready()
    assert lab.pool.slots and lab.frozen == 0


async def test_a_server_that_cannot_serve_ends_the_run_with_the_reason(lab):
    lab.answer = EngineError("configuration", "SGLang 0.5.18 has no sessions")
    lost = await lab.ready()
    assert not lab.pool.slots and not lab.process.killed
    with pytest.raises(StartFailed, match=r"engine-0: SGLang 0\.5\.18 has no sessions"):
        lost.result()


async def test_w1_an_engine_that_does_not_answer_is_replaced(lab):
    lab.answer = EngineError("infrastructure", "no answer in 5 s")
    assert not (await lab.ready()).done()
    assert not lab.pool.slots
    assert lab.process.killed == ["it does not say what it can do: no answer in 5 s"]


@pytest.mark.parametrize("answer", [CURRENT, EngineError("infrastructure", "reset"), EngineError("configuration", "old")])
async def test_w1_an_engine_that_died_while_it_was_asked_is_left_to_its_next_life(lab, answer):
    lab.answer = answer
    lab.process.incarnation = 4
    assert not (await lab.ready()).done()
    assert not lab.pool.slots and not lab.process.killed


async def test_what_goes_wrong_in_a_registration_is_not_swallowed(lab):
    lab.answer = RuntimeError("a mistake of ours")
    lost = await lab.ready()
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        lost.result()


async def test_E5_pushes_wait_for_a_courier_that_died_and_it_ends_no_run(lab):
    said = []
    lab.processes._run.courier = SimpleNamespace(attach=lambda *told: said.append(told), detach=lambda: said.append("gone"))
    lab.processes._lost = asyncio.get_running_loop().create_future()
    lab.processes._on_event(Ready("courier", 0, 2, "http://127.0.0.1:2"))
    lab.processes._on_event(Died("courier", 0, 2, "killed"))
    assert said == [("http://127.0.0.1:2", 2), "gone"] and not lab.processes._lost.done()


async def test_E16_an_engine_that_is_sent_away_while_it_is_asked_is_not_registered(lab):
    """Its process is still there for a moment, and says that it is ready."""
    ended = asyncio.Event()
    lab.processes._leaving.add("engine-0", asyncio.create_task(ended.wait()))
    lab.processes._stopping = True
    await lab.ready()
    assert not lab.pool.slots
    ended.set()
    await lab.processes._leaving.wait()


async def test_H1_L1_an_engine_that_died_is_named_at_once_and_one_that_is_left_alone_with_its_remedy(lab):
    said = {}
    lab.processes._core.waiting = said.__setitem__
    await lab.ready()
    lab.processes._on_event(Died("engine", 0, 3, "engine-0 (incarnation 3) was killed by SIGKILL after 4.0 s; its log is x\n    more"))
    assert lab.pool.why() == "no engine is registered; engine-0: engine-0 (incarnation 3) was killed by SIGKILL after 4.0 s; its log is x"
    lab.processes._on_event(Quarantined("engine", 0, 3, "engine-0 died 5 times within 60 s and is left alone"))
    assert "engine-0 is out of use: engine-0 died 5 times" in said["engine engine-0"]
    assert "headrace scale rollout 1 starts it again" in said["engine engine-0"]
    assert not lab.processes._lost.done(), "the run waits, and says why"
    lab.process.incarnation = 4
    lab.processes._on_event(Ready("engine", 0, 4, "http://127.0.0.1:2"))
    await asyncio.gather(*lab.processes._asking)
    assert lab.pool.slots["engine-0"].incarnation == 4 and not lab.pool.absent


@pytest.mark.parametrize("role", ["trainer", "reward", "courier"])
async def test_L2_a_role_that_nothing_can_do_without_ends_the_run_when_it_is_left_alone(lab, role):
    lab.processes._lost = asyncio.get_running_loop().create_future()
    gone = SimpleNamespace(detach=lambda *_: None)
    lab.processes._run.training = lab.processes._run.scoring = lab.processes._run.courier = gone
    lab.processes._on_event(Quarantined(role, 0, 5, f"{role}-0 died 5 times within 60 s and is left alone; the last time: no memory"))
    with pytest.raises(StartFailed, match="no memory"):
        lab.processes._lost.result()


async def test_O3_the_loop_goes_on_while_the_host_is_asked_for_the_children_of_our_processes(lab, monkeypatch):
    asked, may_answer = threading.Event(), threading.Event()
    pids = psutil.pids

    def slow_pids():
        asked.set()
        assert may_answer.wait(30), "the loop stood still for it"
        return pids()

    monkeypatch.setattr(psutil, "pids", slow_pids)
    lab.process.pid = os.getppid()
    lab.process.spec = SimpleNamespace(role="engine", index=0)
    lab.process.url = "http://127.0.0.1:1"
    showing = asyncio.create_task(lab.processes.shown())
    assert await asyncio.to_thread(asked.wait, 30)
    may_answer.set()
    driver, engine = await showing
    assert driver["children"] == [] and os.getpid() in engine["children"]
