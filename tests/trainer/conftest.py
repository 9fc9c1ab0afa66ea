"""Shared by the trainer's tests: one warm lab process, one store, the tiny models, and trainers that serve several tests each."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from pydantic import BaseModel

from store import EmbeddedStore
from store.rows import packed
from trainer.client import TrainerClient, TrainerLost
from trainer.spec import TrainerSpec
from trainer.wire import MiniBatch, PlanRow, TrainRequest, WireRef

ROOT = Path(__file__).parents[2]
GPUS = torch.cuda.device_count()
"""Counted before a test hides them from this process."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def _json(message: BaseModel) -> dict[str, Any]:
    return message.model_dump(mode="json")


@dataclass
class Outcome:
    """Reports of each step; arrays named log_probs/ROW, gradients/STEP/TENSOR, weights/TENSOR, routes/ROW as rank 0 read them; what rank 0
    computed and keeps."""

    reports: list[dict[str, Any]]
    arrays: dict[str, np.ndarray]
    seen: dict[str, int]

    def named(self, kind: str) -> dict[str, np.ndarray]:
        return {name: array for name, array in self.arrays.items() if name.startswith(kind + "/")}

    def error(self, other: Outcome, kind: str) -> float:
        """The largest difference in any tensor, relative to that tensor's largest element."""
        mine, theirs = self.named(kind), other.named(kind)
        assert mine.keys() == theirs.keys() and mine
        return max(float(np.abs(mine[name] - theirs[name]).max() / max(np.abs(theirs[name]).max(), 1e-30)) for name in mine)

    def distance(self, other: Outcome, kind: str) -> float:
        """The largest absolute difference."""
        mine, theirs = self.named(kind), other.named(kind)
        assert mine.keys() == theirs.keys() and mine
        return max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine)


class Lab:
    """The process of lab.py, for one kind of device. One job at a time."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self._directory = directory
        self._log = (directory / "lab.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).parent / "lab.py"), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=ENVIRONMENT,
            text=True,
        )

    def ask(self, name: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({"name": name, "arguments": arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the lab died"}
        if "error" in answer:
            pytest.fail(f"{name}: {answer['error']}\n{(self._directory / 'lab.log').read_text()[-3000:]}")
        return answer

    def layout(
        self,
        spec: TrainerSpec,
        requests: list[TrainRequest],
        resume: Path | None = None,
        save: Path | None = None,
        freeing: bool = False,
    ) -> Outcome:
        """What the product does, on the spec's ranks. With `resume` also resumed/SLOT/TENSOR, with `save` saved/SLOT/TENSOR."""
        places = {"resume": resume and str(resume), "save": save and str(save)}
        return self._compute("layout", spec=_json(spec), requests=[_json(request) for request in requests], freeing=freeing, **places)

    def reference(self, spec: TrainerSpec, requests: list[TrainRequest]) -> Outcome:
        """What plain transformers and torch do."""
        arguments = {"model_path": str(spec.model_path), "spec": _json(spec), "requests": [_json(request) for request in requests]}
        return self._compute("reference", **arguments)

    def _compute(self, name: str, **arguments: Any) -> Outcome:
        out = self._directory / f"{uuid.uuid4().hex}.npz"
        answer = self.ask(name, out=str(out), **arguments)
        with np.load(out) as arrays:
            return Outcome(answer["reports"], dict(arrays), answer.get("seen", {}))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=20)
        self._log.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="session")
def models(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(path) for name, path in lab.ask("make_models", directory=str(tmp_path_factory.mktemp("models"))).items()}


