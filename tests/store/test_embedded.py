"""The embedded store within one process: what goes in comes out, once, whole, and within the capacity."""

import fcntl
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import Column, EmbeddedStore, Full, Gone, Ref, Unavailable, default_root, occupied_bytes, open_store
from store.account import Balance
from store.embedded import FREED_AT_ONCE
from tests.store.conftest import wait_for

ROW: dict[str, Any] = {
    "input_ids": np.arange(7, dtype=np.int32),
    "score": np.float32(0.5),
    "spans": np.zeros((0, 4), np.int64),
    "flags": np.array([True, False]),
}


def test_views_are_aligned_read_only_and_share_one_mapping(store: EmbeddedStore) -> None:
    lease = store.open(store.put("k", ROW))
    assert all(view.ctypes.data % 64 == 0 and not view.flags.writeable and not view.flags.owndata for view in lease.values())
    assert len({id(view.base) for view in lease.values()}) == 1
    with pytest.raises(ValueError, match="read-only"):
        lease["input_ids"][0] = 9
    with pytest.raises(ValueError, match="WRITEABLE"):
        lease["input_ids"].flags.writeable = True


def test_B3_a_view_outlives_close_free_and_the_store_itself(root: Path) -> None:
    store = EmbeddedStore(root, 1 << 20)
    ref = store.put("k", ROW)
    lease = store.open(ref)
    view = lease["input_ids"]
    lease.close()
    with pytest.raises(ValueError, match="closed"):
        lease["input_ids"]
    store.free([ref])
    store.remove()
    gc.collect()
    np.testing.assert_array_equal(view, ROW["input_ids"])


def test_B3_bytes_count_until_the_last_view_is_let_go(store: EmbeddedStore) -> None:
    ref = store.put("k", ROW)
    lease = store.open(ref)
    view = lease["score"]
    store.free([ref])
    assert (store.stats().objects, store.stats().used_bytes) == (0, ref.size_bytes)
    lease.close()
    assert store.stats().used_bytes == ref.size_bytes
    del view
    gc.collect()
    assert store.stats().used_bytes == 0


def test_B2_full_is_raised_before_anything_is_written_and_room_comes_back(root: Path) -> None:
    store = EmbeddedStore(root, 3 * 4096)
    refs = [store.put(f"k{index}", {"a": np.zeros(10)}) for index in range(3)]
    with pytest.raises(Full, match="needs 4096 bytes, but 12288 of 12288 are in use"):
        store.put("k3", {"a": np.zeros(10)})
    assert not list((root / "temp").iterdir()) and store.stats().used_bytes == 12288
    store.free(refs[:1])
    store.put("k3", {"a": np.zeros(10)})
    store.remove()


def test_B2_full_counts_what_readers_let_go_meanwhile(root: Path) -> None:
    store = EmbeddedStore(root, 4096)
    ref = store.put("a", {"a": np.zeros(10)})
    lease = store.open(ref)
    store.free([ref])
    with pytest.raises(Full):
        store.put("b", {"a": np.zeros(10)})
    lease.close()
    gc.collect()
    store.put("b", {"a": np.zeros(10)})
    store.remove()


