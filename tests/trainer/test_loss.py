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

from trainer.loss import (
    AGGREGATIONS,
    REGISTRY,
    SumRows,
    Sums,
    Tokens,
    ValueTokens,
    alone,
    denominator,
    loss_sums,
    units,
    value_sums,
)
from trainer.loss_spec import POLICIES, KLSpec, LossSpec
from trainer.own_loss import made_up_tokens

BASE: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.15, "old_log_probs": "recomputed", "dual_clip": 1.5}
EVERY = [
    LossSpec(
        policy=policy,
        aggregation=aggregation,
        divisor=37.0 if aggregation == "constant" else None,
        entropy_bonus=0.01 if index % 2 else 0.0,
        kl=KLSpec(coefficient=(0.0, 0.1, 0.2)[index % 3], estimator=("k1", "k2", "k3")[index % 4 % 3]),  # type: ignore[arg-type]
        sequence="trajectory" if index % 2 else "leaf",
        **BASE,
    )
    for index, (policy, aggregation) in enumerate(itertools.product(POLICIES, AGGREGATIONS))
]
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
    old: torch.Tensor
    weight: torch.Tensor
    reference: torch.Tensor
    trajectory: int


def ragged(seed: int, count: int) -> list[Row]:
    """Rows of all lengths with holes in their masks, some all masked, some of advantage 0, some leaves of one trajectory.

    What has a gradient is the log-probs and the entropies.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    rows = []
    trajectory, advantage = -1, 0.0
    for _ in range(count):
        size = int(torch.randint(1, 12, (), generator=generator))
        behaviour = -normal(size).abs() - 0.1
        mask = torch.rand(size, generator=generator) < (0.8 if torch.rand((), generator=generator) < 0.9 else 0.0)
        if trajectory < 0 or torch.rand((), generator=generator) < 0.6:  # else another leaf of the last trajectory
            trajectory += 1
            advantage = float(normal(1)) if torch.rand((), generator=generator) < 0.8 else 0.0
        log_probs = (behaviour + 0.4 * normal(size)).requires_grad_()
        old, reference = behaviour + 0.2 * normal(size), behaviour + 0.3 * normal(size)
        entropy = normal(size).abs().requires_grad_()
        rows.append(
            Row(log_probs, behaviour, entropy, mask, advantage, bool(normal(1) > 0), old, normal(size).exp(), reference, trajectory)
        )
    return rows


def trained(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.advantage != 0.0 and bool(row.mask.any())]


def sequences(spec: LossSpec, rows: list[Row]) -> dict[int, int]:
    """By sequence, its tokens in the loss, over the whole mini-batch."""
    found: dict[int, int] = {}
    for row in trained(rows):
        found[key(spec, row)] = found.get(key(spec, row), 0) + int(row.mask.sum())
    return found


def key(spec: LossSpec, row: Row) -> int:
    return row.trajectory if spec.sequence == "trajectory" else id(row)


def as_tokens(
    spec: LossSpec,
    rows: list[Row],
    every: list[Row],
    chosen: Callable[[Row], torch.Tensor] = lambda row: row.mask,
    sum_rows: SumRows = alone,
) -> tuple[Tokens, torch.Tensor]:
    """The trained tokens of a micro-batch, as the packer lists them; `chosen` leaves some to another context-parallel rank."""
    none = torch.zeros(0, dtype=torch.float64)
    take = [chosen(row) & row.mask for row in rows]
    index = torch.tensor([i for i, part in enumerate(take) for _ in range(int(part.sum()))], dtype=torch.int64)

    def column(name: str) -> torch.Tensor:
        return torch.cat([none, *(getattr(row, name)[part] for row, part in zip(rows, take, strict=True))])

    if spec.policy == "gspo":  # its gradient is the paper's when the tokens of a row weigh the same
        for row in rows:
            row.weight = torch.cat([row.weight[row.mask], torch.ones(1)])[:1].repeat(len(row.mask))
    advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float64)[index]
    lengths = sequences(spec, every)
    tokens = Tokens(
        **{name: column(name) for name in ("log_probs", "behaviour", "old", "weight", "reference", "entropy")},
        advantage=advantage,
        counts=advantage != 0,
        row=index,
        row_tokens=torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.int64),
        sequence_tokens=torch.tensor([lengths.get(key(spec, row), 0) for row in rows], dtype=torch.int64),
        sum_rows=sum_rows,
    )
    return tokens, torch.tensor([row.sampled_now for row in rows], dtype=torch.bool)[index]


def sums_of(spec: LossSpec, tokens: Tokens, same: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    return loss_sums(spec, tokens, same, REGISTRY[spec.policy])


def step(spec: LossSpec, parts: list[list[Row]]) -> tuple[torch.Tensor, Sums]:
    """A mini-batch over these micro-batches: the units first, then each one's sums."""
    every = [row for part in parts for row in part]
    count = denominator(spec, units(spec, list(sequences(spec, every).values())))
    made = [sums_of(spec, *as_tokens(spec, part, every)) for part in parts]
    return sum((loss for loss, _ in made), torch.zeros((), dtype=torch.float64)) / count, sum((s for _, s in made), Sums.nothing())