@pytest.fixture(scope="session")
def store() -> Iterator[EmbeddedStore]:
    import shutil

    root = Path(f"/dev/shm/headrace-test-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    yield EmbeddedStore(root, 64 << 20)
    shutil.rmtree(root)


@dataclass
class Rows:
    """Makes rows in the store, deterministic by seed."""

    store: EmbeddedStore
    vocab: int = 96

    def put(self, row_id: str, columns: dict[str, Any], advantage: float) -> PlanRow:
        name = f"test/{uuid.uuid4().hex}"
        routes = {key: value for key, value in columns.items() if key == "routed_experts"}
        ref = self.store.put(f"{name}/rollout", packed([{key: value for key, value in columns.items() if key not in routes}]))
        extras = WireRef.of(self.store.put(f"{name}/extras", routes)) if routes else None
        return PlanRow(row_id=row_id, rollout=WireRef.of(ref), extras=extras, advantage=advantage, length=len(columns["input_ids"]))

    def columns(self, rng: np.random.Generator, prompt: int, response: int, temperature: float = 1.0, version: int = 0) -> dict[str, Any]:
        """`prompt` tokens, then `response` tokens of which about one in five is not trained."""
        length = prompt + response
        mask = np.zeros(length - 1, np.uint8)
        mask[prompt - 1 :] = rng.random(response) < 0.8
        mask[-1] = 1
        behaviour = rng.normal(-np.log(self.vocab), 0.5, length - 1).astype(np.float32)
        return {
            "input_ids": rng.integers(0, self.vocab, length).astype(np.int32),
            "response_mask": mask,
            "rollout_log_probs": np.where(mask, behaviour, 0.0).astype(np.float32),
            "version_spans": np.array([[0, version, 0, length - 1]], dtype=np.int64),
            "temperature": np.float32(temperature),
        }

    def ragged(self, seed: int, count: int, version: int = 0) -> list[PlanRow]:
        """Rows of all lengths and temperatures, with advantages of both signs."""
        rng = np.random.default_rng(seed)
        rows = []
        for index in range(count):
            prompt, response = int(rng.integers(2, 9)), int(rng.integers(1, 14))
            columns = self.columns(rng, prompt, response, temperature=(0.7, 1.0, 1.3)[index % 3], version=version)
            rows.append(self.put(f"{seed}-{index}", columns, float(rng.normal())))
        return rows


@pytest.fixture(scope="session")
def rows(store: EmbeddedStore) -> Rows:
    return Rows(store)


@pytest.fixture
def make_spec(store: EmbeddedStore, models: dict[str, str], tmp_path: Path) -> Callable[..., TrainerSpec]:
    def make(model: str = "qwen3_tied", **changes: Any) -> TrainerSpec:
        facts = {"run_id": "test", "run_dir": tmp_path / "run", "store_location": store.location, "model_path": models[model], "port": 0}
        return TrainerSpec.model_validate({**facts, **changes})

    return make


@pytest.fixture(scope="session")
def plan() -> Callable[..., TrainRequest]:
    """`plan(batch_id, mini_batches)`, where `mini_batches[m][rank][micro-batch]` are rows."""

    def make(batch_id: int, mini_batches: list[list[list[list[PlanRow]]]], lr: float = 1e-2, epoch: int = 0) -> TrainRequest:
        return TrainRequest(batch_id=batch_id, epoch=epoch, lr=lr, mini_batches=[MiniBatch(ranks=ranks) for ranks in mini_batches])

    return make


@dataclass
class Running:
    """A trainer that serves. `pid` is the warm parent's."""

    pid: int
    client: TrainerClient
    http: httpx.AsyncClient
    url: str
    spec: TrainerSpec
    log: Path

    def rank_pids(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    async def until(self, wanted: Callable[[Any], bool], deadline_s: float = 20.0) -> Any:
        give_up = time.monotonic() + deadline_s
        while time.monotonic() < give_up:
            try:
                health = await self.client.health(deadline_s=2.0)
                if wanted(health):
                    return health
            except TrainerLost:
                pass
            await asyncio.sleep(0.02)
        pytest.fail(f"the trainer did not get there in {deadline_s} s:\n{self.log.read_text()[-3000:]}")


Start = Callable[..., Any]


@pytest.fixture
def start(lab: Lab, make_spec: Callable[..., TrainerSpec], tmp_path: Path) -> Start:
    """`async with start(dp=2) as trainer`: forked from the lab, ended by SIGTERM."""

    @asynccontextmanager
    async def start_one(**changes: Any) -> AsyncIterator[Running]:
        spec = make_spec(**{"run_dir": tmp_path / uuid.uuid4().hex, **changes})
        spec.run_dir.mkdir(parents=True)
        spec_path, log = spec.run_dir / "spec.json", spec.run_dir / "trainer.log"
        spec_path.write_text(spec.model_dump_json())
        pid = lab.ask("trainer", spec_path=str(spec_path), log=str(log))["pid"]
        try:
            async with httpx.AsyncClient() as http:
                url = f"http://127.0.0.1:{await port_of(spec.run_dir)}"
                running = Running(pid, TrainerClient(url, http, spec.token), http, url, spec, log)
                await running.until(lambda health: True)
                yield running
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            lab.ask("wait", pid=pid)

    return start_one


async def port_of(run_dir: Path, deadline_s: float = 60.0) -> int:
    give_up = time.monotonic() + deadline_s
    while time.monotonic() < give_up:
        try:
            return int(json.loads((run_dir / "trainer.json").read_text())["port"])
        except (FileNotFoundError, json.JSONDecodeError):
            await asyncio.sleep(0.02)
    pytest.fail(f"no trainer.json in {run_dir} after {deadline_s} s")
