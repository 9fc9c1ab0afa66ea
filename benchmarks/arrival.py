"""How soon a row that is ready can be read on its rank, and what small rows gain by riding in the plan: `python -P -m benchmarks.arrival`.

    columns ──put──▶ ready (ledger) ──batch, plan, durable──▶ HTTP ──▶ rank opens and reads every column ──▶ applied … committed ──▶ freed

The driver's own `Training` over a real ledger, store and HTTP, one batch at a time; the rank is a process that reads rows and computes
nothing, and no weights are pushed. A row's time is from the event that makes it ready to its last column read, by the host's clock. The
crossover is that of one object: put, opened and freed in the store, against carried through the ledger's row, the plan and its two
JSONs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from pydantic import BaseModel

from benchmarks.common import Aim, flags, median, report
from benchmarks.scripted_trainer import ScriptedTrainer
from driver.balance import Terms
from driver.config import load_config
from driver.core import Core
from driver.events import Leaf, SampleRegistered, TrajectoryReady
from driver.feed import Feed
from driver.holds import Holds
from driver.ledger_db import LedgerDB
from driver.ledger_state import Sample, traj_uid_of
from driver.training import Training
from rollout.client import make_http
from store import EmbeddedStore, Lease, Ref, open_ref, put_small
from store.rows import packed, row_of
from store.schema import reward_columns
from trainer.server import Desk, Server, build_app, listen
from trainer.spec import TrainerSpec
from trainer.wire import PlanRow, WireRef

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/sort_digits/config.yaml"
EVERY = 20  # batches to a commit
WARM = 10
GROUP = 50  # rows to a commit
SIZES = (16, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
AIMS: dict[str, Aim] = {"row_p99_ms": ("<=", 41.0), "four_short_rows_direct_over_stored": (">=", 1.35)}


def columns(tokens: int) -> dict[str, Any]:
    """One row: as long as said, a third of it prompt."""
    mask = (np.arange(tokens - 1) >= tokens // 3).astype(np.uint8)
    return packed(
        [
            {
                "input_ids": np.arange(tokens, dtype=np.int32) % 250,
                "response_mask": mask,
                "rollout_log_probs": mask * np.float32(-0.5),
                "version_spans": np.array([[0, 0, tokens // 3, tokens - 1]], np.int64),
                "temperature": np.float32(1.0),
            }
        ]
    )


# ---- the rank ----------------------------------------------------------------------------------------------------------------


class Rank(ScriptedTrainer):
    """Notes when each row could be read."""

    def _open(self, rows: list[PlanRow]) -> list[Lease]:
        leases, lines = [], []
        for row in rows:
            leases.append(open_ref(row.rollout.ref()))
            for column in row_of(leases[-1], row.row).values():
                column.sum()
            lines.append(f"{row.row_id} {time.monotonic():.6f}\n")
        with (self._spec.run_dir / "read.txt").open("a") as file:
            file.writelines(lines)
        return leases


def rank(spec_file: Path) -> None:
    spec = TrainerSpec.model_validate_json(spec_file.read_bytes())
    desk = Desk(spec.incarnation, 1)
    trainer = Rank(spec, 0.0, desk)
    listener = listen(spec.host, 0)
    Server(build_app(desk, None), listener).start()
    print(listener.getsockname()[1], flush=True)
    while True:  # ends with its standard input, which is its parent
        command = desk.commands.get()
        reply: BaseModel = trainer.answer(command)
        command.answer.set_result(reply)


# ---- the driver --------------------------------------------------------------------------------------------------------------


class Handing(Training):
    """The product's, without weights."""

    async def _snapshot(self) -> None:
        pass


