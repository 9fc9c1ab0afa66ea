"""The built-in rules: a response against the row's `answer`.

Each says a score in [0, 1] and whether the response is correct. A row without a usable answer is a mistake in the data: the rule raises,
and the leaf fails.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

RuleName = Literal["exact", "numeric", "partial"]
Verdict = dict[str, Any]
Rule = Callable[[str, Mapping[str, Any]], Verdict]

# A sign counts unless it joins two numbers: 7-2 ends in 2, x = -2 in -2. A thousands comma must be followed by three digits.
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?:(?<![\w.)])[-+−])?\.\d+")


class Exact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 when the response is the answer, but for white space around and runs of it inside."""

    ignore_case: bool = False

    def __call__(self, response: str, row: Mapping[str, Any]) -> Verdict:
        given, wanted = normalised(response), normalised(_answer(row))
        if self.ignore_case:
            given, wanted = given.casefold(), wanted.casefold()
        return {"score": float(given == wanted), "is_correct": given == wanted}


class Numeric(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 when the last number in the response is within `tolerance` of the answer (its last number, where it is text)."""

    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be 0 or more, not {self.tolerance}")

    def __call__(self, response: str, row: Mapping[str, Any]) -> Verdict:
        wanted = last_number(_answer(row))
        if wanted is None:
            raise ValueError(f"the answer {row['answer']!r} holds no number")
        given = last_number(response)
        correct = given is not None and abs(given - wanted) <= self.tolerance
        return {"score": float(correct), "is_correct": correct}


class Partial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 when exact; else `weight` times the share of character positions that match, of the longer of the two.

    With `must_stop`, a response cut by its length limit gets 0.
    """

    weight: float = 0.5
    must_stop: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ValueError(f"weight must lie in [0, 1], not {self.weight}")

    def __call__(self, response: str, row: Mapping[str, Any]) -> Verdict:
        given, wanted = normalised(response), normalised(_answer(row))
        share = sum(a == b for a, b in zip(given, wanted, strict=False)) / max(len(given), len(wanted), 1)
        correct = given == wanted
        if self.must_stop and row.get("finish_reason") == "length":
            return {"score": 0.0, "is_correct": False, "parts": {"matching": share}}
        return {"score": 1.0 if correct else self.weight * share, "is_correct": correct, "parts": {"matching": share}}


RULES: dict[str, type[Exact] | type[Numeric] | type[Partial]] = {"exact": Exact, "numeric": Numeric, "partial": Partial}


def make_rule(name: str, params: Mapping[str, Any]) -> Rule:
    """Raises ValueError for an unknown rule, or parameters it does not take."""
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}; the rules are {', '.join(RULES)}")
    try:
        return msgspec.convert(dict(params), RULES[name])
    except msgspec.ValidationError as error:
        known = ", ".join(RULES[name].__struct_fields__)
        raise ValueError(f"params of rule {name}: {error}; it takes {known}") from error


def normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None


def _answer(row: Mapping[str, Any]) -> str:
    answer = row.get("answer")
    if answer is None or isinstance(answer, list | dict):
        raise ValueError(f"the row's answer is {answer!r}; a rule needs a text or a number")
    return str(answer)
