"""Copies of rows on disk follow the store that lives, survive it, and are whole or left out."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from store import EmbeddedStore, Full, Unavailable
from store.row_file import RowFile, Saved


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    return EmbeddedStore(tmp_path / "store", 1 << 22)


def put(store: EmbeddedStore, *keys: str) -> None:
    for key in keys:
        store.put(key, {"input_ids": np.arange(50, dtype=np.int32) + len(key)})


def read(store: EmbeddedStore, key: str) -> list[int]:
    with store.open(store.ref(key)) as columns:
        return list(columns["input_ids"])


def test_a_save_copies_what_is_new_and_forgets_what_is_no_longer_wanted(store, tmp_path):
    file = RowFile(tmp_path / "rows.sqlite")
    put(store, "a", "bb")
    first = file.save(store, ["a", "bb"])
    assert (first.copied, first.forgotten, first.held) == (2, 0, 2) and first.copied_bytes > 400
    put(store, "ccc")
    assert file.save(store, ["a", "bb", "ccc"]).copied == 1, "only what is new"
    assert file.save(store, ["a", "bb", "ccc"]) == Saved(0, 0, 0, 3)
    store.free([store.ref("a")])
    assert file.save(store, ["bb", "ccc"]) == Saved(0, 0, 1, 2)
    assert file.save(store, ["bb", "ccc", "never put"]) == Saved(0, 0, 0, 2), "what was freed meanwhile is left out"
    assert sorted(store.keys()) == ["bb", "ccc"], "the store is as it was"
    file.close(remove=True)
    assert not list(tmp_path.glob("rows*"))


def test_what_a_save_returned_survives_sigkill_and_the_store(store, tmp_path):
    program = """
import os, signal, sys
from pathlib import Path
from store import EmbeddedStore
from store.row_file import RowFile
from tests.store.test_row_file import put
directory = Path(sys.argv[1])
store = EmbeddedStore(directory / "store", 1 << 22)
put(store, "a", "bb")
RowFile(directory / "rows.sqlite").save(store, ["a", "bb"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    child = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2], timeout=60)
    assert child.returncode == -signal.SIGKILL
    before = {key: read(store, key) for key in ("a", "bb")}
    store.remove()  # as after a restart of the host
    store = EmbeddedStore(tmp_path / "store", 1 << 22)
    file = RowFile(tmp_path / "rows.sqlite")
    assert file.restore(store, ["a", "bb", "elsewhere"]) == {"a", "bb"}
    assert {key: read(store, key) for key in ("a", "bb")} == before
    assert file.restore(store, ["a"]) == {"a"}, "twice is the same as once"
    file.close()


def test_N4_a_copy_with_a_flipped_byte_is_left_out_and_the_others_are_used(store, tmp_path, caplog):
    file = RowFile(tmp_path / "rows.sqlite")
    put(store, "a", "bb")
    file.save(store, ["a", "bb"])
    (encoded,) = file._connection.execute("SELECT bytes FROM objects WHERE key = 'a'").fetchone()
    bad = bytearray(encoded)
    bad[-3] ^= 1  # in the last token: the object's own checksum covers its table only
    file._connection.execute("UPDATE objects SET bytes = ? WHERE key = 'a'", (bytes(bad),))
    store.free([store.ref("a"), store.ref("bb")])
    assert file.restore(store, ["a", "bb"]) == {"bb"} and "its bytes are not what was written" in caplog.text
    file.close()


def test_what_does_not_fit_is_left_out(store, tmp_path, caplog):
    file = RowFile(tmp_path / "rows.sqlite")
    put(store, "a", "bb", "ccc")
    file.save(store, ["a", "bb", "ccc"])
    file.close()
    small = EmbeddedStore(tmp_path / "small", 2 * 4096)
    file = RowFile(tmp_path / "rows.sqlite")
    assert file.restore(small, ["a", "bb", "ccc"]) == {"a", "bb"} and "not all copied rows fit" in caplog.text
    with pytest.raises(Full):
        put(small, "more")
    file.close()


def test_a_full_disk_is_said_keeps_what_was_copied_and_the_next_save_goes_on(store, tmp_path):
    file = RowFile(tmp_path / "rows.sqlite")
    put(store, "a")
    file.save(store, ["a"])
    keys = [f"key{i}" for i in range(60)]
    put(store, *keys)
    file._connection.execute(f"PRAGMA max_page_count = {file._connection.execute('PRAGMA page_count').fetchone()[0] + 1}")
    with pytest.raises(Unavailable, match=r"database or disk is full; free space"):
        file.save(store, ["a", *keys])
    assert file.held == {"a"}
    file._connection.execute("PRAGMA max_page_count = 100000")
    assert file.save(store, ["a", *keys]).held == 61
    file.close()


@pytest.mark.parametrize("damage", [b"no database" * 500, b"", "another format"])
def test_a_file_that_can_not_be_used_is_begun_anew(store, tmp_path, damage):
    path = tmp_path / "rows.sqlite"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version = 9")
        connection.close()
    put(store, "a")
    file = RowFile(path)
    assert file.held == set() and file.save(store, ["a"]).held == 1
    file.close()


def test_a_file_that_can_not_be_made_is_said(tmp_path):
    with pytest.raises(Unavailable, match="cannot keep copies of rows"):
        RowFile(tmp_path / "nowhere" / "rows.sqlite")
