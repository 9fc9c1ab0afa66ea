"""E10: what the trainer cuts arrives whole in an engine. A real trainer, its store, and a real embedded engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from driver.checkpoint_files import tensor_shapes
from driver.life import free_port
from driver.push import Pusher
from driver.snapshot import PushImpossible, Snapshot
from driver.transport import StoreTransport, Transports
from rollout.answer import EngineError
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool, EngineSlot
from store import EmbeddedStore, TensorForm
from trainer import wire

ROOT = Path(__file__).parents[2]
CANARY = [5, 7, 11, 13, 17]


@contextmanager
def engine_of(model: str, log: Path) -> Iterator[str]:
    """An embedded engine's URL; it may still be starting."""
    port = free_port()
    command = [sys.executable, "-P", "-m", "rollout.engine", "--model-path", model, "--port", str(port), "--context-length", "64"]
    with log.open("w") as output:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        engine = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(10)


@asynccontextmanager
async def pusher_of(model: str, log: Path) -> AsyncIterator[tuple[Pusher, EngineSlot]]:
    """One embedded engine on this checkpoint, and who pushes to it."""
    with engine_of(model, log) as url:
        async with make_http() as http:
            client = EngineClient(url, http)
            async with asyncio.timeout(60):
                while True:
                    try:
                        capabilities = await client.capabilities()
                        break
                    except EngineError:
                        await asyncio.sleep(0.1)
            pool = EnginePool()
            slot = pool.register("engine-0", client, 1, 4, capabilities)

            async def replace(_slot: object, _reason: str) -> None:
                pass

            transports = Transports("auto", {"store": lambda: StoreTransport(tensor_shapes(Path(model)))})
            yield Pusher(pool, deadline_s=30.0, logprob_tolerance=1e-4, replace=replace, transports=transports), slot


def as_driver_has_it(reply: wire.Snapshot) -> Snapshot:
    buckets = tuple(bucket.model_dump() for bucket in reply.buckets)
    forms = {name: TensorForm(facts.dtype, tuple(facts.shape)) for name, facts in reply.tensors.items()}
    sums = {name: facts.sha256 for name, facts in reply.tensors.items()}
    return Snapshot("test", 0, 0, buckets, sums, tuple(CANARY), tuple(reply.canary.log_probs), forms)


@pytest.mark.parametrize("model", ["qwen3_tied", "llama"])
async def test_E10_tensors_of_several_buckets_arrive_whole_and_a_tied_one_once(
    start: Any, store: EmbeddedStore, models: dict[str, str], tmp_path: Path, model: str
) -> None:
    most_bytes = 96 * 64 * 4 // 3  # the embedding is three buckets
    async with start(model=model) as trainer, pusher_of(models[model], tmp_path / "engine.log") as (pusher, _):
        await trainer.client.load()
        reply = await trainer.client.snapshot(0, 0, bucket_bytes=most_bytes, canary_ids=CANARY)
        for bucket in reply.buckets:
            with store.open(bucket.ref()) as lease:
                assert sum(column.nbytes for column in lease.values()) <= most_bytes
        snapshot = as_driver_has_it(reply)
        bundles = snapshot.bundles()
        names = [name for bundle in bundles for name, _, _ in bundle.tensors]
        assert ("lm_head.weight" in names) == (model == "llama") and len(set(names)) == len(names) and set(names) == set(reply.tensors)
        assert [len(bundle.refs) for bundle in bundles if bundle.tensors[0][0] == "model.embed_tokens.weight"] == [3]
        (outcome,) = await pusher.push_all(snapshot)
        assert outcome.verified, outcome.reason
        store.free([bucket.ref() for bucket in reply.buckets])
    assert set(load_file(Path(models[model]) / "model.safetensors")) >= set(names)


async def test_E10_a_snapshot_with_a_name_the_engine_does_not_know_is_refused_before_its_gate_is_shut(
    start: Any, store: EmbeddedStore, models: dict[str, str], tmp_path: Path
) -> None:
    """Of a model with biases, to an engine without."""
    async with start(model="qwen2") as trainer, pusher_of(models["llama"], tmp_path / "engine.log") as (pusher, slot):
        await trainer.client.load()
        reply = await trainer.client.snapshot(0, 0, bucket_bytes=1 << 20, canary_ids=CANARY)
        with pytest.raises(PushImpossible, match=r"tensors of the snapshot are not in the engines' checkpoint, the first is .*bias"):
            await pusher.push_all(as_driver_has_it(reply))
        assert slot.state == "starting", "nothing was said to it"
        store.free([bucket.ref() for bucket in reply.buckets])
