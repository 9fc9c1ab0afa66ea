"""What a run leaves for later reading: finished trajectories as Parquet, and one line of metrics per batch.

`Archive` promises that every file under a final name is whole: a file is written and synced under a temporary name, then renamed.
Rows still buffered when the process dies are lost here but not in the ledger, whose replay appends them again; the reader keeps the
last row of each `traj_uid`, so a replay may write a row twice.

`MetricsLog` appends one JSON object per batch to `metrics.jsonl` and one event to TensorBoard. A line is written by a single call;
a torn last line (the machine stopped) is cut off at the next start, and of a batch written twice `read_metrics` keeps the last.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import orjson


class FinishedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory that has ended, with what made it. Token lists are those of its leaf: S ids, S-1 mask and log-prob entries."""

    traj_uid: str
    uid: int
    run_id: str
    dataset_id: str
    row_index: int
    outcome: str  # trained | evaluated | discarded
    reason: str | None = None
    version_tag: int
    batch_id: int | None = None
    reward: float | None = None
    is_correct: bool | None = None
    prompt: str
    response: str
    input_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    version_spans: list[list[int]]  # (epoch, version, start, end) over response positions
    attempts: int
    started_at: float
    finished_at: float
    parts: str = "{}"  # JSON


@functools.cache
def _schema() -> Any:
    """pyarrow takes a quarter of a second to import: it is, at the first file."""
    import pyarrow as pa

    schema = pa.schema(
        [
            ("traj_uid", pa.string()),
            ("uid", pa.int64()),
            ("run_id", pa.string()),
            ("dataset_id", pa.string()),
            ("row_index", pa.int64()),
            ("outcome", pa.string()),
            ("reason", pa.string()),
            ("version_tag", pa.int64()),
            ("batch_id", pa.int64()),
            ("reward", pa.float64()),
            ("is_correct", pa.bool_()),
            ("prompt", pa.string()),
            ("response", pa.string()),
            ("input_ids", pa.list_(pa.int32())),
            ("response_mask", pa.list_(pa.int8())),
            ("rollout_log_probs", pa.list_(pa.float32())),
            ("version_spans", pa.list_(pa.list_(pa.int64()))),
            ("attempts", pa.int32()),
            ("started_at", pa.float64()),
            ("finished_at", pa.float64()),
            ("parts", pa.string()),
        ]
    )
    assert tuple(schema.names) == FinishedTrajectory.__struct_fields__
    return schema


