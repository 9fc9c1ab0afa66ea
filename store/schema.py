"""The fields of every stored object: who writes them, who reads them, what they are, who ends them.

`FIELDS` is the table that docs/dataflow.md prints and a test compares. `validate` is what stands between a bug in one package and a
silently wrong number in another; `padded` lays rows out as the contract's right-padded table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from store.base import Column, Value
from store.format import occupied_bytes

UNKNOWN_CORRECTNESS = 255
ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """`shape` is numbers and letters (S tokens, R = S − 1 response positions, K spans, Q ≤ R routed tokens, L layers, E experts of a
    token, … anything); `dtype` may name several, with |. What is `optional` is checked where it is there."""

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


def _rollout(name: str, dtype: str, shape: tuple[str | int, ...], meaning: str) -> FieldSpec:
    return FieldSpec(name, "rollout", dtype, shape, "rollout.tree", ("trainer", "driver.archive"), "driver", _ROW_ENDS, meaning)


_ROUTES = "optional: the experts of each layer that the last Q of the first R tokens went to when they were sampled"


def _reward(name: str, dtype: str, meaning: str) -> FieldSpec:
    return FieldSpec(name, "reward", dtype, (), "driver.dispatch", ("trainer", "driver.archive"), "driver", _ROW_ENDS, meaning)


FIELDS: tuple[FieldSpec, ...] = (
    _rollout("input_ids", "int32", ("S",), "prompt and response tokens of the leaf"),
    _rollout("response_mask", "uint8", ("R",), "1 where input_ids[1+i] was sampled by the policy and is trained in this leaf"),
    _rollout("rollout_log_probs", "float32", ("R",), "the engine's log-probs at the row's temperature; 0 where the mask is 0"),
    _rollout("version_spans", "int64", ("K", 4), "(epoch, version, start, end) over response positions [0, R)"),
    _rollout("temperature", "float32", (), "the sampling temperature"),
    FieldSpec(
        "routed_experts", "rollout", "uint8|int16|int32", ("Q", "L", "E"), "rollout.tree", ("trainer",), "driver", _ROW_ENDS, _ROUTES, True
    ),
    _reward("score", "float32", "what the scorer said"),
    _reward("is_correct", "uint8", "1, 0, or 255 when the scorer did not say"),
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


def fields_of(hop: str) -> tuple[FieldSpec, ...]:
    found = tuple(field for field in FIELDS if field.hop == hop)
    if not found:
        raise ValueError(f"there is no hop {hop!r}; the hops are {', '.join(HOPS)}")
    return found


def most_bytes(hop: str, **sizes: int) -> int:
    """What an object of this hop takes up in a store at these sizes (S, R, K), without its optional fields: what is to be reserved."""
    wanted = (field for field in fields_of(hop) if not field.optional)
    return occupied_bytes({f.name: (f.dtype, tuple(sizes[n] if isinstance(n, str) else n for n in f.shape)) for f in wanted})


def validate(hop: str, columns: Mapping[str, Value]) -> None:
    """Raises ValueError, naming the column and what it should be, unless the object is one of this hop."""
    fields = fields_of(hop)
    if fields[0].name == ANY_NAME:
        if not columns:
            raise ValueError(f"an object of hop {hop!r} needs at least one column")
        for name, column in columns.items():
            _check_dtype(fields[0], name, column)
        return
    expected = [field.name for field in fields]
    missing = [field.name for field in fields if field.name not in columns and not field.optional]
    unknown = [name for name in columns if name not in expected]
    if missing or unknown:
        wrong = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has the unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"an object of hop {hop!r} {' and '.join(wrong)}; its columns are {', '.join(expected)}")
    sizes: dict[str, int] = {}
    for field in (field for field in fields if field.name in columns):
        _check_dtype(field, field.name, columns[field.name])
        _check_shape(field, _array(columns[field.name]), sizes)
    arrays = {name: _array(column) for name, column in columns.items()}
    if hop == "rollout":
        _check_rollout(arrays)
    else:
        _check_reward(arrays)


def padded(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray | list[np.ndarray]]:
    """The contract's field table for rows given as their rollout and reward columns together. B rows, S the longest, R = S − 1.

    Everything is right-padded with 0. The scalar of a row stands on its last trained position, or on its last position when none is.
    `version_spans` stays ragged: a list of B arrays [K, 4].
    """
    if not rows:
        raise ValueError("padded needs at least one row")
    lengths = np.array([len(row["input_ids"]) for row in rows])
    if lengths.min() < 1:
        raise ValueError(f"row {int(lengths.argmin())} has no tokens")
    rows_count, longest = len(rows), int(lengths.max())
    valid = np.arange(longest)[None, :] < lengths[:, None]
    input_ids = np.zeros((rows_count, longest), np.int32)
    response_mask = np.zeros((rows_count, longest - 1), np.uint8)
    log_probs, scores = np.zeros((rows_count, longest - 1), np.float32), np.zeros((rows_count, longest - 1), np.float32)
    for index, row in enumerate(rows):
        positions = lengths[index] - 1
        input_ids[index, : lengths[index]] = row["input_ids"]
        response_mask[index, :positions] = row["response_mask"]
        log_probs[index, :positions] = row["rollout_log_probs"]
        if positions:
            trained = np.flatnonzero(row["response_mask"])
            scores[index, trained[-1] if trained.size else positions - 1] = row["score"]
    return {
        "prompts": input_ids[:, :1].copy(),
        "responses": input_ids[:, 1:].copy(),
        "input_ids": input_ids,
        "attention_mask": valid.astype(np.uint8),
        "position_ids": np.where(valid, np.arange(longest, dtype=np.int32)[None, :], np.int32(0)),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
        "token_level_scores": scores,
        "token_level_rewards": scores.copy(),
        "is_correct": np.array([row["is_correct"] for row in rows], np.uint8),
        "version_spans": [np.array(row["version_spans"], np.int64) for row in rows],
    }


def _array(column: Value) -> np.ndarray:
    return column.data if isinstance(column, Column) else np.asarray(column)


def _check_dtype(field: FieldSpec, name: str, column: Value) -> None:
    dtype = column.dtype if isinstance(column, Column) else getattr(getattr(column, "dtype", None), "name", type(column).__name__)
    if dtype not in field.dtype.split("|"):
        raise ValueError(f"column {name!r} of hop {field.hop!r} is {dtype}; it must be {field.dtype.replace('|', ' or ')}")


def _check_shape(field: FieldSpec, array: np.ndarray, sizes: dict[str, int]) -> None:
    said = f"column {field.name!r} of hop {field.hop!r} has shape {list(array.shape)}; it must be [{', '.join(map(str, field.shape))}]"
    if array.ndim != len(field.shape):
        raise ValueError(said)
    for size, want in zip(array.shape, field.shape, strict=True):
        if isinstance(want, int):
            if size != want:
                raise ValueError(said)
        elif sizes.setdefault(want, size) != size:
            raise ValueError(f"{said} with {want} = {sizes[want]}")
        elif want == "S":
            sizes["R"] = size - 1


def _check_rollout(arrays: Mapping[str, np.ndarray]) -> None:
    mask, log_probs, spans = arrays["response_mask"], arrays["rollout_log_probs"], arrays["version_spans"]
    if not arrays["input_ids"].size:
        raise ValueError("input_ids is empty; a row has at least one token")
    if arrays["input_ids"].min() < 0:
        raise ValueError("input_ids holds a negative token id")
    if mask.size and mask.max() > 1:
        raise ValueError(f"response_mask holds {int(mask.max())}; it may hold 0 and 1")
    if not np.isfinite(log_probs).all():
        raise ValueError(f"rollout_log_probs is not finite at position {int(np.flatnonzero(~np.isfinite(log_probs))[0])}")
    if log_probs[mask == 0].any():
        raise ValueError("rollout_log_probs is not 0 where response_mask is 0")
    routes = arrays.get("routed_experts")
    if routes is not None and len(routes) > mask.size:
        raise ValueError(f"routed_experts speaks of {len(routes)} tokens; the last token is never routed, so at most R = {mask.size}")
    if routes is not None and routes.size and routes.min() < 0:
        raise ValueError("routed_experts holds a negative number; leave out leading tokens whose experts are not known")
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
    if not np.isfinite(arrays["score"]):
        raise ValueError(f"score is {float(arrays['score'])}; a failed reward is a failed reward, not a number")
    if int(arrays["is_correct"]) not in (0, 1, UNKNOWN_CORRECTNESS):
        raise ValueError(f"is_correct is {int(arrays['is_correct'])}; it may be 0, 1, or {UNKNOWN_CORRECTNESS} for unknown")
