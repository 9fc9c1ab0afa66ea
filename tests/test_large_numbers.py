"""A run whose ids, versions, batches, epochs, incarnations and cursor begin just below 2^31, 2^32 and 2^53, and cross it.

Nobody trains so long in a test, so the ledger is prepared as such a run would have left it: its numbers, one committed batch, and the
checkpoint of that version (of a run of two batches, under another number). The dataset's segment and pass begin there too. Then the run
goes on: past it and then attacked, or attacked all the way (N= attacks, as in `make chaos`). Every number must come back whole: in the
ledger, in the trainer's log, in the archive, in the metrics, over REST, in the version that an engine says, and in the names of
checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from driver.archive import read_metrics, read_trajectories
from driver.datasets import DataRow
from driver.ledger_db import LedgerDB
from driver.ledger_rows import Upsert
from driver.mix import Walk
from tests.chaos.accounts import check_end
from tests.chaos.attacks import BOUND, EXPLAINED, KILL, KINDS, N_PER_SAMPLE, REPAIR_S, STOP, Cell, Chaos, cells
from tests.chaos.points import AFTER, LOST
from trainer.checkpoints import META, newest

N = min(25, int(os.environ.get("N", "6")))  # attacks beside those that are always made
SEED = int(os.environ.get("SEED", "0"))
BEFORE = 3  # so many batches, and samples, below the power of two
ROWS = 40
ROW = '{"prompt": "sort %d =", "answer": "%d", "task_type": "sort"}\n'
ROLES = ("engine-0", "engine-1", "evaluator-0", "reward-0", "trainer-0", "all engines")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def rows(first: int, kinds: Mapping[int, str]) -> list[DataRow]:
    answers = [kinds.get(n % 20, str(n)) for n in range(first, first + ROWS)]
    return [DataRow(i, f"sort {first + i} =", None, answer, "sort", {"answer": answer}) for i, answer in enumerate(answers)]


def prepare(
    run_dir: Path, checkpoint: Path, version: int, uid: int, epoch: int, incarnation: int, walked: int, kinds: Mapping[int, str]
) -> None:
    """What a run at this version leaves behind, with nothing in flight. `walked`: the last segment, and the pass over it that goes on."""
    held = run_dir / "checkpoints" / f"step_{version:08d}"
    shutil.copytree(checkpoint, held)
    meta = json.loads((held / META).read_text())
    (held / META).write_text(json.dumps(meta | {"trained_version": version, "batch_id": version - 1, "epoch": epoch}))
    line = {"batch_id": version - 1, "epoch": epoch, "row_ids": [], "skipped": None, "skipped_row_ids": []}
    (run_dir / "trained_rows.jsonl").write_text(json.dumps(line) + "\n")
    values: dict[str, object] = {
        **dict.fromkeys(("next_batch", "trained_version", "committed_version", "serving_version"), version),
        "next_uid": uid,
        "epoch": epoch,
        "checkpoint": str(held),
        "cursor/d000000": Walk(pass_index=walked, segment=walked, position=ROWS - 5),
    }
    values |= {f"incarnation/{role}": incarnation for role in ROLES}
    segment = {"segment": walked, "dataset_id": "d000000", "rows": ROWS, "idempotency_key": None, "digest": None}

    async def write() -> None:
        db = LedgerDB(run_dir / "ledger.sqlite")
        db.write(Upsert("meta", {"name": name, "value": msgspec.json.encode(value)}) for name, value in values.items())
        db.write([Upsert("datasets", {"dataset_id": "d000000", "name": "old", "closed": 1, "created_at": time.time()})])
        db.write([Upsert("segments", segment)])
        db.write(
            Upsert("dataset_rows", {"segment": walked, "row_index": row.row_index, "payload": msgspec.json.encode(row)})
            for row in rows(100, kinds)
        )
        db.write([Upsert("batches", {"batch_id": version - 1, "state": "committed", "uids": b"[]", "plan": None, "skipped": None})])
        await db.durable()
        db.close()

    asyncio.run(write())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chaos = Chaos(tmp_path_factory.mktemp("seed") / "it", random.Random(0), "stop.batches=2", step_s=0.0)
    try:
        chaos.start()
        assert chaos.service.submit().status_code == 201
        chaos.service.wait(lambda s: s["state"] == "finished", "two batches", REPAIR_S)
    finally:
        chaos.close()
    found = newest(chaos.run_dir / "checkpoints")
    assert found is not None and found.trained_version == 2
    return found.path


@pytest.mark.parametrize("power", [31, 32, 53])
def test_A1_A2_a_run_crosses_a_power_of_two_with_every_number_it_counts_by(tmp_path: Path, checkpoint: Path, power: int) -> None:
    start = 2**power - BEFORE
    chaos = Chaos(tmp_path / "it", random.Random(0), "checkpoint.every=2", "checkpoint.keep_last=3", step_s=0.0)
    service = chaos.service
    prepare(chaos.run_dir, checkpoint, start, start, start, start, start, {})
    try:
        chaos.start()
        status = service.wait(lambda s: s["trained_version"] >= start + 4, "past it")
        assert service.submit("".join(ROW % (n, n) for n in range(50, 90)).encode()).status_code == 201
        for victim in ("engine", "rank", "driver", "reward"):
            chaos.attack(Cell(victim, KILL))
        engines = service.run("/engines")
        assert all(int(engine["version"].split("/")[2]) > start for engine in engines if engine["version"]), engines
        page = service.run("/trajectories", state="finished", limit=7)
        assert [item["traj_uid"] for item in page["items"][:4]] == [f"s{start:016d}t{index:04d}" for index in range(4)]
        after = service.run("/trajectories", limit=1000, after=page["next"])["items"]
        assert (after[0]["uid"], after[0]["version_tag"]) == (start + 1, start)
        one = service.run(f"/trajectories/{page['items'][0]['traj_uid']}")
        assert one["uid"] == one["archive"]["uid"] == start and one["segment"] == start and one["deadline_batch"] == start + BOUND
        assert "headrace_ledger_trained_version" in service.http.get(f"{service.url}/metrics").text
        chaos.drain()
        books = check_end(chaos.run_dir, N_PER_SAMPLE, BOUND, ())
        status = service.run()
    finally:
        chaos.close()
    assert min(books.samples) == start and max(books.samples) > 2**power
    assert books.number("committed_version") == status["trained_version"] > 2**power
    assert books.number("incarnation/engine-0") > 2**power - BEFORE and books.number("incarnation/all engines") > 2**power
    assert {segment for segment, *_ in books.samples.values()} == {start, start + 1}
    assert max(pass_index for _, _, pass_index, *_ in books.samples.values()) > start, "the cursor went into the next pass"
    ends = list(read_trajectories(chaos.run_dir / "archive"))
    assert {end.uid for end in ends} == set(books.samples) and {end.batch_id for end in ends} == set(books.batches) - {start - 1}
    spans = {version for end in ends for _, version, _, _ in end.version_spans}
    assert start in spans and max(spans) > 2**power and all(end.version_tag >= start for end in ends)
    assert sorted(line["batch_id"] for line in read_metrics(chaos.run_dir)) == sorted(set(books.batches) - {start - 1})
    held = newest(chaos.run_dir / "checkpoints")
    assert held is not None and held.trained_version == status["trained_version"] and held.path.name == f"step_{held.trained_version}"


@pytest.mark.parametrize("power", [31, 32, 53])
def test_W1_A1_A2_it_crosses_it_while_processes_are_killed_and_stopped(tmp_path: Path, checkpoint: Path, power: int) -> None:
    """Part of the matrix of `tests/test_chaos.py`, in a run in which each number crosses at a moment of its own, between attacks."""
    top, rng = 2**power, random.Random(f"{SEED}/{power}")
    chaos = Chaos(tmp_path / "it", rng, "checkpoint.every=3", "checkpoint.keep_last=2", evaluators=1)
    prepare(chaos.run_dir, checkpoint, top - 8, top - 40, top - 2, top - 2, top - 1, KINDS)
    lost_epochs = [Cell("driver", KILL, "EpochBegan", moment) for moment in (LOST, AFTER)]
    always = [Cell("driver", KILL, "BatchApplied", LOST), *lost_epochs, Cell("engine", KILL), Cell("engine", STOP), Cell("rank", KILL)]
    try:
        chaos.start()
        for cell in [*always, *rng.sample(cells(rng), N)]:
            chaos.attack(cell, wait=rng.random() > 0.3)
        chaos.healthy()
        books = chaos.books()
        chaos.service.wait(lambda s: s["trained_version"] > top and s["epoch"] >= top, "past it", REPAIR_S)
        assert chaos.service.submit("".join(ROW % (n, n) for n in range(50, 90)).encode()).status_code == 201
        chaos.healthy()
        chaos.drain()
        books = check_end(chaos.run_dir, N_PER_SAMPLE, BOUND, EXPLAINED)
    finally:
        chaos.close()
    print(f"not reached: {chaos.not_reached}")
    names = "trained_version", "committed_version", "serving_version", "next_batch", "next_uid", "epoch", "incarnation/all engines"
    crossed = {name: books.number(name) - top for name in names}
    assert min(crossed.values()) >= 0, crossed
    assert books.walks()["d000000"]["pass_index"] >= top and top in books.segments
    assert {version >= top for version in books.evaluated.values()} == {False, True}
    last = {end.traj_uid: end for end in read_trajectories(chaos.run_dir / "archive")}
    trained = {uid for uid, found in books.trajectories.items() for _, _, outcome, *_ in found if outcome == "trained"}
    assert trained <= {end.uid for end in last.values()} and {end.uid >= top for end in last.values()} == {False, True}
