"""The built-in rules, by example and by property."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward.rules import last_number, make_rule


def verdict(rule: str, response: str, answer: Any, finish_reason: str = "stop", **params: Any) -> tuple[float, bool]:
    told = make_rule(rule, params)(response, {"answer": answer, "finish_reason": finish_reason})
    return told["score"], told["is_correct"]


@pytest.mark.parametrize(
    ("response", "answer", "params", "right"),
    [
        ("12", "12", {}, True),
        (" 1  2\n", "1 2", {}, True),
        ("1 2", "12", {}, False),
        ("42", 42, {}, True),
        ("Cafe\u0301", "Café", {}, True),
        ("yes", "Yes", {}, False),
        ("yes", "Yes", {"ignore_case": True}, True),
        ("", "", {}, True),
    ],
)
def test_exact_matches_but_for_white_space(response: str, answer: Any, params: dict[str, Any], right: bool) -> None:
    assert verdict("exact", response, answer, **params) == (float(right), right)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 42.", 42),
        ("first 3, then 4", 4),
        ("1,234,567.5 tons", 1234567.5),
        ("1,23", 23),
        ("x = -2", -2),
        ("x=-2", -2),
        ("−7", -7),
        ("7-2", 2),
        ("(3)-2", 2),
        ("1e3", 1000),
        ("$.50", 0.5),
        ("#### 18", 18),
        ("100%", 100),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numeric_is_within_its_tolerance() -> None:
    assert verdict("numeric", "so it is 3.14", "3.1416") == (0, False)
    assert verdict("numeric", "so it is 3.14", "3.1416", tolerance=0.01) == (1, True)
    assert verdict("numeric", "so it is 3.14", 3.14) == (1, True)
    assert verdict("numeric", "no idea", "3") == (0, False)
    assert verdict("numeric", "1e999", "1e999") == (0, False)


def test_partial_is_the_share_of_matching_positions_and_1_when_exact() -> None:
    assert verdict("partial", "1234", "1234") == (1, True)
    assert verdict("partial", "1243", "1234") == (0.25, False)
    assert verdict("partial", "12345678", "1234") == (0.25, False)
    assert verdict("partial", "", "1234") == (0, False)
    assert verdict("partial", "1243", "1234", weight=1) == (0.5, False)
    assert verdict("partial", "1234", "1234", weight=0) == (1, True)
    assert verdict("partial", "1234", "1234", "length", must_stop=True) == (0, False)
    assert verdict("partial", "1234", "1234", "length") == (1, True)


@settings(max_examples=50, deadline=None)
@given(st.text(), st.text(), st.floats(0, 1))
def test_partial_stays_within_its_weight_and_is_1_only_when_exact(response: str, answer: str, weight: float) -> None:
    score, right = verdict("partial", response, answer, weight=weight)
    assert score == 1 if right else 0 <= score <= weight
    assert right == verdict("exact", response, answer)[1]


@pytest.mark.parametrize("rule", ["exact", "numeric", "partial"])
@pytest.mark.parametrize("answer", [None, [1], {"a": 1}])
def test_L4_a_row_without_a_usable_answer_is_an_error_not_a_zero(rule: str, answer: Any) -> None:
    with pytest.raises(ValueError, match="a rule needs a text or a number"):
        verdict(rule, "1", answer)


@pytest.mark.parametrize(
    ("rule", "params", "said"),
    [
        ("exakt", {}, "no rule 'exakt'; the rules are exact, numeric, partial"),
        ("numeric", {"tolerence": 1}, "unknown field `tolerence`; it takes tolerance"),
        ("numeric", {"tolerance": -1}, "0 or more"),
        ("numeric", {"tolerance": "big"}, "Expected `float`"),
        ("partial", {"weight": 2}, r"lie in \[0, 1\]"),
    ],
)
def test_O1_a_parameter_that_a_rule_does_not_take_is_named(rule: str, params: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_rule(rule, params)
