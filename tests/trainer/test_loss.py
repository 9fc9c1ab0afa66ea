"""Loss and metrics as sums, in float64, without a model (M1, N1)."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.loss import Sums, clipped_policy_loss, token_sums


def tokens(seed: int, count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(count, generator=generator, dtype=torch.float64) * 5
    return {
        "log_probs": behaviour + torch.randn(count, generator=generator, dtype=torch.float64) * 0.4,
        "behaviour": behaviour,
        "advantage": torch.randn(count, generator=generator, dtype=torch.float64),
        "entropy": torch.rand(count, generator=generator, dtype=torch.float64),
        "same_weights": torch.rand(count, generator=generator) < 0.5,
    }


def sums_of(part: dict[str, torch.Tensor]) -> Sums:
    losses = clipped_policy_loss(part["log_probs"], part["behaviour"], part["advantage"], 0.2, 0.28)
    return token_sums(losses, **part, clip_low=0.2, clip_high=0.28)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 80), cuts=st.lists(st.integers(0, 80), max_size=6), shuffled=st.booleans())
def test_M1_every_sum_is_the_same_for_any_split_and_order(seed: int, count: int, cuts: list[int], shuffled: bool) -> None:
    whole = tokens(seed, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) if shuffled else torch.arange(count)
    edges = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [{name: value[order][a:b] for name, value in whole.items()} for a, b in itertools.pairwise(edges)]
    expected, found = sums_of(whole), sum(map(sums_of, parts), Sums.nothing())
    assert torch.allclose(found.total, expected.total, rtol=1e-12, atol=1e-12)
    assert torch.equal(found.highest, expected.highest)


@settings(deadline=None, max_examples=60)
@given(log_ratio=st.floats(-2, 2), advantage=st.floats(-3, 3))
def test_the_clip_bounds_the_gain_on_the_side_that_would_grow_it(log_ratio: float, advantage: float) -> None:
    ratio = math.exp(log_ratio)
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    log_probs = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
    loss = clipped_policy_loss(
        log_probs, torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), 0.2, 0.28
    )
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)
    loss.sum().backward()
    assert log_probs.grad is not None
    acts = (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    assert float(log_probs.grad) == pytest.approx(0.0 if acts else -advantage * ratio, abs=1e-12)


def test_N1_100_tokens_of_loss_2_and_900_of_0_5_sum_to_0_65_a_token() -> None:
    part = tokens(0, 1000)
    part["log_probs"] = part["behaviour"]
    part["advantage"] = torch.cat([torch.full((100,), -2.0), torch.full((900,), -0.5)]).double()
    sums = sums_of(part)
    assert float(sums.total[0] / sums.total[1]) == pytest.approx(0.65, abs=1e-12)


def test_equal_log_probs_give_ratio_1_no_kl_no_clip_and_no_gap() -> None:
    part = tokens(1, 50)
    part["log_probs"] = part["behaviour"]
    found = dict(zip((*Sums.TOTALS, *Sums.HIGHEST), (*sums_of(part).total.tolist(), *sums_of(part).highest.tolist()), strict=True))
    assert found["ratio"] == 1.0 and found["kl"] == 0.0 and found["clipped"] == 0.0 and found["gap"] == 0.0


def test_no_tokens_add_nothing_and_maximise_nothing() -> None:
    empty = {name: value[:0] for name, value in tokens(2, 3).items()}
    some = sums_of(tokens(2, 3))
    together = some + sums_of(empty)
    assert torch.equal(together.total, some.total) and torch.equal(together.highest, some.highest)
