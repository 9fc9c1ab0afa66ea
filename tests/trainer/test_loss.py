"""Losses, aggregations and metrics as sums, in float64, without a model, against the papers' formulas a row at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.loss import AGGREGATIONS, POLICIES, Sums, Tokens, denominator, loss_sums, units
from trainer.spec import LossSpec

EVERY = [
    LossSpec(policy=policy, aggregation=aggregation, divisor=37.0 if aggregation == "constant" else None, clip_low=0.1, clip_high=0.15)
    for policy, aggregation in itertools.product(POLICIES, AGGREGATIONS)
]
EVERY = [spec.model_copy(update={"dual_clip": 1.5, "entropy_bonus": 0.01 if index % 2 else 0.0}) for index, spec in enumerate(EVERY)]
each_loss = pytest.mark.parametrize("spec", EVERY, ids=lambda spec: f"{spec.policy}-{spec.aggregation}")
seeds = st.integers(0, 10_000)


@dataclass
class Row:
    """R response positions, of which `mask` says which are trained."""

    log_probs: torch.Tensor
    behaviour: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    advantage: float
    sampled_now: bool


def ragged(seed: int, count: int) -> list[Row]:
    """Rows of all lengths with holes in their masks, some all masked, some of advantage 0; the leaves are the log-probs and entropies."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rows = []
    for _ in range(count):
        size = int(torch.randint(1, 12, (), generator=generator))
        behaviour = -normal(size).abs() - 0.1
        mask = torch.rand(size, generator=generator) < (0.8 if torch.rand((), generator=generator) < 0.9 else 0.0)
        advantage = float(normal(1)) if torch.rand((), generator=generator) < 0.8 else 0.0
        log_probs = (behaviour + 0.4 * normal(size)).requires_grad_()
        rows.append(Row(log_probs, behaviour, normal(size).abs().requires_grad_(), mask, advantage, bool(normal(1) > 0)))
    return rows


def trained(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.advantage != 0.0 and bool(row.mask.any())]


def as_tokens(rows: list[Row], chosen: Callable[[Row], torch.Tensor] = lambda row: row.mask) -> tuple[Tokens, torch.Tensor]:
    """The trained tokens of a micro-batch, as the packer lists them; `chosen` leaves some to another context-parallel rank."""
    none = torch.zeros(0, dtype=torch.float64)
    take = [chosen(row) & row.mask for row in rows]
    index = torch.tensor([i for i, part in enumerate(take) for _ in range(int(part.sum()))], dtype=torch.int64)

    def columns(name: str) -> torch.Tensor:
        return torch.cat([none, *(getattr(row, name)[part] for row, part in zip(rows, take, strict=True))])

    advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float64)[index]
    same = torch.tensor([row.sampled_now for row in rows], dtype=torch.bool)[index]
    length = torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.int64)
    return Tokens(columns("log_probs"), columns("behaviour"), advantage, columns("entropy"), index, length), same


def step(spec: LossSpec, parts: list[list[Row]]) -> tuple[torch.Tensor, Sums]:
    """A mini-batch over these micro-batches: the units first, then each one's sums."""
    count = denominator(spec, sum(units(spec, [int(row.mask.sum()) for row in trained(part)]) for part in parts))
    made = [loss_sums(spec, *as_tokens(part)) for part in parts]
    return sum((loss for loss, _ in made), torch.zeros((), dtype=torch.float64)) / count, sum((s for _, s in made), Sums.nothing())


def plain(spec: LossSpec, rows: list[Row]) -> torch.Tensor:
    """The papers' formulas, a row at a time, over the whole mini-batch."""
    per_row = []
    for row in trained(rows):
        log_probs, a = row.log_probs[row.mask], row.advantage
        log_ratio = log_probs - row.behaviour[row.mask]
        ratio = log_ratio.mean().exp() * torch.ones_like(log_ratio) if spec.policy == "gspo" else log_ratio.exp()
        bounded = ratio.clip(1 - spec.clip_low, 1 + spec.clip_high)
        gain = bounded.detach() * a * log_probs if spec.policy == "cispo" else torch.minimum(ratio * a, bounded * a)
        if spec.policy == "dual_clip" and a < 0:
            gain = torch.maximum(gain, torch.full_like(gain, spec.dual_clip * a))
        per_row.append(-(gain + spec.entropy_bonus * row.entropy[row.mask]))
    if spec.aggregation == "token_mean":
        return torch.cat(per_row).mean()
    if spec.aggregation == "constant":
        assert spec.divisor
        return torch.cat(per_row).sum() / spec.divisor
    reduce = torch.mean if spec.aggregation == "sequence_mean_token_mean" else torch.sum
    return torch.stack([reduce(losses) for losses in per_row]).mean()


def gradients(loss: torch.Tensor, rows: list[Row]) -> list[torch.Tensor]:
    """Of every response position, trained or not."""
    leaves = [leaf for row in rows for leaf in (row.log_probs, row.entropy)]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return list(found)


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


