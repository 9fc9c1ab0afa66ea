"""What every store promises, within one process: what goes in comes out, once, whole, and within the capacity."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import Column, EmbeddedStore, Exists, Full, Gone, MooncakeStore, Ref, open_store
from store.base import SCHEMA_VERSION
from tests.store.conftest import CAPACITY_BYTES, Backend

ROW: dict[str, Any] = {
    "input_ids": np.arange(7, dtype=np.int32),
    "score": np.float32(0.5),
    "spans": np.zeros((0, 4), np.int64),
    "flags": np.array([True, False]),
}
MB = 1 << 20


def test_columns_come_back_equal_with_their_dtypes_and_shapes_even_0_d_and_empty(backend: Backend) -> None:
    ref = backend.store.put("run/row/rollout", ROW)
    with backend.store.open(ref) as lease:
        assert list(lease) == list(ROW)
        for name, array in ROW.items():
            assert lease[name].shape == array.shape and lease[name].dtype == array.dtype
            np.testing.assert_array_equal(lease[name], array)
            assert lease.dtypes[name] == array.dtype.name
    assert Ref.from_wire(ref.to_wire()) == ref


def test_bfloat16_travels_as_tagged_uint16(backend: Backend) -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    lease = backend.store.open(backend.store.put("w", {"layer.weight": Column(bits, "bfloat16"), "plain": bits}))
    np.testing.assert_array_equal(lease["layer.weight"], bits)
    assert dict(lease.dtypes) == {"layer.weight": "bfloat16", "plain": "uint16"}


def test_strided_and_big_endian_columns_are_stored_by_value(backend: Backend) -> None:
    strided, foreign = np.arange(12, dtype=np.int64).reshape(3, 4).T[::2], np.arange(3, dtype=">f4")
    lease = backend.store.open(backend.store.put("k", {"strided": strided, "foreign": foreign}))
    np.testing.assert_array_equal(lease["strided"], strided)
    np.testing.assert_array_equal(lease["foreign"], foreign)


def test_an_object_without_columns_is_an_object(backend: Backend) -> None:
    assert len(backend.store.open(backend.store.put("empty", {}))) == 0


def test_columns_are_read_one_by_one_and_an_absent_one_is_named(backend: Backend) -> None:
    ref = backend.store.put("k", ROW)
    assert list(backend.store.open(ref, columns=["score"])) == ["score"]
    assert list(backend.store.open(ref, columns=["flags", "input_ids"])) == ["flags", "input_ids"]
    assert not list(backend.store.open(ref, columns=[]))
    with pytest.raises(ValueError, match=r"no column 'reward'; it has input_ids, score"):
        backend.store.open(ref, columns=["reward"])


def test_a_large_object_with_a_long_table_is_read_whole_and_in_part(backend: Backend) -> None:
    """Larger than what any backend reads, writes or registers at a time, and with more columns than fit into a first look."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"small/{index}": np.int64(index) for index in range(1000)}
    columns |= {"first": rng.integers(0, 255, 17 * MB, np.uint8), "empty": np.zeros((0, 3)), "last": rng.random(1_500_000)}
    ref = backend.store.put("large", columns)
    whole, part = backend.store.open(ref), backend.store.open(ref, ["last", "small/7", "empty"])
    assert list(whole) == list(columns) and list(part) == ["last", "small/7", "empty"]
    for name, array in columns.items():
        np.testing.assert_array_equal(whole[name], array)
    np.testing.assert_array_equal(part["last"], columns["last"])
    assert part["small/7"] == 7 and all(view.ctypes.data % 64 == 0 for view in (*whole.values(), *part.values()) if view.size)


def test_views_are_aligned_and_read_only(backend: Backend) -> None:
    lease = backend.store.open(backend.store.put("k", ROW))
    assert all(view.ctypes.data % 64 == 0 and not view.flags.writeable for view in lease.values())
    with pytest.raises(ValueError, match="read-only"):
        lease["input_ids"][0] = 9
    with pytest.raises(ValueError, match="WRITEABLE"):
        lease["input_ids"].flags.writeable = True


