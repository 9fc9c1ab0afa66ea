"""The fields of every stored object: who writes them, who reads them, what they are, who ends them.

`FIELDS` is the table that docs/dataflow.md prints and a test compares. `validate` is what stands between a bug in one package and a
silently wrong number in another; `padded` lays rows out as the contract's right-padded table. This is schema 2
(`store.base.SCHEMA_VERSION`), in which the rows of a trajectory's leaves lie in one object (`store.rows`); in schema 1 each had its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from store.base import Column, Value
from store.rows import COUNTED, GRIDS, OFFSET_COLUMNS, OFFSETS, PATCHES, POSITIONS, RAGGED, ROWS, SPANS, TOKENS, cut

UNKNOWN_CORRECTNESS = 255
ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """`shape` is numbers and letters (N rows, T tokens of all of them, U = T − N response positions, K spans, Q routed tokens, L layers,
    E experts of a token, G pictures, V patches, F numbers of a patch, … anything); `dtype` may name several, with |. What is `optional` is
    checked where it is there."""

    name: str
    hop: str
    dtype: str
    shape: tuple[str | int, ...]
    writer: str
    readers: tuple[str, ...]
    owner: str
    ends: str
    meaning: str
    optional: bool = False


_ROW_ENDS = "when the row is committed or discarded"
_N1 = f"{ROWS} + 1"
_TABLE = ("store.schema.padded",)


def _rollout(
    name: str, dtype: str, shape: tuple[str | int, ...], meaning: str, readers: tuple[str, ...] = ("trainer", "driver.archive")
) -> FieldSpec:
    optional = meaning.startswith("optional")
    return FieldSpec(name, "rollout", dtype, shape, "rollout.tree", readers, "driver", _ROW_ENDS, meaning, optional)


_ROUTES = "the experts of each layer that the last Q of a row's first R tokens went to when they were sampled"


def _reward(name: str, dtype: str, meaning: str) -> FieldSpec:
    return FieldSpec(name, "reward", dtype, (ROWS,), "driver.dispatch", _TABLE, "driver", _ROW_ENDS, meaning)


FIELDS: tuple[FieldSpec, ...] = (
    _rollout(
        "row_offsets", "int64", (_N1,), "row i has the tokens from row_offsets[i] to row_offsets[i+1], R = S − 1 positions for S tokens"
    ),
    _rollout("span_offsets", "int64", (_N1,), "where each row's spans begin and end"),
    _rollout("input_ids", "int32", (TOKENS,), "prompt and response tokens of each leaf"),
    _rollout(
        "response_mask", "uint8", (POSITIONS,), "1 where input_ids[1+i] of the row was sampled by the policy and is trained in this leaf"
    ),
    _rollout("rollout_log_probs", "float32", (POSITIONS,), "the engine's log-probs at the row's temperature; 0 where the mask is 0"),
    _rollout("version_spans", "int64", (SPANS, 4), "(epoch, version, start, end) over the row's response positions [0, R)"),
    _rollout("temperature", "float32", (ROWS,), "the sampling temperature"),
    _rollout("position_ids", "int32", (TOKENS, 3), "optional: positions of a model with pictures (mRoPE): time, height, width", _TABLE),
    _rollout("grid_offsets", "int64", (_N1,), "optional: which of the pictures are a row's", _TABLE),
    _rollout("image_grid", "int32", (GRIDS, 3), "optional: patches of a picture in time, height and width", _TABLE),
    _rollout(
        "pixel_values",
        "float32|bfloat16|float16",
        (PATCHES, "F"),
        "optional: the pictures' patches, one picture after the other",
        _TABLE,
    ),
    _reward("score", "float32", "what the scorer said"),
    _reward("is_correct", "uint8", "1, 0, or 255 when the scorer did not say"),
    FieldSpec("routed_experts", "extras", "uint8|uint16|int32", ("Q", "L", "E"), "engine", ("trainer",), "driver", _ROW_ENDS, _ROUTES),
    FieldSpec(
        ANY_NAME,
        "weights",
        "float32|bfloat16|float16",
        ("…",),
        "trainer.export",
        ("rollout.engine",),
        "driver",
        "when a newer version is verified",
        "one tensor of the policy under its Hugging Face name, or a part of it: NAME@START, flat",
    ),
)
HOPS: tuple[str, ...] = tuple(dict.fromkeys(field.hop for field in FIELDS))
_FIELDS = {hop: tuple(field for field in FIELDS if field.hop == hop) for hop in HOPS}
_KNOWN = {hop: dict.fromkeys(field.name for field in fields).keys() for hop, fields in _FIELDS.items()}
_NEEDED = {hop: {field.name for field in fields if not field.optional} for hop, fields in _FIELDS.items()}
_CUT_BY = {offsets: {offsets, *(name for name, kind in RAGGED.items() if OFFSETS[kind] == offsets)} for offsets in COUNTED}
_DTYPES: dict[str, frozenset[Any]] = {
    field.dtype: frozenset([*field.dtype.split("|"), *(np.dtype(name) for name in field.dtype.split("|") if name != "bfloat16")])
    for field in FIELDS
}
"""by what a field says of its dtype: as a column names its own, and as numpy does"""


def fields_of(hop: str) -> tuple[FieldSpec, ...]:
    if hop not in _FIELDS:
        raise ValueError(f"there is no hop {hop!r}; the hops are {', '.join(HOPS)}")
    return _FIELDS[hop]


def check_form(hop: str, columns: Mapping[str, Value]) -> None:
    """Names, dtypes, shapes and offsets, for whoever puts such an object: some microseconds, however long the rows are. ValueError names
    the column that is wrong, and says what it should be."""
    fields = fields_of(hop)
    if fields[0].name == ANY_NAME:
        if not columns:
            raise ValueError(f"an object of hop {hop!r} needs at least one column")
        for name, column in columns.items():
            _check_dtype(fields[0], name, column)
        return
    if not _NEEDED[hop] <= columns.keys() <= _KNOWN[hop]:
        missing = [name for name in _KNOWN[hop] if name in _NEEDED[hop] and name not in columns]
        unknown = [name for name in columns if name not in _KNOWN[hop]]
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has the unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"an object of hop {hop!r} {' and '.join(wrong)}; its columns are {', '.join(_KNOWN[hop])}")
    sizes: dict[str, int] = {}
    for field in fields:
        if field.name in columns:
            _check_dtype(field, field.name, columns[field.name])
            _check_shape(field, _array(columns[field.name]).shape, sizes)
    for offsets, counted in COUNTED.items():
        if not _CUT_BY[offsets].isdisjoint(columns):
            _check_offsets(columns, offsets, counted)


def validate(hop: str, columns: Mapping[str, Value]) -> None:
    """As `check_form`, and every number in it: unless the object is one of this hop, ValueError names the column and what it should be."""
    check_form(hop, columns)
    arrays = {name: _array(column) for name, column in columns.items()}
    if hop == "rollout":
        _check_rows(arrays, len(arrays["row_offsets"]) - 1)
    elif hop == "reward":
        _check_reward(arrays)
    elif hop == "extras" and arrays["routed_experts"].size and arrays["routed_experts"].min() < 0:
        raise ValueError("routed_experts holds a negative number; leave out leading tokens whose experts are not known")


def reward_columns(scores: Sequence[tuple[float, bool | None]]) -> dict[str, Value]:
    """The reward hop of a trajectory's rows, from the score and correctness of each."""
    return {
        "score": np.array([score for score, _ in scores], np.float32),
        "is_correct": np.array([UNKNOWN_CORRECTNESS if correct is None else correct for _, correct in scores], np.uint8),
    }


