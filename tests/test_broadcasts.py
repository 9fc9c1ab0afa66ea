"""Pushes by broadcasts, with real processes on both sides: a courier, and embedded engines that can be cut off in mid-bucket."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import httpx
import pytest

from driver.checkpoint_files import tensor_shapes
from driver.distributed import Courier, DistributedTransport
from driver.life import CHILD, free_port
from driver.push import Outcome, Pusher
from driver.transport import Transports
from rollout.answer import EngineError
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool, EngineSlot
from rollout.version import Version
from store import EmbeddedStore, Ref
from tests.courier import CourierProcess
from tests.fleet import BASE, Engine, fleet
from tests.service import ServiceUnderTest
from tests.sglang_server import Weights
from tests.test_whole import check_accounts
from trainer.address import address_towards

BUCKETS = 4
START_S = 60.0
SEND = "/update_weights_from_distributed"


@pytest.fixture(scope="module")
def weights() -> list[Weights]:
    return [Weights(version) for version in range(4)]


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(Path(f"/dev/shm/headrace-test-{os.getpid()}-broadcasts"), 64 << 20)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> Iterator[list[Engine]]:
    with fleet(tmp_path_factory.mktemp("engines"), 2, None, slow_s=0.0) as both:
        for engine in both:
            engine.wait(START_S)
        yield both


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[CourierProcess]:
    made = CourierProcess(tmp_path_factory.mktemp("courier"))
    made.start()
    yield made
    made.kill()


class Parts:
    """A run's pusher, its engines and its hold on a courier."""

    def __init__(self, http, process: CourierProcess, deadline_s: float, wanted: Literal["auto", "distributed"] = "distributed") -> None:
        self.http, self.pool, self.replaced = http, EnginePool(), dict[str, str]()
        self.courier = Courier(http)
        self.courier.attach(process.url, process.incarnation)
        self.transport = DistributedTransport(self.courier, tensor_shapes(BASE), run_id="t", deadline_s=deadline_s)
        transports = Transports(wanted, {"distributed": lambda: self.transport})
        self.pusher = Pusher(self.pool, deadline_s=deadline_s, logprob_tolerance=1e-4, replace=self._replace, transports=transports)

    async def _replace(self, slot: EngineSlot, reason: str) -> None:
        self.replaced[slot.engine_id] = reason

    async def register(self, engine_id: str, engine: Engine, incarnation: int = 1) -> EngineSlot:
        client = EngineClient(engine.proxy.url, self.http)
        return self.pool.register(engine_id, client, incarnation, 16, await client.capabilities())

    async def push(self, weights: Weights, store: EmbeddedStore) -> dict[str, Outcome]:
        snapshot = weights.snapshot(store, BUCKETS)
        try:
            return {outcome.engine_id: outcome for outcome in await self.pusher.push_all(snapshot)}
        finally:
            store.free(Ref.from_wire(bucket) for bucket in snapshot.buckets)

    def names(self) -> dict[str, str]:
        return {engine_id: group.name for engine_id, group in self.transport.groups.items()}


@asynccontextmanager
async def parts_of(engines: list[Engine], process: CourierProcess, deadline_s: float = 30.0) -> AsyncIterator[Parts]:
    async with make_http() as http:
        parts = Parts(http, process, deadline_s)
        for number, engine in enumerate(engines):
            await parts.register(f"engine-{number}", engine)
        yield parts
        for name in parts.names().values():
            await parts.courier.close(name)


async def test_L3_three_pushes_by_broadcasts_in_one_group_an_engine(engines, process, weights, store):
    async with parts_of(engines, process) as parts:
        sent, names = process.health()["progress"], []
        for version in (0, 1, 2):
            outcomes = await parts.push(weights[version], store)
            assert len(outcomes) == 2 and all(o.verified and o.logprob_gap <= 1e-4 for o in outcomes.values()), outcomes
            names.append(parts.names())
        assert names[0] == names[1] == names[2] and len(set(names[0].values())) == 2
        assert process.health() == {"role": "courier", "incarnation": process.incarnation, "groups": 2, "progress": sent + 3 * 2 * BUCKETS}


def start_at(address: str, port: int, log_path: Path) -> subprocess.Popen[bytes]:
    flags = ["--model-path", str(BASE), "--host", address, "--port", str(port), "--context-length", "256"]
    argv = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), sys.executable, "-P", "-m", "rollout.engine", *flags]
    with log_path.open("wb") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)


async def test_an_engine_at_another_address_gets_its_weights_by_broadcasts_without_being_told_so(process, weights, store, tmp_path):
    """As on another host: its URL is not loopback, and neither is where the courier listens and the bytes go."""
    try:
        address = address_towards("192.0.2.200")
    except OSError:
        pytest.skip("this host has no address but loopback")
    port = free_port()
    engine = start_at(address, port, tmp_path / "engine.log")
    try:
        async with make_http() as http, asyncio.timeout(START_S):
            parts = Parts(http, process, 30.0, wanted="auto")
            client = EngineClient(f"http://{address}:{port}", http)
            while True:
                try:
                    slot = parts.pool.register("engine-0", client, 1, 16, await client.capabilities())
                    break
                except EngineError:
                    await asyncio.sleep(0.1)
            outcomes = await parts.push(weights[1], store)
            assert outcomes["engine-0"].verified and slot.verified == Version("t", 0, 1, 1), outcomes
            assert parts.transport.groups["engine-0"].address == address
            await parts.courier.close(parts.names()["engine-0"])
    finally:
        engine.kill()
        engine.wait(30)