def test_B3_a_view_outlives_close_free_and_the_store_itself(backend: Backend) -> None:
    ref = backend.store.put("k", ROW)
    lease = backend.store.open(ref)
    view = lease["input_ids"]
    lease.close()
    with pytest.raises(ValueError, match="closed"):
        lease["input_ids"]
    backend.store.free([ref])
    backend.store.put("next", {"a": np.ones(1000)})
    gc.collect()
    np.testing.assert_array_equal(view, ROW["input_ids"])


def test_a_key_is_written_once_and_may_be_used_again_after_free(backend: Backend) -> None:
    store = backend.store
    ref = store.put("k", {"a": np.zeros(1)})
    with pytest.raises(Exists, match="'k'"):
        store.put("k", {"a": np.ones(1)})
    held = store.open(ref)
    assert held["a"][0] == 0, "the first stays"
    store.free([ref])
    again = store.put("k", {"a": np.ones(1)})
    assert held["a"][0] == 0 and store.open(again)["a"][0] == 1


def test_free_is_idempotent_and_a_freed_or_unknown_object_is_gone(backend: Backend) -> None:
    backend.empty()
    store = backend.store
    ref = store.put("k", ROW)
    store.open(ref)
    store.free([ref])
    store.free([ref, ref])
    store.free([])
    for missing in (ref, Ref("never", 1, store.location)):
        with pytest.raises(Gone, match=missing.key):
            store.open(missing)
        with pytest.raises(Gone, match=missing.key):
            store.encoded(missing)
        with pytest.raises(Gone, match=missing.key):
            store.ref(missing.key)
    assert store.keys() == [] and store.stats().objects == 0
    backend.settled(0, 0)


def test_B2_a_full_store_refuses_loses_nothing_and_has_room_again_after_a_free(backend: Backend) -> None:
    backend.empty()
    store = backend.store
    refs: list[Ref] = []
    with pytest.raises(Full, match="bytes"):
        for index in range(100):
            refs.append(store.put(f"k{index}", {"a": np.full(4 * MB, index, np.uint8)}))
    assert sum(ref.size_bytes for ref in refs) >= CAPACITY_BYTES * 0.9
    assert store.stats().used_bytes == sum(ref.size_bytes for ref in refs)
    for index, ref in enumerate(refs):
        assert (store.open(ref)["a"] == index).all()
    store.free(refs[3:4])
    again = store.put("again", {"a": np.full(4 * MB, 200, np.uint8)})
    assert (store.open(again)["a"] == 200).all() and (store.open(refs[4])["a"] == 4).all()


def test_B2_what_is_larger_than_the_store_is_refused(backend: Backend) -> None:
    backend.empty()
    with pytest.raises(Full, match="'k'"):
        backend.store.put("k", {"a": np.zeros(2 * CAPACITY_BYTES, np.uint8)})
    backend.settled(0, 0)


@pytest.mark.parametrize("key", ["plain", "run/row-0.1/rollout", ".hidden", "a%2Fb", "späße / \n", "x" * 255])
def test_any_key_that_fits_is_reversible(backend: Backend, key: str) -> None:
    ref = backend.store.put(key, ROW)
    assert backend.store.keys() == [key] and backend.store.ref(key) == ref
    backend.store.free([ref])
    assert backend.store.keys() == []


@pytest.mark.parametrize("key", ["", "x" * 256, "/" * 86, "\ud800"])
def test_a_key_that_does_not_fit_is_a_clear_error(backend: Backend, key: str) -> None:
    with pytest.raises(ValueError, match=r"key|surrogates"):
        backend.store.put(key, ROW)


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
def test_a_column_that_cannot_be_stored_is_named(backend: Backend, column: object, said: str) -> None:
    backend.empty()
    with pytest.raises(ValueError, match=f"column 'bad'.*{said}"):
        backend.store.put("k", {"bad": column})  # type: ignore[dict-item]
    backend.settled(0, 0)


