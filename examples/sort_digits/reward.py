"""The reward of "sort the digits": 1 for the exact answer, partial credit up to a half for digits in the right place.

An answer that was cut at the token limit earns nothing: the model must also learn to stop. Name it as
`examples/sort_digits/reward.py:score`.
"""

from typing import Any


def score(response: str, row: dict[str, Any]) -> dict[str, Any]:
    """`row` is the dataset row plus `finish_reason`. Returns `score` in [0, 1], `is_correct`, and the parts it is made of."""
    answer = str(row["answer"])
    if row.get("finish_reason") == "length":
        return {"score": 0.0, "is_correct": False, "parts": {"in_place": 0.0, "cut": 1.0}}
    in_place = sum(given == wanted for given, wanted in zip(response, answer, strict=False)) / max(len(response), len(answer), 1)
    is_correct = response == answer
    return {"score": 1.0 if is_correct else 0.5 * in_place, "is_correct": is_correct, "parts": {"in_place": in_place, "cut": 0.0}}
