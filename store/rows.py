"""The rows of a trajectory in one object: flat columns with row offsets, nothing padded.

    input_ids      │ row 0 ········ │ row 1 ··· │ row 2 ······ │       [T]
    row_offsets      0                14          21            32    [N + 1]

Row i has the tokens from row_offsets[i] to row_offsets[i + 1], and one response position less. What is ragged otherwise has its own
offsets: spans have `span_offsets`, and pictures a grid each in `image_grid`, which says how many of `pixel_values` are theirs. In schema 1
each row was an object of its own, without offsets: `row_of` reads both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from store.base import Column, Lease, Value

TOKENS, POSITIONS, SPANS, GRIDS, PATCHES, ROWS = "T", "U", "K", "G", "V", "N"
RAGGED = {
    "input_ids": TOKENS,
    "position_ids": TOKENS,
    "response_mask": POSITIONS,
    "rollout_log_probs": POSITIONS,
    "version_spans": SPANS,
    "image_grid": GRIDS,
    "pixel_values": PATCHES,
}
OFFSETS = {TOKENS: "row_offsets", POSITIONS: "row_offsets", SPANS: "span_offsets", GRIDS: "grid_offsets", PATCHES: "grid_offsets"}
OFFSET_COLUMNS = tuple(dict.fromkeys(OFFSETS.values()))
COUNTED = {"row_offsets": "input_ids", "span_offsets": "version_spans", "grid_offsets": "image_grid"}


def packed(rows: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """One object's columns from those of its rows, each as `row_of` gives it. ValueError when the rows do not have the same columns."""
    if not rows:
        raise ValueError("an object holds at least one row")
    names = list(rows[0])
    strange = next((number for number, row in enumerate(rows) if set(row) != set(names)), None)
    if strange is not None:
        raise ValueError(f"row {strange} has the columns {', '.join(rows[strange])}, row 0 {', '.join(names)}: give all rows the same")
    out: dict[str, Value] = {
        offsets: np.cumsum([0, *(len(_array(row[counted])) for row in rows)], dtype=np.int64)
        for offsets, counted in COUNTED.items()
        if counted in names
    }
    for name in names:
        arrays = [_array(row[name]) for row in rows]
        joined = np.concatenate(arrays) if name in RAGGED else np.stack(arrays)
        first = rows[0][name]
        out[name] = Column(joined, first.dtype) if isinstance(first, Column) else joined
    return out


def row_of(columns: Lease, number: int) -> dict[str, np.ndarray]:
    """Views of one row's columns, as its writer gave them to `packed`. ValueError for what cannot be."""
    if columns.schema == 1:
        if number:
            raise ValueError(f"there is no row {number}: in schema 1 an object holds one")
        return dict(columns)
    return {name: cut(columns, name, number) for name in columns if name not in OFFSET_COLUMNS}


def cut(columns: Mapping[str, np.ndarray], name: str, number: int) -> np.ndarray:
    """Row `number`'s part of one column. ValueError when the offsets do not fit it."""
    column, kind = columns[name], RAGGED.get(name, ROWS)
    if kind == ROWS:
        if not (column.ndim and 0 <= number < len(column)):
            raise ValueError(f"there is no row {number} in column {name}, which has shape {list(column.shape)}")
        return column[number]
    offsets = columns.get(OFFSETS[kind])
    if offsets is None:
        raise ValueError(f"the object has no column {OFFSETS[kind]}, so {name} cannot be cut into rows")
    if offsets.ndim != 1 or not 0 <= number < len(offsets) - 1:
        raise ValueError(f"there is no row {number}: {OFFSETS[kind]} has shape {list(offsets.shape)}")
    start, end = int(offsets[number]), int(offsets[number + 1])
    most = int(offsets[-1])
    if kind == POSITIONS:
        start, end, most = start - number, end - number - 1, most - (len(offsets) - 1)
    elif kind == PATCHES:
        patches = np.prod(columns["image_grid"], axis=1, dtype=np.int64)
        start, end, most = int(patches[:start].sum()), int(patches[:end].sum()), int(patches.sum())
    if offsets[0] != 0 or not 0 <= start <= end or most != len(column):
        raise ValueError(f"{OFFSETS[kind]} does not fit column {name}: row {number} is {start} to {end} of {len(column)}")
    return column[start:end]


def _array(column: Value) -> np.ndarray:
    return column.data if isinstance(column, Column) else np.asarray(column)
