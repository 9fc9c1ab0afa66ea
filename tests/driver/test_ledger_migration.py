"""A ledger of an older schema is opened with all that it holds, or left as it was; a newer one is refused."""

from __future__ import annotations

import json
import logging
import sqlite3
from pathlib import Path

import msgspec
import pytest

from driver import ledger_schema
from driver.events import BatchApplied, BatchAssembled, Leaf, TrajectoryDiscarded, TrajectoryRetried, VersionCommitted, VersionServed
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB, LedgerError
from driver.ledger_load import check
from driver.ledger_state import traj_uid_of
from tests.driver.conftest import fields, leaf, ready, register

# As schema 1 wrote it. Not taken from the product, which may change.
SCHEMA_1 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE datasets (dataset_id TEXT PRIMARY KEY, name TEXT NOT NULL, closed INTEGER NOT NULL, created_at REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE segments (segment INTEGER PRIMARY KEY, dataset_id TEXT NOT NULL REFERENCES datasets, rows INTEGER NOT NULL,
  idempotency_key TEXT UNIQUE, digest TEXT);
CREATE TABLE dataset_rows (segment INTEGER NOT NULL, row_index INTEGER NOT NULL, payload BLOB NOT NULL,
  PRIMARY KEY (segment, row_index)) WITHOUT ROWID;
CREATE TABLE samples (uid INTEGER PRIMARY KEY, segment INTEGER, row_index INTEGER, pass_index INTEGER, version_tag INTEGER,
  deadline_batch INTEGER, batch_id INTEGER, over INTEGER NOT NULL);
CREATE INDEX samples_live ON samples (uid) WHERE over = 0;
CREATE TABLE trajectories (uid INTEGER NOT NULL, idx INTEGER NOT NULL, state TEXT NOT NULL, outcome TEXT, reason TEXT,
  infrastructure_attempts INTEGER NOT NULL, data_attempts INTEGER NOT NULL, leaves BLOB, reward REAL, finish_reason TEXT,
  started_at REAL, ready_at REAL, PRIMARY KEY (uid, idx)) WITHOUT ROWID;
CREATE TABLE batches (batch_id INTEGER PRIMARY KEY, state TEXT NOT NULL, uids BLOB, plan BLOB, skipped TEXT, report BLOB,
  assembled_at REAL, applied_at REAL, committed_at REAL);
PRAGMA user_version = 1;
INSERT INTO meta VALUES ('cursor', '[0,0,4]'), ('next_uid', '4'), ('trained_version', '1'), ('committed_version', '1'),
  ('serving_version', '1'), ('checkpoint', '"c"'), ('intent', '{"state": "paused"}');
INSERT INTO datasets VALUES ('d000000', 'data.jsonl', 1, 1.0);
INSERT INTO segments VALUES (0, 'd000000', 9, NULL, NULL);
INSERT INTO samples VALUES (0,0,0,0,0,2,0,1), (1,0,1,0,0,2,1,0), (2,0,2,0,0,2,NULL,0), (3,0,3,0,0,2,NULL,1);
INSERT INTO batches VALUES (0,'committed','[0]',NULL,NULL,'{}',1.0,2.0,3.0), (1,'assembled','[1]',x'5b325d',NULL,NULL,5.0,NULL,NULL),
  (2,'unmade','[2]','[3]',NULL,NULL,6.0,NULL,NULL);
"""


def leaves(uid: int, index: int) -> bytes:
    return msgspec.json.encode((leaf(traj_uid_of(uid, index)),))


def write_1(path: Path) -> None:
    """What schema 1 held after the events of `same_events`, with the newest part still in the WAL, as a killed driver leaves it."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SCHEMA_1)
    connection.executemany(
        "INSERT INTO trajectories VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        [
            (0, 0, "finished", "trained", None, 0, 0, leaves(0, 0), 1.0, "stop", 1.0, 2.0),
            (0, 1, "finished", "trained", None, 0, 0, leaves(0, 1), 1.0, "stop", 1.0, 2.0),
            (1, 0, "consumed", None, None, 0, 0, leaves(1, 0), 1.0, "stop", 1.0, 2.0),
            (1, 1, "finished", "discarded", "data: too long: 99 tokens", 0, 0, None, None, None, 1.0, None),
            (2, 0, "running", None, "engine died", 1, 0, None, None, None, 1.0, None),
            (2, 1, "ready", None, None, 0, 0, leaves(2, 1), 1.0, "stop", 1.0, 2.0),
            (3, 0, "finished", "discarded", "data: no answer", 0, 0, None, None, None, 1.0, None),
            (3, 1, "finished", "discarded", "data: no answer", 0, 0, None, None, None, 1.0, None),
        ],
    )
    for kept in (path, path.with_name(path.name + "-wal")):
        kept.with_name(kept.name + ".killed").write_bytes(kept.read_bytes())
    connection.close()
    for kept in (path, path.with_name(path.name + "-wal")):
        kept.with_name(kept.name + ".killed").rename(kept)


