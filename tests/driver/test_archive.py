"""The archive of finished trajectories and the log of metrics, with real files and real crashes."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from driver.archive import Archive, FinishedTrajectory, MetricsLog, read_metrics, read_trajectories


def trajectory(number: int, **changes: Any) -> FinishedTrajectory:
    row = FinishedTrajectory(
        traj_uid=f"s{number}t0",
        uid=number,
        run_id="run",
        dataset_id="d000000",
        row_index=number,
        outcome="trained",
        version_tag=3,
        batch_id=4,
        reward=0.5,
        is_correct=False,
        prompt="sort 21 =",
        response="12",
        input_ids=[5, 6, 7],
        response_mask=[0, 1],
        rollout_log_probs=[0.0, -0.25],
        version_spans=[[0, 3, 1, 2]],
        attempts=1,
        started_at=1.5,
        finished_at=2.5,
        parts='{"in_place": 1.0}',
    )
    return msgspec.structs.replace(row, **changes)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_row_is_found_whole_before_and_after_it_is_written(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    rows = [trajectory(0), trajectory(1, outcome="discarded", reason="deadline", batch_id=None, reward=None, is_correct=None, input_ids=[])]
    for row in rows:
        archive.append(row)
    assert [archive.find(row.traj_uid) for row in rows] == rows and files(tmp_path) == []
    archive.flush()
    assert [archive.find(row.traj_uid) for row in rows] == rows
    assert archive.find("s9t9") is None
    assert list(read_trajectories(tmp_path)) == rows


def test_files_are_rotated_by_count_and_numbered_on_after_a_restart(tmp_path: Path) -> None:
    archive = Archive(tmp_path, rows_per_file=2)
    for number in range(5):
        archive.append(trajectory(number))
    assert files(tmp_path) == ["trajectories-00000000.parquet", "trajectories-00000001.parquet"]
    again = Archive(tmp_path, rows_per_file=1)
    again.append(trajectory(4))
    assert files(tmp_path)[-1] == "trajectories-00000002.parquet"
    assert [row.uid for row in read_trajectories(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_file_is_due_by_age(tmp_path: Path) -> None:
    archive = Archive(tmp_path, max_age_s=0.05)
    assert not archive.due
    archive.append(trajectory(0))
    deadline = time.monotonic() + 5.0
    while not archive.due:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    archive.append(trajectory(1))
    assert len(files(tmp_path)) == 1 and not archive.due


def test_A2_a_row_written_twice_by_a_replay_counts_once_and_the_last_wins(tmp_path: Path) -> None:
    archive = Archive(tmp_path, rows_per_file=2)
    for row in [
        trajectory(0, reward=0.1),
        trajectory(1),
        trajectory(0, reward=0.2),
        trajectory(2),
        trajectory(3),
        trajectory(3, reward=0.3),
    ]:
        archive.append(row)
    archive.flush()
    assert [(row.uid, row.reward) for row in read_trajectories(tmp_path)] == [(1, 0.5), (0, 0.2), (2, 0.5), (3, 0.3)]
    assert [found and found.reward for found in map(archive.find, ["s0t0", "s3t0"])] == [0.2, 0.3]


def test_W7_a_crash_in_the_middle_of_writing_leaves_no_half_file(tmp_path: Path) -> None:
    """A process is killed while it writes file after file; what stands under a final name is whole, and the next owner tidies up."""
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); from tests_row import trajectory; from driver.archive import Archive\n"
        "archive = Archive(pathlib.Path(sys.argv[1]), rows_per_file=50)\n"
        "number = 0\n"
        "while True:\n"
        "    archive.append(trajectory(number, input_ids=[1] * 2000)); number += 1\n"
        "    print(number, flush=True)\n"
    )
    (tmp_path / "tests_row.py").write_text(Path(__file__).read_text())
    root = Path(__file__).parents[2]
    directory = tmp_path / "archive"
    command = [sys.executable, "-c", program, str(directory), str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 150:
                child.send_signal(signal.SIGKILL)
                break
    (directory / ".trajectories-00000099.parquet.tmp").write_bytes(b"PAR1 half")
    Archive(directory)
    assert len(files(directory)) >= 3
    assert all(pq.read_metadata(directory / name).num_rows == 50 for name in files(directory))


def test_rows_are_kept_when_the_disk_refuses_them(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    archive.append(trajectory(0))
    (tmp_path / "archive").rename(tmp_path / "moved")
    with pytest.raises(OSError, match="1 rows wait in memory"):
        archive.flush()
    (tmp_path / "moved").rename(tmp_path / "archive")
    archive.flush()
    assert [row.uid for row in read_trajectories(tmp_path / "archive")] == [0]


# ---- metrics -------------------------------------------------------------------------------------------------------------------------


def test_metrics_are_read_back_as_written_and_at_once(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    assert read_metrics(tmp_path) == read_metrics(tmp_path / "elsewhere") == []
    log.write({"batch_id": 0, "loss": 0.5, "reward_mean": float("nan"), "note": "x"})
    assert read_metrics(tmp_path) == [{"batch_id": 0, "loss": 0.5, "reward_mean": None, "note": "x"}]
    log.close()


def test_V6_a_restart_continues_the_log_and_a_batch_written_twice_counts_once(tmp_path: Path) -> None:
    first = MetricsLog(tmp_path)
    for batch_id in range(3):
        first.write({"batch_id": batch_id, "loss": 1.0})
    first.close()
    second = MetricsLog(tmp_path)
    for batch_id in range(2, 5):
        second.write({"batch_id": batch_id, "loss": 2.0})
    second.close()
    assert [(row["batch_id"], row["loss"]) for row in read_metrics(tmp_path)] == [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_a_torn_last_line_is_neither_read_nor_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"batch_id": 0, "loss": 1.0}\n{"batch_id": 1, "lo')
    assert len(read_metrics(tmp_path)) == 1
    log = MetricsLog(tmp_path)
    log.write({"batch_id": 1, "loss": 2.0})
    log.close()
    assert [row["loss"] for row in read_metrics(tmp_path)] == [1.0, 2.0]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"batch_id": 0}\nxx\n{"batch_id": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


def board(directory: Path) -> list[Any]:
    """All events, file by file as TensorBoard reads them: length, its checksum, the event, its checksum."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(directory.iterdir(), key=lambda path: int(path.name.rpartition(".")[2])):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            data = content[12 : 12 + length]
            crc = crc32c(data)
            masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
            assert struct.unpack("<I", content[12 + length : 16 + length]) == (masked,)
            events.append(Event.FromString(data))
            content = content[16 + length :]
    return events


def test_tensorboard_gets_the_scalars_of_each_batch_and_a_mark_where_a_replay_begins(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for batch_id in (0, 1, 2, 1, 2):
        log.write({"batch_id": batch_id, "loss": 0.5, "kl": None, "name": "x", "ok": True, "memory_bytes": {"load": 7}})
    log.close()
    events = board(tmp_path / "tensorboard")
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(batch_id, *one) for batch_id in (0, 1, 2, 1, 2) for one in (("loss", 0.5), ("memory_bytes/load", 7.0))]
    assert [event.step for event in events if event.HasField("session_log")] == [0, 1]


def test_importing_the_archive_is_light_and_logging_never_loads_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, driver.archive as a\n"
        "assert not {'torch', 'tensorboardX', 'matplotlib'} & set(sys.modules)\n"
        "a.MetricsLog(pathlib.Path(sys.argv[1])).write({'batch_id': 0, 'loss': 1.0})\n"
        "assert 'tensorboardX' in sys.modules and not [name for name in sys.modules if name.partition('.')[0] == 'torch']\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2], check=True, timeout=60)
    assert os.listdir(tmp_path / "tensorboard")
