"""Plans for the parity tests, and what "the same steps" means in numbers.

Adam's eps is 1e-4 here: with 1e-8 the first step is nearly the sign of the gradient, and its smallest elements flip on any rounding.
"""

from __future__ import annotations

from typing import Any

import pytest

from trainer.spec import OptimizerSpec
from trainer.wire import PlanRow

ADAM = OptimizerSpec(eps=1e-4, weight_decay=0.01, grad_clip=1.0)
SGD = OptimizerSpec(kind="sgd", momentum=0.9, weight_decay=0.01, grad_clip=1.0)


def in_one(rows: list[PlanRow], dp: int = 1) -> list[list[list[PlanRow]]]:
    """A mini-batch of one micro-batch, on the first rank."""
    return [[rows], *([] for _ in range(dp - 1))]


def dealt(rows: list[PlanRow], dp: int, size: int) -> list[list[list[PlanRow]]]:
    """Rows dealt to ranks unevenly, in micro-batches of `size`."""
    shares = [rows[: len(rows) // dp + 1], rows[len(rows) // dp + 1 :]] if dp == 2 else [rows]
    return [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]


def assert_equal_steps(found: Any, expected: Any, *, gradients: bool = True) -> None:
    """`gradients` False where no rank has them whole: with the distributed optimizer the norm is compared, and what they did."""
    for mine, theirs in zip(found.reports, expected.reports, strict=True):
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
        assert mine["tokens"] == theirs["tokens"]
    assert found.distance(expected, "log_probs") < 5e-6
    if gradients:
        assert found.error(expected, "gradients") < 1e-5
    assert found.error(expected, "weights") < 1e-5
