"""Files of freed objects are written anew only when nobody can see what was in them, and never take room that a put needs."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from store import EmbeddedStore, Full, Gone, Ref, Unavailable, files

Spawn = Callable[..., subprocess.Popen[str]]
LARGE = 2 << 20


def large(value: int, length: int = LARGE) -> dict[str, np.ndarray]:
    return {"a": np.full(length, value, np.uint8)}


def spare(root: Path) -> list[Path]:
    return list((root / "spare").iterdir())


def test_a_large_object_is_written_into_the_pages_of_one_that_was_freed(store: EmbeddedStore, root: Path) -> None:
    before = store.put("before", large(1))
    inode = next((root / "objects").iterdir()).stat().st_ino
    store.free([before])
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0), "spare pages are not in use"
    assert store.stats().spare_bytes == before.size_bytes
    longer = store.put("longer", large(2, LARGE + 5000))
    assert next((root / "objects").iterdir()).stat().st_ino == inode and not spare(root)
    assert (store.open(longer)["a"] == 2).all() and store.stats().used_bytes == longer.size_bytes
    store.free([longer])
    shorter = store.put("shorter", large(3, LARGE - 5000))
    assert next((root / "objects").iterdir()).stat().st_ino == inode
    assert (store.open(shorter)["a"] == 3).all() and store.stats().used_bytes == shorter.size_bytes


def test_a_small_object_leaves_nothing_and_takes_no_large_file(store: EmbeddedStore, root: Path) -> None:
    store.free([store.put("small", {"a": np.zeros(10)})])
    assert not spare(root)
    store.free([store.put("large", large(1))])
    store.put("small", {"a": np.zeros(10)})
    assert len(spare(root)) == 1


def test_B3_a_file_that_is_viewed_is_not_written_anew(store: EmbeddedStore, root: Path) -> None:
    lease = store.open(store.put("viewed", large(1)))
    view = lease["a"]
    store.free([lease.ref])
    lease.close()
    store.put("other", large(2))
    assert (view == 1).all() and not spare(root)
    assert store.stats().pending_frees == 1 and store.stats().oldest_pending_s >= 0
    del view
    gc.collect()
    assert store.stats().pending_frees == 0 and len(spare(root)) == 1, "and when it is let go it is spare"


def test_B3_a_view_in_another_process_keeps_its_file_from_being_written_anew(store: EmbeddedStore, spawn: Spawn) -> None:
    code = """
import json, sys
from store import Ref, open_store
ref = Ref.from_wire(json.loads(sys.argv[1]))
view = open_store(ref.location).open(ref)["a"]
for _ in range(2):
    print(int(view.max()), flush=True)
    sys.stdin.readline()
"""
    ref = store.put("viewed", large(1))
    reader = spawn(code, json.dumps(ref.to_wire()))
    assert reader.stdout is not None and reader.stdin is not None
    assert reader.stdout.readline() == "1\n"
    store.free([ref])
    for index in range(2):
        store.put(f"other{index}", large(9))
    reader.stdin.write("\n")
    assert reader.stdout.readline() == "1\n"
    reader.kill()
    reader.wait(10)
    assert store.stats().spare_bytes == ref.size_bytes, "a killed reader's file is spare too"


@pytest.mark.parametrize("again", ["the same key", "another key"])
def test_B3_a_reader_that_was_overtaken_between_opening_and_locking_is_told_that_its_object_is_gone(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, again: str
) -> None:
    """Its file is another object by then. Under the same key that is what the key holds now, and whole."""
    ref = store.put("first", large(1))
    flock = fcntl.flock

    def overtaken(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        store.free([ref])
        store.put("first" if again == "the same key" else "second", large(2))
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    if again == "the same key":
        assert (store.open(ref)["a"] == 2).all()
    else:
        with pytest.raises(Gone):
            store.open(ref)


def test_a_reader_that_races_a_writer_of_recycled_files_is_never_shown_anothers_bytes(
    store: EmbeddedStore, root: Path, spawn: Spawn
) -> None:
    code = """
