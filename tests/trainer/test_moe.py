"""Mixture of experts: every split of the experts gives the numbers of plain transformers, with the engine's routing replayed or not.

A layout is written as its digits, tensor, pipeline, context and data parallel ranks, and after the dash the ranks that share the experts.
Replayed experts are random, so that a replay which is ignored shows; gradients are compared expert by expert.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from store import EmbeddedStore
from tests.trainer.steps import ADAM, SGD, assert_equal_steps, dealt
from trainer.client import TrainerRefused
from trainer.routes import Routing
from trainer.spec import TrainerSpec
from trainer.wire import MiniBatch, PlanRow, TrainRequest

MakeSpec = Callable[..., TrainerSpec]
LAYERS, EXPERTS, CHOSEN = 2, 8, 2
LAYOUTS = ("1111-1", "1112-2", "1122-2", "1212-2", "2111-2", "2211-2", "2112-4")


def in_words(layout: str) -> dict[str, int]:
    return dict(zip(("tp", "pp", "cp", "dp", "ep"), map(int, layout.replace("-", "")), strict=True))


def random_routes(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """[tokens, layers, k], each token's experts distinct."""
    return rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.uint8)


def routed(rows: Any, seed: int, count: int, version: int = 0) -> list[PlanRow]:
    """Rows of four kinds in turn: routes of all tokens, of the response's only, none, and of a row that two versions sampled."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        prompt, response = int(rng.integers(2, 9)), int(rng.integers(3, 14))
        columns = rows.columns(rng, prompt, response, temperature=(0.7, 1.0, 1.3)[index % 3], version=version)
        positions = prompt + response - 1
        kind = index % 4
        if kind != 2:
            columns["routed_experts"] = random_routes(rng, response if kind == 1 else positions)
        if kind == 3:
            columns["version_spans"] = np.array([[0, version, 0, positions - 1], [0, version + 1, positions - 1, positions]], np.int64)
        advantage = float(rng.normal())
        made.append(rows.put(f"{seed}-{index}", columns, advantage).model_copy(update={"score": advantage}))
    return made


def two_steps(plan: Any, rows: Any, seed: int, dp: int) -> list[TrainRequest]:
    """With two data-parallel ranks: 3 and 2 micro-batches, then 2 and 1. The learning rate is small, because an expert of few tokens has a
    small gradient, and shows every rounding of the step before."""
    first, second = routed(rows, seed, 9), routed(rows, seed + 1, 8, version=1)
    return [plan(0, [dealt(first, dp, 2)], 1e-3), plan(1, [dealt(second, dp, 4)], 1e-3)]


@pytest.fixture(scope="module")
def references() -> dict[Any, Any]:
    return {}


def cases() -> list[Any]:
    quick = {("qwen3_moe", "1112-2", True), ("qwen3_moe_mixed", "1211-1", False)}
    every = [("qwen3_moe", *case) for case in itertools.product(LAYOUTS, (False, True))]
    every += [("qwen3_moe_mixed", layout, replay) for layout in ("1211-1", "1212-2", "2111-2") for replay in (False, True)]
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow, id=f"{case[0]}-{case[1]}-{'replay' if case[2] else 'live'}")
        for case in every
    ]


@pytest.mark.parametrize(("model", "layout", "replay"), cases())
def test_M2_two_steps_of_any_split_of_the_experts_equal_plain_transformers(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, references: dict[Any, Any], model: str, layout: str, replay: bool
) -> None:
    spec = make_spec(model, **in_words(layout), routing_replay=replay, optimizer=ADAM)
    requests = two_steps(plan, rows, 61, spec.dp)
    if (model, replay) not in references:
        references[model, replay] = lab.reference(spec, requests)
    found, expected = lab.layout(spec, requests), references[model, replay]
    experts = max(
        float(np.abs(found.arrays[name] - array).max() / np.abs(array).max())
        for name, array in expected.named("gradients").items()
        if ".experts." in name and array.any()
    )
    print(
        f"\n{model} {layout} {'replayed' if replay else 'live'}: log-probs {found.distance(expected, 'log_probs'):.1e}, "
        + ", ".join(f"{kind} {found.error(expected, kind):.1e}" for kind in ("gradients", "weights"))
        + f", the experts' gradients {experts:.1e}"
    )
    assert_equal_steps(found, expected)
    counts = [(report["replayed_rows"], report["unreplayed_rows"]) for report in found.reports]
    assert counts == ([(5, 4), (4, 4)] if replay else [(None, None)] * 2)


def test_replayed_routes_are_not_those_the_router_would_choose(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any) -> None:
    """Or the tests above would prove nothing."""
    some = [plan(0, [dealt(routed(rows, 61, 9), 1, 9)])]
    live, replayed = (lab.reference(make_spec("qwen3_moe", routing_replay=replay), some) for replay in (False, True))
    assert replayed.distance(live, "log_probs") > 0.1 and replayed.error(live, "gradients") > 0.1


@pytest.mark.parametrize(
    "layout", ["1112-2", pytest.param("1122-4", marks=pytest.mark.slow), pytest.param("2212-4", marks=pytest.mark.slow)]
)
def test_M1_M4_one_row_on_ranks_that_share_the_experts_is_the_step_of_one_row_on_one_rank(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, layout: str
) -> None:
    """The other data-parallel rank has no rows, then one has two micro-batches fewer."""
    row, others = routed(rows, 63, 1)[0], routed(rows, 64, 4)
    one, spec = make_spec("qwen3_moe", optimizer=ADAM), make_spec("qwen3_moe", **in_words(layout), optimizer=ADAM)
    alone = lab.layout(one, [plan(0, [[[[row]]]]), plan(1, [[[others]]])])
    found = lab.layout(spec, [plan(0, [[[[row]], []]]), plan(1, [[[others[:1]], [[other] for other in others[1:]]]])])
    assert found.error(alone, "gradients") < 1e-5 and found.error(alone, "weights") < 1e-5
    for mine, theirs in zip(found.reports, alone.reports, strict=True):
        assert (mine["tokens"], mine["rows"]) == (theirs["tokens"], theirs["rows"])
        for name in ("loss", "grad_norm", "entropy", "kl", "ratio_max"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


TRIPS = [("qwen3_moe", layout) for layout in ("1111-1", "1112-2", "1212-2", "2112-2", "2212-4")]
TRIPS += [("qwen3_moe_mixed", layout) for layout in ("1211-1", "1212-2", "2111-2")]


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*trip, marks=() if trip == ("qwen3_moe", "1112-2") else pytest.mark.slow, id="-".join(trip)) for trip in TRIPS],
)
def test_a_checkpoint_comes_out_of_any_split_of_the_experts_bit_for_bit_as_it_went_in(
    lab: Any, make_spec: MakeSpec, models: dict[str, str], model: str, layout: str
) -> None:
    exported = lab.layout(make_spec(model, **in_words(layout)), []).named("weights")
    given = load_file(Path(models[model]) / "model.safetensors")
    assert {name.removeprefix("weights/") for name in exported} == given.keys()
    for name, tensor in given.items():
        assert tensor.dtype == exported[f"weights/{name}"].dtype and np.array_equal(tensor, exported[f"weights/{name}"]), name


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (np.zeros((12, 2, 2), np.uint8), r"of shape \(12, 2, 2\), not \[at most 11, 2, 2\]"),
        (np.zeros((11, 1, 2), np.uint8), r"of shape \(11, 1, 2\)"),
        (np.zeros((11, 2, 3), np.uint8), r"of shape \(11, 2, 3\)"),
        (np.tile(np.array([7, 8], np.uint8), (11, 2, 1)), "a routed expert outside the model's 8"),
        (np.tile(np.array([3, 3], np.uint8), (11, 2, 1)), "to the same expert twice"),
    ],
)
def test_routes_that_are_not_this_models_are_refused_with_the_reason(routes: np.ndarray, words: str) -> None:
    fault = Routing(EXPERTS, CHOSEN, (True, True)).fault(routes, 11)
    assert fault and re.search(words, fault)
    dense = Routing(EXPERTS, CHOSEN, (False, False)).fault(routes, 11)
    assert (dense is None) == ("shape" not in words), "an engine writes anything for a dense layer"


async def test_a_dense_model_and_a_row_with_routes_of_another_model_are_refused_and_nothing_changes(
    start: Any, rows: Any, store: EmbeddedStore, models: dict[str, str]
) -> None:
    wrong = rows.columns(np.random.default_rng(65), 4, 8) | {"routed_experts": np.full((11, 2, 2), 9, np.uint8)}
    async with start(model="qwen3_moe", dp=2, ep=2, routing_replay=True) as trainer:
        with pytest.raises(TrainerRefused, match="has none: leave ep at 1"):
            await trainer.client.load(models["qwen3"])
        await trainer.client.load()
        before = await trainer.client.snapshot(0, 0, 1 << 20, [])
        mini_batch = MiniBatch(ranks=[[[rows.put("wrong", wrong, 1.0)]], [routed(rows, 66, 2)]])
        with pytest.raises(TrainerRefused, match="row wrong has a routed expert outside the model's 8"):
            await trainer.client.train(0, 0, 1e-2, [mini_batch])
        after = await trainer.client.snapshot(0, 0, 1 << 20, [])
        store.free([bucket.ref() for bucket in after.buckets])
        assert after.tensors == before.tensors and len(after.tensors) == 3 + 2 * (8 + 1 + 3 * EXPERTS)


FULL, SELECTIVE, SPREAD = {"recompute": "full"}, {"recompute": "selective"}, {"distributed_optimizer": True}
SWITCHED: list[tuple[str, dict[str, Any]]] = [
    *((layout, FULL) for layout in ("1212-2", "1111-1", "1122-2", "2212-4")),
    ("1212-2", SELECTIVE),
    *((layout, SPREAD) for layout in ("1112-2", "1122-2", "2212-4")),
    ("2112-2", SPREAD | FULL),
    ("1112-2", {"optimizer": SGD}),
]


@pytest.mark.parametrize(
    ("layout", "switches"),
    [
        pytest.param(*case, marks=pytest.mark.slow if index else (), id="-".join([case[0], *case[1]]) + f"-{index}")
        for index, case in enumerate(SWITCHED)
    ],
)
def test_M2_replayed_routes_hold_under_any_switch_and_when_the_backward_pass_routes_again(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, layout: str, switches: dict[str, Any]
) -> None:
    """One row a micro-batch first: while one is recomputed, others with other routes are on their way through the pipeline."""
    spec = make_spec("qwen3_moe", **{"optimizer": ADAM, **in_words(layout), **switches}, routing_replay=True)
    first, second = routed(rows, 61, 9), routed(rows, 62, 8, version=1)
    requests = [plan(0, [dealt(first, spec.dp, 1)], 1e-3), plan(1, [dealt(second, spec.dp, 2)], 1e-3)]
    found, expected = lab.layout(spec, requests), lab.reference(spec, requests)
    errors = ", ".join(f"{kind} {found.error(expected, kind):.1e}" for kind in ("gradients", "weights") if found.named(kind))
    print(f"\nqwen3_moe {layout} {', '.join(switches)}: log-probs {found.distance(expected, 'log_probs'):.1e}, {errors}")
    assert_equal_steps(found, expected, gradients=not spec.distributed_optimizer)


PREPARED: dict[str, dict[str, Any]] = {
    "reference": {"loss": {"old_log_probs": "recomputed", "correction": {"weight": "token", "cap": 1.2}, "kl": {"coefficient": 0.1}}},
    "critic": {"critic": {"gamma": 0.97, "lam": 0.9}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.parametrize("layout", ["1112-2", "1212-2", "2112-4"])
def test_M2_what_is_prepared_before_a_step_equals_plain_transformers_where_ranks_share_experts(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, layout: str, name: str
) -> None:
    """Old log-probs go the replayed ways; the frozen reference and the critic, from which no engine sampled, their own."""
    spec = make_spec("qwen3_moe", **in_words(layout), routing_replay=True, optimizer=ADAM, **PREPARED[name])
    requests = [request.model_copy(update={"critic_lr": 1e-3}) for request in two_steps(plan, rows, 67, spec.dp)]
    found, expected = lab.layout(spec, requests), lab.reference(spec, requests)
    print(f"\nqwen3_moe {layout} {name}: " + ", ".join(f"{kind} {found.error(expected, kind):.1e}" for kind in ("gradients", "weights")))
    assert_equal_steps(found, expected)
