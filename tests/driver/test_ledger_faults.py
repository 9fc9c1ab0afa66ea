"""A full disk, a read-only one, a damaged file: nothing more is accepted, the reason and the remedy are said, and what was durable is
there when the cause is gone."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest

from driver.events import VersionServed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB, LedgerError
from driver.ledger_load import check
from driver.ledger_rows import Upsert
from tests.driver.conftest import fields, register
from tests.driver.test_ledger_db import play


def large(number: int) -> Upsert:
    return Upsert("dataset_rows", {"segment": 9, "row_index": number, "payload": b"x" * 40_000})


async def reopened(path: Path) -> Ledger:
    db = LedgerDB(path)
    ledger = db.load()
    db.write(ledger.apply(VersionServed(version=ledger.trained_version)))
    await db.durable()
    db.close()
    assert check(path).well
    return ledger


async def test_W1_a_full_disk_stops_the_ledger_at_its_last_commit_and_it_goes_on_when_there_is_room(tmp_path):
    path = tmp_path / "ledger.sqlite"
    db = LedgerDB(path)
    ledger = db.load()
    play(db, ledger)
    await db.durable()
    durable = fields(ledger)
    pages = db._connection.execute("PRAGMA page_count").fetchone()[0]
    db._connection.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite then says what it says of a full disk
    db.write([*ledger.apply(register(ledger)), *(large(i) for i in range(5))])
    with pytest.raises(LedgerError, match="database or disk is full; free space on its disk, then start again"):
        await db.durable()
    with pytest.raises(LedgerError, match="disk is full"):
        db.write(())
    assert db.query("SELECT count(*) FROM samples") == [(3,)], "it can still be read"
    db.close()
    assert fields(await reopened(path)) == durable


async def test_A1_what_was_queued_behind_a_failed_commit_is_not_written_though_it_would_fit(tmp_path):
    """Else the ledger had a hole: a trajectory ready of a sample that was never registered."""
    path = tmp_path / "ledger.sqlite"
    db = LedgerDB(path)
    ledger = db.load()
    play(db, ledger)
    await db.durable()
    db._connection.execute(f"PRAGMA max_page_count = {db._connection.execute('PRAGMA page_count').fetchone()[0] + 2}")
    in_commit, go_on = threading.Event(), threading.Event()
    commit = db._commit

    def slow_commit(writes: list[Upsert]) -> None:
        in_commit.set()
        go_on.wait(10)
        commit(writes)

    db._commit = slow_commit  # type: ignore[method-assign]
    db.write([*ledger.apply(register(ledger)), *(large(i) for i in range(5))])
    assert await asyncio.to_thread(in_commit.wait, 10)
    db.write([Upsert("meta", {"name": "late", "value": b"1"})])  # small, and accepted: nobody knows yet
    waiting = asyncio.create_task(db.durable())
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(LedgerError, match="disk is full"):
        await waiting
    db.close()
    again = LedgerDB(path)
    assert again.query("SELECT count(*) FROM meta WHERE name = 'late'") == [(0,)]
    assert again.load().next_uid == 3
    again.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", place], capture_output=True).returncode == 0
    )
    if not mounted:
        pytest.skip("this user may not mount a file system")
    yield place
    subprocess.run(["umount", "-l", place], check=True, capture_output=True)


def remount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", place], check=True, capture_output=True)


async def test_W1_a_disk_that_fills_up_for_real(small_disk):
    path = small_disk / "ledger.sqlite"
    db = LedgerDB(path)
    ledger = db.load()
    play(db, ledger)
    await db.durable()
    durable = fields(ledger)
    (small_disk / "others").write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 8192))
    db.write(large(i) for i in range(5))
    with pytest.raises(LedgerError, match=r"full.*free space"):
        await db.durable()
    db.close()
    with pytest.raises(LedgerError, match=r"free space|look at its disk"):
        full = LedgerDB(path)  # opens where there is room for its shared memory, and then fails at the first write
        try:
            full.write(large(i) for i in range(5))
            await full.durable()
        finally:
            full.close()
    (small_disk / "others").unlink()
    assert fields(await reopened(path)) == durable


async def test_W1_a_disk_that_becomes_read_only_for_real(small_disk):
    path = small_disk / "ledger.sqlite"
    db = LedgerDB(path)
    ledger = db.load()
    play(db, ledger)
    await db.durable()
    durable = fields(ledger)
    db.close()
    remount(small_disk, "ro")
    with pytest.raises(LedgerError, match="writ"):
        LedgerDB(path)
    remount(small_disk, "rw")
    assert fields(await reopened(path)) == durable


def a_ledger(directory: Path) -> tuple[Path, dict[str, object]]:
    path = directory / "ledger.sqlite"
    db = LedgerDB(path)
    ledger = db.load()
    play(db, ledger)
    for _ in range(200):
        db.write(ledger.apply(register(ledger)))
    asyncio.run(db.durable())
    db.close()
    return path, fields(ledger)


@pytest.mark.parametrize("seed", range(4))
def test_W1_any_flipped_bytes_are_refused_with_a_sentence_or_do_no_harm_to_what_is_counted(tmp_path, seed):
    """SQLite has no checksums: a flip in a reward is not seen. But nothing else than LedgerError comes of any, and the counts balance."""
    path, durable = a_ledger(tmp_path)
    whole = path.read_bytes()
    draw = random.Random(seed)
    refused = 0
    for _ in range(40):
        bad = bytearray(whole)
        start = draw.randrange(len(bad))
        for position in range(start, min(len(bad), start + draw.choice((1, 64, 4096)))):
            bad[position] ^= draw.randrange(1, 256)
        path.write_bytes(bad)
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        try:
            db = LedgerDB(path)
        except LedgerError as error:
            assert "restore a copy" in str(error) or "newer Headrace" in str(error) or "start again" in str(error), error
            refused += 1
            continue
        try:
            ledger = db.load()
            assert ledger.counts.balanced() and ledger.counts.registered == durable["counts"].registered  # type: ignore[attr-defined]
        except LedgerError as error:
            assert "restore a copy" in str(error), error
            refused += 1
        finally:
            db.close()
    assert refused >= 5, "the test damages what matters"
    path.write_bytes(whole)
    for name in ("-wal", "-shm"):
        path.with_name(path.name + name).unlink(missing_ok=True)
    again = LedgerDB(path)
    assert fields(again.load()) == durable, "restored from a copy"
    again.close()


@pytest.mark.parametrize("left", [0.0, 0.3, 0.9])
def test_W1_a_file_cut_short_is_refused_with_a_sentence(tmp_path, left):
    path, _ = a_ledger(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * left)])
    if left == 0.0:  # an empty file is a new ledger, as SQLite has it
        db = LedgerDB(path)
        assert db.load().next_uid == 0
        db.close()
        return
    with pytest.raises(LedgerError, match="damaged: restore a copy"):
        db = LedgerDB(path)
        try:
            db.load()
        finally:
            db.close()


async def test_W1_a_page_damaged_while_it_runs_stops_the_ledger_or_the_read_and_says_so(tmp_path):
    path, _ = await asyncio.to_thread(a_ledger, tmp_path)
    db = LedgerDB(path)
    ledger = db.load()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    db._reader.execute("PRAGMA shrink_memory")
    with pytest.raises(LedgerError, match=r"damaged: restore a copy|malformed"):
        for _ in range(300):
            db.write(ledger.apply(register(ledger)))
            await db.durable()
            db.query("SELECT count(*) FROM trajectories")
    db.close()


def test_a_directory_that_can_not_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="can not be written"):
        LedgerDB(tmp_path / "file" / "ledger.sqlite")


def test_a_copy_taken_while_it_runs_is_a_ledger(tmp_path):
    path, durable = a_ledger(tmp_path)
    db = LedgerDB(path)
    with sqlite3.connect(path) as source, sqlite3.connect(tmp_path / "copy.sqlite") as copy:
        source.backup(copy)
    source.close()
    copy.close()
    db.close()
    shutil.move(tmp_path / "copy.sqlite", path)
    again = LedgerDB(path)
    assert fields(again.load()) == durable
    again.close()
