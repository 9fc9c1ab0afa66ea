"""Park and unpark: every object is in the store or in the archive, whenever the owner is killed."""

import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from store import Column, Damaged, EmbeddedStore, Full
from store.parking import ARCHIVE

Child = subprocess.Popen[str]
KEYS = ["run/1/rollout", "run/1/reward", "run/weights/0/3/" + "ü" * 20]


def say_line(child: Child) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def fill(store: EmbeddedStore) -> None:
    for index, key in enumerate(KEYS):
        store.put(key, {"a": np.full(1000, index), "w": Column(np.full(3, index, np.uint16), "bfloat16"), "s": np.float32(index)})


def check(store: EmbeddedStore) -> None:
    assert sorted(store.keys()) == sorted(KEYS)
    for index, key in enumerate(KEYS):
        lease = store.open(store.ref(key))
        assert (lease["a"] == index).all() and (lease["w"] == index).all() and lease["s"] == index and lease.dtypes["w"] == "bfloat16"


def test_H6_parked_objects_come_back_byte_for_byte_in_a_new_store(root: Path, tmp_path: Path) -> None:
    store = EmbeddedStore(root, 1 << 20)
    fill(store)
    before = {key: store.encoded(store.ref(key)) for key in KEYS}
    assert store.park(tmp_path / "parked") == len(KEYS)
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0)
    store.remove()
    again = EmbeddedStore(root, 1 << 20)
    assert again.unpark(tmp_path / "parked") == len(KEYS)
    check(again)
    assert {key: again.encoded(again.ref(key)) for key in KEYS} == before
    assert not list((tmp_path / "parked").iterdir())
    again.remove()


def test_nothing_parked_is_not_an_error(store: EmbeddedStore, tmp_path: Path) -> None:
    assert store.unpark(tmp_path / "absent") == 0
    assert store.park(tmp_path / "empty") == 0 and store.unpark(tmp_path / "empty") == 0


KILLED = """
import os, sys, time
from pathlib import Path
import store.parking
from store import EmbeddedStore
def stop(*_):
    print("there", flush=True)
    time.sleep(600)
step, put, count = sys.argv[3], EmbeddedStore.put_encoded, []
if step == "archive half written":
    encoded = EmbeddedStore.encoded
    EmbeddedStore.encoded = lambda self, ref: (count.append(1), encoded(self, ref) if len(count) < 3 else stop())[1]
elif step == "archive in place":
    store.parking._sync = stop
elif step == "half put back":
    EmbeddedStore.put_encoded = lambda self, key, data: (count.append(1), put(self, key, data) if len(count) < 3 else stop())[1]
embedded = EmbeddedStore(Path(sys.argv[1]))
if step == "half put back":
    embedded.unpark(Path(sys.argv[2]))
else:
    embedded.park(Path(sys.argv[2]))
"""


@pytest.mark.parametrize("step", ["archive half written", "archive in place", "half put back"])
def test_W7_killed_half_way_unpark_completes_it(
    store: EmbeddedStore, root: Path, tmp_path: Path, spawn: Callable[..., Child], step: str
) -> None:
    fill(store)
    if step == "half put back":
        store.park(tmp_path)
    child = spawn(KILLED, root, tmp_path, step)
    assert say_line(child) == "there"
    child.kill()
    child.wait(10)
    store.unpark(tmp_path)
    check(store)
    assert not list(tmp_path.iterdir())
    assert store.stats().used_bytes == sum(store.ref(key).size_bytes for key in KEYS)


def test_parking_again_after_a_half_way_unpark_loses_nothing(store: EmbeddedStore, tmp_path: Path) -> None:
    fill(store)
    store.park(tmp_path)
    store.put("later", {"a": np.zeros(1)})
    store.park(tmp_path)
    store.unpark(tmp_path)
    assert sorted(store.keys()) == sorted([*KEYS, "later"])


def test_a_store_too_small_for_what_was_parked_says_so_and_keeps_the_archive(root: Path, tmp_path: Path) -> None:
    store = EmbeddedStore(root, 1 << 20)
    fill(store)
    store.park(tmp_path)
    small = EmbeddedStore(root, 4096 * 4)
    with pytest.raises(Full):
        small.unpark(tmp_path)
    big = EmbeddedStore(root, 1 << 20)
    big.unpark(tmp_path)
    check(big)
    big.remove()


def test_a_damaged_archive_is_an_error_not_an_object(store: EmbeddedStore, tmp_path: Path) -> None:
    fill(store)
    store.park(tmp_path)
    archive = tmp_path / ARCHIVE
    whole = archive.read_bytes()
    with tarfile.open(archive) as tar:
        first = tar.getmembers()[0]
    archive.write_bytes(whole[: first.offset_data] + b"not an object" + whole[first.offset_data + 13 :])
    with pytest.raises(Damaged):
        store.unpark(tmp_path)
    archive.write_bytes(whole[:5000])
    with pytest.raises(Damaged):
        store.unpark(tmp_path)
    archive.write_bytes(whole)
    store.unpark(tmp_path)
    check(store)
