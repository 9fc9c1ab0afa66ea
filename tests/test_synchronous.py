"""S = 0 is the synchronous loop, bit for bit; S = 1, 2, 4 keep their bound whatever the lengths are and whoever dies.

The plain loop below is what a person would write in an evening: take P rows, generate, score, train, give the engine the new weights.
It has the same engine, trainer and scorer as the service, and nothing of its driver but pure functions: what an advantage is, and which
rows share a micro-batch, for both decide about the last bit. The lengths of the second test are drawn from the two public traces.
"""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from driver.advantage import advantages
from driver.archive import read_trajectories
from driver.balance import PlanRow as Planned
from driver.balance import Terms, plan
from driver.ledger_state import traj_uid_of
from driver.life import CHILD, free_port
from rollout.answer import EngineError
from rollout.client import EngineClient, make_http
from rollout.tokens import TokenizerView
from rollout.tree import row_columns
from rollout.workflow import Task, single_turn
from store import EmbeddedStore
from store.rows import packed
from tests.chaos.accounts import check_end
from tests.chaos.attacks import KILL, N_PER_SAMPLE, STOP, VICTIMS, Cell, Chaos
from tests.fleet import BASE
from tests.service import trained_rows
from tests.test_endings import run_to_the_end
from trainer.client import TrainerClient, TrainerLost
from trainer.wire import MiniBatch, PlanRow, WireRef

BATCHES, SAMPLES, N, CONTEXT, RATE = 4, 4, 4, 64, 5e-4
TRACES = Path(__file__).parents[1] / "benchmarks/data"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def child(log: Path, *argv: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), sys.executable, "-P", "-m", *argv]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


class PlainLoop:
    """Rows in file order, one batch after the other. `rewards` and `trained` are what it leaves behind, beside the checkpoints."""

    def __init__(self, directory: Path, spec_of_service: Path) -> None:
        self.directory = directory
        self.store = EmbeddedStore(Path(f"/dev/shm/headrace-test-plain-{os.getpid()}"), 64 << 20)
        self.tokenizer = TokenizerView(BASE)
        self.rewards: dict[str, float] = {}
        self.tokens: dict[str, tuple[list[int], list[float]]] = {}
        self.trained: list[set[str]] = []
        engine, trainer = free_port(), free_port()
        spec = json.loads(spec_of_service.read_text())
        spec |= {"run_dir": str(directory), "store_location": self.store.location, "port": trainer}
        (directory / "trainer.spec").write_text(json.dumps(spec))
        flags = ["--model-path", str(BASE), "--port", str(engine), "--context-length", str(CONTEXT), "--deterministic"]
        self._processes = [
            child(directory / "engine.log", "rollout.engine", *flags),
            child(directory / "trainer.log", "trainer.main", "--spec", str(directory / "trainer.spec")),
        ]
        self._http = make_http()
        self._engine = EngineClient(f"http://127.0.0.1:{engine}", self._http, vocab_size=self.tokenizer.vocab_size)
        self._trainer = TrainerClient(f"http://127.0.0.1:{trainer}", self._http)

    async def run(self, rows: list[dict[str, Any]], score: Any) -> None:
        await self._up()
        await self._trainer.load()
        for batch_id in range(BATCHES):
            version = f"sort-digits/0/{batch_id}/1"
            await self._engine.set_version(version)
            planned: list[Planned] = []
            by_id: dict[str, PlanRow] = {}
            for uid in range(batch_id * SAMPLES, (batch_id + 1) * SAMPLES):
                group = [await self._trajectory(uid, index, rows[uid], version, score) for index in range(N)]
                made = advantages({uid: [row.score for row in group]}, "group_mean", {uid: [1] * N})[uid]
                for row, advantage in zip(group, made, strict=True):
                    if advantage != 0.0:
                        by_id[row.row_id] = row.model_copy(update={"advantage": advantage})
                        planned.append(Planned(row.row_id, uid, row.length))
            cut = plan(planned, Terms(ranks=1, budget_tokens=4096), mini_batch_count=2, seed=0, batch_id=batch_id)
            mini_batches = [MiniBatch(ranks=[[[by_id[row_id] for row_id in micro] for micro in rank] for rank in mini]) for mini in cut]
            report = await self._trainer.train(batch_id, 0, RATE, mini_batches)
            self.trained.append(set(report.row_ids))
            saved = await self._trainer.save(str(self.directory / "checkpoints"), None)
            await self._engine.update_from_disk(f"{saved.path}/hf")

    async def _trajectory(self, uid: int, index: int, row: dict[str, Any], version: str, score: Any) -> PlanRow:
        name = traj_uid_of(uid, index)
        prompt = self.tokenizer.prompt_ids(row["prompt"])
        seed = int.from_bytes(hashlib.blake2b(f"sort-digits/0/{name}/0".encode(), digest_size=8).digest()) >> 1
        sampling = {"temperature": 1.0, "max_new_tokens": 16, "stream_interval": 16, "sampling_seed": seed}

        async def generate(input_ids: Any) -> Any:
            return await self._engine.generate(list(input_ids), sampling, f"plain.{name}", stall_s=60.0, version=version)

        (leaf,) = (await single_turn(Task(tuple(prompt), {}), generate)).leaves()
        columns = row_columns(leaf, 1.0)
        self.tokens[name] = columns["input_ids"].tolist(), columns["rollout_log_probs"].tolist()
        self.rewards[name] = score(self.tokenizer.decode(leaf.turns[-1].token_ids), row)
        ref = self.store.put(f"plain/{name}/rollout", packed([columns]))
        row_id, length = f"{name}a0000l0000", len(columns["input_ids"])
        return PlanRow(row_id=row_id, rollout=WireRef.model_validate(ref.to_wire()), score=self.rewards[name], sequence=name, length=length)

    async def _up(self) -> None:
        until = time.monotonic() + 90
        while True:
            try:
                await self._engine.health()
                await self._trainer.health()
                return
            except (EngineError, TrainerLost):
                assert time.monotonic() < until, (self.directory / "trainer.log").read_text()
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        await self._http.aclose()
        for process in self._processes:
            process.kill()
            process.wait(30)
        self.store.remove()


