"""What a ledger of a million samples costs: transitions per second beside one of a thousand, and the time until a start has read it.

python -m benchmarks.ledger [--quick] [--json FILE] [--samples N] [--small N] [--batches N] [--rounds N]

The old samples are put into the tables by SQL, as a run leaves them. Then both ledgers take the same new samples in turn, through the
real `Ledger` and `LedgerDB`: registered, ready, consumed, finished, a batch after the other, each plan waited for until it is on disk.
The prefix log is measured beside them, by itself.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.common import Aim, Stopwatch, flags, median, report
from driver.events import BatchApplied, BatchAssembled, Leaf, SampleRegistered, TrajectoryReady, VersionCommitted, VersionServed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.ledger_schema import recount
from driver.ledger_state import traj_uid_of
from driver.prefix_log import PrefixLog

N = 8
P = 64
CHECKPOINT_EVERY = 4
LIVE_BATCHES = 3  # of samples in flight when a start reads the ledger
PLAN = b"x" * 60_000  # about what the plan of 512 rows takes


def leaf(traj_uid: str) -> Leaf:
    def ref(hop: str) -> dict[str, object]:
        return {"key": f"bench/{traj_uid}a0000l0000/{hop}", "size_bytes": 8192, "location": "tmpfs:/dev/shm/headrace-0-bench"}

    return Leaf(f"{traj_uid}a0000l0000", ref("rollout"), ref("reward"), 600, 500, 1.0, True)


def fill(path: Path, samples: int, n: int = N) -> None:
    """A ledger with so many finished samples, a multiple of P: every hundredth was discarded, the rest trained. Left without its WAL."""
    assert samples % P == 0
    LedgerDB(path).close()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN")
    numbers = "WITH RECURSIVE number(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM number WHERE i + 1 < {})"
    batches, discarded = samples // P, -(-samples // 100)
    connection.execute(
        f"INSERT INTO samples {numbers.format(samples)} SELECT i, 0, i, 0, max(0, i / {P} - 2), i / {P}, "
        f"CASE WHEN i % 100 = 0 THEN NULL ELSE i / {P} END, 1 FROM number"
    )
    connection.execute(
        f"INSERT INTO trajectories {numbers.format(samples * n)} SELECT i / {n}, i % {n}, 'finished', "
        f"CASE WHEN i / {n} % 100 = 0 THEN 'discarded' ELSE 'trained' END, CASE WHEN i / {n} % 100 = 0 THEN 'data: too long' END, "
        "0, 0, NULL, 1.0, 'stop', 1.7e9, 1.7e9 FROM number"
    )
    connection.execute(
        f"INSERT INTO batches {numbers.format(batches)} SELECT i, 'committed', ?, NULL, NULL, ?, 1.7e9, 1.7e9, 1.7e9 FROM number",
        (msgspec.json.encode(list(range(P))), b"{}" * 400),
    )
    taken = connection.execute("SELECT batch_id - version_tag, count(*) FROM samples WHERE batch_id IS NOT NULL GROUP BY 1").fetchall()
    counters = [("staleness", str(staleness), count) for staleness, count in taken]
    counters += [("state", "finished", samples * n), ("outcome", "trained", (samples - discarded) * n)]
    counters += [("outcome", "discarded", discarded * n), ("reason", "data: too long", discarded * n)]
    connection.executemany("INSERT INTO counters VALUES (?, ?, ?)", counters)
    meta = {"next_uid": samples, "next_batch": batches, "cursor": [0, 0, samples], "checkpoint": "somewhere"}
    meta |= {"trained_version": batches, "committed_version": batches, "serving_version": batches}
    connection.executemany("INSERT INTO meta VALUES (?, ?)", [(name, msgspec.json.encode(value)) for name, value in meta.items()])
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


class Player:
    """One ledger and its database, which take batches of new samples."""

    def __init__(self, db: LedgerDB) -> None:
        self._db = db
        self.ledger: Ledger = db.load()

    def register(self) -> None:
        ledger = self.ledger
        event = SampleRegistered(
            uid=ledger.next_uid,
            segment=0,
            row_index=ledger.next_uid,
            pass_index=0,
            position=ledger.next_uid,
            version_tag=ledger.serving_version,
            deadline_batch=ledger.serving_version + LIVE_BATCHES,
            n=N,
            time=1.7e9,
        )
        self._db.write(ledger.apply(event))

    def finish_generation(self, uid: int) -> None:
        for index in range(N):
            name = traj_uid_of(uid, index)
            ready = TrajectoryReady(traj_uid=name, leaves=(leaf(name),), reward=1.0, finish_reason="stop", time=1.7e9)
            self._db.write(self.ledger.apply(ready))

    async def batch(self, *, checkpoint: bool) -> None:
        """P samples from registration to applied, and the checkpoint that finishes all before it."""
        ledger, db = self.ledger, self._db
        uids = range(ledger.next_uid, ledger.next_uid + P)
        for _ in uids:
            self.register()
            await asyncio.sleep(0)
        for uid in uids:
            self.finish_generation(uid)
            await asyncio.sleep(0)
        db.write(ledger.apply(BatchAssembled(batch_id=ledger.next_batch, uids=tuple(uids), plan=PLAN, time=1.7e9)))
        await db.durable()
        report = b"{}" * 400
        db.write(ledger.apply(BatchApplied(batch_id=ledger.trained_version, epoch=0, skipped=None, report=report, time=1.7e9)))
        db.write(ledger.apply(VersionServed(version=ledger.trained_version)))
        if checkpoint:
            db.write(ledger.apply(VersionCommitted(version=ledger.trained_version, checkpoint="somewhere", time=1.7e9)))
            await db.durable()


async def played(player: Player, batches: int) -> tuple[float, float]:
    """Transitions per second, and CPU microseconds per trajectory in this process, the writer's thread included."""
    watch, cpu_s = Stopwatch(), time.process_time()
    for number in range(1, batches + 1):
        await player.batch(checkpoint=number % CHECKPOINT_EVERY == 0 or number == batches)
    trajectories = batches * P * N
    return trajectories * 4 / watch.seconds(), (time.process_time() - cpu_s) / trajectories * 1e6  # registered, ready, consumed, finished


