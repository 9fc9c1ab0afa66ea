"""What is fixed once a batch: importance weights, masks, token rewards, advantages and returns, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer.loss_spec import CorrectionSpec, CriticSpec, KLSpec, LossSpec, check_critic
from trainer.targets import correction, gae, kl_estimate, token_rewards, vtrace

numbers = st.floats(-2, 2)
rows = st.lists(st.tuples(numbers, numbers, st.floats(-1, 1)), min_size=1, max_size=9).map(lambda row: np.array(row).T)
discounts = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@given(row=rows, gamma=discounts, lam=discounts)
def test_gae_is_the_discounted_sum_of_all_later_errors(row: np.ndarray, gamma: float, lam: float) -> None:
    rewards, values, _ = row
    count = len(values)
    advantages, returns = gae(rewards, values, CriticSpec(gamma=gamma, lam=lam))
    errors = [rewards[t] + gamma * (values[t + 1] if t + 1 < count else 0.0) - values[t] for t in range(count)]
    for s in range(count):
        assert advantages[s] == pytest.approx(sum((gamma * lam) ** (t - s) * errors[t] for t in range(s, count)), abs=1e-12)
    assert np.allclose(returns, advantages + values, rtol=0, atol=1e-12)


@given(row=rows, gamma=discounts)
def test_with_lambda_1_the_return_is_the_sum_of_rewards_whatever_the_values_say(row: np.ndarray, gamma: float) -> None:
    rewards, values, _ = row
    returns = gae(rewards, values, CriticSpec(gamma=gamma, lam=1.0))[1]
    for s in range(len(rewards)):
        assert returns[s] == pytest.approx(sum(gamma ** (t - s) * rewards[t] for t in range(s, len(rewards))), abs=1e-11)


@given(row=rows, gamma=discounts, lam=discounts, rho_cap=st.floats(0.5, 2), c_cap=st.floats(0.5, 2))
def test_vtrace_is_the_papers_sum_with_products_of_capped_weights(
    row: np.ndarray, gamma: float, lam: float, rho_cap: float, c_cap: float
) -> None:
    rewards, values, log_ratio = row
    count = len(values)
    critic = CriticSpec(targets="vtrace", gamma=gamma, lam=lam, rho_cap=rho_cap, c_cap=c_cap)
    advantages, returns = vtrace(rewards, values, log_ratio, critic)
    rho = [min(math.exp(x), rho_cap) for x in log_ratio]
    c = [lam * min(math.exp(x), c_cap) for x in log_ratio]
    for s in range(count):
        later = 0.0
        for t in range(s, count):
            after = values[t + 1] if t + 1 < count else 0.0
            later += gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * (rewards[t] + gamma * after - values[t])
        assert returns[s] == pytest.approx(values[s] + later, abs=1e-10)
        after = returns[s + 1] if s + 1 < count else 0.0
        assert advantages[s] == pytest.approx(rho[s] * (rewards[s] + gamma * after - values[s]), abs=1e-10)


@given(row=rows, gamma=discounts, lam=discounts)
def test_on_policy_vtrace_has_the_returns_of_gae(row: np.ndarray, gamma: float, lam: float) -> None:
    rewards, values, _ = row
    critic = CriticSpec(gamma=gamma, lam=lam)
    assert np.allclose(vtrace(rewards, values, np.zeros(len(values)), critic)[1], gae(rewards, values, critic)[1], rtol=0, atol=1e-12)


def test_the_score_stands_on_the_last_token_and_the_penalty_on_every_one() -> None:
    kl = KLSpec(coefficient=0.5, estimator="k1", where="reward")
    assert token_rewards(3, 2.0, None, kl).tolist() == [0.0, 0.0, 2.0]
    assert token_rewards(3, 2.0, np.array([1.0, -2.0, 0.0]), kl).tolist() == [-0.5, 1.0, 2.0]


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.3), ("k2", 0.045), ("k3", math.exp(-0.3) - 1 + 0.3)])
def test_the_estimators_of_kl_are_those_of_their_source(estimator: str, expected: float) -> None:
    assert kl_estimate(np.array([0.3]), estimator)[0] == pytest.approx(expected, abs=1e-15)
    assert kl_estimate(np.zeros(1), estimator)[0] == 0.0


RATIOS = np.log(np.array([0.2, 0.9, 1.5, 8.0]))


def test_truncated_importance_sampling_caps_each_token_s_weight() -> None:
    weight, keep = correction(RATIOS, CorrectionSpec(weight="token", cap=2.0))
    assert weight == pytest.approx([0.2, 0.9, 1.5, 2.0]) and keep.all()


def test_icepop_leaves_out_tokens_outside_its_range_and_weighs_the_others_without_a_cap() -> None:
    weight, keep = correction(RATIOS, CorrectionSpec(weight="token", cap=None, mask="token", low=0.5, high=5.0))
    assert keep.tolist() == [False, True, True, False] and weight[keep] == pytest.approx([0.9, 1.5])


def test_a_sequence_s_weight_is_the_product_and_its_mask_goes_by_the_geometric_mean() -> None:
    product, mean = 0.2 * 0.9 * 1.5 * 8.0, (0.2 * 0.9 * 1.5 * 8.0) ** 0.25
    weight, keep = correction(RATIOS, CorrectionSpec(weight="sequence", cap=None, mask="sequence", low=mean - 0.01, high=mean + 0.01))
    assert weight == pytest.approx([product] * 4) and keep.all()
    assert not correction(RATIOS, CorrectionSpec(mask="sequence", low=mean + 0.01, high=9.0))[1].any()
    assert correction(RATIOS, CorrectionSpec(mask="sequence"))[0].tolist() == [1.0] * 4, "a mask alone weighs nothing"


@pytest.mark.parametrize("mask", ["token", "sequence"])
def test_N4_a_ratio_that_is_not_a_number_is_a_fault_to_be_seen_and_not_masked_away(mask: str) -> None:
    log_ratio = np.array([0.0, math.nan])
    weight, keep = correction(log_ratio, CorrectionSpec(weight="token", mask=mask))  # type: ignore[arg-type]
    assert keep[1] and math.isnan(weight[1])


def test_a_critic_and_a_loss_that_do_not_fit_are_refused_with_the_remedy() -> None:
    recomputed = LossSpec(old_log_probs="recomputed")
    with pytest.raises(ValueError, match=r"set loss\.old_log_probs: recomputed"):
        check_critic(LossSpec(), CriticSpec(targets="vtrace"))
    with pytest.raises(ValueError, match="already carry the importance weight"):
        weighted = recomputed.model_copy(update={"correction": CorrectionSpec(weight="token")})
        check_critic(weighted, CriticSpec(targets="vtrace"))
    with pytest.raises(ValueError, match="needs a critic"):
        check_critic(LossSpec(kl=KLSpec(coefficient=0.1, where="reward")), None)
    check_critic(recomputed, CriticSpec(targets="vtrace"))
    with pytest.raises(ValidationError):
        CriticSpec.model_validate({"gamma": 1.5})
