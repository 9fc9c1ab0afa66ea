"""Through Megatron-core, on real ranks, against plain transformers and torch.

Here on one rank, or two that split the rows; `test_layouts.py` has the other layouts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.trainer.steps import ADAM, assert_equal_steps, dealt, in_one
from trainer.spec import TrainerSpec

MakeSpec = Callable[..., TrainerSpec]


@pytest.mark.parametrize(
    ("model", "dp"), [(m, dp) for m in ("qwen3", "qwen3_tied", "llama", "llama_tied") for dp in (1, 2)] + [("qwen2", 2)]
)
def test_M2_two_steps_equal_plain_torch_at_temperatures_0_7_1_0_and_1_3(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, model: str, dp: int
) -> None:
    spec = make_spec(model, dp=dp, optimizer=ADAM)
    requests = [plan(0, [dealt(rows.ragged(1, 9), dp, 3)]), plan(1, [dealt(rows.ragged(2, 8), dp, 4)])]
    assert_equal_steps(lab.layout(spec, requests), lab.reference(spec, requests))


LOSSES = {
    "gspo": {"policy": "gspo", "aggregation": "sequence_mean_token_mean", "clip_low": 0.1, "clip_high": 0.1, "entropy_bonus": 0.02},
    "cispo": {"policy": "cispo", "aggregation": "sequence_mean_token_sum", "clip_low": 1.0, "clip_high": 1.5},
    "dual_clip": {"policy": "dual_clip", "aggregation": "constant", "divisor": 50.0, "dual_clip": 1.6, "entropy_bonus": 0.02},
}


@pytest.mark.parametrize("name", LOSSES)
def test_M1_M2_N2_every_other_loss_equals_plain_torch_in_any_split_and_order(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, name: str
) -> None:
    drawn = [rows.ragged(41, 9, version=0), rows.ragged(42, 8, version=1)]
    one = make_spec(loss=LOSSES[name], optimizer=ADAM)
    whole = lab.layout(one, [plan(i, [in_one(some)]) for i, some in enumerate(drawn)])
    assert_equal_steps(whole, lab.reference(one, [plan(i, [in_one(some)]) for i, some in enumerate(drawn)]))
    split = lab.layout(
        make_spec(loss=LOSSES[name], dp=2, optimizer=ADAM), [plan(i, [dealt(some[::-1], 2, 2)]) for i, some in enumerate(drawn)]
    )
    assert split.error(whole, "gradients") < 1e-5 and split.error(whole, "weights") < 1e-5
    for mine, theirs in zip(split.reports, whole.reports, strict=True):
        for metric in ("loss", "grad_norm", "clip_fraction", "entropy", "kl", "ratio_max"):
            assert mine[metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-6), metric
    fractions = [report["clip_fraction"] for report in whole.reports]
    assert all(0.0 < fraction < 1.0 for fraction in fractions), f"tokens on both sides of the clip: {fractions}"


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, pytest.param({"pp": 2, "cp": 2}, marks=pytest.mark.slow)], ids=str)
def test_M2_gspo_with_an_entropy_bonus_equals_plain_torch_with_the_vocabulary_or_the_rows_split(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, layout: dict[str, int]
) -> None:
    spec = make_spec(loss=LOSSES["gspo"], **layout, optimizer=ADAM)
    requests = [plan(0, [dealt(rows.ragged(43, 7), 1, 3)])]
    assert_equal_steps(lab.layout(spec, requests), lab.reference(spec, requests))


def test_M1_N2_any_split_and_order_over_one_or_two_ranks_is_the_same_step(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any) -> None:
    drawn = [rows.ragged(3, 10, version=0), rows.ragged(4, 10, version=1)]
    one = lab.layout(make_spec(optimizer=ADAM), [plan(i, [in_one(some)]) for i, some in enumerate(drawn)])
    for dp, size, backwards in ((1, 1, False), (1, 3, True), (2, 2, False), (2, 10, True)):
        ordered = [list(reversed(some)) if backwards else some for some in drawn]
        split = lab.layout(make_spec(dp=dp, optimizer=ADAM), [plan(i, [dealt(some, dp, size)]) for i, some in enumerate(ordered)])
        assert split.error(one, "gradients") < 1e-5
        assert split.error(one, "weights") < 1e-5
        for mine, theirs in zip(split.reports, one.reports, strict=True):
            for name in ("loss", "grad_norm", "clip_fraction", "entropy", "kl", "ratio_max", "logprob_gap_max"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
            for name in ("tokens", "rows", "logprob_gap_rows"):
                assert mine[name] == theirs[name], name


def test_M4_a_rank_without_rows_runs_an_empty_micro_batch_and_changes_nothing(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any) -> None:
    some = rows.ragged(5, 1)
    alone = lab.layout(make_spec(optimizer=ADAM), [plan(0, [[[some]]])])
    with_idle_rank = lab.layout(make_spec(dp=2, optimizer=ADAM), [plan(0, [[[], [some]]])])
    assert with_idle_rank.error(alone, "gradients") < 1e-6
    for name in ("loss", "grad_norm"):  # the gradients are clipped, which hides their scale
        assert with_idle_rank.reports[0][name] == pytest.approx(alone.reports[0][name], rel=1e-6), name
    assert with_idle_rank.reports[0]["tokens"] == alone.reports[0]["tokens"]
    assert with_idle_rank.reports[0]["ratio_max"] == pytest.approx(alone.reports[0]["ratio_max"], rel=1e-6)


def test_N1_loss_2_on_100_tokens_and_0_5_on_900_is_0_65_in_any_split(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any) -> None:
    """With the behaviour equal to the current policy the ratio is 1, and a token's loss is minus its advantage."""
    rng = np.random.default_rng(7)

    def draw(trained: int, advantage: float) -> tuple[dict[str, Any], float]:
        columns = rows.columns(rng, 3, trained) | {"response_mask": np.r_[np.zeros(2, np.uint8), np.ones(trained, np.uint8)]}
        return columns, advantage

    drawn = {f"a{i}": draw(25, -2.0) for i in range(4)} | {f"b{i}": draw(90, -0.5) for i in range(10)}
    first = [rows.put(row_id, columns, advantage) for row_id, (columns, advantage) in drawn.items()]
    now = lab.layout(make_spec(), [plan(0, [in_one(first)])])
    again = [
        rows.put(row_id, columns | {"rollout_log_probs": now.arrays[f"log_probs/{row_id}"].astype(np.float32)}, advantage)
        for row_id, (columns, advantage) in drawn.items()
    ]
    for dp, size in ((1, 14), (1, 1), (2, 4)):
        report = lab.layout(make_spec(dp=dp), [plan(0, [dealt(again, dp, size)])]).reports[0]
        assert report["tokens"] == 1000
        assert report["loss"] == pytest.approx(0.65, abs=1e-5)