def cut(rows: list[Row], cuts: list[int]) -> list[list[Row]]:
    edges = sorted({0, len(rows), *(c for c in cuts if c < len(rows))})
    return [rows[a:b] for a, b in itertools.pairwise(edges)]


@each_loss
@settings(deadline=None, max_examples=12)
@given(seed=seeds, count=st.integers(1, 12), cuts=st.lists(st.integers(0, 12), max_size=5), order=seeds)
def test_M1_N2_any_split_and_order_of_rows_is_the_papers_formula_with_its_gradient(
    spec: LossSpec, seed: int, count: int, cuts: list[int], order: int
) -> None:
    rows = ragged(seed, count)
    if not trained(rows):
        return
    shuffled = [rows[i] for i in torch.randperm(count, generator=torch.Generator().manual_seed(order)).tolist()]
    whole = plain(spec, rows)
    expected = gradients(whole, rows)
    one, sums = step(spec, [rows])
    loss, split_sums = step(spec, [*cut(shuffled, cuts), []])
    assert float(one.detach()) == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-12)
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), rel=1e-12, abs=1e-12)
    assert_close(gradients(one, rows), expected)
    assert_close(gradients(loss, rows), expected)
    assert torch.allclose(split_sums.total, sums.total, rtol=1e-12, atol=1e-12)
    assert torch.allclose(split_sums.highest, sums.highest, rtol=1e-12, atol=0)


@each_loss
@settings(deadline=None, max_examples=6)
@given(seed=seeds, count=st.integers(1, 8))
def test_M2_a_row_whose_tokens_lie_on_two_context_parallel_ranks_counts_once_with_its_whole_ratio(
    spec: LossSpec, seed: int, count: int
) -> None:
    rows = ragged(seed, count)
    if not trained(rows):
        return
    halves = [as_tokens(rows, lambda row, side=side: torch.arange(len(row.mask)) % 2 == side) for side in (0, 1)]  # type: ignore[misc]
    sent: list[torch.Tensor] = []

    def record(sums: torch.Tensor) -> torch.Tensor:
        sent.append(sums)
        return sums

    for tokens, same in halves:
        loss_sums(spec, tokens, same, record)
    made = [loss_sums(spec, tokens, same, lambda _: sent[0] + sent[1]) for tokens, same in halves]
    count_of = denominator(spec, units(spec, [int(row.mask.sum()) for row in trained(rows)]))
    expected = plain(spec, rows)
    loss = (made[0][0] + made[1][0]) / count_of
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12, abs=1e-12)
    assert_close(gradients(loss, rows), gradients(expected, rows))
    assert torch.allclose((made[0][1] + made[1][1]).total, step(spec, [rows])[1].total, rtol=1e-12, atol=1e-12)


@each_loss
@settings(deadline=None, max_examples=6)
@given(seed=seeds, count=st.integers(1, 6))
def test_N6_rows_of_advantage_0_with_a_ratio_that_overflows_change_no_bit_of_the_loss(spec: LossSpec, seed: int, count: int) -> None:
    rows = ragged(seed, count)
    if not trained(rows):
        return
    wild = ragged(seed + 1, 3)
    for row in wild:
        row.advantage, row.behaviour = 0.0, row.behaviour - 1e3
    without = [row for row in rows if row.advantage != 0.0]
    loss, expected = step(spec, [wild[:1] + without + wild[1:]])[0], step(spec, [without])[0]
    assert float(loss.detach()) == float(expected.detach())
    assert all(torch.equal(a, b) for a, b in zip(gradients(loss, without), gradients(expected, without), strict=True))
    assert not any(gradient.any() for gradient in gradients(step(spec, [[*wild, *without]])[0], wild))


@each_loss
@settings(deadline=None, max_examples=6)
@given(seed=seeds, count=st.integers(1, 6))
def test_M4_N4_nan_at_masked_positions_and_in_rows_without_a_trained_token_change_no_bit(spec: LossSpec, seed: int, count: int) -> None:
    rows = ragged(seed, count)
    if not trained(rows):
        return
    loss, sums = step(spec, [rows])
    expected = gradients(loss, rows)
    for row in rows:
        for values in (row.log_probs, row.behaviour, row.entropy):
            values.data[~row.mask] = math.nan
    failed = ragged(seed + 1, 1)[0]
    failed.mask, failed.advantage = torch.zeros_like(failed.mask), 100.0
    failed.behaviour = failed.behaviour * math.nan
    poisoned, poisoned_sums = step(spec, [[failed], rows])
    assert float(poisoned.detach()) == float(loss.detach()) and torch.equal(poisoned_sums.total, sums.total)
    assert all(torch.equal(a, b) for a, b in zip(gradients(poisoned, rows), expected, strict=True))


