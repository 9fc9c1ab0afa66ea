"""One trainer rank against a plain torch loop on the same rows, two ranks against one, packed rows against padded ones.

The product's side is a trainer as the driver starts it, asked over HTTP, rows in the store and the clock around the call. The plain loop
is `benchmarks/plain_trainer.py`, which has no call to answer. Both have one thread. Sides take turns, step by step, so that the machine's
moods fall on all of them; a ratio is one of medians. Both losses must be the same number, or the benchmark ends.

    python -m benchmarks.trainer [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common import Aim, arguments, median, read_json, report
from benchmarks.overlap import DATA, ROOT
from driver import balance
from rollout.tokens import TokenizerView
from store import EmbeddedStore
from store.rows import packed
from trainer.client import TrainerClient
from trainer.spec import TrainerSpec
from trainer.wire import MiniBatch, PlanRow, TrainReport, TrainRequest, WireRef

BASE = ROOT / "examples/sort_digits/base"
LENGTHS = Path(__file__).parent / "data/lengths_conversation.csv"
HOWS = ("padded", "alone")
"""How the plain loop takes rows: as micro-batches of similar lengths, or one by one. The faster one is compared."""
BUDGET_TOKENS = 4096
LEARNING_RATE = 1e-5
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
VOCABULARY = 8192
BIGGER: dict[str, int | float] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
BIGGER |= {"intermediate_size": 768, "max_position_embeddings": 4096, "initializer_range": 0.02}
Sampled = tuple[list[int], int]
"""A row's tokens, and how many of them are the prompt."""
Plan = list[list[list[int]]]
"""ranks, micro-batches, indices of rows"""
Step = Callable[[], Awaitable[tuple[float, TrainReport]]]


# Rows


def demo_rows() -> list[Sampled]:
    """A batch of the demo: 16 prompts, 8 answers each, of the lengths that its answers have."""
    tokenizer = TokenizerView(BASE)
    lines = [json.loads(line) for line in DATA.read_text().splitlines()[:16]]
    found = []
    for line in lines:
        prompt, answer = (tokenizer.encode(text) for text in (line["prompt"], line["answer"]))
        found += [([*prompt, *answer], len(prompt))] * 8
    return found


def trace_lengths() -> list[int]:
    with LENGTHS.open() as file:
        return [int(row["output_tokens"]) for row in csv.DictReader(file)]