def plain(spec: LossSpec, rows: list[Row]) -> torch.Tensor:
    """The papers' formulas, a row at a time, over the whole mini-batch."""
    per_sequence: dict[int, list[torch.Tensor]] = {}
    as_tokens(spec, rows, rows)
    for row in trained(rows):
        log_probs, a = row.log_probs[row.mask], row.advantage
        log_ratio = log_probs - row.old[row.mask]
        ratio = log_ratio.mean().exp() * torch.ones_like(log_ratio) if spec.policy == "gspo" else log_ratio.exp()
        bounded = ratio.clip(1 - spec.clip_low, 1 + spec.clip_high)
        gain = bounded.detach() * a * log_probs if spec.policy == "cispo" else torch.minimum(ratio * a, bounded * a)
        if spec.policy == "dual_clip" and a < 0:
            gain = torch.maximum(gain, torch.full_like(gain, spec.dual_clip * a))
        if spec.policy == "decoupled_ppo":
            gain = gain * (row.old[row.mask] - row.behaviour[row.mask]).exp()
        gain = gain * row.weight[row.mask]
        away = log_probs - row.reference[row.mask]
        penalty = {"k1": away, "k2": away**2 / 2, "k3": torch.exp(-away) - 1 + away}[spec.kl.estimator]
        losses = -(gain + spec.entropy_bonus * row.entropy[row.mask] - spec.kl.coefficient * penalty)
        per_sequence.setdefault(key(spec, row), []).append(losses)
    joined = [torch.cat(losses) for losses in per_sequence.values()]
    if spec.aggregation == "token_mean":
        return torch.cat(joined).mean()
    if spec.aggregation == "constant":
        assert spec.divisor
        return torch.cat(joined).sum() / spec.divisor
    reduce = torch.mean if spec.aggregation == "sequence_mean_token_mean" else torch.sum
    return torch.stack([reduce(losses) for losses in joined]).mean()


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
    sent: list[torch.Tensor] = []

    def record(sums: torch.Tensor) -> torch.Tensor:
        sent.append(sums)
        return sums

    def half(side: int, sum_rows: SumRows) -> tuple[torch.Tensor, Sums]:
        return sums_of(spec, *as_tokens(spec, rows, rows, lambda row: torch.arange(len(row.mask)) % 2 == side, sum_rows))

    for side in (0, 1):
        half(side, record)
    made = [half(side, lambda _: sent[0] + sent[1]) for side in (0, 1)]
    count_of = denominator(spec, units(spec, list(sequences(spec, rows).values())))
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
        row.advantage, row.behaviour, row.old = 0.0, row.behaviour - 1e3, row.old - 1e3
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
        for values in (row.log_probs, row.behaviour, row.entropy, row.old, row.weight, row.reference):
            values.data[~row.mask] = math.nan
    failed = ragged(seed + 1, 1)[0]
    failed.mask, failed.advantage = torch.zeros_like(failed.mask), 100.0
    failed.behaviour, failed.old, failed.trajectory = failed.behaviour * math.nan, failed.old * math.nan, -1
    poisoned, poisoned_sums = step(spec, [[failed], rows])
    assert float(poisoned.detach()) == float(loss.detach()) and torch.equal(poisoned_sums.total, sums.total)
    assert all(torch.equal(a, b) for a, b in zip(gradients(poisoned, rows), expected, strict=True))


def one_token(policy: str, log_ratio: float, advantage: float, **changes: Any) -> tuple[float, float, float]:
    """(loss, its gradient, clipped) of one token whose log-prob is log_ratio - 1."""
    spec = LossSpec(policy=policy, **{"clip_low": 0.2, "clip_high": 0.28, **changes})
    log_probs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    behaviour, a, zero, one = torch.tensor([[-1.0], [advantage], [0.0], [1.0]], dtype=torch.float64)
    single = torch.ones(1, dtype=torch.int64)
    tokens = Tokens(log_probs, behaviour, behaviour, a, one, behaviour, zero, a != 0, single * 0, single, single)
    loss, sums = sums_of(spec, tokens, torch.tensor([False]))
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
            one = torch.ones(size, dtype=torch.float64)
            rows.append(Row(*leaves, one > 0, advantage, True, behaviour, one, behaviour, len(rows)))
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