def start_s(path: Path) -> float:
    """Seconds until a start holds the live view, with the file out of the page cache as far as the kernel lets go of it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    watch = Stopwatch()
    db = LedgerDB(path)
    ledger = db.load()
    seconds = watch.seconds()
    assert len(ledger.samples) == LIVE_BATCHES * P and ledger.counts.balanced()
    db.close()
    return seconds


def recount_s(path: Path) -> float:
    """Seconds to count everything again, as a start did before counters were rows, and as `headrace ledger check` does."""
    connection = sqlite3.connect(path)
    watch = Stopwatch()
    recount(connection)
    seconds = watch.seconds()
    connection.close()
    return seconds


async def prefix_log_us(directory: Path, db: LedgerDB) -> tuple[float, float]:
    """CPU microseconds of the prefix log: for a chunk of 16 tokens as it arrives, and for one that is written, of answers of 512 tokens."""
    now = [0.0]
    log = PrefixLog(directory / "prefixes.sqlite", db, every_s=2.0, every_tokens=256, verified=lambda _: True, now=lambda: now[0])
    buffers = [log.turn(traj_uid_of(i, 0), 0, [5] * 64, 1.0)[0] for i in range(512)]
    arrive_s = write_s = 0.0
    chunk, log_probs = list(range(16)), [-0.5] * 16
    for buffer in buffers:
        buffer.asks("run/0/0/1", None)
    for _ in range(32):
        began = time.process_time()
        for buffer in buffers:
            buffer.got(chunk, log_probs, "run/0/0/1")
        arrived = time.process_time()
        now[0] += 0.25
        await log.flush()
        arrive_s, write_s = arrive_s + arrived - began, write_s + time.process_time() - arrived
    log.close(remove=True)
    chunks = 32 * len(buffers)
    return arrive_s / chunks * 1e6, write_s / chunks * 1e6


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--samples", type=int, help=f"finished samples of {N} trajectories in the large ledger (1,000,000; quick: 50,000)")
    parser.add_argument("--small", type=int, default=1_000, help="and in the small one")
    parser.add_argument("--batches", type=int, help=f"of {P} samples, played into each ledger a round (16; quick: 4)")
    parser.add_argument("--rounds", type=int, help="(7; quick: 3)")
    options = parser.parse_args()
    wanted = {"large": options.samples or (50_000 if options.quick else 1_000_000), "small": options.small}
    batches, rounds = options.batches or (4 if options.quick else 16), options.rounds or (3 if options.quick else 7)
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:  # on a disk: /tmp may be memory
        paths = {size: Path(name) / size / "ledger.sqlite" for size in wanted}
        for size, path in paths.items():
            watch = Stopwatch()
            fill(path, wanted[size] // P * P)
            figures[f"{size}_samples"] = wanted[size] // P * P
            figures[f"{size}_file_mb"] = path.stat().st_size / 1e6
            figures[f"{size}_made_s"] = watch.seconds()
        asyncio.run(_play(paths, batches, rounds, figures))
        for size, path in paths.items():
            figures[f"{size}_start_s"] = median([start_s(path) for _ in range(rounds)])
        figures["large_recount_s"] = recount_s(paths["large"])
    aims: dict[str, Aim] = {"large_over_small": (">=", 0.9), "large_start_s": ("<=", 10.0)}
    return report("ledger", figures, aims, options, ["msgspec"])


async def _play(paths: dict[str, Path], batches: int, rounds: int, figures: dict[str, float]) -> None:
    """In turn, so that the machine's moods fall on both; what is left in flight at the end is what the starts read."""
    databases = {size: LedgerDB(path) for size, path in paths.items()}
    players = {size: Player(db) for size, db in databases.items()}
    rates: dict[str, list[float]] = {size: [] for size in paths}
    cpu_us: dict[str, list[float]] = {size: [] for size in paths}
    for player in players.values():
        await played(player, CHECKPOINT_EVERY)  # warm
    for number in range(rounds):
        for size in list(paths)[:: 1 if number % 2 else -1]:
            rate, cpu = await played(players[size], batches)
            rates[size].append(rate)
            cpu_us[size].append(cpu)
    for player in players.values():
        assert not player.ledger.samples, "every batch played is committed"
        for _ in range(LIVE_BATCHES * P):
            player.register()
    log_us = [await prefix_log_us(paths["small"].parent, databases["small"]) for _ in range(rounds)]
    figures["prefix_log_arriving_us_per_chunk"], figures["prefix_log_writing_us_per_chunk"] = map(median, zip(*log_us, strict=True))
    for size, db in databases.items():
        db.close()
        figures[f"{size}_transitions_per_s"] = median(rates[size])
        figures[f"{size}_cpu_us_per_trajectory"] = median(cpu_us[size])
    ratios = [large / small for large, small in zip(rates["large"], rates["small"], strict=True)]
    figures |= {"large_over_small": median(ratios), "large_over_small_lowest": min(ratios), "large_over_small_highest": max(ratios)}


if __name__ == "__main__":
    raise SystemExit(main())