def trace_rows(count: int, shrink: int) -> list[Sampled]:
    """Random tokens; responses of the trace's lengths divided by `shrink`, after prompts of 16 to 64."""
    drawn = random.Random(0)
    found = []
    for length in drawn.sample(trace_lengths(), count):
        prompt = drawn.randint(16, 64)
        found.append(([drawn.randrange(VOCABULARY) for _ in range(prompt + max(1, length // shrink))], prompt))
    return found


class Rows:
    """Puts rows in the store, as a rollout would."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store, self._made = store, 0

    def put(self, rows: Sequence[Sampled], log_probs: Sequence[Sequence[float]] | None = None) -> list[PlanRow]:
        """`log_probs[i]` are of all response positions of rows[i], the prompt's too."""
        told = log_probs or [[0.0] * (len(ids) - 1) for ids, _ in rows]
        return [self._put(index, *row, np.array(told[index]), 0) for index, row in enumerate(rows)]

    def put_padded(self, rows: Sequence[Sampled], log_probs: Sequence[Sequence[float]], plan: Plan) -> list[PlanRow]:
        """Each as long as the longest of its micro-batch, by masked tokens at its end."""
        longest = {index: max(len(rows[other][0]) for other in micro) for share in plan for micro in share for index in micro}
        return [self._put(index, *row, np.array(log_probs[index]), longest[index] - len(row[0])) for index, row in enumerate(rows)]

    def _put(self, index: int, ids: list[int], prompt: int, log_probs: np.ndarray, surplus: int) -> PlanRow:
        mask = np.arange(len(ids) - 1) >= prompt - 1
        columns: dict[str, np.ndarray | np.generic] = {
            "input_ids": np.pad(np.array(ids, np.int32), (0, surplus)),
            "response_mask": np.pad(mask.astype(np.uint8), (0, surplus)),
            "rollout_log_probs": np.pad(np.where(mask, log_probs, 0.0).astype(np.float32), (0, surplus)),
            "version_spans": np.array([[0, 0, 0, len(ids) - 1 + surplus]], dtype=np.int64),
            "temperature": np.float32(1.0),
        }
        self._made += 1
        ref = self._store.put(f"bench/{self._made}/rollout", packed([columns]))
        advantage = 1.0 if index % 2 else -0.7
        return PlanRow(row_id=f"{self._made:06d}", rollout=WireRef.of(ref), advantage=advantage, length=len(ids) + surplus)


def planned(rows: Sequence[Sampled], ranks: int) -> Plan:
    """As the driver plans one mini-batch."""
    known = [balance.PlanRow(f"{index:06d}", index, len(ids)) for index, (ids, _) in enumerate(rows)]
    [shares] = balance.plan(known, balance.Terms(ranks, BUDGET_TOKENS), mini_batch_count=1, seed=0, batch_id=0)
    return [[list(map(int, micro_batch)) for micro_batch in share] for share in shares]


def mini_batch_of(plan: Plan, rows: Sequence[PlanRow]) -> MiniBatch:
    return MiniBatch(ranks=[[[rows[index] for index in micro_batch] for micro_batch in share] for share in plan])


# Sides


class Trainer:
    """A trainer that serves."""

    def __init__(self, client: TrainerClient) -> None:
        self._client, self._batch_id = client, 0

    async def load(self, path: Path) -> None:
        await self._client.load(str(path))
        self._batch_id = 0

    async def log_probs(self, rows: list[PlanRow]) -> list[list[float]]:
        found = (await self._client.logprobs(rows)).log_probs
        return [found[row.row_id] for row in rows]

    async def step(self, mini_batch: MiniBatch) -> tuple[float, TrainReport]:
        started = time.perf_counter()
        told = await self._client.train(self._batch_id, 0, LEARNING_RATE, [mini_batch])
        seconds = time.perf_counter() - started
        assert told.skipped is None
        self._batch_id += 1
        return seconds, told


def started(run_dir: Path, store: EmbeddedStore, dp: int) -> subprocess.Popen[bytes]:
    run_dir.mkdir()
    spec = TrainerSpec(run_id="bench", run_dir=run_dir, store_location=store.location, model_path=BASE, port=0, dp=dp)
    (run_dir / "spec.json").write_text(spec.model_dump_json())
    argv = [sys.executable, "-P", "-m", "trainer.main", "--spec", str(run_dir / "spec.json")]
    with (run_dir / "log").open("w") as log:
        return subprocess.Popen(argv, env=ENVIRONMENT, stdout=log, stderr=log)


@asynccontextmanager
async def trainer(directory: Path, store: EmbeddedStore, dp: int) -> AsyncIterator[Trainer]:
    run_dir = directory / f"dp{dp}"
    process = started(run_dir, store, dp)
    try:
        facts = run_dir / "trainer.json"
        while not facts.exists():
            assert process.poll() is None, (run_dir / "log").read_text()
            await asyncio.sleep(0.02)
        async with httpx.AsyncClient(trust_env=False) as http:
            yield Trainer(TrainerClient(f"http://127.0.0.1:{read_json(facts)['port']}", http))
    finally:
        process.terminate()
        process.wait(30)


class Plain:
    """The plain loop, in its own process."""

    def __init__(self) -> None:
        argv = [sys.executable, "-m", "benchmarks.plain_trainer"]
        self._process = subprocess.Popen(
            argv, env=ENVIRONMENT, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, name: str, **facts: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([name, facts]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def step(self, path: Path, mini_batch: MiniBatch, how: str) -> tuple[float, float, float]:
        """Seconds, loss, gradient norm."""
        request = TrainRequest(batch_id=0, epoch=0, lr=LEARNING_RATE, mini_batches=[mini_batch])
        answer = self.ask("step", path=str(path), request=request.model_dump(mode="json"), how=how, budget_tokens=BUDGET_TOKENS)
        return answer["seconds"], answer["loss"], answer["grad_norm"]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


# Figures


@dataclass(frozen=True)
class Bench:
    """`one` and `two` are trainers of as many data-parallel ranks."""

    one: Trainer
    two: Trainer
    plain: Plain
    rows: Rows
    rounds: int

    async def sampled(self, rows: Sequence[Sampled]) -> list[list[float]]:
        """The log-probs that the model loaded in `one` would have sampled these rows with."""
        return await self.one.log_probs(self.rows.put(rows))

    async def against_plain(self, path: Path, rows: Sequence[Sampled]) -> dict[str, float]:
        """Tokens per second, prompts included, and how they compare."""
        await self.one.load(path)
        mini_batch = mini_batch_of(planned(rows, 1), self.rows.put(rows, await self.sampled(rows)))
        tokens = sum(row.length for row in mini_batch.rows())
        # The first step of each is a warm-up, and starts from the same weights.
        _, told = await self.one.step(mini_batch)
        _, loss, norm = self.plain.step(path, mini_batch, HOWS[0])
        assert told.loss is not None and told.grad_norm is not None
        assert math.isclose(told.loss, loss, rel_tol=1e-4, abs_tol=1e-5) and math.isclose(told.grad_norm, norm, rel_tol=1e-3), (
            told,
            loss,
            norm,
        )
        self.plain.step(path, mini_batch, HOWS[1])
        times: dict[str, list[float]] = {name: [] for name in ("trainer", *HOWS)}
        for _ in range(self.rounds):
            times["trainer"].append((await self.one.step(mini_batch))[0])
            for how in HOWS:
                times[how].append(self.plain.step(path, mini_batch, how)[0])
        taken = {name: median(seconds) for name, seconds in times.items()}
        rates = {("" if name == "trainer" else "plain_") + f"{name}_tokens_per_s": tokens / seconds for name, seconds in taken.items()}
        return rates | {"trainer_over_plain": min(taken[how] for how in HOWS) / taken["trainer"]}

    async def two_over_one(self, path: Path, rows: Sequence[Sampled]) -> float:
        """How much faster two ranks take the same rows."""
        await self.one.load(path)
        await self.two.load(path)
        put = self.rows.put(rows, await self.sampled(rows))
        batches = {ranks: mini_batch_of(planned(rows, ranks), put) for ranks in (1, 2)}
        return await self._ratio(lambda: self.one.step(batches[1]), lambda: self.two.step(batches[2]))

    async def packed_over_padded(self, path: Path, rows: Sequence[Sampled]) -> dict[str, float]:
        """The same trainer, rows and micro-batches; tokens computed and time."""
        await self.one.load(path)
        log_probs, plan = await self.sampled(rows), planned(rows, 1)
        packed = mini_batch_of(plan, self.rows.put(rows, log_probs))
        padded = mini_batch_of(plan, self.rows.put_padded(rows, log_probs, plan))
        computed, needed = (sum(row.length for row in batch.rows()) for batch in (padded, packed))
        ratio = await self._ratio(lambda: self.one.step(padded), lambda: self.one.step(packed))
        return {"padded_over_packed_tokens": computed / needed, "packed_over_padded_speed": ratio}

    async def _ratio(self, slow: Step, fast: Step) -> float:
        """Of the median times of two sides that take turns."""
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(self.rounds + 1):
            for side, step in enumerate((slow, fast)):
                seconds, _ = await step()
                if number:  # the first is a warm-up
                    times[side].append(seconds)
        return median(times[0]) / median(times[1])


async def measure(directory: Path, store: EmbeddedStore, quick: bool) -> dict[str, float]:
    plain = Plain()
    try:
        async with trainer(directory, store, 1) as one, trainer(directory, store, 2) as two:
            plain.ask("make_model", path=str(directory / "bigger"), **BIGGER)
            bench = Bench(one, two, plain, Rows(store), 3 if quick else 9)
            demo, trace = demo_rows(), trace_rows(16 if quick else 48, shrink=4)
            figures = {f"demo_{name}": value for name, value in (await bench.against_plain(BASE, demo)).items()}
            figures |= {f"bigger_{name}": value for name, value in (await bench.against_plain(directory / "bigger", trace)).items()}
            figures["demo_two_ranks_over_one"] = await bench.two_over_one(BASE, demo)
            figures["bigger_two_ranks_over_one"] = await bench.two_over_one(directory / "bigger", trace)
            figures |= await bench.packed_over_padded(directory / "bigger", trace)
    finally:
        plain.close()
    return figures


def main() -> int:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as directory:
        store = EmbeddedStore(Path(f"/dev/shm/headrace-bench-{time.time_ns():x}"), 256 << 20)
        try:
            figures = asyncio.run(measure(Path(directory), store, options.quick))
        finally:
            store.remove()
    aims: dict[str, Aim] = {f"{model}_trainer_over_plain": (">=", 0.9) for model in ("demo", "bigger")}
    aims["bigger_two_ranks_over_one"] = (">=", 1.6)
    return report(
        "trainer: one rank and plain torch, two ranks, packing", figures, aims, options, ["torch", "megatron-core", "transformers"]
    )


if __name__ == "__main__":
    sys.exit(main())
