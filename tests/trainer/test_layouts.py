"""Every layout gives the numbers of plain transformers and torch: `make selfcheck` runs the whole matrix and prints what it measured.

A layout is written as its digits: tensor, pipeline, context and data parallel ranks. The tests that are not slow cover each of the four,
and both models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer.steps import ADAM, SGD, assert_equal_steps, dealt
from trainer.spec import TrainerSpec

MakeSpec = Callable[..., TrainerSpec]
LAYOUTS = ("1111", "2111", "1211", "1121", "1112", "2211", "2121", "1221", "2112", "1122", "2221")
MODELS = ("llama", "qwen3")
QUICK = {("qwen3", "2211"), ("llama", "1122"), ("qwen3_odd", "2111")}
PADDED = [("qwen3_odd", layout) for layout in ("1111", "2111", "2211", "2121", "2112")]
"""A vocabulary that does not divide by tp and is padded, one key-value head that both tensor-parallel ranks need, tied embeddings."""


def in_words(layout: str) -> dict[str, int]:
    return dict(zip(("tp", "pp", "cp", "dp"), map(int, layout), strict=True))


def matrix(pairs: list[tuple[str, str]], quick: set[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow, id="-".join(pair)) for pair in pairs]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    """By model: the reference takes each row alone, so that it is one for all layouts."""
    return {}


@pytest.mark.parametrize(("model", "layout"), matrix([*itertools.product(MODELS, LAYOUTS), *PADDED], QUICK))
def test_M2_two_steps_of_any_layout_equal_plain_torch(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, references: dict[str, Any], model: str, layout: str
) -> None:
    check_two_steps(lab, rows, make_spec(model, **in_words(layout), optimizer=ADAM), plan, references, model, layout)


@pytest.mark.parametrize(("model", "layout"), matrix([*itertools.product(MODELS, LAYOUTS)], {("llama", "2111")}))
def test_M2_two_steps_of_sgd_with_momentum_in_any_layout_equal_plain_torch(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, references: dict[str, Any], model: str, layout: str
) -> None:
    check_two_steps(lab, rows, make_spec(model, **in_words(layout), optimizer=SGD), plan, references, f"{model} sgd", layout)


def check_two_steps(lab: Any, rows: Any, spec: TrainerSpec, plan: Any, references: dict[str, Any], model: str, layout: str) -> None:
    # With two data-parallel ranks: 3 and 2 micro-batches, then 2 and 1.
    requests = [plan(0, [dealt(rows.ragged(1, 9), spec.dp, 2)]), plan(1, [dealt(rows.ragged(2, 8), spec.dp, 4)])]
    if model not in references:
        references[model] = lab.reference(spec, requests)
    found, expected = lab.layout(spec, requests), references[model]
    loss = max(
        abs(mine["loss"] - theirs["loss"]) / abs(theirs["loss"]) for mine, theirs in zip(found.reports, expected.reports, strict=True)
    )
    relative = {kind: found.error(expected, kind) for kind in ("gradients", "weights")}
    print(
        f"\n{model} {layout}: log-probs {found.distance(expected, 'log_probs'):.1e}, loss {loss:.1e}, "
        + ", ".join(f"{kind} {error:.1e}" for kind, error in relative.items())
    )
    assert_equal_steps(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1114", "1212", "1122", "2112"])
def test_M1_M4_one_row_on_many_ranks_is_the_step_of_one_row_on_one(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, layout: str
) -> None:
    """The other data-parallel ranks have no rows, and on the last plan not even the first rank is the one that has."""
    row = rows.ragged(3, 1)
    alone = lab.layout(make_spec(optimizer=ADAM), [plan(0, [[[row]]]), plan(1, [[[row]]])])
    spec = make_spec(optimizer=ADAM, **in_words(layout))
    empty: list[Any] = [[] for _ in range(spec.dp - 1)]
    found = lab.layout(spec, [plan(0, [[[row], *empty]]), plan(1, [[*empty, [row]]])])
    assert_equal_steps(found, alone)


ROUND_TRIPS = list(itertools.product(("qwen3", "qwen3_tied", "qwen3_odd", "llama", "llama_tied", "qwen2"), ("2111", "1211", "2211")))


@pytest.mark.parametrize(("model", "layout"), matrix(ROUND_TRIPS, {("qwen3_odd", "2211")}))
def test_a_checkpoint_comes_out_of_any_layout_bit_for_bit_as_it_went_in(
    lab: Any, make_spec: MakeSpec, models: dict[str, str], model: str, layout: str
) -> None:
    exported = lab.layout(make_spec(model, **in_words(layout)), []).named("weights")
    given = load_file(Path(models[model]) / "model.safetensors")
    assert {name.removeprefix("weights/") for name in exported} == given.keys()
    for name, tensor in given.items():
        assert tensor.dtype == exported[f"weights/{name}"].dtype and np.array_equal(tensor, exported[f"weights/{name}"]), name
