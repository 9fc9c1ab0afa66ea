"""What is prepared once a batch, the KL penalty, the corrections and the critic, through Megatron-core against plain torch.

The first batch has one mini-batch, and its metrics are compared; the second has two, so that the old log-probs are not the current ones
any more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.trainer.steps import ADAM, SGD, dealt
from trainer.client import TrainerRefused
from trainer.spec import TrainerSpec
from trainer.wire import PlanRow

MakeSpec = Callable[..., TrainerSpec]
RECOMPUTED = {"old_log_probs": "recomputed", "clip_low": 0.02, "clip_high": 0.03}
PER_TRAJECTORY = {"aggregation": "sequence_mean_token_mean", "sequence": "trajectory"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "decoupled": {"loss": {**RECOMPUTED, "policy": "decoupled_ppo"}},
    "truncated": {
        "loss": {**RECOMPUTED, **PER_TRAJECTORY, "correction": {"weight": "token", "cap": 1.2}, "kl": {"coefficient": 0.1}},
    },
    "icepop": {
        "loss": {
            **RECOMPUTED,
            "correction": {"weight": "token", "cap": None, "mask": "token", "low": 0.6, "high": 1.6},
            "kl": {"coefficient": 0.2, "estimator": "k2"},
            "entropy_bonus": 0.01,
        },
    },
    "masked rows": {
        "loss": {
            **RECOMPUTED,
            "correction": {"weight": "sequence", "cap": 1.5, "mask": "sequence", "low": 0.6, "high": 1.2},
            "kl": {"coefficient": 0.1, "estimator": "k1"},
            "aggregation": "sequence_mean_token_sum",
            "sequence": "trajectory",
        },
    },
    "critic": {
        "loss": {"kl": {"coefficient": 0.05, "estimator": "k1", "where": "reward"}},
        "critic": {"gamma": 0.97, "lam": 0.9, "value_clip": 0.05},
    },
    "vtrace": {
        "loss": {**RECOMPUTED, **PER_TRAJECTORY, "correction": {"mask": "token", "low": 0.3, "high": 3.0}},
        "critic": {"targets": "vtrace", "gamma": 0.99, "lam": 0.95, "rho_cap": 1.4, "whiten": False, "value_clip": None},
    },
}
LAYOUTS = {"1111": {}, "2111": {"tp": 2}, "1211": {"pp": 2}, "1121": {"cp": 2}, "1112": {"dp": 2}, "2211": {"tp": 2, "pp": 2}}
QUICK = {("decoupled", "1111"), ("truncated", "1112"), ("icepop", "1121"), ("masked rows", "1112"), ("critic", "1211"), ("vtrace", "2111")}


def drawn(rows: Any, seed: int, count: int) -> list[PlanRow]:
    """Leaves of trajectories, two and two, with scores."""
    rng = np.random.default_rng(seed)
    found = rows.ragged(seed, count)
    return [row.model_copy(update={"sequence": f"t{seed}-{i // 2}", "score": float(rng.normal())}) for i, row in enumerate(found)]


def requests(rows: Any, plan: Any, dp: int) -> list[Any]:
    first, second = drawn(rows, 61, 8), drawn(rows, 62, 8)
    return [
        plan(0, [dealt(first, dp, 3)], 1e-3).model_copy(update={"critic_lr": 1e-3}),
        plan(1, [dealt(second[:4], dp, 2), dealt(second[4:], dp, 3)], 1e-3).model_copy(update={"critic_lr": 1e-3}),
    ]


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow, id=f"{name}-{layout}")
        for name in OBJECTIVES
        for layout in LAYOUTS
    ],
)
def test_M1_M2_N2_every_objective_equals_plain_torch_in_every_layout(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, references: dict[str, Any], name: str, layout: str
) -> None:
    # Tied embeddings: a critic must not take its head for the embedding.
    spec = make_spec("qwen3_tied", **OBJECTIVES[name], **LAYOUTS[layout], optimizer=ADAM)
    if name not in references:
        references[name] = lab.reference(spec, requests(rows, plan, 1))
    found, expected = lab.layout(spec, requests(rows, plan, spec.dp)), references[name]
    mine, theirs = found.reports[0], expected.reports[0]
    for metric, value in theirs.items():
        assert mine[metric] == pytest.approx(value, rel=1e-5, abs=1e-6), metric
    assert found.distance(expected, "log_probs") < 5e-6
    errors = {kind: found.error(expected, kind) for kind in ("gradients", "weights")}
    print(f"\n{name} {layout}: " + ", ".join(f"{kind} {error:.1e}" for kind, error in errors.items()))
    assert max(errors.values()) < 1e-5
    correction = spec.loss.correction
    if correction.mask == "token":
        assert 0 < mine["masked_tokens"] < mine["masked_tokens"] + mine["tokens"]
    if correction.mask == "sequence":
        assert 0 < mine["masked_rows"] < 8 and mine["tokens"] > 0
    if correction.weight != "none":
        assert 0.0 < mine["effective_sample_size"] < 1.0


def test_N2_without_a_clip_the_ratio_to_the_recorded_log_probs_and_the_weight_of_recomputed_ones_are_one_gradient(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any
) -> None:
    ways = [{"clip_low": 1.0, "clip_high": 1e6}, {"old_log_probs": "recomputed", "correction": {"weight": "token", "cap": None}}]
    steps = [plan(batch, [dealt(drawn(rows, 71 + batch, 8), 1, 3)], 1e-3) for batch in range(3)]
    ratio, weight = (lab.layout(make_spec("qwen3_tied", loss=loss, optimizer=ADAM), steps) for loss in ways)
    assert ratio.reports[0]["grad_norm"] > 0.0
    assert max(ratio.error(weight, kind) for kind in ("gradients", "weights")) < 1e-5


METRICS = (
    *("loss", "grad_norm", "clip_fraction", "entropy", "kl", "ratio_max", "logprob_gap_max", "reference_kl", "off_policy_kl"),
    *("effective_sample_size", "value_loss", "value_clip_fraction", "explained_variance", "critic_grad_norm"),
)
COUNTS = ("tokens", "rows", "logprob_gap_rows", "masked_tokens", "masked_rows")


def shuffled(trajectories: list[list[PlanRow]], dp: int, draw: random.Random) -> list[list[list[PlanRow]]]:
    """One mini-batch: its rows in any order on any ranks, in micro-batches of any size."""
    flat = [row for trajectory in trajectories for row in trajectory]
    shares: list[list[list[PlanRow]]] = [[] for _ in range(dp)]
    for row in draw.sample(flat, len(flat)):
        share = draw.choice(shares)
        if not share or draw.random() < 0.4:
            share.append([])
        draw.choice(share).append(row)
    return shares


def check_a_random_plan(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, name: str, layout: str, seed: int) -> None:
    # Not Adam: a value head begins at 0, and then is Adam's first update, which magnifies the last bits of a small gradient.
    draw = random.Random(seed)
    leaves = drawn(rows, seed, draw.randint(2, 9))
    if len(leaves) > 2:
        leaves[2] = leaves[2].model_copy(update={"advantage": 0.0})
    trajectories = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
    cut = draw.randint(0, len(trajectories))
    minis = [part for part in (trajectories[:cut], trajectories[cut:]) if part]

    def step(spec: TrainerSpec, mini_batches: list[Any]) -> Any:
        return lab.layout(spec, [plan(0, mini_batches, 1e-3).model_copy(update={"critic_lr": 1e-3})])

    base = make_spec("qwen3_tied", **OBJECTIVES[name], optimizer=SGD)
    expected = step(base, [[[[row for trajectory in mini for row in trajectory]]] for mini in minis])
    spec = make_spec("qwen3_tied", **OBJECTIVES[name], **LAYOUTS[layout], optimizer=SGD)
    found = step(spec, [shuffled(mini, spec.dp, draw) for mini in minis])
    assert max(found.error(expected, kind) for kind in ("gradients", "weights")) < 1e-5
    mine, theirs = found.reports[0], expected.reports[0]
    for metric in METRICS:
        assert mine[metric] == (None if theirs[metric] is None else pytest.approx(theirs[metric], rel=1e-5, abs=2e-6)), metric
    assert {count: mine[count] for count in COUNTS} == {count: theirs[count] for count in COUNTS}
    assert sorted(mine["row_ids"]) == sorted(theirs["row_ids"])


plans: dict[str, Any] = {
    "name": st.sampled_from(sorted(OBJECTIVES)),
    "layout": st.sampled_from(sorted(LAYOUTS)),
    "seed": st.integers(100, 999),
}
unhurried = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(deadline=None, max_examples=3, suppress_health_check=unhurried)
@given(**plans)
def test_M1_M2_N2_a_random_plan_of_any_objective_in_any_layout_is_the_step_of_one_micro_batch(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, name: str, layout: str, seed: int
) -> None:
    check_a_random_plan(lab, rows, make_spec, plan, name, layout, seed)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, suppress_health_check=unhurried)
@given(**plans)
def test_M1_M2_N2_many_random_plans(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, name: str, layout: str, seed: int) -> None:
    check_a_random_plan(lab, rows, make_spec, plan, name, layout, seed)


def test_M1_returns_that_are_all_the_same_have_no_variance_to_explain(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any) -> None:
    """Equal rewards are common. What is left of these 51 tokens' squares is rounding: 2e-18, by which the error would be divided."""
    rng = np.random.default_rng(81)
    same = []
    for index in range(3):
        columns = rows.columns(rng, 1, 17) | {"response_mask": np.ones(17, np.uint8)}
        same.append(rows.put(f"same-{index}", columns, 1.0).model_copy(update={"score": 0.1}))
    found = lab.layout(make_spec("qwen3_tied", critic={}, optimizer=ADAM), [plan(0, [dealt(same, 1, 2)])]).reports[0]
    assert found["tokens"] == 51 and found["value_loss"] == pytest.approx(0.005) and found["explained_variance"] is None


async def test_a_critic_that_speaks_of_other_tokens_is_refused_as_a_reference_is(start: Any, models: dict[str, str]) -> None:
    """With tensor-parallel ranks a token it does not know would be embedded as zeros, and nothing would say so."""
    async with start(tp=2, critic={"model_path": models["qwen3_odd"]}) as trainer:
        with pytest.raises(TrainerRefused, match=r"the critic .* has a vocabulary of 97 tokens, the policy of 96: they must be the same"):
            await trainer.client.load()
        assert (await trainer.client.health()).state == "empty"