import sys
from pathlib import Path
import numpy as np
from store import EmbeddedStore
store = EmbeddedStore(Path(sys.argv[1]))
turn, refs = 0, []
while True:
    turn += 1
    refs.append(store.put(f"k{turn % 5}", {"turn": np.int64(turn), "a": np.full(200_000, turn)}))
    if len(refs) == 3:
        store.free([refs.pop(0)])
"""
    writer = spawn(code, root)
    seen: set[int] = set()
    for attempt in range(2_000_000):
        try:
            with store.open(Ref(f"k{attempt % 5}", 1, store.location)) as lease:
                turn, values = int(lease["turn"]), np.unique(lease["a"])
        except Gone:
            continue
        assert values.tolist() == [turn] and turn % 5 == attempt % 5, "torn, or another key's"
        seen.add(turn)
        if len(seen) == 40:
            break
    writer.kill()
    assert len(seen) == 40


def test_B2_spare_pages_give_way_to_a_put_and_are_never_more_than_half(root: Path) -> None:
    store = EmbeddedStore(root, 8 << 20)
    store.free([store.put(f"k{index}", large(index, LARGE - 8192)) for index in range(3)])
    assert len(spare(root)) == 2, "half of the capacity"
    refs = [store.put(f"s{index}", {"a": np.zeros((1 << 20) - 8192, np.uint8)}) for index in range(6)]
    stats = store.stats()
    assert stats.used_bytes == sum(ref.size_bytes for ref in refs) and stats.used_bytes + stats.spare_bytes <= 8 << 20
    refs += [store.put("t", large(1, (2 << 20) - 4096))]
    assert store.stats().spare_bytes == 0
    with pytest.raises(Full):
        store.put("u", large(1))
    store.remove()


def test_O2_on_a_full_file_system_spare_pages_are_given_up_before_a_put_is_refused(
    store: EmbeddedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.free([store.put("k", large(1))])
    create, calls = files.create_filled, []

    def full_once(path: Path, length_bytes: int) -> int:
        calls.append(path)
        if spare(root):
            raise OSError(28, "No space left on device")
        return create(path, length_bytes)

    monkeypatch.setattr(files, "create_filled", full_once)
    store.put("small", {"a": np.zeros(10)})
    assert len(calls) == 2 and not spare(root)


def test_a_writer_killed_while_it_writes_into_a_recycled_file_leaves_no_object(store: EmbeddedStore, root: Path, spawn: Spawn) -> None:
    code = """
import sys, time
from pathlib import Path
import numpy as np
import store.files
from store import EmbeddedStore
def stop(*_):
    print("there", flush=True)
    time.sleep(600)
store.files.write_all = stop
EmbeddedStore(Path(sys.argv[1])).put("k", {"a": np.full(2 << 20, 7, np.uint8)})
"""
    store.free([store.put("before", large(1))])
    writer = spawn(code, root)
    assert writer.stdout is not None and writer.stdout.readline() == "there\n"
    assert not spare(root) and len(list((root / "temp").iterdir())) == 1
    writer.kill()
    writer.wait(10)
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0)
    with pytest.raises(Gone):
        store.ref("k")
    assert (store.open(store.put("k", large(2)))["a"] == 2).all()


def test_an_owner_that_starts_again_gives_spare_pages_back(store: EmbeddedStore, root: Path) -> None:
    store.free([store.put("k", large(1))])
    assert EmbeddedStore(root, 4 << 20).stats().spare_bytes == 0 and not spare(root)


def test_a_copy_of_an_object_is_made_under_a_lease(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = store.put("k", large(1))
    fdopen, held = open, []

    def looking(handle: int, mode: str):  # type: ignore[no-untyped-def]
        other = os.open(store._path_of("k"), os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.append(True)
        os.close(other)
        return fdopen(handle, mode)

    monkeypatch.setattr("builtins.open", looking)
    assert len(store.encoded(ref)) > LARGE
    assert held == [True]


def mappings_of(root: Path) -> list[str]:
    """Permissions of what this process has mapped of the store's files."""
    return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if f"{root}/" in line]