def sums(checkpoints: Path) -> dict[str, str]:
    """sha256 of every tensor file of every checkpoint: weights and the optimizer's state."""
    return {
        str(path.relative_to(checkpoints)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(checkpoints.rglob("*.safetensors"))
        if "random" not in path.parts
    }


SCORER = """import zlib

def score(response, row):
    return zlib.crc32((row["answer"] + response).encode()) % 5 / 4
"""


def score(response: str, row: dict[str, Any]) -> float:
    """The same."""
    return zlib.crc32((row["answer"] + response).encode()) % 5 / 4


async def test_A3_bound_0_on_the_deterministic_engine_is_the_synchronous_loop_bit_for_bit(tmp_path: Path) -> None:
    """The same tokens, log-probs and rewards of every trajectory, the same rows in every batch, the same bytes in every checkpoint."""
    rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 140)]
    settings = ("rollout.engines=2", "rollout.deterministic=true", "staleness.bound=0", f"stop.batches={BATCHES}", "shuffle=false")
    settings += ("checkpoint.every=1", "checkpoint.keep_last=100", "batch.mini_batches=2", f"trainer.learning_rate={RATE}")
    (tmp_path / "scorer.py").write_text(SCORER)
    settings += (f"reward.scorers={{'*': {{function: '{tmp_path}/scorer.py:score'}}}}",)
    run = await asyncio.to_thread(run_to_the_end, tmp_path, rows, *settings)
    (tmp_path / "plain").mkdir()
    loop = PlainLoop(tmp_path / "plain", run / "processes" / "trainer-0.json")
    try:
        await loop.run(rows, score)
    finally:
        await loop.close()
    ends = {end.traj_uid: end for end in read_trajectories(run / "archive") if end.batch_id is not None}
    assert ends.keys() == loop.rewards.keys() and len(ends) == BATCHES * SAMPLES * N
    assert {name: (end.input_ids, end.rollout_log_probs) for name, end in ends.items()} == loop.tokens
    assert {name: end.reward for name, end in ends.items()} == loop.rewards
    assert [set(line["row_ids"]) for line in trained_rows(run)] == loop.trained and any(loop.trained)
    assert all(end.batch_id == end.version_tag for end in ends.values()), "nothing is stale at all"
    theirs = sums(loop.directory / "checkpoints")
    assert len({value for name, value in theirs.items() if name.endswith("hf/model.safetensors")}) == BATCHES, (
        "every batch moved the weights"
    )
    assert sums(run / "checkpoints") == theirs


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize("trace", ["mild", "heavy"])
def test_A3_A4_L0_the_bound_holds_under_kills_with_the_lengths_of_a_trace(tmp_path: Path, trace: str, bound: int) -> None:
    """A whole service, whose answers are as long as the trace's, scaled to a mean of 12 tokens: the longest are 40 and 130. Four
    attacks of each; infrastructure retries without a limit, so nothing at all may be discarded."""
    with (TRACES / f"lengths_{trace}.csv").open() as file:
        lengths = [int(line["output_tokens"]) for line in csv.DictReader(file)]
    scale = 12 / (sum(lengths) / len(lengths))
    table = tmp_path / "lengths.json"
    table.write_text(json.dumps([max(1, round(length * scale)) for length in lengths]))
    rng = random.Random(f"{trace}/{bound}")
    settings = ("rollout.context_length=256", "rollout.sampling.max_new_tokens=200", "checkpoint.every=2")
    chaos = Chaos(tmp_path / "it", rng, *settings, bound=bound, lengths=table, step_s=0.2)
    try:
        chaos.start()
        body = "".join(json.dumps({"prompt": f"sort {n} =", "answer": str(n), "task_type": "sort"}) + "\n" for n in range(100, 900))
        assert chaos.service.submit(body.encode()).status_code == 201
        chaos.service.wait(lambda s: s["trained_version"] >= 2, "two batches")
        for victim in ("engine", "rank", "driver", rng.choice(VICTIMS)):
            chaos.attack(Cell(victim, rng.choice((KILL, KILL, STOP))))
        chaos.drain()
        books = check_end(chaos.run_dir, N_PER_SAMPLE, bound, ())
        counted = chaos.service.run()["trajectories"]
    finally:
        chaos.close()
    assert counted["trained"] == counted["registered"] and counted["discarded"] == 0
    ages = [batch_id - tag for *_, tag, _, batch_id, _ in books.samples.values()]
    print(f"{trace}, S = {bound}: {len(ages)} samples, mean staleness {sum(ages) / len(ages):.2f}, max {max(ages)}", flush=True)
    assert max(ages) <= bound
    found = [sum(end.response_mask) for end in read_trajectories(chaos.run_dir / "archive")]
    assert max(found) > 2.5 * sum(found) / len(found), "the lengths are those of the trace"