def padded(rows: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, extras: Sequence[str] = ()) -> dict[str, Any]:
    """The contract's field table for rows given as `store.rows.row_of` gives them, with their `score` and `is_correct`. B rows, S the
    longest, R = S − 1.

    A row may bring `reward` (what the advantage uses; else it is the score), `finish_reason` (else stop), `position_ids` [S, 3], and
    `advantage` and `returns`, a number or [R] each. Without returns a trained token's is the reward, all of which comes after it; without
    advantages the table has none. `extras` names per-token columns [Q, …] of the last Q of the row's first R tokens: such a column comes
    as [B, R, …] in its own dtype, and NAME_mask [B, R] is 1 where something is known.

    Everything is right-padded with 0. A row of more than `max_tokens` is cut, and its finish_reason is then length. The scalar of a row
    stands on its last (kept) trained position, or on its last position when none is. `version_spans` stays ragged: a list of B arrays
    [K, 4]. Raises ValueError for no rows, and for rows of which only some have an advantage.
    """
    if not rows:
        raise ValueError("padded needs at least one row")
    whole = [len(row["input_ids"]) for row in rows]
    if min(whole) < 1:
        raise ValueError(f"row {whole.index(min(whole))} has no tokens")
    lengths = np.minimum(whole, max_tokens or max(whole))
    size, longest = len(rows), int(lengths.max())
    valid = np.arange(longest) < lengths[:, None]

    def right_padded(arrays: Sequence[Any], dtype: Any, positions: bool) -> np.ndarray:
        first = np.asarray(arrays[0])
        out = np.zeros((size, longest - positions, *first.shape[1:]), dtype)
        for number, array in enumerate(arrays):
            kept = lengths[number] - positions
            out[number, :kept] = array[:kept]
        return out

    input_ids = right_padded([row["input_ids"] for row in rows], np.int32, False)
    mask = right_padded([row["response_mask"] for row in rows], np.uint8, True)
    last = [np.flatnonzero(mask[number]).max(initial=-1) for number in range(size)]
    last = [int(at) if at >= 0 else int(length) - 2 for at, length in zip(last, lengths, strict=True)]

    def scalar(values: Sequence[Any]) -> np.ndarray:
        out = np.zeros((size, longest - 1), np.float32)
        for number, (at, value) in enumerate(zip(last, values, strict=True)):
            if at >= 0:
                out[number, at] = value
        return out

    def tiled(values: Sequence[Any]) -> np.ndarray:
        each = [np.broadcast_to(np.asarray(value, np.float32), max(0, before - 1)) for value, before in zip(values, whole, strict=True)]
        return right_padded(each, np.float32, True) * mask

    rewards = [row.get("reward", row["score"]) for row in rows]
    cut_short = [bool(kept < before) for kept, before in zip(lengths, whole, strict=True)]
    table: dict[str, Any] = {
        "prompts": input_ids[:, :1].copy(),
        "responses": input_ids[:, 1:].copy(),
        "input_ids": input_ids,
        "attention_mask": valid.astype(np.uint8),
        "position_ids": _positions(rows, lengths, valid),
        "response_mask": mask,
        "rollout_log_probs": right_padded([row["rollout_log_probs"] for row in rows], np.float32, True),
        "token_level_scores": scalar([row["score"] for row in rows]),
        "token_level_rewards": scalar(rewards),
        "returns": tiled([row.get("returns", reward) for row, reward in zip(rows, rewards, strict=True)]),
        "is_correct": np.array([row["is_correct"] for row in rows], np.uint8),
        "finish_reason": ["length" if was_cut else row.get("finish_reason", "stop") for row, was_cut in zip(rows, cut_short, strict=True)],
        "version_spans": [_kept_spans(row["version_spans"], int(length) - 1) for row, length in zip(rows, lengths, strict=True)],
    }
    known = ["advantage" in row for row in rows]
    if any(known):
        if not all(known):
            raise ValueError(f"row {known.index(False)} has no advantage, others have: give all or none")
        table["advantages"] = tiled([row["advantage"] for row in rows])
    for name in extras:
        table[name], table[f"{name}_mask"] = _per_token(name, rows, whole, lengths)
    return table


