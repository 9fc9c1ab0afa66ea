"""Reward functions as users write them, the good and the bad."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]


def length(response: str, row: Row) -> float:
    return len(response) / row["scale"]


def told(response: str, row: Row) -> dict[str, Any]:
    print("a print is no answer", flush=True)
    os.write(1, b"neither is this")
    return {
        "score": np.float32(0.5),
        "is_correct": np.bool_(True),
        "parts": {"length": len(response), "note": "fine", "row": ",".join(sorted(row))},
    }


RETURNS: dict[str, Any] = {
    "nan": float("nan"),
    "inf": float("inf"),
    "too big": 1e39,
    "bool": True,
    "none": None,
    "text": "1.0",
    "list": [1.0],
    "array": np.zeros(2),
    "no score": {"is_correct": True},
    "unknown key": {"score": 1, "reward": 2},
    "correct 2": {"score": 1, "is_correct": 2},
    "parts list": {"score": 1, "parts": [1]},
    "part nan": {"score": 1, "parts": {"a": float("nan")}},
}


def returns(response: str, row: Row) -> Any:
    return RETURNS[response]


def bad(response: str, row: Row) -> float:
    """Misbehaves as the response says; anything else scores 1."""
    if response == "raise":
        raise KeyError("no such thing")
    if response == "exit":
        sys.exit("enough")
    if response == "loop":
        while True:
            pass
    if response == "hold the GIL":
        sum(itertools.repeat(1))
    if response == "crash":
        ctypes.string_at(0)
    if response == "quit":
        os._exit(3)
    if response == "die once":
        marker = Path(row["marker"])
        if not marker.exists():
            marker.touch()
            os.abort()
    if response == "nap":
        time.sleep(0.3)
    if response == "leave a child":
        child = subprocess.Popen(["sleep", "600"])
        Path(row["marker"]).write_text(str(child.pid))
        time.sleep(600)
    return 1.0


def batch(pairs: list[tuple[str, Row]]) -> list[Any]:
    """Scores each by the size of the call; `loop` hangs and `raise` raises for the whole call."""
    for response, _ in pairs:
        if response == "loop":
            time.sleep(600)
        if response == "quit":
            os._exit(3)
        if response == "raise":
            raise RuntimeError("the judge is away")
    if any(response == "short" for response, _ in pairs):
        return [1.0]
    return [float("nan") if response == "nan" else len(pairs) for response, _ in pairs]


batch.batched = True  # type: ignore[attr-defined]

not_callable = 3
