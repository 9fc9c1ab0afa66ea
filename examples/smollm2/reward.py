"""The reward of the arithmetic rows: 1 when the response is the right number and nothing else, else 0.

Numbers are compared as numbers, so "07" and "7" are the same. Name it as `examples/smollm2/reward.py:score`.
"""

import re
from typing import Any

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def score(response: str, row: dict[str, Any]) -> dict[str, Any]:
    """`row["answer"]` is an integer as text. Returns `score` 0 or 1, `is_correct`, and whether a number was given at all."""
    text = response.strip()
    is_number = _INTEGER.fullmatch(text) is not None
    is_correct = is_number and int(text) == int(row["answer"])
    return {"score": float(is_correct), "is_correct": is_correct, "parts": {"is_number": float(is_number)}}