@pytest.mark.parametrize("length", [LARGE, 20 << 20], ids=["by one thread", "by several"])
def test_what_is_written_through_a_kept_mapping_is_whole_and_the_mapping_is_no_lease(root: Path, length: int) -> None:
    store = EmbeddedStore(root, 96 << 20)
    drawn = np.random.default_rng(0)
    store.free([store.put("first", large(1, length))])
    for turn, size in enumerate([length, length - 70_001, length + 5_000, length // 2, length]):
        columns = {"a": drawn.integers(0, 256, size, np.uint8), "b": drawn.standard_normal(1000)}
        ref = store.put(f"k{turn}", columns)
        assert mappings_of(root) == ["rw-s"], "the writer's, one for all of them"
        with store.open(ref) as lease:
            assert (lease["a"] == columns["a"]).all() and (lease["b"] == columns["b"]).all()
        store.free([ref])
        assert store.stats().pending_frees == 0 and len(spare(root)) == 1, "a writer's mapping is no lease"
    store.remove()


def test_B2_a_spare_file_that_is_given_up_keeps_no_memory_though_its_writer_has_it_mapped(store: EmbeddedStore, root: Path) -> None:
    for value in range(3):
        store.free([store.put("k", large(value))])
    assert mappings_of(root) == ["rw-s"]
    EmbeddedStore(root, 64 << 20)  # its owner starts anew
    found = [os.stat(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if f"{root}/" in _target(name)]
    assert [(facts.st_nlink, facts.st_blocks) for facts in found] in ([(0, 0)], [(0, 0), (0, 0)])
    for value in (7, 8):
        ref = store.put("k", large(value))
        assert (store.open(ref)["a"] == value).all()
        store.free([ref])
    assert mappings_of(root) == ["rw-s"], "of the file that is gone nothing is left"
    store.close()
    assert mappings_of(root) == []


def test_B2_a_spare_file_that_can_not_grow_keeps_no_memory_though_its_writer_has_it_mapped(
    store: EmbeddedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in range(2):
        store.free([store.put("k", large(value))])
    (mapped,) = store._kept._mapped.values()
    real, blocks = os.posix_fallocate, []

    def full_once(handle: int, start: int, length: int) -> None:
        if start:  # what grows
            raise OSError(errno.ENOSPC, "no space")
        blocks.append(os.fstat(mapped.handle).st_blocks)
        real(handle, start, length)

    monkeypatch.setattr(os, "posix_fallocate", full_once)
    ref = store.put("longer", large(3, LARGE + 5000))
    assert blocks == [0], "its pages are there for the file that takes its place"
    assert (store.open(ref)["a"] == 3).all()


def test_threads_that_let_go_of_mappings_at_once_do_not_close_what_another_looks_at(
    store: EmbeddedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.free([store.put("k", large(1))])
    (mapped,) = store._kept._mapped.values()
    store._spares.shrink()
    real = os.fstat

    def meanwhile(handle: int) -> os.stat_result:
        if handle == mapped.handle:
            monkeypatch.setattr(os, "fstat", real)
            store._kept._prune()  # another thread's
        return real(handle)

    monkeypatch.setattr(os, "fstat", meanwhile)
    try:
        ref = store.put("k", large(2))
    except Unavailable as error:
        store._kept._mapped.clear()
        pytest.fail(f"it was closed meanwhile: {error}")
    assert (store.open(ref)["a"] == 2).all()
    assert mappings_of(root) == ["rw-s"]


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


def test_O2_what_a_recycled_file_grows_by_is_there_before_it_is_written(store: EmbeddedStore, root: Path) -> None:
    """A page that is missing when a full file system is written to through a mapping ends the process."""
    store.free([store.put("k", large(1))])
    with store._account.locked():
        handle = store._spares.take(root / "temp" / "grown", 2 * LARGE)
    assert handle is not None and os.fstat(handle).st_blocks * 512 >= 2 * LARGE
    os.close(handle)


def test_W8_a_writer_of_many_large_objects_keeps_few_mappings(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("store.kept._MOST", 3)
    store = EmbeddedStore(root, 96 << 20)
    refs = [store.put(f"k{value}", large(value)) for value in range(10)]
    assert len(mappings_of(root)) == 4
    assert all((store.open(ref)["a"] == value).all() for value, ref in enumerate(refs))
    store.remove()
    assert mappings_of(root) == []
