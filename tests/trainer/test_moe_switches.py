"""A mixture of experts under Megatron's switches, and its checkpoints from one split of the experts to another.

Layouts are written as in `test_moe.py`. Recomputation runs the router again in the backward pass: with a pipeline, while other
micro-batches are on their way, and each must go the way of its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.steps import ADAM, SGD, assert_equal_steps, dealt
from tests.trainer.test_moe import in_words, routed
from trainer.spec import TrainerSpec

MakeSpec = Callable[..., TrainerSpec]
FULL, SELECTIVE, SPREAD = {"recompute": "full"}, {"recompute": "selective"}, {"distributed_optimizer": True}
QUICK: list[tuple[str, dict[str, Any]]] = [("1212-2", FULL)]
SLOW: list[tuple[str, dict[str, Any]]] = [
    *((layout, FULL) for layout in ("1111-1", "1122-2", "2212-4")),
    ("1212-2", SELECTIVE),
    *((layout, SPREAD) for layout in ("1112-2", "1122-2", "2212-4")),
    ("2112-2", SPREAD | FULL),
    ("1112-2", {"optimizer": SGD}),
]


def cases() -> list[Any]:
    def name(layout: str, switches: dict[str, Any]) -> str:
        return "-".join([layout, *(str(value) if isinstance(value, str) else key for key, value in switches.items())])

    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=name(*case)) for case in [*QUICK, *SLOW]]


@pytest.mark.parametrize(("layout", "switches"), cases())
def test_M2_two_steps_with_replayed_routes_and_any_switch_equal_plain_transformers(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, layout: str, switches: dict[str, Any]
) -> None:
    spec = make_spec("qwen3_moe", **{"optimizer": ADAM, **in_words(layout), **switches}, routing_replay=True)
    # One row a micro-batch, so that neighbours in the pipeline differ in what is replayed.
    requests = [plan(0, [dealt(routed(rows, 61, 9), spec.dp, 1)], 1e-3), plan(1, [dealt(routed(rows, 62, 8, version=1), spec.dp, 2)], 1e-3)]
    found, expected = lab.layout(spec, requests), lab.reference(spec, requests)
    errors = {kind: f"{found.error(expected, kind):.1e}" for kind in ("gradients", "weights") if found.named(kind)}
    print(f"\nqwen3_moe {layout} {switches}: log-probs {found.distance(expected, 'log_probs'):.1e}, {errors}")
    assert_equal_steps(found, expected, gradients=not spec.distributed_optimizer)


SAME = ["1112-2", "1212-2"]
PAIRS = [("1112-2", "1111-1"), ("1111-1", "2112-4"), ("2111-2", "1212-2"), ("1122-4", "1112-2")]


def resumes() -> list[Any]:
    quick = ("1112-2", "1111-1")
    pairs = [*((layout, layout) for layout in SAME), *PAIRS]
    every = [(*pair, switches) for switches in ({}, SPREAD, {"dtype": "bfloat16"}) for pair in pairs]
    return [
        pytest.param(*case, marks=() if case[:2] == quick and not case[2] else pytest.mark.slow, id="-".join([*case[:2], *case[2]]))
        for case in every
    ]


@pytest.mark.parametrize(("layout", "other", "switches"), resumes())
def test_a_checkpoint_of_any_split_of_the_experts_resumes_in_any_other_bit_for_bit(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, tmp_path: Path, layout: str, other: str, switches: dict[str, Any]
) -> None:
    drawn = [routed(rows, 71 + index, 8, version=index) for index in range(3)]
    here, there = (make_spec("qwen3_moe", **in_words(name), optimizer=ADAM, routing_replay=True, **switches) for name in (layout, other))

    def plans(spec: TrainerSpec) -> list[Any]:
        return [plan(index, [dealt(some, spec.dp, 3)], 1e-3) for index, some in enumerate(drawn)]

    saved, on = lab.layout(here, plans(here)[:2], save=tmp_path), lab.layout(here, plans(here))
    resumed = lab.layout(there, plans(there)[2:], resume=tmp_path / "step_00000002")
    kept, found = (
        {name.split("/", 1)[1]: array for name, array in run.named(kind).items()} for run, kind in ((saved, "saved"), (resumed, "resumed"))
    )
    assert kept.keys() == found.keys() and any("experts.7" in name for name in kept)
    assert all(np.array_equal(array, kept[name]) for name, array in found.items())
    print(f"\nqwen3_moe {layout} -> {other} {switches}: weights after the next step {resumed.error(on, 'weights'):.1e}")
    if layout == other:
        assert all(np.array_equal(array, resumed.arrays[name]) for name, array in on.named("weights").items())
    elif "dtype" not in switches:
        assert resumed.error(on, "weights") < 1e-5
