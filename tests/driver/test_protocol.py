"""The protocol of docs/recovery.md, line by line: what a second reader of the disk finds at the moment of the next step, and what a crash
at each step recovers to. The trainer is a stand-in that keeps its account as the real one does; ledger, store and checkpoints are real.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from driver.balance import Terms
from driver.config import load_config
from driver.core import Core
from driver.events import Leaf, TrajectoryReady
from driver.feed import Feed
from driver.holds import Holds
from driver.ledger_db import LedgerDB
from driver.ledger_state import Sample, traj_uid_of
from driver.training import Training
from store import EmbeddedStore, open_ref, put_small
from tests.driver.conftest import register
from trainer import checkpoints
from trainer.wire import TrainReport

ROOT = Path(__file__).parents[2]
SAMPLES, N, BATCHES = 2, 2, 3
STEPS = ("train", "trained", "snapshot", "save", "saved", "archive", "archived", "free", "freed")


class Crash(BaseException):
    """The process is gone here: nothing catches it."""


class Trainer:
    """Rank 0 as the driver sees it. It forgets everything with the process, but for its log and its checkpoints."""

    def __init__(self, directory: Path, at: Callable[[str], None]) -> None:
        self._directory = directory
        self._at = at
        self.version = 0
        self.trained: list[int] = []

    async def health(self) -> Any:
        return SimpleNamespace(incarnation=1)

    async def load(self) -> Any:
        self.version = 0
        return SimpleNamespace(trained_version=0)

    async def resume(self, path: str) -> Any:
        self.version = checkpoints.read(Path(path)).trained_version
        return SimpleNamespace(trained_version=self.version)

    async def train(self, batch_id: int, epoch: int, lr: float, mini_batches: list[Any], deadline_s: float, **_: Any) -> Any:
        assert batch_id == self.version
        self._at("train")
        rows = [row for mini in mini_batches for row in mini.rows()]
        row_ids = [row.row_id for row in rows]
        assert all(open_ref(row.rollout.ref())["a"].tolist() == [0] * 4 for row in rows), "wherever they are"
        with (self._directory / "trained_rows.jsonl").open("a") as log:
            log.write(json.dumps({"batch_id": batch_id, "epoch": epoch, "row_ids": row_ids, "skipped": None}) + "\n")
        self.version += 1
        self.trained.append(batch_id)
        self._at("trained")
        return TrainReport.model_construct(skipped=None, batch_id=batch_id, trained_version=self.version, row_ids=row_ids)

    async def snapshot(self, epoch: int, version: int, bucket_bytes: int, canary_ids: list[int]) -> Any:
        self._at("snapshot")
        return SimpleNamespace(buckets=[], tensors={}, canary=SimpleNamespace(input_ids=[], log_probs=[]))

    async def save(self, directory: str, keep_last: int) -> Any:
        self._at("save")
        partial = checkpoints.begin(Path(directory))
        (partial / "weights").write_bytes(b"w")
        made = checkpoints.publish(partial, self.version, 0, {"tp": 1}, {"torch": "", "megatron": ""})
        self._at("saved")
        return SimpleNamespace(path=str(made.path), trained_version=self.version)


class Life:
    """One life of a driver over this directory: training, and what it calls. `at` hears of each step before it is done."""

    def __init__(self, directory: Path, store: Path, at: Callable[[str], None], every: int = 2, small_bytes: int = 0) -> None:
        settings = [f"run_dir={directory}", f"batch.samples={SAMPLES}", f"rollout.n={N}", f"stop.batches={BATCHES}"]
        config = load_config(ROOT / "examples/sort_digits/config.yaml", [*settings, f"checkpoint.every={every}", "trainer.critic={}"])
        self.directory, self._small_bytes = directory, small_bytes
        self.db = LedgerDB(directory / "ledger.sqlite")
        self.ledger = self.db.load()
        self.store = EmbeddedStore(store, 1 << 22)
        self.core = Core(config, self.ledger, self.db, Feed(self.db, seed=0, shuffle=False, passes=1), self.store)
        self.archived: list[int] = []
        self._at = at
        free = self.store.free

        def freed(refs: Any) -> None:
            at("free")
            free(refs)
            at("freed")

        self.store.free = freed  # type: ignore[method-assign]
        self.trainer = Trainer(directory, at)
        self.training = Training(
            self.core,
            None,  # type: ignore[arg-type]
            canary_ids=[],
            on_snapshot=lambda snapshot: None,
            on_applied=lambda batch_id, report: None,
            archive=self._archive,
            on_running_again=lambda sample: None,
            replace=self._replace,
            holds=Holds(self.core, cut=lambda sample, reason: None, moving=lambda: True),
            terms=Terms(config.trainer.dp, config.batch.micro_batch_tokens),
        )
        self.training._client = self.trainer  # type: ignore[assignment]

    async def _archive(self, samples: list[Sample], outcome: str, reason: str | None) -> None:
        self._at("archive")
        self.archived += [sample.uid for sample in samples]
        self._at("archived")

    async def _replace(self, reason: str) -> None:
        raise AssertionError(reason)

    def register_all(self) -> None:
        for uid in range(SAMPLES * BATCHES):
            self.core.apply(register(self.ledger, bound=BATCHES, n=N))
            for index in range(N):
                name = traj_uid_of(uid, index)
                columns = {"a": np.zeros(4, np.int32)}
                rollout, reward = (put_small(self.store, f"run/{name}/{hop}", columns, self._small_bytes) for hop in ("rollout", "reward"))
                leaf = Leaf(f"{name}a0000l0000", rollout.to_wire(), reward.to_wire(), 12, 5, float(index), None)
                self.core.apply(TrajectoryReady(traj_uid=name, leaves=(leaf,), reward=float(index), finish_reason="stop", time=1.0))

    async def to_the_end(self) -> None:
        async with asyncio.timeout(20):
            await self.training.run()


def on_disk(directory: Path) -> dict[str, Any]:
    """What a second reader finds."""
    reader = sqlite3.connect(f"file:{directory}/ledger.sqlite?mode=ro", uri=True)
    try:
        meta = {name: json.loads(value) for name, value in reader.execute("SELECT name, value FROM meta")}
        batches = {batch_id: (state, plan) for batch_id, state, plan in reader.execute("SELECT batch_id, state, plan FROM batches")}
        ends = Counter(outcome for (outcome,) in reader.execute("SELECT outcome FROM trajectories"))
        return {"committed": meta.get("committed_version", 0), "batches": batches, "ends": ends}
    finally:
        reader.close()


async def test_A2_W1_each_step_finds_on_the_disk_what_the_one_before_it_promised(tmp_path):
    seen: list[tuple[str, dict[str, Any]]] = []
    life = Life(tmp_path / "run", tmp_path / "store", lambda step: seen.append((step, on_disk(tmp_path / "run"))))
    life.register_all()
    await life.to_the_end()
    life.db.close()
    trained = [facts for step, facts in seen if step == "train"]
    for batch_id, facts in enumerate(trained):
        state, plan = facts["batches"][batch_id]
        assert state == "assembled" and json.loads(plan), f"batch {batch_id}: its plan is durable before the trainer sees it"
    archiving = [facts for step, facts in seen if step == "archive"]
    assert [facts["committed"] for facts in archiving] == [0, 0, 2], "archived before the ledger says that it is finished"
    freeing = [facts for step, facts in seen if step == "free"]
    assert [facts["committed"] for facts in freeing] == [2, 3], "committed before its rows are freed"
    assert [facts["ends"]["trained"] for facts in freeing] == [2 * SAMPLES * N, 3 * SAMPLES * N]
    assert life.archived == list(range(SAMPLES * BATCHES)) and life.store.stats().used_bytes == 0


async def test_B1_the_plan_on_the_disk_names_the_rows_that_ride_along_and_the_one_that_is_sent_holds_them(tmp_path):
    plans: list[bytes] = []
    life = Life(tmp_path / "run", tmp_path / "store", lambda now: None, small_bytes=4096)
    life.register_all()
    assert life.store.keys() == []
    train = life.trainer.train

    async def sent(batch_id: int, *facts: Any, **more: Any) -> Any:
        plans.append(on_disk(tmp_path / "run")["batches"][batch_id][1])
        return await train(batch_id, *facts, **more)

    life.trainer.train = sent  # type: ignore[method-assign]
    await life.to_the_end()
    life.db.close()
    rows = [row for plan in plans for mini in json.loads(plan) for rank in mini["ranks"] for micro in rank for row in micro]
    assert len(rows) == SAMPLES * BATCHES * N and all(row["rollout"]["inline"] is None and row["rollout"]["key"] for row in rows)


@pytest.mark.parametrize(("step", "small_bytes"), [*((step, 0) for step in STEPS), *((step, 4096) for step in STEPS if "free" not in step)])
@pytest.mark.parametrize("count", [1, 2])
async def test_A1_A2_W1_a_crash_at_any_step_ends_as_if_there_had_been_none(tmp_path, step, count, small_bytes):
    """The disk is kept as it is at that moment: what was not committed is gone. Shared memory survives."""
    left = count

    def crash_there(now: str) -> None:
        nonlocal left
        left -= now == step
        if left == 0 and now == step:
            (tmp_path / "after").mkdir()
            for name in ("ledger.sqlite", "ledger.sqlite-wal", "trained_rows.jsonl"):
                if (tmp_path / "run" / name).exists():
                    shutil.copy(tmp_path / "run" / name, tmp_path / "after" / name)
            if (tmp_path / "run" / "checkpoints").exists():
                shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "after" / "checkpoints")
            raise Crash

    first = Life(tmp_path / "run", tmp_path / "store", crash_there, small_bytes=small_bytes)
    first.register_all()
    await first.db.durable()
    with pytest.raises(Crash):
        await first.to_the_end()
    await first.training.abandon()
    first.db.close()
    second = Life(tmp_path / "after", tmp_path / "store", lambda now: None)
    await second.to_the_end()
    second.db.close()
    ledger = LedgerDB(tmp_path / "after" / "ledger.sqlite")
    counts, found = ledger.load().counts, ledger.load()
    ledger.close()
    assert counts.by_outcome == {"trained": SAMPLES * BATCHES * N} and counts.registered == SAMPLES * BATCHES * N
    assert (found.trained_version, found.committed_version, found.next_batch) == (BATCHES, BATCHES, BATCHES)
    lines = {line["batch_id"]: line for line in map(json.loads, (tmp_path / "after" / "trained_rows.jsonl").read_text().splitlines())}
    rows = Counter(row for line in lines.values() for row in line["row_ids"])
    assert sorted(lines) == list(range(BATCHES)) and len(rows) == SAMPLES * BATCHES * N and set(rows.values()) == {1}
    assert set(first.archived) | set(second.archived) == set(range(SAMPLES * BATCHES))
    held = checkpoints.newest(tmp_path / "after" / "checkpoints")
    assert held is not None and held.trained_version == BATCHES


async def test_A2_W1_a_checkpoint_that_the_ledger_knows_nothing_of_is_believed_and_nothing_in_it_is_trained_again(tmp_path):
    """The ledger's last commits never came: on the disk the batch is assembled, and a whole checkpoint holds it."""
    (tmp_path / "after").mkdir()

    def crash_there(now: str) -> None:
        if now == "trained":
            for name in ("ledger.sqlite", "ledger.sqlite-wal"):
                shutil.copy(tmp_path / "run" / name, tmp_path / "after" / name)
        elif now == "saved":
            shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "after" / "checkpoints")
            shutil.copy(tmp_path / "run" / "trained_rows.jsonl", tmp_path / "after" / "trained_rows.jsonl")
            raise Crash

    first = Life(tmp_path / "run", tmp_path / "store", crash_there, every=1)
    first.register_all()
    await first.db.durable()
    with pytest.raises(Crash):
        await first.to_the_end()
    first.db.close()
    second = Life(tmp_path / "after", tmp_path / "store", lambda now: None)
    assert second.ledger.trained_version == 0 and second.ledger.next_batch == 1
    await second.to_the_end()
    second.db.close()
    assert second.trainer.trained == [1, 2] and second.archived == list(range(SAMPLES * BATCHES))
    assert second.ledger.counts.by_outcome == {"trained": SAMPLES * BATCHES * N} and second.ledger.epoch == 0


async def test_L1_why_tells_how_far_the_replay_is_and_says_nothing_of_it_afterwards(tmp_path):
    def crash_there(now: str) -> None:
        if now == "trained" and first.ledger.trained_version == BATCHES - 1:
            raise Crash

    first = Life(tmp_path, tmp_path / "store", crash_there, every=100)
    first.register_all()
    with pytest.raises(Crash):
        await first.to_the_end()
    await first.training.abandon()
    await first.db.durable()
    first.db.close()
    said = []

    def look(now: str) -> None:
        if now == "train":
            wait = second.core.waits["trainer"]
            said.append((wait.kind, wait.reason))

    second = Life(tmp_path, tmp_path / "store", look, every=100)
    await second.to_the_end()
    assert said == [("replay", f"replaying batch {n + 1} of {BATCHES} since checkpoint 0 (batch_id {n})") for n in range(BATCHES)]
    assert second.core.lost_time.seconds(time.monotonic())["trainer"]["replay"] >= 0.0
    second.db.close()