def test_a_reference_to_another_store_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="use open_store"):
        backend.store.open(Ref("k", 1, "tmpfs:/dev/shm/other"))
    with pytest.raises(ValueError, match="use open_store"):
        backend.store.free([Ref("k", 1, "mooncake:127.0.0.1:1/other?http=2")])


def test_open_store_attaches_once_by_location(backend: Backend) -> None:
    attached = open_store(backend.store.location)
    assert attached is open_store(backend.store.location)
    assert isinstance(attached, EmbeddedStore if backend.name == "embedded" else MooncakeStore)
    assert attached.stats().capacity_bytes == CAPACITY_BYTES
    assert list(backend.store.open(attached.put("k", ROW))) == list(ROW)
    attached.close()


def test_an_object_goes_from_store_to_store_byte_for_byte(backend: Backend, tmp_path: Path) -> None:
    first = backend.store.put("k", ROW)
    store = EmbeddedStore(tmp_path / "other", 1 << 20)
    there = store.put_encoded("k", backend.store.encoded(first))
    assert list(store.open(there)) == list(ROW)
    back = backend.store.put_encoded("again", store.encoded(there))
    assert backend.store.encoded(back) == backend.store.encoded(first)


def test_an_object_of_an_older_schema_says_so(backend: Backend) -> None:
    new = backend.store.put("new", ROW)
    encoded = bytearray(backend.store.encoded(new))
    encoded[8:12], encoded[28:32] = (1).to_bytes(4, "little"), bytes(4)  # format 1 had no schema version
    old = backend.store.put_encoded("old", bytes(encoded))
    assert (backend.store.open(old).schema, backend.store.open(new).schema) == (1, SCHEMA_VERSION)


def test_H6_parked_objects_come_back(backend: Backend, tmp_path: Path) -> None:
    backend.empty()
    store = backend.store
    before = {f"k/{index}": store.encoded(store.put(f"k/{index}", {"a": np.full(1000, index)})) for index in range(5)}
    assert store.park(tmp_path) == 5
    assert store.keys() == []
    backend.settled(0, 0)
    assert store.unpark(tmp_path) == 5
    assert {key: store.encoded(store.ref(key)) for key in sorted(store.keys())} == before


def test_threads_that_put_read_and_free_leave_the_account_exact(backend: Backend) -> None:
    backend.empty()
    store, wrong = backend.store, []

    def work(index: int) -> None:
        for turn in range(20):
            ref = store.put(f"{index}/{turn}", {"a": np.full(1000, turn)})
            if not (store.open(ref)["a"] == turn).all():
                wrong.append((index, turn))
            store.free([ref])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    backend.settled(0, 0)


def test_gauges_have_units(backend: Backend) -> None:
    backend.empty()
    ref = backend.store.put("k", ROW)
    gauges = backend.store.gauges()
    assert gauges["headrace_store_objects_count"] == 1
    assert gauges["headrace_store_used_bytes"] == ref.size_bytes
    assert gauges["headrace_store_capacity_bytes"] == CAPACITY_BYTES


def test_the_parts_that_hold_the_objects_are_named_and_stay(backend: Backend) -> None:
    parts = backend.store.parts()
    assert len(parts) == 1 and backend.store.parts() == parts


def test_there_is_one_owner(backend: Backend) -> None:
    backend.store.claim()
    other = EmbeddedStore(Path(backend.store.location.removeprefix("tmpfs:"))) if backend.name == "embedded" else None
    with pytest.raises(ValueError, match="another run"):
        (other or MooncakeStore(backend.store.location)).claim()


def test_many_small_objects_are_put_found_and_freed(backend: Backend) -> None:
    backend.empty()
    refs = [backend.store.put(f"row/{index}", {"a": np.int64(index)}) for index in range(2000)]
    assert sorted(backend.store.keys()) == sorted(ref.key for ref in refs)
    assert all(backend.store.open(refs[index])["a"] == index for index in range(0, 2000, 100))
    backend.store.free(refs)
    backend.settled(0, 0)
