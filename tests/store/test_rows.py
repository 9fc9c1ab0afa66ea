"""The rows of a trajectory lie in one object, and come out as they went in; those of the schema before are read as what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from store import Column, EmbeddedStore
from store.rows import packed, row_of
from store.schema import validate
from tests.store.test_schema import row

DATA = Path(__file__).parents[1] / "data"


def equal(found: dict[str, np.ndarray], given: dict[str, Any]) -> bool:
    arrays = {name: column.data if isinstance(column, Column) else column for name, column in given.items()}
    return found.keys() == arrays.keys() and all(
        np.array_equal(found[name], array) and found[name].dtype == array.dtype for name, array in arrays.items()
    )


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=6), pictures=st.booleans())
def test_rows_of_any_lengths_come_out_of_one_object_as_they_went_in(lengths: list[int], pictures: bool) -> None:
    rows = []
    for number, length in enumerate(lengths):
        prompt = 1 + length // 3
        given: dict[str, Any] = row(length, prompt, version=number, temperature=np.array(0.5 + number, np.float32))
        if length == prompt:
            given["version_spans"] = np.zeros((0, 4), np.int64)
        if pictures:  # a row may have none
            grid = np.array([[1, 2, length]] * (number % 3), np.int32).reshape(-1, 3)
            patches = np.arange(int(np.prod(grid, axis=1).sum()) * 3, dtype=np.uint16).reshape(-1, 3)
            positions = np.full((length, 3), number, np.int32)
            given |= {"image_grid": grid, "pixel_values": Column(patches, "bfloat16"), "position_ids": positions}
        rows.append(given)
    columns = packed(rows)
    validate("rollout", columns)
    held = _Held(columns)
    assert [equal(row_of(held, number), given) for number, given in enumerate(rows)] == [True] * len(rows)  # type: ignore[arg-type]


class _Held(dict[str, np.ndarray]):
    """Columns as a lease gives them."""

    schema = 2

    def __init__(self, columns: dict[str, Any]) -> None:
        super().__init__({name: column.data if isinstance(column, Column) else column for name, column in columns.items()})


def test_a_row_is_views_of_the_object_and_what_is_no_row_is_refused(store: EmbeddedStore) -> None:
    with store.open(store.put("run/t/rollout", packed([row(5), row(9)]))) as lease:
        second = row_of(lease, 1)
        assert np.shares_memory(second["input_ids"], lease["input_ids"]) and float(second["temperature"]) == 1.0
        for number in (2, -1):
            with pytest.raises(ValueError, match="there is no row"):
                row_of(lease, number)
    with store.open(store.put("run/r/reward", {"score": np.zeros(2, np.float32)})) as lease:
        assert float(row_of(lease, 1)["score"]) == 0.0
    with store.open(store.put("run/u/rollout", row(5))) as lease, pytest.raises(ValueError, match="has no column row_offsets"):
        row_of(lease, 0)
    with pytest.raises(ValueError, match="row 1 has the columns input_ids, row 0 "):
        packed([row(5), {"input_ids": np.zeros(3, np.int32)}])
    with pytest.raises(ValueError, match="at least one row"):
        packed([])


def test_an_object_with_offsets_that_do_not_fit_is_refused_not_misread(store: EmbeddedStore) -> None:
    for number, offsets in enumerate(([0, 5, 13], [1, 5, 14], [0, 15, 14], [0, -1, 14])):
        wrong = packed([row(5), row(9)]) | {"row_offsets": np.array(offsets)}
        with store.open(store.put(f"run/{number}/rollout", wrong)) as lease, pytest.raises(ValueError, match="row_offsets does not fit"):
            row_of(lease, 0), row_of(lease, 1)


def stored_before(store: EmbeddedStore, hop: str) -> Any:
    """As the program wrote it that knew schema 1; see tests/data/README.md."""
    return store.put_encoded(f"run/old/{hop}", (DATA / f"schema-1-{hop}.object").read_bytes())


def test_a_row_of_schema_1_is_read(store: EmbeddedStore) -> None:
    with store.open(stored_before(store, "rollout")) as lease:
        assert lease.schema == 1
        old = row_of(lease, 0)
        assert old["input_ids"].tolist() == [10, 11, 12, 13, 14, 15] and old["response_mask"].tolist() == [0, 0, 1, 1, 1]
        assert old["rollout_log_probs"].tolist() == [0, 0, -0.5, -0.25, -1] and old["version_spans"].tolist() == [[1, 3, 2, 5]]
        assert float(old["temperature"]) == 0.75 and old["routed_experts"].shape == (5, 2, 2)
        with pytest.raises(ValueError, match="no row 1: in schema 1 an object holds one"):
            row_of(lease, 1)
    with store.open(stored_before(store, "reward")) as lease:
        assert float(row_of(lease, 0)["score"]) == 0.25 and int(row_of(lease, 0)["is_correct"]) == 1
    with store.open(store.put("run/new", {"a": np.zeros(1)})) as lease:
        assert lease.schema == 2


def test_opening_one_column_touches_no_page_of_the_others(store: EmbeddedStore) -> None:
    """The kernel says what of the mapping is in this process's memory. Around a page that is read it maps a few that it has at hand."""
    large = {f"large{number}": np.ones(1 << 20, np.uint8) for number in range(3)}
    ref = store.put("run/t/rollout", {"first": np.zeros(4), **large, "last": np.arange(4)})
    with store.open(ref, ["last"]) as lease:
        assert list(lease) == ["last"] and lease["last"].tolist() == [0, 1, 2, 3]
        touched_bytes = resident_bytes(lease["last"])
        assert 0 < touched_bytes <= 1 << 19
    with store.open(ref) as lease:
        assert sum(int(column.sum()) for column in lease.values()) == 3 * (1 << 20) + 6
        assert resident_bytes(lease["last"]) >= 3 << 20, "or the first figure would prove nothing"


def resident_bytes(view: np.ndarray) -> int:
    """Of the mapping that `view` lies in."""
    address, inside = view.ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            start, end = (int(part, 16) for part in words[0].split("-"))
            inside = start <= address < end
        elif inside and words[0] == "Rss:":
            return int(words[1]) << 10
    raise AssertionError("no such mapping")