def test_O2_a_file_system_that_is_full_raises_full_and_leaves_nothing(
    store: EmbeddedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(Full, match="shm-size"):
        store.put("k", ROW)
    assert store.stats().used_bytes == 0 and not list((root / "temp").iterdir())


def test_O2_a_capacity_that_the_file_system_lacks_is_refused_at_once(root: Path) -> None:
    with pytest.raises(ValueError, match="shm-size"):
        EmbeddedStore(root, 1 << 60)
    EmbeddedStore(root, 4096).remove()


@pytest.mark.parametrize(
    "columns", [{"w": ("float32", (300, 70)), "b": ("bfloat16", (5,))}, {"s": ("uint8", ())}, {"e": ("int64", (0, 4))}, {}]
)
def test_B2_a_reservation_is_what_the_object_takes(store: EmbeddedStore, columns: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    arrays = {
        name: Column(np.zeros(shape, np.uint16), dtype) if dtype == "bfloat16" else np.zeros(shape, dtype)
        for name, (dtype, shape) in columns.items()
    }
    assert store.put("k", arrays).size_bytes == occupied_bytes(columns) == store.stats().used_bytes


def test_a_reference_to_another_store_is_refused(store: EmbeddedStore) -> None:
    ref = Ref("k", 1, "tmpfs:/dev/shm/other")
    with pytest.raises(ValueError, match="use open_store"):
        store.open(ref)
    with pytest.raises(ValueError, match="not a reference"):
        Ref.from_wire({"key": "k"})
    with pytest.raises(ValueError, match="unknown store location"):
        open_store("elsewhere://somewhere")


def test_open_store_attaches_once_and_says_when_there_is_none(store: EmbeddedStore) -> None:
    attached = open_store(store.location)
    assert attached is open_store(store.location)
    assert attached.stats().capacity_bytes == 8 << 20
    ref = attached.put("k", ROW)
    assert list(store.open(ref)) == list(ROW)
    with pytest.raises(Unavailable, match="no store at"):
        open_store(f"tmpfs:{default_root('never-made')}")


def test_a_store_that_was_removed_is_unavailable_to_those_attached(root: Path) -> None:
    store = EmbeddedStore(root, 1 << 20)
    ref = store.put("k", ROW)
    store.remove()
    with pytest.raises(Unavailable):
        store.put("k2", ROW)
    with pytest.raises(Unavailable):
        store.free([ref])
    with pytest.raises(Gone):
        store.open(ref)


def test_the_directory_is_private_and_one_that_is_not_is_refused(root: Path, tmp_path: Path) -> None:
    store = EmbeddedStore(root, 1 << 20)
    assert root.stat().st_mode & 0o777 == 0o700
    root.chmod(0o755)
    with pytest.raises(ValueError, match="mode 755"):
        EmbeddedStore(root, 1 << 20)
    root.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(root)
    with pytest.raises(ValueError, match="not a directory"):
        EmbeddedStore(link)
    store.remove()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 12345, -1)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        EmbeddedStore(root, 1 << 20)
    root.rmdir()


def test_B2_room_is_what_is_not_in_use_and_grows_again_when_the_last_view_of_what_was_freed_goes(store: EmbeddedStore) -> None:
    capacity_bytes = store.stats().capacity_bytes
    ref = store.put("k", ROW)
    assert store.room_bytes() == capacity_bytes - ref.size_bytes
    lease = store.open(ref)
    store.free([ref])
    assert store.room_bytes() == capacity_bytes - ref.size_bytes
    lease.close()
    gc.collect()
    assert store.room_bytes() == capacity_bytes


@pytest.mark.parametrize("length", [1000, 2 << 20], ids=["small", "large"])
def test_B2_a_put_that_ends_while_its_file_is_looked_at_stays_counted(
    root: Path, store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Whoever collects has opened the temporary file, and comes to lock it when the writer has published it and let it go."""
    link, flock, may_link = os.link, fcntl.flock, threading.Event()
    refs: list[Ref] = []
    writing = threading.Thread(target=lambda: refs.append(EmbeddedStore(root).put("k", {"a": np.ones(length, np.uint8)})))

    def linked(temp: Path, target: Path) -> None:
        assert may_link.wait(20)
        link(temp, target)

    def locked(handle: int, how: int) -> None:
        if how & fcntl.LOCK_EX and Path(os.readlink(f"/proc/self/fd/{handle}")).parent.name == "temp":
            may_link.set()
            writing.join(20)
        flock(handle, how)

    monkeypatch.setattr(os, "link", linked)
    writing.start()
    wait_for(lambda: os.listdir(root / "temp"), "a put that has not ended")
    monkeypatch.setattr(fcntl, "flock", locked)
    stats = store.stats()
    assert not writing.is_alive() and (stats.objects, stats.used_bytes) == (1, refs[0].size_bytes)
    assert (store.open(refs[0])["a"] == 1).all()
    store.free(refs)
    assert store.stats().used_bytes == 0


def test_O3_whoever_puts_gets_in_between_while_thousands_are_freed(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [store.put(f"k{number}", ROW) for number in range(3 * FREED_AT_ONCE)]
    locked, unlinked = store._account.locked, store._let_go
    freed: list[int] = []

    @contextmanager
    def counted() -> Iterator[Balance]:
        freed.append(0)
        with locked() as balance:
            yield balance

    def counting(path: Path, balance: Balance) -> bool:
        freed[-1] += 1
        return unlinked(path, balance)

    monkeypatch.setattr(store._account, "locked", counted)
    monkeypatch.setattr(store, "_let_go", counting)
    store.free(refs)
    assert freed == [FREED_AT_ONCE] * 3, "of one lock"
    monkeypatch.undo()
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0)