@pytest.mark.slow
async def test_E8_E16_an_engine_that_was_killed_gets_a_group_of_its_own_and_the_other_keeps_its(engines, process, weights, store):
    async with parts_of(engines, process) as parts:
        await parts.push(weights[0], store)
        before = parts.names()
        engines[0].kill()
        engines[0].start()
        await asyncio.to_thread(engines[0].wait, START_S)
        slot = await parts.register("engine-0", engines[0], 2)
        outcomes = await parts.push(weights[1], store)
        assert all(o.verified for o in outcomes.values()) and slot.verified == Version("t", 0, 1, 2)
        after = parts.names()
        assert after["engine-1"] == before["engine-1"] and after["engine-0"] != before["engine-0"]
        assert process.health()["groups"] == 2, "the old one is closed"


async def test_E4_E8_an_engine_killed_between_two_buckets_holds_up_nobody(engines, process, weights, store):
    async with parts_of(engines, process) as parts:
        engines[0].proxy.arm(SEND, 2, engines[0].kill)
        outcomes = await parts.push(weights[2], store)
        assert not engines[0].proxy.disarm(), "it was not killed"
        assert {name: o.verified for name, o in outcomes.items()} == {"engine-0": False, "engine-1": True}
        assert list(parts.replaced) == ["engine-0"]
        engines[0].start()
        await asyncio.to_thread(engines[0].wait, START_S)
        await parts.register("engine-0", engines[0], 2)
        outcomes = await parts.push(weights[2], store)
        assert list(outcomes) == ["engine-0"] and outcomes["engine-0"].verified


@pytest.mark.slow
async def test_E4_E6_an_engine_that_stops_in_mid_push_is_quarantined_and_the_other_commits(engines, process, weights, store):
    async with parts_of(engines, process, deadline_s=4.0) as parts:
        engines[0].proxy.arm(SEND, 2, lambda: engines[0].signal(signal.SIGSTOP))
        try:
            outcomes = await parts.push(weights[3], store)
            assert {name: o.verified for name, o in outcomes.items()} == {"engine-0": False, "engine-1": True}, outcomes
            assert parts.pool.slots["engine-0"].state == "quarantined" and list(parts.replaced) == ["engine-0"]
        finally:
            engines[0].proxy.disarm()
            engines[0].signal(signal.SIGCONT)
        # Were it left alone (nobody of ours started it), it would be taken again as it is: in a session, in a group that has ended.
        await parts.register("engine-0", engines[0], 2)
        outcomes = await parts.push(weights[3], store)
        assert outcomes["engine-0"].verified, outcomes


async def test_E5_the_courier_killed_between_two_buckets_spoils_no_push(engines, process, weights, store):
    async with parts_of(engines, process) as parts:
        await parts.push(weights[0], store)
        before, dead, loop = parts.names(), asyncio.Event(), asyncio.get_running_loop()

        def kill() -> None:
            process.kill()
            loop.call_soon_threadsafe(dead.set)

        engines[0].proxy.arm(SEND, 2, kill)
        pushing = asyncio.create_task(parts.push(weights[1], store))
        async with asyncio.timeout(30):
            await dead.wait()
        parts.courier.detach()
        process.start()  # in this thread: the kernel ends a child with the thread that started it
        assert not pushing.done(), "it waits for the next courier"
        parts.courier.attach(process.url, process.incarnation)
        outcomes = await pushing
        assert all(o.verified for o in outcomes.values()), outcomes
        assert not parts.replaced and parts.names()["engine-0"] != before["engine-0"]
        assert all(o.verified for o in (await parts.push(weights[2], store)).values())
        # The other engine may have had all its buckets before the kill: its group is a new one from the next push on.
        assert not set(parts.names().values()) & set(before.values())


@pytest.mark.slow
async def test_E12_two_runs_of_one_name_push_at_once_and_share_nothing(engines, process, weights, store, tmp_path):
    other = CourierProcess(tmp_path)
    other.start()
    second = EmbeddedStore(Path(f"/dev/shm/headrace-test-{os.getpid()}-other"), 64 << 20)
    try:
        async with parts_of(engines[:1], process) as one, parts_of(engines[1:], other) as two:
            for version in (0, 1):
                both = await asyncio.gather(one.push(weights[version], store), two.push(weights[version + 2], second))
                assert all(outcomes["engine-0"].verified for outcomes in both), both
            assert one.names()["engine-0"] != two.names()["engine-0"], "the same run, engine and incarnation"
    finally:
        other.kill()
        second.remove()


@pytest.mark.slow
def test_E5_a_run_that_pushes_by_broadcasts_outlives_its_courier(tmp_path):
    service = ServiceUnderTest(
        tmp_path / "run",
        "push.transport=distributed",
        "push.bucket_bytes=65536",
        "rollout.engines=2",
        "batch.samples=4",
        "rollout.n=4",
        "stop.batches=8",
    )

    def courier() -> dict:
        (found,) = [process for process in service.run("/processes") if process["role"] == "courier"]
        return found

    try:
        service.up()
        service.submit()
        service.wait(lambda s: s["serving_version"] and s["serving_version"] >= 2, "two versions served")
        first = courier()
        assert httpx.get(first["url"] + "/health", trust_env=False).json()["groups"] == 2
        os.kill(first["pid"], signal.SIGKILL)
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        assert status["trained_version"] == 8 and status["trajectories"]["discarded"] == 0
        check_accounts(service, status)
        assert service.log("courier-0").count("Traceback") == 0
        log = service.log()
        assert "engine-0 (incarnation 1): " not in log and "engine-1 (incarnation 1): " not in log, "no engine was given up for it"
    finally:
        service.close()
