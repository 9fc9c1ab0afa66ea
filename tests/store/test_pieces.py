"""E10: a tensor larger than a bucket is cut, found whole again, and never taken for whole when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import Column, Damaged, EmbeddedStore, Ref, TensorForm
from store.pieces import bundles, cut, whole_tensors, write_whole

LARGE = np.arange(35, dtype=np.float32).reshape(5, 7)
HALF = Column(np.arange(12, dtype=np.uint16).reshape(3, 4), "bfloat16")
FORMS = {"large": TensorForm("float32", (5, 7)), "half": TensorForm("bfloat16", (3, 4))}


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    return EmbeddedStore(tmp_path / "store", 1 << 20)


def put(store: EmbeddedStore, *buckets: dict[str, Any]) -> list[Ref]:
    return [store.put(f"b/{number}", bucket) for number, bucket in enumerate(buckets)]


def parts(name: str, value: Any, most_bytes: int) -> list[dict[str, Any]]:
    return [{column: part} for column, part in cut(name, value, most_bytes)]


def test_E10_a_tensor_of_several_buckets_is_cut_into_parts_that_fit_and_found_whole(store: EmbeddedStore, tmp_path: Path) -> None:
    large, half = parts("large", LARGE, 48), parts("half", HALF, 5)
    assert [list(part) for part in large] == [["large@0"], ["large@12"], ["large@24"]] and max(
        p.nbytes for b in large for p in b.values()
    ) <= 48
    refs = put(
        store, {"first": np.ones(3, np.float32)}, *large, {"middle": np.zeros((), np.float32), "last": np.ones(1, np.float16)}, *half
    )
    found = bundles(refs, FORMS)
    assert [[name for name, _, _ in bundle.tensors] for bundle in found] == [["first"], ["large"], ["middle", "last"], ["half"]]
    assert [len(bundle.refs) for bundle in found] == [1, 3, 1, 6]
    whole = {name: (form, array) for bundle in found for name, form, array in whole_tensors(bundle)}
    assert np.array_equal(whole["large"][1], LARGE) and np.array_equal(whole["half"][1], HALF.data)
    assert whole["half"][0] == FORMS["half"] and whole["middle"][1].shape == () and whole["last"][0].dtype == "float16"
    for bundle, expected in ((found[1], LARGE.tobytes()), (found[3], HALF.data.tobytes())):
        ((name, _, size_bytes),) = bundle.tensors
        with (tmp_path / name).open("wb") as file:
            write_whole(bundle, file.fileno(), {name: 8})
        assert (tmp_path / name).read_bytes() == bytes(8) + expected and size_bytes == len(expected)


def test_parts_may_share_a_bucket_with_others_and_what_is_linked_stays_together(store: EmbeddedStore) -> None:
    first, second = parts("large", LARGE, 80)
    refs = put(store, {"a": np.ones(1, np.float32)} | first, second | {"b": np.ones(2, np.float32)})
    (bundle,) = bundles(refs, FORMS)
    assert {name: array.shape for name, _, array in whole_tensors(bundle)} == {"a": (1,), "large": (5, 7), "b": (2,)}


def test_a_part_is_one_element_at_least() -> None:
    assert [list(part) for part in parts("t", np.ones(2, np.float64), 3)] == [["t@0"], ["t@1"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b[:2], "the buckets end before element 24 of 'large'"),
        (lambda b: [b[0], b[2]], "goes on with 'large' at element 24, where element 12 of 'large' was expected"),
        (lambda b: b[1:], "where a tensor's beginning was expected"),
        (lambda b: [b[0], {"other": LARGE}], "goes on with 'other' at element 0"),
        (lambda b: [b[0], {"large@12": LARGE.reshape(-1)}], r"elements up to 47 of 'large', which is TensorForm\("),
        (lambda b: [{"large@0": np.ones(12, np.float64)}], "float64 elements"),
        (lambda b: [{"unknown@0": np.ones(12, np.float32)}], "of 'unknown', which is unknown"),
        (lambda b: [{"large@0": LARGE}], "no part of a tensor"),
        (lambda b: [{"large@x": LARGE.reshape(-1)}], "no part of a tensor"),
    ],
)
def test_E10_parts_that_do_not_make_the_tensor_are_refused(store: EmbeddedStore, change: Any, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        bundles(put(store, *change(parts("large", LARGE, 48))), FORMS)
