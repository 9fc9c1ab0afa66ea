"""Megatron's switches change what a step costs, not what it computes: each against plain transformers and torch, as the layouts are.

bf16 is the exception, and has its own tolerances; what is bit-equal there is a resume, from the fp32 weights behind the bf16 ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.steps import ADAM, assert_equal_steps, dealt
from trainer.spec import TrainerSpec

MakeSpec = Callable[..., TrainerSpec]


def in_words(layout: str) -> dict[str, int]:
    return dict(zip(("tp", "pp", "cp", "dp"), map(int, layout), strict=True))


def cases(quick: list[tuple[str, dict[str, Any]]], slow: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    def name(layout: str, switches: dict[str, Any]) -> str:
        return "-".join([layout, *(key if value is True else str(value) for key, value in switches.items())])

    marked = [pytest.param(*case, marks=pytest.mark.slow, id=name(*case)) for case in slow]
    return [*(pytest.param(*case, id=name(*case)) for case in quick), *marked]


SPREAD = {"distributed_optimizer": True}
ALONG = {"sequence_parallel": True}
FULL, SELECTIVE = {"recompute": "full"}, {"recompute": "selective"}
QUICK: list[tuple[str, dict[str, Any]]] = [("1112", SPREAD), ("2111", ALONG), ("1111", SELECTIVE), ("1111", FULL)]
SLOW: list[tuple[str, dict[str, Any]]] = [
    ("1122", SPREAD),
    ("2212", SPREAD),
    ("2111", SPREAD),
    ("2211", ALONG),
    ("2121", ALONG),
    *((layout, switches) for switches in (FULL, SELECTIVE) for layout in ("2211", "1121")),
    ("2212", SPREAD | ALONG | FULL),
]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(("layout", "switches"), cases(QUICK, SLOW))
def test_M2_two_steps_with_any_switch_equal_plain_torch(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, references: dict[str, Any], layout: str, switches: dict[str, Any]
) -> None:
    spec = make_spec("qwen3_odd", **in_words(layout), optimizer=ADAM, **switches)
    requests = [plan(0, [dealt(rows.ragged(1, 9), spec.dp, 2)]), plan(1, [dealt(rows.ragged(2, 8), spec.dp, 4)])]
    if "clipped" not in references:
        references["clipped"] = lab.reference(spec, requests)
    found, expected = lab.layout(spec, requests), references["clipped"]
    errors = {kind: found.error(expected, kind) for kind in ("gradients", "weights") if found.named(kind)}
    print(f"\n{layout} {switches}: log-probs {found.distance(expected, 'log_probs'):.1e}, {errors}")
    assert_equal_steps(found, expected, gradients=not spec.distributed_optimizer)
    assert_switched(spec, requests, found.seen)


def assert_switched(spec: TrainerSpec, requests: list[Any], seen: dict[str, int]) -> None:
    """The same numbers could come from a switch that is not connected."""
    micro_batches = sum(len(mini_batch.ranks[0]) for request in requests for mini_batch in request.mini_batches)
    calls = micro_batches * 2 // spec.pp
    assert seen["layer_calls"] == calls * (2 if spec.recompute == "full" else 1)
    assert seen["attention_calls"] == calls * (1 if spec.recompute == "none" else 2)
    rows = {kind: seen[f"{kind}_rows"] / seen[f"{kind}_calls"] for kind in ("layer", "attention")}
    assert rows["layer"] * (spec.tp if spec.sequence_parallel else 1) == rows["attention"]
    share = seen["state"] / (2 * seen["parameters"])  # two moments, and a step count each
    assert share == pytest.approx(1 / (spec.dp * spec.cp) if spec.distributed_optimizer else 1.0, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "ep", "switches"),
    [("1112", 2, SPREAD | FULL), ("2112", 4, SPREAD | SELECTIVE | ALONG), ("1211", 1, FULL)],
    ids=["1112e2-distributed_optimizer-full", "2112e4-distributed_optimizer-selective", "1211e1-full"],
)
def test_M2_two_steps_of_a_mixture_of_experts_with_any_switch_equal_plain_torch(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, references: dict[str, Any], layout: str, ep: int, switches: dict[str, Any]
) -> None:
    spec = make_spec("qwen3_moe", **in_words(layout), ep=ep, optimizer=ADAM, **switches)
    requests = [plan(0, [dealt(rows.ragged(1, 9), spec.dp, 2)]), plan(1, [dealt(rows.ragged(2, 8), spec.dp, 4)])]
    if "experts" not in references:
        references["experts"] = lab.reference(spec, requests)
    assert_equal_steps(lab.layout(spec, requests), references["experts"], gradients=not spec.distributed_optimizer)


BF16_QUICK: list[tuple[str, dict[str, Any]]] = [("1111", {})]
BF16_SLOW: list[tuple[str, dict[str, Any]]] = [("2211", {}), ("1122", {}), ("1112", SPREAD), ("2111", ALONG | FULL)]


UNCLIPPED = {"clip_low": 1.0, "clip_high": 1e6}
"""A token that rounding moves over a bound of the clip has another gradient altogether."""


@pytest.mark.parametrize(("layout", "switches"), cases(BF16_QUICK, BF16_SLOW))
def test_M2_two_steps_in_bf16_are_those_of_fp32_within_what_bf16_costs_plain_transformers(
    lab: Any,
    rows: Any,
    make_spec: MakeSpec,
    plan: Any,
    references: dict[str, Any],
    models: dict[str, str],
    layout: str,
    switches: dict[str, Any],
) -> None:
    spec = make_spec("qwen3_odd", **in_words(layout), optimizer=ADAM, loss=UNCLIPPED, dtype="bfloat16", **switches)
    requests = [plan(0, [dealt(rows.ragged(1, 9), spec.dp, 2)]), plan(1, [dealt(rows.ragged(2, 8), spec.dp, 4)])]
    if "bf16" not in references:
        references["unclipped"] = lab.reference(spec.model_copy(update={"dtype": "float32"}), requests)
        references["bf16"] = lab.reference(spec, requests[:1])
    found, expected, plain = lab.layout(spec, requests), references["unclipped"], references["bf16"]

    def moved(outcome: Any) -> np.ndarray:
        given = load_file(Path(models["qwen3_odd"]) / "model.safetensors")
        weights = outcome.named("weights")
        return np.concatenate([(weights[f"weights/{name}"] - tensor).ravel() for name, tensor in sorted(given.items())])

    ours, theirs = moved(found), moved(expected)
    likeness = float(ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs))
    distances = [outcome.distance(expected, "log_probs") for outcome in (found, plain)]
    print(f"\nbf16 {layout} {switches}: log-probs {distances[0]:.1e} (transformers {distances[1]:.1e}), moved {likeness:.4f} alike")
    assert distances[0] < 2 * distances[1]
    if not spec.distributed_optimizer:
        errors = [worst(outcome.named("gradients/0"), expected.named("gradients/0")) for outcome in (found, plain)]
        print(f"first gradients {errors[0]:.1e} (transformers {errors[1]:.1e})")
        assert errors[0] < 2 * errors[1]
    for step, (mine, right) in enumerate(zip(found.reports, expected.reports, strict=True)):
        assert mine["loss"] == pytest.approx(right["loss"], abs=0.03), step
        assert mine["grad_norm"] == pytest.approx(right["grad_norm"], rel=0.03), step
    assert likeness > 0.98


def worst(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys() and found
    return max(float(np.abs(found[name] - array).max() / np.abs(array).max()) for name, array in expected.items())