def test_the_metrics_are_their_definitions_over_all_trained_tokens_and_the_gap_over_this_version_s() -> None:
    spec = LossSpec(clip_low=0.1, clip_high=0.15, old_log_probs="recomputed", kl=KLSpec(coefficient=0.1, estimator="k2"))
    rows = ragged(11, 12)
    _, sums = step(spec, [rows])
    found = dict(zip((*Sums.TOTALS, *Sums.HIGHEST), (*sums.total.tolist(), *sums.highest.tolist()), strict=True))
    picked = [(row, int(i)) for row in rows for i in row.mask.nonzero()[:, 0]]
    away = [float((row.log_probs - row.behaviour)[i].detach()) for row, i in picked]
    ratios = [math.exp(float((row.log_probs - row.old)[i].detach())) for row, i in picked]
    signs = [row.advantage for row, _ in picked]
    clipped = [(a > 0 and r > 1.15) or (a < 0 and r < 0.9) for a, r in zip(signs, ratios, strict=True)]
    assert found["tokens"] == len(picked) and found["clipped"] == sum(clipped) > 0 and 0.0 in signs
    assert found["kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in away), rel=1e-12)
    assert found["reference_kl"] == pytest.approx(sum(float((row.log_probs - row.reference)[i].detach()) ** 2 / 2 for row, i in picked))
    assert found["entropy"] == pytest.approx(sum(float(row.entropy[i].detach()) for row, i in picked), rel=1e-12)
    assert found["ratio"] == pytest.approx(math.exp(max(away)), rel=1e-12)
    assert found["gap"] == pytest.approx(max(abs(x) for x, (row, _) in zip(away, picked, strict=True) if row.sampled_now), rel=1e-12)


def test_every_choice_of_a_spec_is_in_its_registry() -> None:
    assert tuple(REGISTRY) == POLICIES
    assert get_args(LossSpec.model_fields["aggregation"].annotation) == tuple(AGGREGATIONS)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"aggregation": "constant"}, "needs a divisor"),
        ({"divisor": 8.0}, "set both or neither"),
        ({"policy": "gspo", "clip_high": 4e-4}, "set clip_low and clip_high"),
        ({"policy": "pp0_clip"}, "is not known: did you mean 'ppo_clip'"),
        ({"params": {"x": 1.0}}, "for a function of your own"),
        ({"policy": "decoupled_ppo"}, "set old_log_probs: recomputed"),
        ({"correction": {"weight": "token"}}, "set old_log_probs: recomputed"),
        ({"correction": {"low": 2.0, "high": 1.0}}, "must be below"),
        ({"policy": "decoupled_ppo", "old_log_probs": "recomputed", "correction": {"weight": "token"}}, "already weighs"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_with_the_remedy(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LossSpec.model_validate(loss)


@settings(deadline=None, max_examples=40)
@given(seed=seeds, count=st.integers(1, 30), clip=st.one_of(st.none(), st.floats(0.05, 1.0)), cut_at=st.integers(0, 30))
def test_M1_the_value_loss_is_half_the_larger_squared_error_in_any_split(seed: int, count: int, clip: float | None, cut_at: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, count, generator=generator, dtype=torch.float64)
    values.requires_grad_()
    moved = values if clip is None else torch.maximum(torch.minimum(values, old + clip), old - clip)
    expected = torch.maximum((values - returns) ** 2, (moved - returns) ** 2).sum() / 2
    parts = [slice(0, cut_at), slice(cut_at, None)]
    made = [value_sums(clip, ValueTokens(values[part], old[part], returns[part])) for part in parts]
    loss = made[0][0] + made[1][0]
    assert_close([loss, made[0][1] + made[1][1]], [expected, value_sums(clip, ValueTokens(values, old, returns))[1]])
    assert_close(list(torch.autograd.grad(loss, values)), list(torch.autograd.grad(expected, values)))
    assert float((made[0][1] + made[1][1])[2]) == pytest.approx(float(((old - returns) ** 2).sum()), rel=1e-12)


def test_a_function_that_breaks_the_contract_is_named_with_what_it_gave() -> None:
    tokens = made_up_tokens()
    for broken in (
        lambda tokens, spec: tokens.log_probs.sum(),
        lambda tokens, spec: (tokens.log_probs, tokens.log_probs[:1]),
        lambda tokens, spec: (tokens.log_probs, tokens.log_probs > 0, 1.0),
    ):
        with pytest.raises(ValueError, match="it must give one for each"):
            loss_sums(LossSpec(), tokens, torch.zeros(3, dtype=torch.bool), broken)