def test_M3_N10_a_row_packed_first_last_or_alone_and_over_one_or_two_context_parallel_ranks_has_the_same_log_probs(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any
) -> None:
    rng = np.random.default_rng(8)
    same = rows.columns(rng, 4, 9, temperature=0.7)
    neighbours = [rows.columns(rng, 3, length) for length in (9, 10, 10, 30, 2)]  # the pack sorts: longer ones before, shorter ones after
    found = []
    for budget, cp, positions in ((1, 1, (0,)), (4096, 1, (0, 2, 5)), (1, 2, (0,)), (4096, 2, (0, 2, 5))):
        spec = make_spec(micro_batch_tokens=budget, cp=cp)
        for position in positions:
            others = [rows.put(f"n{i}", columns, 1.0) for i, columns in enumerate(neighbours)]
            some = [*others[:position], rows.put("x", same, 1.0), *others[position:]]
            found.append(lab.layout(spec, [plan(0, [in_one(some)])]).arrays["log_probs/x"])
    for left, right in itertools.combinations(found, 2):
        assert np.abs(left - right).max() < 5e-6


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_M5_the_gap_is_nothing_for_the_right_token_and_temperature_and_large_when_shifted_by_one(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, temperature: float
) -> None:
    columns = rows.columns(np.random.default_rng(9), 5, 12, temperature) | {
        "response_mask": np.r_[np.zeros(4, np.uint8), np.ones(12, np.uint8)]
    }
    truth = lab.reference(make_spec("llama"), [plan(0, [in_one([rows.put("x", columns, 1.0)])])]).arrays["log_probs/x"]
    gaps = {}
    for name, told in {
        "right": truth,
        "shifted": np.roll(truth, 1),
        "other temperature": truth * 1.05,
    }.items():
        some = [rows.put("x", columns | {"rollout_log_probs": told.astype(np.float32)}, 1.0)]
        report = lab.layout(make_spec("llama"), [plan(0, [in_one(some)])]).reports[0]
        gaps[name] = report["logprob_gap_max"]
        assert report["logprob_gap_rows"] == 1
    assert gaps["right"] < 5e-6
    assert gaps["shifted"] > 0.1 and gaps["other temperature"] > 0.01


@pytest.mark.parametrize("loss", [{}, LOSSES["gspo"]], ids=["ppo_clip", "gspo"])
def test_M4_N4_nan_at_masked_positions_and_a_wild_advantage_in_an_all_masked_row_change_no_bit(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, loss: dict[str, Any]
) -> None:
    rng = np.random.default_rng(10)
    drawn = [rows.columns(rng, 4, length) for length in (6, 9, 12)]
    clean = [rows.put(f"{i}", columns, 0.5 - i) for i, columns in enumerate(drawn)]
    poisoned = [
        rows.put(
            f"{i}", c | {"rollout_log_probs": np.where(c["response_mask"], c["rollout_log_probs"], np.nan).astype(np.float32)}, 0.5 - i
        )
        for i, c in enumerate(drawn)
    ]
    failed = rows.columns(rng, 4, 9)
    failed |= {"response_mask": np.zeros(12, np.uint8), "rollout_log_probs": np.full(12, np.nan, np.float32)}
    expected = lab.layout(make_spec(loss=loss), [plan(0, [in_one(clean)])])
    found = lab.layout(make_spec(loss=loss), [plan(0, [[[poisoned, [rows.put("failed", failed, 100.0)]]]])])
    assert found.reports[0]["loss"] == expected.reports[0]["loss"]
    assert all(np.array_equal(array, expected.arrays[name]) for name, array in found.named("weights").items())