def _positions(rows: Sequence[Mapping[str, Any]], lengths: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """[B, S], or [B, 3, S] where any row has three positions a token; a row of text alone then has its one three times."""
    counted = np.where(valid, np.arange(valid.shape[1], dtype=np.int32), np.int32(0))
    if not any("position_ids" in row for row in rows):
        return counted
    out = np.repeat(counted[:, None], 3, axis=1)
    for number, row in enumerate(rows):
        if "position_ids" in row:
            out[number, :, : lengths[number]] = np.asarray(row["position_ids"])[: lengths[number]].T
    return out


def _kept_spans(spans: Any, positions: int) -> np.ndarray:
    kept = np.array(spans, np.int64).reshape(-1, 4)
    kept = kept[kept[:, 2] < positions]
    kept[:, 3] = np.minimum(kept[:, 3], positions)
    return kept


def _per_token(name: str, rows: Sequence[Mapping[str, Any]], whole: Sequence[int], lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A row without the column has a mask of zeros. ValueError when none has it."""
    columns = [np.asarray(row[name]) if row.get(name) is not None else None for row in rows]
    first = next((column for column in columns if column is not None), None)
    if first is None:
        raise ValueError(f"no row has a column {name}")
    positions = int(lengths.max()) - 1
    dtype = np.result_type(*(column.dtype for column in columns if column is not None))
    out = np.zeros((len(rows), positions, *first.shape[1:]), dtype)
    mask = np.zeros((len(rows), positions), np.uint8)
    for number, column in enumerate(columns):
        if column is None:
            continue
        start, end = whole[number] - 1 - len(column), int(lengths[number]) - 1
        out[number, start:end] = column[: max(0, end - start)]
        mask[number, start:end] = 1
    return out, mask


def _array(column: Value) -> np.ndarray:
    return column.data if isinstance(column, Column) else np.asarray(column)


def _check_dtype(field: FieldSpec, name: str, column: Value) -> None:
    dtype = getattr(column, "dtype", None)
    if dtype in _DTYPES[field.dtype]:
        return
    said = dtype if isinstance(dtype, str) else getattr(dtype, "name", type(column).__name__)
    if isinstance(column, Column) or said not in _DTYPES[field.dtype]:  # by name: of another byte order it is the same
        raise ValueError(f"column {name!r} of hop {field.hop!r} is {said}; it must be {field.dtype.replace('|', ' or ')}")


def _check_shape(field: FieldSpec, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    fault = None if len(shape) == len(field.shape) else ""
    for size, want in zip(shape, field.shape, strict=False):
        if want == _N1:
            if size < 2:
                fault = ", and an object has at least one row"
            elif sizes.setdefault(ROWS, size - 1) != size - 1:
                fault = f" with {ROWS} = {sizes[ROWS]}"
        elif isinstance(want, int):
            if size != want:
                fault = ""
        elif sizes.setdefault(want, size) != size:
            fault = f" with {want} = {sizes[want]}"
        elif want == TOKENS:
            sizes[POSITIONS] = size - sizes[ROWS]
        if fault is not None:
            break
    if fault is not None:
        wanted = ", ".join(map(str, field.shape))
        raise ValueError(f"column {field.name!r} of hop {field.hop!r} has shape {list(shape)}; it must be [{wanted}]{fault}")


def _check_offsets(columns: Mapping[str, Value], name: str, counted: str) -> None:
    """They begin with 0, rise, and end where the column does."""
    if missing := [other for other in (name, counted) if other not in columns]:
        there = ", ".join(other for other in columns if other in _CUT_BY[name])
        raise ValueError(f"the object has no column {missing[0]}, so {there} cannot be cut into rows")
    offsets, end = _array(columns[name]).tolist(), len(_array(columns[counted]))
    least = int(name == "row_offsets")
    if offsets[0] or any(after - before < least for before, after in pairwise(offsets)):
        raise ValueError(f"{name} is {offsets[:8]}: it begins with 0 and rises; a row has at least one token")
    if offsets[-1] != end:
        raise ValueError(f"{name} does not fit column {counted}: they end at {offsets[-1]}, it has {end}")
    if counted == "image_grid" and "pixel_values" in columns:
        patches, given = int(np.prod(_array(columns[counted]), axis=1, dtype=np.int64).sum()), len(_array(columns["pixel_values"]))
        if patches != given:
            raise ValueError(f"image_grid does not fit column pixel_values: it counts {patches} patches of {given}")


def _check_rows(arrays: Mapping[str, np.ndarray], rows: int) -> None:
    for number in range(rows):
        try:
            _check_rollout({name: cut(arrays, name, number) for name in arrays if name not in OFFSET_COLUMNS})
        except ValueError as error:
            raise ValueError(f"row {number}: {error}" if rows > 1 else str(error)) from None


def _check_rollout(arrays: Mapping[str, np.ndarray]) -> None:
    mask, log_probs, spans = arrays["response_mask"], arrays["rollout_log_probs"], arrays["version_spans"]
    if arrays["input_ids"].min() < 0:
        raise ValueError("input_ids holds a negative token id")
    if mask.size and mask.max() > 1:
        raise ValueError(f"response_mask holds {int(mask.max())}; it may hold 0 and 1")
    if not np.isfinite(log_probs).all():
        raise ValueError(f"rollout_log_probs is not finite at position {int(np.flatnonzero(~np.isfinite(log_probs))[0])}")
    if log_probs[mask == 0].any():
        raise ValueError("rollout_log_probs is not 0 where response_mask is 0")
    if not (np.isfinite(arrays["temperature"]) and arrays["temperature"] > 0):
        raise ValueError(f"temperature is {float(arrays['temperature'])}; it must be a number above 0")
    covered, before = np.zeros(mask.shape, bool), 0
    for epoch, version, start, end in spans.tolist():
        if epoch < 0 or version < 0 or not before <= start < end <= mask.size:
            raise ValueError(
                f"version_spans has ({epoch}, {version}, {start}, {end}): spans rise, do not overlap and lie in [0, {mask.size})"
            )
        covered[start:end], before = True, end
    if (mask.astype(bool) & ~covered).any():
        raise ValueError(f"no version span covers the sampled position {int(np.flatnonzero(mask.astype(bool) & ~covered)[0])}")


def _check_reward(arrays: Mapping[str, np.ndarray]) -> None:
    strange = arrays["score"][~np.isfinite(arrays["score"])]
    if strange.size:
        raise ValueError(f"score is {float(strange[0])}; a failed reward is a failed reward, not a number")
    other = arrays["is_correct"][~np.isin(arrays["is_correct"], (0, 1, UNKNOWN_CORRECTNESS))]
    if other.size:
        raise ValueError(f"is_correct is {int(other[0])}; it may be 0, 1, or {UNKNOWN_CORRECTNESS} for unknown")