def same_events() -> Ledger:
    ledger = Ledger()
    for _ in range(4):
        ledger.apply(register(ledger))
    for index in range(2):
        ledger.apply(ready(0, index))
        ledger.apply(TrajectoryDiscarded(traj_uid=traj_uid_of(3, index), reason="data: no answer", time=4.0))
    ledger.apply(BatchAssembled(batch_id=0, uids=(0,), plan=b"[1]", time=1.0))
    ledger.apply(BatchApplied(batch_id=0, epoch=0, skipped=None, report=b"{}", time=2.0))
    ledger.apply(VersionCommitted(version=1, checkpoint="c", time=3.0))
    ledger.apply(VersionServed(version=1))
    ledger.apply(ready(1, 0))
    ledger.apply(TrajectoryDiscarded(traj_uid=traj_uid_of(1, 1), reason="data: too long: 99 tokens", time=4.0))
    ledger.apply(BatchAssembled(batch_id=1, uids=(1,), plan=b"[2]", time=5.0))
    ledger.apply(TrajectoryRetried(traj_uid=traj_uid_of(2, 0), kind="infrastructure", reason="engine died"))
    ledger.apply(ready(2, 1))
    return ledger


def test_W1_a_ledger_of_schema_1_is_opened_with_all_its_state_and_a_copy_of_it_is_kept(tmp_path, caplog):
    path = tmp_path / "ledger.sqlite"
    write_1(path)
    with caplog.at_level(logging.INFO):
        db = LedgerDB(path)
    kept = tmp_path / "ledger.schema1.sqlite"
    assert f"was of schema 1 and is now of schema 2; as it was it lies in {kept}" in caplog.text
    expected = same_events()
    expected.last_discard = None  # schema 1 did not keep it
    expected.cursor = {"d000000": expected.cursor[""]}  # schema 1 had one for all datasets
    assert fields(db.load()) == fields(expected)
    assert json.loads(db.query("SELECT value FROM meta WHERE name = 'intent'")[0][0]) == {"state": "paused"}
    assert db.query("SELECT rows FROM segments") == [(9,)]
    db.close()
    assert check(path).well
    with sqlite3.connect(kept) as old:
        assert old.execute("PRAGMA user_version").fetchone() == (1,)
        assert old.execute("SELECT count(*) FROM trajectories WHERE leaves IS NOT NULL").fetchone() == (4,), "the WAL's part too"
    old.close()
    caplog.clear()
    LedgerDB(path).close()
    assert "schema" not in caplog.text, "once"


@pytest.mark.parametrize("fault", ["in the middle of it", "no room for the copy"])
def test_W1_a_migration_that_fails_leaves_the_ledger_as_it_was(tmp_path, monkeypatch, fault):
    path = tmp_path / "ledger.sqlite"
    write_1(path)
    if fault == "in the middle of it":

        def half(connection: sqlite3.Connection) -> None:
            connection.execute("CREATE TABLE counters (kind TEXT)")
            connection.execute("UPDATE samples SET over = 1")
            raise sqlite3.OperationalError("disk I/O error")

        monkeypatch.setattr(ledger_schema, "MIGRATIONS", {2: half})
    else:
        (tmp_path / "ledger.schema1.sqlite.partial").mkdir()  # nothing can be written there
    with pytest.raises(LedgerError):
        LedgerDB(path)
    monkeypatch.undo()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
        assert connection.execute("SELECT over FROM samples ORDER BY uid").fetchall() == [(1,), (0,), (0,), (1,)]
        assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'counters'").fetchone() == (0,)
    connection.close()
    if fault == "in the middle of it":
        db = LedgerDB(path)
        assert db.load().next_uid == 4, "the next start migrates it"
        db.close()


def test_a_new_ledger_and_a_migrated_one_have_the_same_tables(tmp_path):
    def tables(path: Path) -> list[tuple[str, str]]:
        LedgerDB(path).close()
        with sqlite3.connect(path) as connection:
            found = connection.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        connection.close()
        return found

    write_1(tmp_path / "old.sqlite")
    assert tables(tmp_path / "old.sqlite") == tables(tmp_path / "new.sqlite")


def test_the_check_does_not_read_an_older_schema_and_names_what_migrates_it(tmp_path):
    write_1(tmp_path / "ledger.sqlite")
    with pytest.raises(LedgerError, match=r"schema 1.*headrace up"):
        check(tmp_path / "ledger.sqlite")


def test_a_leaf_is_what_both_schemas_hold():
    assert msgspec.json.decode(leaves(0, 0), type=tuple[Leaf, ...]) == (leaf(traj_uid_of(0, 0)),)
