"""The peak of a phase is that of the phase, of whichever rank needs most."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from store import EmbeddedStore
from tests.trainer.steps import in_one
from trainer.wire import MiniBatch

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
TWO_RANKS = """
import json, os, sys
import torch, torch.distributed as dist
from trainer.memory import Peaks, binding

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
peaks = Peaks()

def use(phase, mib):
    with peaks.phase(phase):
        held = torch.ones(mib << 18)

use("load", 400)
use("forward_backward", 20 + 230 * rank)
use("forward_backward", 20)
use("optimizer", 100)
first = peaks.report()
use("optimizer", 20)
second = peaks.report()
use("load", 60)
third = peaks.report()
if rank == 0:
    print(json.dumps([first, second, third, binding(first)]), flush=True)
dist.barrier()
os._exit(0)  # gloo's threads have aborted a process that was ending when the other one was gone
"""


def test_each_phase_has_its_own_highest_mark_over_ranks_and_load_is_remembered(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path / "store")]
    with subprocess.Popen([*command, "1"], env=environment) as other:
        done = subprocess.run([*command, "0"], env=environment, capture_output=True, text=True, timeout=60, check=True)
        assert other.wait(20) == 0
    first, second, third, binds = json.loads(done.stdout)
    base = second["optimizer"] - 20 * MIB
    above = {phase: (size - base) / MIB for phase, size in first.items()}
    assert above.keys() == {"load", "forward_backward", "optimizer"} and binds == "load"
    assert abs(above["load"] - 400) < 30 and abs(above["forward_backward"] - 250) < 30 and abs(above["optimizer"] - 100) < 30, above
    assert second.keys() == {"load", "optimizer"} and second["load"] == first["load"], "forgotten but for what other commands do"
    assert third.keys() == {"load"} and abs((third["load"] - base) / MIB - 60) < 30


async def test_a_step_reports_the_phases_that_ran_and_which_one_binds(start: Any, rows: Any, store: EmbeddedStore) -> None:
    async with start(dp=2) as trainer:
        await trainer.client.load()
        batches = [[MiniBatch(ranks=in_one(rows.ragged(95 + i, 4), 2))] for i in range(2)]
        report = await trainer.client.train(0, 0, 1e-3, batches[0])
        assert report.memory_bytes.keys() == {"load", "forward_backward", "optimizer"}
        snapshot = await trainer.client.snapshot(0, 1, 1 << 20, [])
        store.free([bucket.ref() for bucket in snapshot.buckets])
        report = await trainer.client.train(1, 0, 1e-3, batches[1])
        assert report.memory_bytes.keys() == {"load", "forward_backward", "optimizer", "export"}
        assert report.memory_bytes[report.memory_phase or ""] == max(report.memory_bytes.values()) > 50 * MIB
