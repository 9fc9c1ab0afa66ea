"""What is prepared once a batch, the KL penalty, the corrections and the critic, through Megatron-core against plain torch.

The first batch has one mini-batch, and its metrics are compared; the second has two, so that the old log-probs are not the current ones
any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.steps import ADAM, dealt
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
        if metric == "entropy" and mine["masked_tokens"]:
            continue
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
