"""A real SGLang of a tiny Qwen3-MoE behind its sidecar: where its tokens went lies in the store, as transformers would have sent them.

Slow: SGLang needs a quarter of a minute to start on a quiet machine, and minutes on a busy one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from driver.life import CHILD, free_port
from rollout.client import EngineClient, make_http
from rollout.sglang import launch
from store import EmbeddedStore, Ref, default_root
from store.schema import validate
from tests.rollout.engine.conftest import make_checkpoint
from tests.rollout.engine.test_experts import CHOSEN, LAYERS, SHAPE, routed_by
from tests.sglang_server import Server, sglang_here

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(900)]


class Behind(Server):
    """Started as the driver starts it: the sidecar, which starts the server."""

    def __init__(self, model: Path, directory: Path, store: EmbeddedStore) -> None:
        port = free_port()
        told = launch.Server(model, free_port(), 0, 128, 4, 4, 0, "float32", routed_experts=True)
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = directory / f"sglang-{port}.log"
        argv = launch.behind_sidecar(sglang_here(), told, port, store.location, 1)
        with self.log_path.open("wb") as log:
            command = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), *argv]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(default_root(f"test-{uuid.uuid4().hex[:12]}"), 1 << 20)
    yield made
    made.remove()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint("Qwen3Moe", tmp_path / "model", **SHAPE)


@pytest.fixture
def server(model: Path, store: EmbeddedStore, tmp_path: Path) -> Iterator[Behind]:
    running = Behind(model, tmp_path, store)
    try:
        running.wait()
        yield running
    finally:
        running.close()


async def test_B1_a_real_server_puts_where_its_tokens_went_and_answers_with_a_reference(
    server: Behind, store: EmbeddedStore, model: Path
) -> None:
    expected = routed_by(model)
    async with make_http() as http:
        client = EngineClient(server.url, http)
        can = await client.capabilities()
        assert can.routed_experts and can.stores_extras and not can.embedded
        for number, prompt in enumerate(([5, 6, 7], [5, 6, 7, 8, 9, 30])):  # the second finds the first's prefix in the cache
            place = {"location": store.location, "key": f"run/extras/{number}"}
            sampling = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            made = await client.generate(prompt, sampling, f"r{number}", stall_s=300.0, extras=place)
            said = made.meta["routed_experts"]
            assert said["shape"] == [len(prompt) + 7, LAYERS, CHOSEN]
            with store.open(Ref.from_wire(said)) as lease:
                validate("extras", lease)
                assert lease["routed_experts"].dtype == np.uint8
                assert np.array_equal(np.sort(lease["routed_experts"], axis=-1), expected([*prompt, *made.output_ids]))
