"""What was durable comes back as it was, whatever happened to the process; damage and rivals are refused with a sentence."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from driver.events import BatchApplied, BatchAssembled, TrajectoryDiscarded, VersionCommitted, VersionServed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB, LedgerError
from driver.ledger_load import check
from driver.ledger_state import traj_uid_of
from tests.driver.conftest import fields, ready, register


def play(db: LedgerDB, ledger: Ledger) -> None:
    """Three samples: one trained and committed, one consumed, one half ready."""

    def apply(event):
        db.write(ledger.apply(event))

    for _ in range(3):
        apply(register(ledger))
    for index in range(2):
        apply(ready(0, index))
    apply(BatchAssembled(batch_id=0, uids=(0,), plan=b"[1]", time=1.0))
    apply(BatchApplied(batch_id=0, epoch=0, skipped=None, report=b"{}", time=2.0))
    apply(VersionCommitted(version=1, checkpoint="c", time=3.0))
    apply(VersionServed(version=1))
    apply(ready(1, 0))
    apply(TrajectoryDiscarded(traj_uid=traj_uid_of(1, 1), reason="data: too long", time=4.0))
    apply(BatchAssembled(batch_id=1, uids=(1,), plan=b"[2]", time=5.0))
    apply(ready(2, 1))


async def test_the_live_view_is_rebuilt_exactly(tmp_path):
    db = LedgerDB(tmp_path / "ledger.sqlite")
    ledger = db.load()
    play(db, ledger)
    await db.durable()
    db.close()
    again = LedgerDB(tmp_path / "ledger.sqlite")
    assert fields(again.load()) == fields(ledger)
    assert again._connection.execute("PRAGMA synchronous").fetchone() == (2,), "FULL: a commit survives the host"
    again.close()


def test_W1_what_was_durable_survives_kill_minus_9(tmp_path):
    program = """
import asyncio, os, signal, sys
from pathlib import Path
from driver.ledger_db import LedgerDB
from tests.driver.test_ledger_db import play
async def main():
    db = LedgerDB(Path(sys.argv[1]))
    play(db, db.load())
    await db.durable()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    path = tmp_path / "ledger.sqlite"
    child = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(__file__).parents[2], timeout=60)
    assert child.returncode == -signal.SIGKILL
    db = LedgerDB(path)
    ledger = db.load()
    assert (ledger.next_uid, ledger.trained_version, ledger.next_batch) == (3, 1, 2)
    assert ledger.counts.registered == 6 and ledger.counts.balanced()
    db.close()


def test_one_driver_per_ledger_and_the_rival_is_told_who_holds_it(tmp_path):
    db = LedgerDB(tmp_path / "ledger.sqlite")
    with pytest.raises(LedgerError, match=f"process {os.getpid()}.*headrace down"):
        LedgerDB(tmp_path / "ledger.sqlite")
    db.close()
    LedgerDB(tmp_path / "ledger.sqlite").close()


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(LedgerError, match="can not be opened as a ledger"):
        LedgerDB(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_ledger_of_a_newer_version_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    LedgerDB(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(LedgerError, match="newer Headrace"):
        LedgerDB(path)


async def test_a_write_that_fails_stops_everything_and_says_so(tmp_path):
    db = LedgerDB(tmp_path / "ledger.sqlite")
    ledger = db.load()
    db.write(ledger.apply(register(ledger)))
    await db.durable()
    db._connection.execute("PRAGMA query_only = 1")  # as a read-only or full disk would
    db.write(ledger.apply(register(ledger)))
    with pytest.raises(LedgerError, match="can not be written"):
        await db.durable()
    with pytest.raises(LedgerError, match="can not be written"):
        db.write([])
    db.close()
    again = LedgerDB(tmp_path / "ledger.sqlite")
    assert again.load().next_uid == 1
    again.close()


async def test_a_run_directory_may_have_any_name(tmp_path):
    path = tmp_path / "50% of #1, really? yes&no=file:x" / "ledger.sqlite"
    db = LedgerDB(path)
    ledger = db.load()
    db.write(ledger.apply(register(ledger)))
    await db.durable()
    db.close()
    assert path.stat().st_size > 0 and check(path).samples == 1
    again = LedgerDB(path)
    assert again.load().next_uid == 1
    again.close()