def one_token(policy: str, log_ratio: float, advantage: float, **changes: Any) -> tuple[float, float, float]:
    """(loss, its gradient, clipped) of one token whose log-prob is log_ratio - 1."""
    spec = LossSpec(policy=policy, **{"clip_low": 0.2, "clip_high": 0.28, **changes})
    log_probs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    rest = torch.tensor([[-1.0], [advantage], [0.0]], dtype=torch.float64)
    tokens = Tokens(log_probs, rest[0], rest[1], rest[2], torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
    loss, sums = loss_sums(spec, tokens, torch.tensor([False]))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return float(loss.detach()), float(gradient), float(sums.total[2])


log_ratios = st.floats(-2, 2).filter(lambda x: all(abs(math.exp(x) - bound) > 1e-9 for bound in (0.8, 1.28, 3.0)))


@settings(deadline=None, max_examples=60)
@given(log_ratio=log_ratios, advantage=st.floats(-3, 3).filter(lambda a: abs(a) > 1e-6))
def test_the_clip_bounds_the_gain_on_the_side_that_would_grow_it(log_ratio: float, advantage: float) -> None:
    ratio = math.exp(log_ratio)
    acts = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    wanted = (expected, 0.0 if acts else -advantage * ratio, float(acts))
    assert one_token("ppo_clip", log_ratio, advantage) == pytest.approx(wanted, abs=1e-12)
    assert one_token("gspo", log_ratio, advantage) == pytest.approx(wanted, abs=1e-12), "a row of one token has its token's ratio"


@settings(deadline=None, max_examples=60)
@given(log_ratio=log_ratios, advantage=st.floats(-3, 3).filter(lambda a: abs(a) > 1e-6))
def test_the_dual_clip_is_the_clip_but_for_a_negative_advantage_above_its_bound(log_ratio: float, advantage: float) -> None:
    if advantage < 0 and math.exp(log_ratio) > 3.0:
        assert one_token("dual_clip", log_ratio, advantage) == pytest.approx((-3.0 * advantage, 0.0, 1.0), abs=1e-12)
    else:
        assert one_token("dual_clip", log_ratio, advantage) == one_token("ppo_clip", log_ratio, advantage)


@settings(deadline=None, max_examples=60)
@given(log_ratio=log_ratios, advantage=st.floats(-3, 3).filter(lambda a: abs(a) > 1e-6))
def test_cispo_keeps_a_gradient_at_every_token_with_a_bounded_weight(log_ratio: float, advantage: float) -> None:
    weight = min(max(math.exp(log_ratio), 0.8), 1.28)
    expected = (-weight * advantage * (log_ratio - 1.0), -weight * advantage, float(weight != math.exp(log_ratio)))
    assert one_token("cispo", log_ratio, advantage) == pytest.approx(expected, abs=1e-12)
    unbounded = min(math.exp(log_ratio), 1.28)
    assert one_token("cispo", log_ratio, advantage, clip_low=1.0)[1] == pytest.approx(-unbounded * advantage, abs=1e-12)


def test_N1_100_tokens_of_loss_2_and_900_of_0_5_in_any_split() -> None:
    rows = []
    for advantage, size, count in ((-2.0, 25, 4), (-0.5, 90, 10)):
        for _ in range(count):
            behaviour = -torch.rand(size, dtype=torch.float64)
            leaves = (behaviour.clone().requires_grad_(), behaviour, torch.zeros(size, dtype=torch.float64).requires_grad_())
            rows.append(Row(*leaves, torch.ones(size, dtype=torch.bool), advantage, True))
    expected = {"token_mean": 0.65, "sequence_mean_token_mean": 13 / 14, "sequence_mean_token_sum": 650 / 14, "constant": 0.5}
    for parts in ([rows], [[row] for row in rows], [rows[:1], rows[1:]], [rows[::-1]]):
        for aggregation, wanted in expected.items():
            spec = LossSpec(aggregation=aggregation, divisor=1300.0 if aggregation == "constant" else None)
            loss, sums = step(spec, parts)
            assert float(loss.detach()) == pytest.approx(wanted, abs=1e-12)
            found = dict(zip((*Sums.TOTALS, *Sums.HIGHEST), (*sums.total.tolist(), *sums.highest.tolist()), strict=True))
            assert found["tokens"] == 1000 and found["ratio"] == 1.0 and found["kl"] == found["clipped"] == found["gap"] == 0.0


def test_no_tokens_add_nothing_and_maximise_nothing() -> None:
    rows = ragged(2, 5)
    some, together = step(EVERY[0], [rows])[1], step(EVERY[0], [rows, [], []])[1]
    assert torch.equal(together.total, some.total) and torch.equal(together.highest, some.highest)


def test_every_choice_of_a_spec_is_in_its_registry() -> None:
    assert get_args(LossSpec.model_fields["policy"].annotation) == tuple(POLICIES)
    assert get_args(LossSpec.model_fields["aggregation"].annotation) == tuple(AGGREGATIONS)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"aggregation": "constant"}, "needs a divisor"),
        ({"divisor": 8.0}, "set both or neither"),
        ({"policy": "gspo", "clip_high": 4e-4}, "set clip_low and clip_high"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_with_the_remedy(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LossSpec.model_validate(loss)
