"""The client and the push against a real SGLang server: what the embedded engine plays is what SGLang does (E, L3, A5, M5)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from driver.agreement import Agreements
from driver.checkpoint_files import tensor_shapes
from driver.distributed import Courier, DistributedTransport
from driver.push import Pusher
from driver.snapshot import PushImpossible, Snapshot
from driver.transport import DiskTransport, Parcel, SharedMemoryTransport, Transport, Transports
from rollout.capabilities import capabilities_of
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool
from rollout.slot import EngineSlot
from rollout.version import Version
from store import EmbeddedStore
from tests.courier import CourierProcess
from tests.sglang_server import BASE, Server, Weights, sglang_here

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
PROMPT = [10, 20, 30, 40, 50]
OWNER = Path(f"/dev/shm/headrace-test-{os.getpid()}-sglang")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Server(sglang_here(), tmp_path_factory.mktemp("sglang"))
    try:
        running.wait()
        yield running
    finally:
        running.close()


@pytest.fixture
def store():
    made = EmbeddedStore(OWNER, 64 << 20)
    yield made
    made.remove()


class Parts:
    """A pool with the one server in it, and a pusher."""

    def __init__(self, http: httpx.AsyncClient, url: str, transport: Transport) -> None:
        self.pool = EnginePool()
        self.client = EngineClient(url, http)
        self.slot = self.pool.register("engine-0", self.client, 1, 16, CAPABILITIES)
        self.replaced: list[str] = []

        async def replaced(_slot: object, reason: str) -> None:
            self.replaced.append(reason)

        self.pusher = Pusher(
            self.pool,
            deadline_s=60.0,
            logprob_tolerance=1e-4,
            replace=replaced,
            transports=Transports("auto", {"tensor": lambda: transport}),
            agreements=AGREEMENTS,
        )


CAPABILITIES = capabilities_of({"version": "0.5.23"}, {})
AGREEMENTS = Agreements()  # of the one server of this file


@asynccontextmanager
async def parts_of(server: Server, transport: Transport | None = None) -> AsyncIterator[Parts]:
    shared = SharedMemoryTransport(OWNER, tensor_shapes(BASE))
    async with make_http() as http:
        yield Parts(http, server.url, transport or shared)
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(shared.prefix)], "nothing of a push is left"


async def test_tokens_come_with_log_probs_streamed_or_not_and_are_the_models(server):
    async with parts_of(server) as parts:
        greedy = {"temperature": 0.0, "max_new_tokens": 12}
        whole = await parts.client.generate(PROMPT, greedy, "whole", stall_s=60, stream=False)
        streamed = await parts.client.generate(PROMPT, greedy, "streamed", stall_s=60)
        assert whole.output_ids == streamed.output_ids and whole.finish_reason in ("stop", "length")
        sampled = await parts.client.generate(PROMPT, {"temperature": 0.7, "max_new_tokens": 12}, "sampled", stall_s=60)
        expected = Weights(0).log_probs([*PROMPT, *sampled.output_ids], 0.7)[len(PROMPT) - 1 :]
        assert np.allclose(sampled.log_probs, expected, atol=1e-4)


async def test_it_reports_requests_of_others_and_what_it_can_run(server):
    async with parts_of(server) as parts:
        long = {"temperature": 1.0, "max_new_tokens": 200, "ignore_eos": True}
        requests = [asyncio.create_task(parts.client.generate(PROMPT, long, f"load-{i}", stall_s=60)) for i in range(4)]
        most = 0
        async with asyncio.timeout(60):
            while not all(request.done() for request in requests):
                parts.slot.reported(await parts.client.loads(), 3.0)
                assert parts.slot.load is not None
                assert parts.slot.load.foreign == parts.slot.load.running + parts.slot.load.waiting, "none of them went through the pool"
                assert (parts.slot.load.kv_use > 0) == (parts.slot.load.used_tokens > 0)
                most = max(most, parts.slot.load.foreign)
        assert most == 4 and parts.slot.load.max_running == 16 and parts.slot.load.max_total_tokens > 4 * 205
        await asyncio.gather(*requests)


async def test_siblings_on_one_engine_find_their_prompt_in_its_cache(server):
    async with parts_of(server) as parts:
        prompt = [11 + n % 40 for n in range(100)]
        first, sibling = [
            await parts.client.generate(prompt, {"temperature": 1.0, "max_new_tokens": 4}, f"cache-{i}", stall_s=60) for i in range(2)
        ]
        assert sibling.meta["cached_tokens"] >= 90 > first.meta["cached_tokens"]


async def test_L3_a_push_through_shared_memory_is_verified_and_its_tokens_carry_its_label(server, store):
    async with parts_of(server) as parts:
        for version in (0, 1):
            (outcome,) = await parts.pusher.push_all(Weights(version).snapshot(store))
            assert outcome.verified and outcome.logprob_gap <= 1e-4, outcome
        label = str(Version("t", 0, 1, 1))
        assert (await parts.client.model_info())["weight_version"] == label
        answer = await parts.client.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 12}, "labelled", stall_s=60)
        assert answer.spans == [(label, 0, len(answer.output_ids))]
        expected = Weights(1).log_probs([*PROMPT, *answer.output_ids])[len(PROMPT) - 1 :]
        assert np.allclose(answer.log_probs, expected, atol=1e-4)


async def test_L3_requests_in_flight_go_on_over_a_push_and_each_token_is_of_the_version_it_claims(server, store):
    async with parts_of(server) as parts:
        old, new = Weights(2), Weights(3)
        await parts.pusher.push_all(old.snapshot(store))
        control = httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60)
        await control.post("/slow_down", json={"forward_sleep_time": 0.1})
        began = asyncio.Event()
        sampling = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
        told = {"stall_s": 60, "on_tokens": lambda *_: began.set(), "clock": parts.slot.clock}
        asked = [asyncio.create_task(parts.client.generate([*PROMPT, i], sampling, f"flight-{i}", **told)) for i in range(6)]
        await began.wait()
        (outcome,) = await parts.pusher.push_all(new.snapshot(store))
        await control.post("/slow_down", json={"forward_sleep_time": None})
        await control.aclose()
        answers = await asyncio.gather(*asked)
        assert outcome.verified
        mixed = 0
        for i, answer in enumerate(answers):
            assert len(answer.output_ids) == 40
            expected = {
                str(Version("t", 0, w.version, 1)): w.log_probs([*PROMPT, i, *answer.output_ids])[len(PROMPT) :] for w in (old, new)
            }
            mixed += len(answer.spans) == 2
            for version, start, end in answer.spans:
                assert np.allclose(answer.log_probs[start:end], expected[version][start:end], atol=1e-4), (i, version, start, end)
            assert (await parts.pusher.trusted(answer)) is answer
        assert mixed >= 1, "no request was in flight"


async def test_E3_a_push_that_had_no_effect_is_refused_however_small_the_step(server, store):
    class Nothing(Parcel):
        in_session = True

        async def send(self, slot: EngineSlot) -> None:
            pass

    class Lost:
        @asynccontextmanager
        async def prepared(self, _snapshot: Snapshot) -> AsyncIterator[Parcel]:
            yield Nothing()

        def sweep(self) -> None:
            pass

    async with parts_of(server) as parts:
        await parts.pusher.push_all(Weights(4).snapshot(store))
    async with parts_of(server, Lost()) as parts:
        (outcome,) = await parts.pusher.push_all(Weights(5, size=1e-7).snapshot(store))
        assert not outcome.verified and "still holds other weights" in outcome.reason
        assert parts.slot.state == "quarantined" and parts.replaced
        info = await parts.client.model_info()
        assert info["weight_version"] == str(Version("t", 0, 4, 1)), "A5: never called by the version it does not hold"


async def test_E11_weights_that_are_not_the_trainers_fail_the_fixed_sequence_and_the_engine_is_repaired(server, store):
    async with parts_of(server) as parts:
        good = Weights(6).snapshot(store)
        of_others = tuple(Weights(7).log_probs(good.canary_ids))
        (outcome,) = await parts.pusher.push_all(replace(good, canary_log_probs=of_others))
        assert not outcome.verified and "log-probs of the fixed sequence" in outcome.reason and parts.slot.state == "quarantined"
    async with parts_of(server) as parts:  # another life of the slot: pushed to from whatever state it is in
        (outcome,) = await parts.pusher.push_all(good)
        assert outcome.verified


async def test_a_push_through_the_disk_is_the_same(server, store, tmp_path):
    async with parts_of(server, DiskTransport(tmp_path / "push", BASE, tensor_shapes(BASE))) as parts:
        (outcome,) = await parts.pusher.push_all(Weights(8).snapshot(store))
        assert outcome.verified and outcome.logprob_gap <= 1e-4, outcome
        assert list((tmp_path / "push").iterdir()) == []


async def test_E10_tensors_of_several_buckets_and_a_tied_embedding_arrive_whole(server, store):
    weights = Weights(9)
    embedding = weights.tensors["model.embed_tokens.weight"]
    async with parts_of(server) as parts:
        (outcome,) = await parts.pusher.push_all(weights.snapshot(store, cut_bytes=embedding.nbytes // 3))
        assert outcome.verified and outcome.logprob_gap <= 1e-4, outcome


async def test_E10_a_name_the_engine_does_not_know_is_refused_before_anything_is_sent(server, store):
    weights = Weights(10)
    weights.tensors["model.norm.bias"] = weights.tensors["model.norm.weight"]
    snapshot = weights.snapshot(store)
    async with parts_of(server) as parts:
        with pytest.raises(PushImpossible, match=r"1 tensors of the snapshot are not in .* model.norm.bias"):
            await parts.pusher.push_all(snapshot)
        assert parts.slot.state == "starting"


async def test_L3_a_push_by_broadcasts_is_the_same_as_through_shared_memory(server, store, tmp_path):
    async def checksum(parts: Parts) -> str:
        return (await parts.client.checksums())["per_engine_checksum"]

    second = Weights(10)
    old, new = Weights(9).snapshot(store), second.snapshot(store)
    async with parts_of(server) as parts:
        (outcome,) = await parts.pusher.push_all(old)
        assert outcome.verified
        expected = await checksum(parts)
    process = CourierProcess(tmp_path)
    process.start()
    try:
        async with make_http() as http:
            courier = Courier(http)
            courier.attach(process.url, process.incarnation)
            transport = DistributedTransport(courier, tensor_shapes(BASE), run_id="t", deadline_s=60.0)
            parts = Parts(http, server.url, transport)
            names = set()
            for epoch, snapshot in enumerate((new, old, new)):
                (outcome,) = await parts.pusher.push_all(replace(snapshot, epoch=epoch))
                assert outcome.verified and outcome.logprob_gap <= 1e-4, outcome
                names.add(transport.groups["engine-0"].name)
                assert (await checksum(parts) == expected) is (snapshot is old)
            assert len(names) == 1, "the group is kept"
            answer = await parts.client.generate(PROMPT, {"temperature": 1.0, "max_new_tokens": 12}, "broadcast", stall_s=60)
            expected_log_probs = second.log_probs([*PROMPT, *answer.output_ids])[len(PROMPT) - 1 :]
            assert np.allclose(answer.log_probs, expected_log_probs, atol=1e-4)

            process.kill()  # with the group open: the server is told by its connection, and joins the next courier's
            courier.detach()
            process.start()
            courier.attach(process.url, process.incarnation)
            (outcome,) = await parts.pusher.push_all(replace(old, epoch=3))
            assert outcome.verified and await checksum(parts) == expected
            assert transport.groups["engine-0"].name not in names
    finally:
        process.kill()
