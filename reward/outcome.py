"""What a scorer returned, judged: a finite number with its facts, or the reason why it is none."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Mapping
from typing import Any

import msgspec

FLOAT32_MAX = 3.4028234e38
_KEYS = ("score", "is_correct", "parts")
_REASON_LIMIT = 1000


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """One job's end. `index` is its place in the task; `error` is set when there is no score."""

    index: int
    score: float | None = None
    is_correct: bool | None = None
    parts: dict[str, float | str] = {}
    seconds: float = 0.0
    error: str | None = None


def judged(index: int, label: str, returned: Any, seconds: float) -> Outcome:
    """`returned` is a number, or a mapping with `score` and perhaps `is_correct` and `parts`."""
    try:
        facts = returned if isinstance(returned, Mapping) else {"score": returned}
        unknown = [str(key) for key in facts if key not in _KEYS]
        if unknown or "score" not in facts:
            raise ValueError(
                f"returned a dict with {', '.join(map(str, facts)) or 'nothing'}; it needs score and may have is_correct and parts"
            )
        return Outcome(index, _number("score", facts["score"]), _verdict(facts.get("is_correct")), _parts(facts.get("parts")), seconds)
    except ValueError as error:
        return Outcome(index, seconds=seconds, error=f"{label} {error}")


def raised(index: int, label: str, error: BaseException, seconds: float) -> Outcome:
    """The reason names the scorer, the exception, and the line of the user's file where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return Outcome(index, seconds=seconds, error=f"{label} raised {type(error).__name__}: {_told(error)}"[:_REASON_LIMIT] + place)


def _told(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # the user's exception may fail to say what it is
        return f"(its message cannot be shown: {type(broken).__name__})"


def _plain(value: Any) -> Any:
    """A numpy or torch scalar as the Python number it holds."""
    return value.item() if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)) else value


def _number(name: str, value: Any) -> float:
    plain = _plain(value)
    if isinstance(plain, bool) or not isinstance(plain, numbers.Real):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ValueError(f"returned {name} {_shown(value)}, a {type(value).__name__}{shape}; it must be a number")
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"returned {name} {_shown(value)}; it must be finite (and fit a float32)")
    return number


def _verdict(value: Any) -> bool | None:
    plain = _plain(value)
    if plain is None or isinstance(plain, bool):
        return plain
    if isinstance(plain, int | float) and plain in (0, 1):
        return bool(plain)
    raise ValueError(f"returned is_correct {_shown(value)}; it must be True, False or None")


def _parts(value: Any) -> dict[str, float | str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"returned parts {_shown(value)}; they must be a dict of names to numbers or texts")
    parts: dict[str, float | str] = {}
    for name, part in value.items():
        plain = _plain(part)
        parts[name] = plain if isinstance(plain, str) else float(plain) if isinstance(plain, bool) else _number(f"part {name}", plain)
    return parts


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