@pytest.mark.parametrize("loss", [{}, LOSSES["gspo"]], ids=["ppo_clip", "gspo"])
def test_N6_a_row_of_advantage_0_has_no_effect_and_counts_in_the_metrics(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, loss: dict[str, Any]
) -> None:
    some = rows.ragged(11, 4)
    columns = rows.columns(np.random.default_rng(12), 4, 8)
    idle = rows.put("idle", columns | {"rollout_log_probs": columns["rollout_log_probs"] - 200.0}, 0.0)  # its ratio overflows
    without = lab.layout(make_spec(loss=loss), [plan(0, [in_one(some)])])
    found = lab.layout(make_spec(loss=loss), [plan(0, [[[some, [idle]]]])])
    assert all(np.array_equal(array, without.arrays[name]) for name, array in found.named("weights").items())
    assert found.reports[0]["loss"] == without.reports[0]["loss"]
    assert found.reports[0]["tokens"] == without.reports[0]["tokens"] + int(columns["response_mask"].sum())
    assert found.reports[0]["row_ids"] == [*without.reports[0]["row_ids"], "idle"]


@pytest.mark.parametrize("kind", ["all masked", "no advantage", "not finite"])
def test_N6_a_batch_without_a_usable_loss_is_skipped_with_its_reason_and_no_weight_moves(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any, kind: str
) -> None:
    columns = rows.columns(np.random.default_rng(13), 4, 8)
    changes = {"all masked": {"response_mask": np.zeros(11, np.uint8)}, "no advantage": {}}
    changes["not finite"] = {"rollout_log_probs": np.full(11, np.nan, np.float32)}
    bad = rows.put("bad", columns | changes[kind], 0.0 if kind == "no advantage" else 1.0)
    spec = make_spec(dp=2)
    good = plan(0, [dealt(rows.ragged(14, 4), 2, 2)])
    before = lab.layout(spec, [good])
    found = lab.layout(spec, [good, plan(1, [[[[bad]], [rows.ragged(15, 1)] if kind == "not finite" else []]])])
    report = found.reports[1]
    assert ("not finite" if kind == "not finite" else "no token to train") in report["skipped"]
    assert report["trained_version"] == 2 and report["row_ids"] == [] and "bad" in report["skipped_row_ids"]
    assert all(np.array_equal(array, before.arrays[name]) for name, array in found.named("weights").items())
    dumps = list((spec.run_dir / "dumps").glob("*")) if kind == "not finite" else []
    assert [json.loads(dump.read_text())["row_ids"] for dump in dumps] == ([["bad", "15-0"]] if dumps else [])
    assert len(dumps) == (kind == "not finite")


def test_a_skipped_mini_batch_leaves_the_others_of_its_batch_alone(lab: Any, rows: Any, make_spec: MakeSpec, plan: Any) -> None:
    columns = rows.columns(np.random.default_rng(16), 4, 8)
    bad = rows.put("bad", columns | {"rollout_log_probs": np.full(11, np.nan, np.float32)}, 1.0)
    some = rows.ragged(17, 3)
    without = lab.layout(make_spec(), [plan(0, [in_one(some)])])
    found = lab.layout(make_spec(), [plan(0, [in_one([bad]), in_one(some)])])
    assert found.reports[0]["skipped"] is None
    assert found.reports[0]["skipped_row_ids"] == ["bad"] and found.reports[0]["row_ids"] == without.reports[0]["row_ids"]
    assert all(np.array_equal(array, without.arrays[name]) for name, array in found.named("weights").items())


def test_the_gap_is_taken_over_rows_of_this_version_only_and_before_the_first_step_only(
    lab: Any, rows: Any, make_spec: MakeSpec, plan: Any
) -> None:
    pure, stale = rows.ragged(18, 3, version=0), rows.ragged(19, 2, version=7)
    rng = np.random.default_rng(20)
    mixed = rows.put("mixed", rows.columns(rng, 4, 8) | {"version_spans": np.array([[0, 7, 0, 5], [0, 0, 5, 11]])}, 1.0)
    report = lab.layout(make_spec(), [plan(0, [in_one([*pure, *stale, mixed]), in_one(rows.ragged(21, 4))])]).reports[0]
    assert report["logprob_gap_rows"] == 3
    alone = lab.layout(make_spec(), [plan(0, [in_one(pure)])]).reports[0]
    assert report["logprob_gap_max"] == pytest.approx(alone["logprob_gap_max"], rel=1e-5)
