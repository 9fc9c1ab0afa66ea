"""The embedded store within one process: what goes in comes out, once, whole, and within the capacity."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import Column, EmbeddedStore, Exists, Full, Gone, Ref, Unavailable, default_root, occupied_bytes, open_store
from store.account import Balance
from store.embedded import FREED_AT_ONCE

ROW: dict[str, Any] = {
    "input_ids": np.arange(7, dtype=np.int32),
    "score": np.float32(0.5),
    "spans": np.zeros((0, 4), np.int64),
    "flags": np.array([True, False]),
}


def test_columns_come_back_equal_with_their_dtypes_and_shapes_even_0_d_and_empty(store: EmbeddedStore) -> None:
    ref = store.put("run/row/rollout", ROW)
    with store.open(ref) as lease:
        assert list(lease) == list(ROW)
        for name, array in ROW.items():
            assert lease[name].shape == array.shape and lease[name].dtype == array.dtype
            np.testing.assert_array_equal(lease[name], array)
            assert lease.dtypes[name] == array.dtype.name
    assert Ref.from_wire(ref.to_wire()) == ref


def test_bfloat16_travels_as_tagged_uint16(store: EmbeddedStore) -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    lease = store.open(store.put("w", {"layer.weight": Column(bits, "bfloat16"), "plain": bits}))
    np.testing.assert_array_equal(lease["layer.weight"], bits)
    assert dict(lease.dtypes) == {"layer.weight": "bfloat16", "plain": "uint16"}


def test_strided_and_big_endian_columns_are_stored_by_value(store: EmbeddedStore) -> None:
    strided, foreign = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2], np.arange(3, dtype=">f4")
    lease = store.open(store.put("k", {"strided": strided, "foreign": foreign}))
    np.testing.assert_array_equal(lease["strided"], strided)
    np.testing.assert_array_equal(lease["foreign"], foreign)


def test_an_object_without_columns_is_an_object(store: EmbeddedStore) -> None:
    assert len(store.open(store.put("empty", {}))) == 0


def test_columns_are_read_one_by_one_and_an_absent_one_is_named(store: EmbeddedStore) -> None:
    ref = store.put("k", ROW)
    assert list(store.open(ref, columns=["score"])) == ["score"]
    with pytest.raises(ValueError, match=r"no column 'reward'; it has input_ids, score"):
        store.open(ref, columns=["reward"])


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


def test_a_key_is_written_once_and_may_be_used_again_after_free(store: EmbeddedStore) -> None:
    ref = store.put("k", {"a": np.zeros(1)})
    with pytest.raises(Exists, match="'k'"):
        store.put("k", {"a": np.ones(1)})
    held = store.open(ref)
    assert store.stats().used_bytes == ref.size_bytes
    store.free([ref])
    again = store.put("k", {"a": np.ones(1)})
    assert held["a"][0] == 0 and store.open(again)["a"][0] == 1


def test_free_is_idempotent_and_a_freed_or_unknown_object_is_gone(store: EmbeddedStore) -> None:
    ref = store.put("k", ROW)
    store.free([ref])
    store.free([ref, ref])
    store.free([])
    for missing in (ref, Ref("never", 1, store.location)):
        with pytest.raises(Gone, match=missing.key):
            store.open(missing)
    with pytest.raises(Gone):
        store.ref("k")


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


@pytest.mark.parametrize("key", ["run/1/rollout", "..", ".hidden", "a%2Fb", "späße / \n", "x" * 255])
def test_any_key_that_fits_is_reversible(store: EmbeddedStore, key: str) -> None:
    ref = store.put(key, ROW)
    assert store.keys() == [key] and store.ref(key) == ref
    store.free([ref])
    assert store.keys() == []


@pytest.mark.parametrize("key", ["", "x" * 256, "/" * 86, "\ud800"])
def test_a_key_that_does_not_fit_is_a_clear_error(store: EmbeddedStore, key: str) -> None:
    with pytest.raises(ValueError, match=r"key|surrogates"):
        store.put(key, ROW)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (np.array([object()]), "dtype object, which cannot be stored"),
        (np.array(["text"]), "cannot be stored"),
        (np.zeros(2, np.complex64), "cannot be stored"),
        ([1, 2], "must be a numpy array, not list"),
        (Column(np.zeros(2, np.float32), "bfloat16"), "tagged bfloat16 but its data is float32"),
        (Column(np.zeros(2, np.int32), "float32"), "tagged float32 but its data is int32"),
    ],
)
def test_a_column_that_cannot_be_stored_is_named(store: EmbeddedStore, column: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"column 'bad'.*{said}"):
        store.put("k", {"bad": column})  # type: ignore[dict-item]
    assert store.stats().objects == store.stats().used_bytes == 0


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


def test_threads_that_put_and_free_leave_the_account_exact(store: EmbeddedStore) -> None:
    def work(index: int) -> None:
        for turn in range(40):
            store.free([store.put(f"{index}/{turn}", ROW)])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0)


def test_gauges_have_units(store: EmbeddedStore) -> None:
    ref = store.put("k", ROW)
    assert store.gauges() == {
        "headrace_store_objects_count": 1,
        "headrace_store_used_bytes": ref.size_bytes,
        "headrace_store_capacity_bytes": 8 << 20,
    }


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


def test_O3_whoever_puts_gets_in_between_while_thousands_are_freed(store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [store.put(f"k{number}", ROW) for number in range(3 * FREED_AT_ONCE)]
    locked, unlinked = store._account.locked, store._unlink_if_idle
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
    monkeypatch.setattr(store, "_unlink_if_idle", counting)
    store.free(refs)
    assert freed == [FREED_AT_ONCE] * 3, "of one lock"
    monkeypatch.undo()
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0)