class Archive:
    """Buffered rows, rotated into `trajectories-N.parquet` by count and by age. One owner per directory; safe to call from threads.

    `append` flushes when `rows_per_file` rows are buffered or the oldest has waited `max_age_s`; an owner that appends seldom calls
    `flush` when `due` says so. A file of long trajectories takes a while to write: call both in a worker thread.
    """

    def __init__(self, directory: Path, rows_per_file: int = 2000, max_age_s: float = 60.0) -> None:
        self.directory = directory
        self._rows_per_file = rows_per_file
        self._max_age_s = max_age_s
        self._rows: list[FinishedTrajectory] = []
        self._oldest_at = 0.0
        self._buffer = threading.RLock()
        self._writing = threading.Lock()
        directory.mkdir(parents=True, exist_ok=True)
        for partial in directory.glob(".trajectories-*.tmp"):
            partial.unlink()
        files = _files(directory)
        self._next_file = int(files[-1].stem.rpartition("-")[2]) + 1 if files else 0

    @property
    def due(self) -> bool:
        """Whether the buffer should be written now."""
        with self._buffer:
            age_s = time.monotonic() - self._oldest_at
            return bool(self._rows) and (len(self._rows) >= self._rows_per_file or age_s >= self._max_age_s)

    def append(self, row: FinishedTrajectory) -> None:
        with self._buffer:
            if not self._rows:
                self._oldest_at = time.monotonic()
            self._rows.append(row)
        if self.due:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered as one file. When that fails the rows stay buffered and OSError says why."""
        with self._writing:
            with self._buffer:
                rows = list(self._rows)
            if not rows:
                return
            final = self.directory / f"trajectories-{self._next_file:08d}.parquet"
            partial = self.directory / f".{final.name}.tmp"
            import pyarrow as pa
            import pyarrow.parquet as pq

            table = pa.Table.from_pylist([msgspec.structs.asdict(row) for row in rows], schema=_schema())
            try:
                with partial.open("wb") as file:
                    pq.write_table(table, file, compression="zstd")
                    file.flush()
                    os.fsync(file.fileno())
                partial.rename(final)
                _sync_directory(self.directory)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"the archive {self.directory} can not be written ({error}); free space there, {len(rows)} rows wait in memory",
                ) from error
            self._next_file += 1
            with self._buffer:
                del self._rows[: len(rows)]
                self._oldest_at = time.monotonic()

    def find(self, traj_uid: str) -> FinishedTrajectory | None:
        """The newest row of this trajectory, buffered or written."""
        with self._buffer:
            for row in reversed(self._rows):
                if row.traj_uid == traj_uid:
                    return row
        import pyarrow.parquet as pq

        for path in reversed(_files(self.directory)):
            # The file's statistics tell most files apart without reading a column.
            found = pq.read_table(path, filters=[("traj_uid", "=", traj_uid)]).to_pylist()
            if found:
                return FinishedTrajectory(**found[-1])
        return None


def read_trajectories(directory: Path) -> Iterator[FinishedTrajectory]:
    """All archived trajectories in the order written, each `traj_uid` once: the row written last wins. One file in memory at a time."""
    import pyarrow.parquet as pq

    last: dict[str, tuple[int, int]] = {}
    files = _files(directory)
    for number, path in enumerate(files):
        uids = pq.read_table(path, columns=["traj_uid"]).column("traj_uid").to_pylist()
        last.update((uid, (number, position)) for position, uid in enumerate(uids))
    for number, path in enumerate(files):
        for position, row in enumerate(pq.read_table(path).to_pylist()):
            if last[row["traj_uid"]] == (number, position):
                yield FinishedTrajectory(**row)


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("trajectories-*.parquet"))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class MetricsLog:
    """One object of numbers per batch, keyed by `batch_id`, to `RUN_DIR/metrics.jsonl` and `RUN_DIR/tensorboard`."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = (run_dir / "metrics.jsonl").open("ab", buffering=0)
        _cut_torn_line(self._file.fileno(), run_dir / "metrics.jsonl")
        self._board = _Board(run_dir / "tensorboard")

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of one batch; must hold an integer `batch_id`. Not-a-number becomes null."""
        assert isinstance(metrics.get("batch_id"), int), "every line of metrics belongs to a batch"
        self._file.write(orjson.dumps(dict(metrics), option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._board.write(metrics)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of every batch in order of `batch_id`; of a batch written twice, the last; [] when there are none yet."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    by_batch: dict[int, dict[str, Any]] = {}
    *lines, _torn = path.read_bytes().split(b"\n")  # after the last newline: nothing, or what is just being written
    for number, line in enumerate(lines, start=1):
        try:
            row = orjson.loads(line)
            by_batch[row["batch_id"]] = row
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is not a batch's metrics ({error!r}); remove the line") from None
    return [by_batch[batch_id] for batch_id in sorted(by_batch)]


def _cut_torn_line(descriptor: int, path: Path) -> None:
    """Truncate to the last newline: what follows it was never written whole."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.ftruncate(descriptor, whole)


class _Board:
    """TensorBoard events, one per batch, written in this thread. The package is imported at the first write, to keep starts quick."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._last_batch = -1
        self._files_opened = 0

    def write(self, metrics: Mapping[str, Any]) -> None:
        events = _tensorboard_events()
        batch_id, now = metrics["batch_id"], time.time()
        if self._writer is None or batch_id <= self._last_batch:
            self._open(events, batch_id, now)
        self._last_batch = batch_id
        values = [
            events.Summary.Value(tag=name, simple_value=float(value))
            for name, value in _one_by_one(metrics)
            if name != "batch_id" and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self._writer.write_event(events.Event(wall_time=now, step=batch_id, summary=events.Summary(value=values)))
        self._writer.flush()

    def _open(self, events: Any, batch_id: int, now: float) -> None:
        """A new event file that begins at this batch and tells the reader to drop what earlier files say from there on."""
        self.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files_opened += 1
        suffix = f".{os.getpid()}.{self._files_opened}"  # names hold whole seconds only: two of one second must differ
        self._writer = events.EventsWriter(str(self._directory / "events"), suffix)
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.write_event(events.Event(wall_time=now, step=batch_id, session_log=start))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _Events:
    """The four names of tensorboardX that are used here."""

    def __init__(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.EventsWriter, self.Event, self.SessionLog, self.Summary = EventsWriter, Event, SessionLog, Summary


def _one_by_one(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A mapping's values one by one, as name/key."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", each) for key, each in value.items())
        else:
            yield name, value


@functools.cache
def _tensorboard_events() -> _Events:
    """Import tensorboardX without torch: it would load it where installed, 4 s and 200 MB the driver has no use for."""
    if "torch" in sys.modules:
        return _Events()
    sys.modules["torch"] = None  # type: ignore[assignment]  # makes `import torch` raise the ImportError that tensorboardX handles
    try:
        return _Events()
    finally:
        del sys.modules["torch"]