class Driver:
    """Lands rows, one batch at a time."""

    def __init__(self, directory: Path, store: Path, samples: int, n: int, tokens: int, inline_bytes: int) -> None:
        settings = [f"run_dir={directory}", f"batch.samples={samples}", f"rollout.n={n}", f"rollout.min_group={n}", "stop.batches=null"]
        settings += ["trainer.critic={}", f"checkpoint.every={EVERY}", f"store.inline_bytes={inline_bytes}", "trainer.schedule=constant"]
        config = load_config(CONFIG, settings)
        self.config, self._samples, self._n = config, samples, n
        self._rollout, self._reward = columns(tokens), reward_columns([(1.0, True)])
        self._tokens, self._inline_bytes = tokens, inline_bytes
        self.ready: dict[str, float] = {}
        self.batch_s: list[float] = []
        self._applied = asyncio.Event()
        self.db = LedgerDB(directory / "ledger.sqlite")
        self.store = EmbeddedStore(store, 1 << 30)
        self.core = Core(config, self.db.load(), self.db, Feed(self.db, seed=0, shuffle=False, passes=None), self.store)
        self.http = make_http()
        self.training = Handing(
            self.core,
            self.http,
            canary_ids=[],
            on_snapshot=lambda snapshot: None,
            on_applied=lambda batch_id, report: self._applied.set(),
            archive=self._archive,
            on_running_again=lambda sample: None,
            replace=self._replace,
            holds=Holds(self.core, cut=lambda sample, reason: None, moving=lambda: True),
            terms=Terms(config.trainer.dp, config.batch.micro_batch_tokens),
        )

    async def _archive(self, samples: list[Sample], outcome: str, reason: str | None) -> None:
        pass

    async def _replace(self, reason: str) -> None:
        raise RuntimeError(reason)

    def land(self) -> None:
        """A whole batch, from its columns to ready."""
        core, ledger = self.core, self.core.ledger
        for _ in range(self._samples):
            uid, now = ledger.next_uid, time.time()
            core.apply(
                SampleRegistered(
                    uid=uid, segment=0, row_index=0, pass_index=0, position=0, version_tag=0, deadline_batch=1 << 40, n=self._n, time=now
                )
            )
            for index in range(self._n):
                name = traj_uid_of(uid, index)
                rollout = put_small(self.store, f"{core.run_id}/{name}a0000/rollout", self._rollout, self._inline_bytes)
                reward = put_small(self.store, f"{core.run_id}/{name}a0000/reward", self._reward, self._inline_bytes)
                leaf = Leaf(f"{name}a0000l0000", rollout.to_wire(), reward.to_wire(), self._tokens, self._tokens // 2, float(index))
                event = TrajectoryReady(traj_uid=name, leaves=(leaf,), reward=float(index), finish_reason="stop", time=now)
                self.ready[leaf.row_id] = time.monotonic()
                core.apply(event)

    async def run(self, url: str, batches: int) -> None:
        self.training.attach(url, None)
        task = asyncio.create_task(self.training.run())
        try:
            for number in range(WARM + batches):
                if number == WARM:
                    self.ready.clear()
                began = time.monotonic()
                self._applied.clear()
                self.land()
                waits = asyncio.create_task(self._applied.wait())
                await asyncio.wait([waits, task], return_when=asyncio.FIRST_COMPLETED, timeout=60)
                if task.done():
                    await task
                if number >= WARM:
                    self.batch_s.append(time.monotonic() - began)
            self.core.ending = "over"
            self.core.ring()
            async with asyncio.timeout(60):
                await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.http.aclose()
            self.db.close()


def handed(directory: Path, batches: int, samples: int, n: int, tokens: int, inline_bytes: int) -> tuple[list[float], list[float], float]:
    """Seconds of each row; of each batch from its first column to applied; and CPU seconds of a batch, the driver's and the rank's."""
    run_dir, place = directory / "run", Path(f"/dev/shm/headrace-arrival-{os.getpid()}")
    run_dir.mkdir(parents=True)
    driver = Driver(run_dir, place, samples, n, tokens, inline_bytes)
    spec = TrainerSpec(run_id="arrival", run_dir=run_dir, store_location=driver.store.location, model_path=driver.config.model.path, port=0)
    (directory / "spec.json").write_text(spec.model_dump_json())
    argv = [sys.executable, "-P", "-m", "benchmarks.arrival", "--rank", str(directory / "spec.json")]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        began = time.process_time() + _cpu_s(process.pid)
        asyncio.run(driver.run(f"http://127.0.0.1:{port}", batches))
        cpu_s = (time.process_time() + _cpu_s(process.pid) - began) / (WARM + batches)
        lines = [line.split() for line in (run_dir / "read.txt").read_text().splitlines()]
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(place, ignore_errors=True)
    read = {row_id: float(at) for row_id, at in lines}
    return [read[row_id] - ready for row_id, ready in driver.ready.items()], driver.batch_s, cpu_s


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


# ---- one object --------------------------------------------------------------------------------------------------------------


def object_us(work: Callable[[], None], repeats: int) -> float:
    """CPU microseconds of one, the least of some series: what else the machine does only adds."""
    series = []
    for _ in range(7):
        began = time.process_time()
        for _ in range(repeats):
            work()
        series.append((time.process_time() - began) / repeats)
    return min(series) * 1e6


def crossover(repeats: int) -> tuple[int, dict[int, tuple[float, float]]]:
    """The longest object that costs less in its reference than in the store, and by encoded length what both cost."""
    place = Path(f"/dev/shm/headrace-arrival-{os.getpid()}")
    store, found, last = EmbeddedStore(place, 1 << 28), {}, 0
    directory = tempfile.TemporaryDirectory(prefix="headrace-arrival-")
    carrying = Carrying(Path(directory.name) / "rows.sqlite")
    try:
        for tokens in SIZES:
            row = columns(tokens)

            def stored(row: dict[str, Any] = row) -> None:
                ref = store.put("run/row/rollout", row)
                carrying.carry(ref)
                store.free([ref])

            def direct(row: dict[str, Any] = row) -> None:
                carrying.carry(put_small(store, "run/row/rollout", row, 1 << 30))

            length = len(put_small(store, "k", row, 1 << 30).inline or b"")
            found[length] = (object_us(stored, repeats), object_us(direct, repeats))
            if found[length][1] < found[length][0]:
                last = length
            else:
                break
    finally:
        carrying.connection.close()
        directory.cleanup()
        shutil.rmtree(place)
    return last, found


class Carrying:
    """A reference on its way from the driver's hands to the rank's, and a row of SQLite for it, committed in groups as the ledger's are."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute("CREATE TABLE rows (uid INTEGER PRIMARY KEY, leaves BLOB)")
        self._written = 0

    def carry(self, ref: Ref) -> None:
        wire = ref.to_wire()
        self._write(msgspec.json.encode(wire))
        sent = PlanRow(row_id="r", rollout=WireRef.model_validate(wire), length=2).model_dump_json()
        row = PlanRow.model_validate(json.loads(sent))
        for column in row_of(open_ref(row.rollout.ref()), 0).values():
            column.sum()

    def _write(self, leaves: bytes) -> None:
        if self._written % GROUP == 0:
            self.connection.execute("BEGIN")
        self.connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (self._written, leaves))
        self._written += 1
        if self._written % GROUP == 0:
            self.connection.execute("UPDATE rows SET leaves = NULL WHERE uid < ?", (self._written,))
            self.connection.execute("COMMIT")


def quantile_ms(seconds: list[float], hundredth: int) -> float:
    return statistics.quantiles(seconds, n=100)[hundredth - 1] * 1000


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank)
    rounds, batches, repeats = (2, 40, 50) if options.quick else (5, 200, 300)
    last, by_length = crossover(repeats)
    figures: dict[str, float] = {}
    for length, (stored_us, direct_us) in by_length.items():
        figures |= {f"stored_us_{length}": stored_us, f"direct_us_{length}": direct_us}
    figures["crossover_bytes"] = float(last)
    times: dict[str, list[float]] = {"rows": [], "stored": [], "direct": []}
    cpu: dict[str, list[float]] = {name: [] for name in times}
    for number in range(rounds):  # taken in turns, so that what else the machine does meets both
        for name, shape, inline_bytes in (
            ("rows", (4, 4, 1024), 0),
            ("stored", (2, 2, 24), 0),
            ("direct", (2, 2, 24), 1 << 20),
        ):
            with tempfile.TemporaryDirectory(prefix="headrace-arrival-") as directory:
                gc.collect()
                row_s, batch_s, cpu_s = handed(Path(directory) / f"{name}{number}", batches, *shape, inline_bytes)
                times[name] += row_s if name == "rows" else batch_s
                cpu[name].append(cpu_s)
    figures |= {"row_p50_ms": quantile_ms(times["rows"], 50), "row_p99_ms": quantile_ms(times["rows"], 99)}
    for name in ("stored", "direct"):
        figures[f"four_short_rows_{name}_ms"] = median(times[name]) * 1000
        figures[f"four_short_rows_{name}_cpu_ms"] = median(cpu[name]) * 1000
    figures["four_short_rows_direct_over_stored"] = figures["four_short_rows_stored_ms"] / figures["four_short_rows_direct_ms"]
    figures["four_short_rows_cpu_direct_over_stored"] = figures["four_short_rows_stored_cpu_ms"] / figures["four_short_rows_direct_cpu_ms"]
    return report("a row, from ready to readable on its rank", figures, AIMS, options, ["numpy", "httpx", "pydantic", "msgspec", "uvloop"])


if __name__ == "__main__":
    sys.exit(main())
