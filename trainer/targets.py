"""What is fixed once per global batch, before its first step: importance weights and masks, token rewards, advantages and returns.

Pure arithmetic on one row's trained tokens, in float64; nothing here sees another row, a rank or a split. A time step is a trained token,
so what a tool wrote between two turns of the policy takes no time.
"""

from __future__ import annotations

import numpy as np

from trainer.loss_spec import CorrectionSpec, CriticSpec, KLSpec


def correction(log_ratio: np.ndarray, spec: CorrectionSpec) -> tuple[np.ndarray, np.ndarray]:
    """(weight [n], keep [n] bool) of tokens whose log k = old - behaviour is given, [n].

    Not-a-number is kept, not masked: it is a fault that the step must see and be skipped for.
    """
    row_mean = log_ratio.mean() if len(log_ratio) else 0.0
    log_weight = {"none": np.zeros_like(log_ratio), "token": log_ratio, "sequence": np.full_like(log_ratio, log_ratio.sum())}[spec.weight]
    judged = {"none": np.zeros_like(log_ratio), "token": log_ratio, "sequence": np.full_like(log_ratio, row_mean)}[spec.mask]
    with np.errstate(over="ignore"):
        weight, k = np.exp(log_weight), np.exp(judged)
    outside = (k < spec.low) | (k > spec.high) if spec.mask != "none" else np.zeros(len(k), bool)
    if spec.weight != "none" and spec.cap is not None:
        weight = np.minimum(weight, spec.cap)
    return weight, ~outside


def kl_estimate(log_ratio: np.ndarray, estimator: str) -> np.ndarray:
    """Of KL(policy, reference) at tokens of the policy; log_ratio = policy - reference, [n] (Schulman 2020)."""
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    return np.expm1(-log_ratio) + log_ratio


def token_rewards(count: int, score: float, log_ratio: np.ndarray | None, kl: KLSpec) -> np.ndarray:
    """[count] the score on the last token; with `log_ratio` = old - reference [count], the KL penalty off every token besides."""
    rewards = np.zeros(count) if log_ratio is None else -kl.coefficient * kl_estimate(log_ratio, kl.estimator)
    rewards[-1] += score
    return rewards


def gae(rewards: np.ndarray, values: np.ndarray, critic: CriticSpec) -> tuple[np.ndarray, np.ndarray]:
    """(advantages [n], returns [n]); the value after the last token is 0 (Schulman et al. 2016, "Generalized advantage estimation", 16)."""
    deltas = rewards + critic.gamma * np.append(values[1:], 0.0) - values
    advantages = _backwards(deltas, np.full(len(deltas), critic.gamma * critic.lam))
    return advantages, advantages + values


def vtrace(rewards: np.ndarray, values: np.ndarray, log_ratio: np.ndarray, critic: CriticSpec) -> tuple[np.ndarray, np.ndarray]:
    """(advantages [n], returns [n]) of tokens that an older policy sampled; log_ratio = old - behaviour, [n].

    Espeholt et al. 2018, "IMPALA", eq. 1 and 4.2 with c scaled by lambda; the advantage carries its weight rho. On policy the returns are
    `gae`'s.
    """
    with np.errstate(over="ignore"):
        ratio = np.exp(log_ratio)
    rho, c = np.minimum(ratio, critic.rho_cap), critic.lam * np.minimum(ratio, critic.c_cap)
    deltas = rho * (rewards + critic.gamma * np.append(values[1:], 0.0) - values)
    returns = values + _backwards(deltas, critic.gamma * c)
    return rho * (rewards + critic.gamma * np.append(returns[1:], 0.0) - values), returns


def _backwards(deltas: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """a[t] = deltas[t] + decay[t] a[t + 1]"""
    carried = 0.0
    made = []
    for delta, factor in zip(deltas[::-1].tolist(), decay[::-1].tolist(), strict=True):
        carried = delta + factor * carried
        made.append(carried)
    return np.array(made[::-1], dtype=np.float64)
