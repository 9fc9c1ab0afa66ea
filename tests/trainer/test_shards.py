"""Each rank writes its share of the files; one that cannot says so when all have drained their tensors, so that none is left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OTHER_RANKS = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from trainer import cpu
cpu.install()
import torch
from trainer.shards import write_shards

def run(directory, rank):
    said = []
    drained = []

    def tensors():
        for i in range(7):
            drained.append(i)
            yield f"t{i}", torch.full((100,), float(i))

    write_shards(SimpleNamespace(rank=rank, size=3, agree=said.append), tensors(), directory, 900)
    return {"drained": len(drained), "faults": [fault for fault in said if fault]}

place = Path(sys.argv[1])
(place / "taken").write_text("a file where the directory should be")
print(json.dumps([run(place / "one", 1), run(place / "two", 2), run(place / "taken", 1)]))
"""


@pytest.mark.slow
def test_file_i_is_written_by_rank_i_and_a_fault_waits_for_the_last_tensor(tmp_path: Path) -> None:
    """Two tensors a file, so four files, over three ranks; rank 0 has the first and the last, and is seen to write in test_resharding."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", OTHER_RANKS, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    one, two, taken = json.loads(done.stdout)
    assert one == two == {"drained": 7, "faults": []}
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["file_00001"]
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["file_00002"]
    ((status, words),) = taken["faults"]
    assert taken["drained"] == 7 and status == 507 and f"cannot write {tmp_path}/taken" in words
