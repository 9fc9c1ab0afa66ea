"""M5 across processes: what the engine says it sampled with is what the trainer computes, at every temperature."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from driver.launcher import LocalLauncher
from driver.life import ProcessSpec
from rollout.client import EngineClient, make_http
from rollout.tokens import TokenizerView
from rollout.tree import Trajectory, row_columns
from store import EmbeddedStore
from store.rows import packed
from trainer.client import TrainerClient
from trainer.spec import TrainerSpec
from trainer.wire import PlanRow, WireRef

ROOT = Path(__file__).parents[1]
BASE = ROOT / "examples/sort_digits/base"
TEMPERATURES = (0.7, 1.0, 1.3)


@pytest.fixture
async def parts(tmp_path):
    """A trainer and an engine on the same weights, and a store between them."""
    store = EmbeddedStore(Path(f"/dev/shm/headrace-test-{os.getpid()}-logprobs"), 64 << 20)

    def trainer(incarnation: int, port: int) -> list[str]:
        spec = TrainerSpec(run_id="t", run_dir=tmp_path, store_location=store.location, model_path=BASE, port=port)
        (tmp_path / "trainer.json").write_text(spec.model_dump_json())
        return [sys.executable, "-P", "-m", "trainer.main", "--spec", str(tmp_path / "trainer.json")]

    def engine(incarnation: int, port: int) -> list[str]:
        return [sys.executable, "-P", "-m", "rollout.engine", "--model-path", str(BASE), "--port", str(port), "--weight-version", "t/0/0/1"]

    launcher = LocalLauncher(lambda event: None)
    try:
        started = [
            await launcher.start(ProcessSpec(role=role, index=0, build=build, log_path=tmp_path / f"{role}.log", start_deadline_s=90.0))
            for role, build in (("trainer", trainer), ("engine", engine))
        ]
        await asyncio.gather(*(process.wait_ready(90) for process in started))
        yield store, started[0].url, started[1].url
    finally:
        await launcher.stop(10)
        store.remove()


async def test_M5_engine_and_trainer_agree_within_1e_4_at_three_temperatures(parts):
    store, trainer_url, engine_url = parts
    tokenizer = TokenizerView(BASE)
    rows: list[PlanRow] = []
    sampled: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    async with make_http() as http, httpx.AsyncClient(trust_env=False) as plain:
        engine, trainer = EngineClient(engine_url, http), TrainerClient(trainer_url, plain)
        await trainer.load()
        prompts = [f"sort {n} =" for n in (31, 5291, 90210, 123456, 8888, 1734205)]
        for temperature in TEMPERATURES:
            sampling = {"temperature": temperature, "max_new_tokens": 16}
            asked = [engine.generate(tokenizer.encode(p), sampling, f"{p}-{temperature}", stall_s=30) for p in prompts]
            for number, (prompt, answer) in enumerate(zip(prompts, await asyncio.gather(*asked), strict=True)):
                tree = Trajectory()
                root = tree.add("user", tokenizer.encode(prompt))
                more = {"log_probs": answer.log_probs, "spans": answer.spans, "policy": "policy"}
                tree.add("assistant", answer.output_ids, parent=root, **more)
                columns = row_columns(tree.leaves()[0], temperature)
                row_id = f"r{number}-{temperature}"
                ref = store.put(f"t/{row_id}/rollout", packed([columns]))
                rows.append(PlanRow(row_id=row_id, rollout=WireRef.of(ref), length=len(columns["input_ids"])))
                sampled[row_id] = columns["rollout_log_probs"], columns["response_mask"] == 1
        ours = (await trainer.logprobs(rows)).log_probs
    assert len(ours) == len(TEMPERATURES) * len(prompts)
    for temperature in TEMPERATURES:
        gaps = []
        for row_id, (theirs, mask) in sampled.items():
            if row_id.endswith(f"-{temperature}"):
                gaps.append(np.abs(np.array(ours[row_id])[mask] - theirs[mask]).max())
                shifted = np.abs(np.roll(np.array(ours[row_id]), 1)[mask] - theirs[mask]).max()
                assert shifted > 1e-2, "a shift by one must not go unseen"
        assert max(gaps) <= 1e-4, f"temperature {temperature}"
