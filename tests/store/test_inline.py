"""Small objects that ride in their reference: read like stored ones, and never in a store."""

import json
from typing import Any

import numpy as np
import pytest

from store import INLINE, Column, Damaged, EmbeddedStore, Ref, in_store, open_ref, put_small
from tests.store.test_embedded import ROW

LONG: dict[str, Any] = {"input_ids": np.arange(2000, dtype=np.int32)}


def test_B1_a_small_object_rides_in_its_reference_as_typed_binary_and_reads_as_a_stored_one_does(store: EmbeddedStore) -> None:
    columns = ROW | {"weight": Column(np.arange(6, dtype=np.uint16).reshape(2, 3), "bfloat16")}
    ref = put_small(store, "run/row/rollout", columns, 4096)
    assert ref.location == INLINE and ref.size_bytes == 0 and store.stats().objects == 0
    carried = Ref.from_wire(json.loads(json.dumps(ref.to_wire())))
    assert carried == ref and carried.key == "run/row/rollout"
    stored = store.open(store.put("run/row/rollout", columns))
    with open_ref(carried) as lease:
        assert list(lease) == list(stored) and dict(lease.dtypes) == dict(stored.dtypes)
        for name, array in stored.items():
            np.testing.assert_array_equal(lease[name], array)
            assert lease[name].dtype == array.dtype and lease[name].shape == array.shape and not lease[name].flags.writeable
    with pytest.raises(ValueError, match="no column 'reward'"):
        open_ref(carried, ["reward"])


def test_what_is_longer_than_the_threshold_lies_in_the_store_and_with_0_everything_does(store: EmbeddedStore) -> None:
    exact = len(put_small(store, "k", ROW, 4096).inline or b"")
    assert put_small(store, "k", ROW, exact).inline is not None, "at most so many bytes"
    shorter, long, none = put_small(store, "a", ROW, exact - 1), put_small(store, "b", LONG, 4096), put_small(store, "c", ROW, 0)
    assert [ref.inline for ref in (shorter, long, none)] == [None] * 3 and sorted(store.keys()) == ["a", "b", "c"]
    assert in_store([put_small(store, "k", ROW, exact), long]) == [long]
    np.testing.assert_array_equal(open_ref(long)["input_ids"], LONG["input_ids"])
    np.testing.assert_array_equal(open_ref(long, store=store)["input_ids"], LONG["input_ids"])


def test_bytes_that_are_no_whole_object_are_refused(store: EmbeddedStore) -> None:
    ref = put_small(store, "k", ROW, 4096)
    assert ref.inline is not None
    with pytest.raises(Damaged, match=r"'k' in its reference is .* bytes long but was written with"):
        open_ref(Ref("k", 0, INLINE, ref.inline[:-1]))
    with pytest.raises(ValueError, match="not a reference"):
        Ref.from_wire(ref.to_wire() | {"inline": "no base64!"})
