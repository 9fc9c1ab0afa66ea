"""What is minimised, as data. No torch here: the driver checks it before anything starts.

The formulas are in `trainer/loss.py` (per token, with gradients) and `trainer/targets.py` (what is fixed once per global batch).
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")

POLICIES = ("ppo_clip", "dual_clip", "gspo", "cispo", "decoupled_ppo")


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CorrectionSpec(Strict):
    """What is done about tokens that the engine sampled with another probability than the trainer's own weights give them.

    With k = exp(old - behaviour), old being recomputed by the trainer when the batch begins. Truncated importance sampling (Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training") is `weight: token`; IcePop (Ling team 2025, "Every step
    evolves") is `weight: token, mask: token, cap: null`; a sequence mask is `mask: sequence`.
    """

    weight: Literal["none", "token", "sequence"] = Field("none", description="the loss times min(k, cap), of the token or of its whole row")
    cap: float | None = Field(2.0, gt=0.0, description="null: the weight has no upper bound")
    mask: Literal["none", "token", "sequence"] = Field(
        "none",
        description="what is left out, before anything is counted: tokens with k outside [low, high], or rows whose geometric mean is",
    )
    low: float = Field(0.5, ge=0.0)
    high: float = Field(5.0, gt=0.0)

    @property
    def active(self) -> bool:
        return self.weight != "none" or self.mask != "none"

    @model_validator(mode="after")
    def _a_range(self) -> CorrectionSpec:
        if self.low >= self.high:
            raise ValueError(f"correction.low ({self.low}) must be below correction.high ({self.high})")
        return self


class KLSpec(Strict):
    """A penalty for leaving a frozen reference model. In the loss, k1's gradient is 0 on average: prefer k2 or k3 there."""

    coefficient: float = Field(0.0, ge=0.0, description="0: no penalty")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of a token's KL (Schulman 2020, 'Approximating KL divergence')")
    reference: Path | None = Field(
        None,
        description="a Hugging Face checkpoint directory, loaded even if the coefficient is 0; null: the model the run begins with",
    )
    where: Literal["loss", "reward"] = Field("loss", description="reward: taken off each token's reward; needs a critic")

    @property
    def wanted(self) -> bool:
        """Whether a reference model is loaded, and every trained token has its log-prob."""
        return self.coefficient > 0.0 or self.reference is not None

    @property
    def in_loss(self) -> bool:
        return self.coefficient > 0.0 and self.where == "loss"

    @property
    def in_reward(self) -> bool:
        return self.coefficient > 0.0 and self.where == "reward"


class LossSpec(Strict):
    """The policy's loss. `old` is what the ratio is against, `behaviour` what the engine recorded at sampling."""

    policy: str = Field(
        "ppo_clip",
        description=f"the loss of a token: {', '.join(POLICIES)}, or your own function as path/file.py:name or module:name",
    )
    clip_low: float = Field(0.2, gt=0.0, le=1.0, description="the ratio's lower bound is 1 - clip_low; 1: there is none")
    clip_high: float = Field(0.28, gt=0.0, description="the ratio's upper bound is 1 + clip_high")
    dual_clip: float = Field(3.0, gt=1.0, description="dual_clip only: with a negative advantage the ratio counts up to this")
    params: dict[str, float | str | bool] = Field({}, description="for your own function, which finds them in spec.params")
    old_log_probs: Literal["rollout", "recomputed"] = Field(
        "rollout", description="recomputed: the trainer's own, once per batch before its first step (one more forward pass)"
    )
    correction: CorrectionSpec = CorrectionSpec()
    kl: KLSpec = KLSpec()
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = Field(
        "token_mean", description="how token losses become one number"
    )
    sequence: Literal["leaf", "trajectory"] = Field(
        "leaf", description="what a sequence is in sequence_mean_...: a row, or all rows of a trajectory"
    )
    divisor: float | None = Field(None, gt=0.0, description="constant only: a mini-batch's sum over tokens is divided by this")
    entropy_bonus: float = Field(0.0, ge=0.0, description="times the entropy, taken off the loss of each token; keeps sampling diverse")

    @property
    def own_policy(self) -> bool:
        """Whether the policy loss is the user's function."""
        return ":" in self.policy

    @field_validator("params")
    @classmethod
    def _numbers(cls, params: dict[str, float | str | bool]) -> dict[str, float | str | bool]:
        """YAML reads 3e-4, which has no point, as a word."""
        return {name: float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value for name, value in params.items()}

    @field_validator("policy")
    @classmethod
    def _known(cls, policy: str) -> str:
        if policy in POLICIES or ":" in policy:
            return policy
        near = difflib.get_close_matches(policy, POLICIES, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(POLICIES)}."
        raise ValueError(f"{policy!r} is not known: {hint} A function of your own is written path/file.py:name")

    @model_validator(mode="after")
    def _fits_together(self) -> LossSpec:
        if (self.aggregation == "constant") != (self.divisor is not None):
            raise ValueError("aggregation constant needs a divisor, and only it: set both or neither; Dr. GRPO's is rows x max_new_tokens")
        if self.policy == "gspo" and not {"clip_low", "clip_high"} <= self.model_fields_set:
            raise ValueError("policy gspo clips the ratio of a whole row: set clip_low and clip_high; its paper has 3e-4 and 4e-4")
        if self.params and not self.own_policy:
            raise ValueError(f"params are for a function of your own; policy {self.policy} has none")
        if self.old_log_probs == "rollout":
            if self.correction.active:
                raise ValueError("correction compares the recomputed log-probs with the recorded: set old_log_probs: recomputed")
            if self.policy == "decoupled_ppo":
                raise ValueError("decoupled_ppo clips around the policy that began the batch: set old_log_probs: recomputed")
        if self.policy == "decoupled_ppo" and self.correction.weight != "none":
            raise ValueError(
                "decoupled_ppo already weighs by exp(old - behaviour): set correction.weight none, or ppo_clip with weight and cap"
            )
        return self


class CriticSpec(Strict):
    """A value model beside the policy: the same backbone with a head of one number, and an optimizer of its own."""

    model_path: Path | None = Field(None, description="where its backbone begins; null: the policy's model")
    gamma: float = Field(1.0, ge=0.0, le=1.0)
    lam: float = Field(1.0, ge=0.0, le=1.0, description="lambda of the generalized advantage, or of V-trace")
    targets: Literal["gae", "vtrace"] = Field("gae", description="vtrace corrects the targets for rows of an older policy")
    rho_cap: float = Field(1.0, gt=0.0, description="vtrace only: upper bound of a token's importance weight")
    c_cap: float = Field(1.0, gt=0.0, description="vtrace only: upper bound of the weights that carry a later error back")
    value_clip: float | None = Field(
        0.2, gt=0.0, description="a value moves this far from its old one before its loss is clipped; null: no clip"
    )
    whiten: bool = Field(True, description="advantages of the global batch to mean 0 and deviation 1")


def check_critic(loss: LossSpec, critic: CriticSpec | None) -> None:
    """Raises ValueError for a loss and a critic that do not fit together."""
    if critic is None:
        if loss.kl.in_reward:
            raise ValueError(
                "kl.where reward takes the penalty off each token's reward, which needs a critic: set critic, or kl.where: loss"
            )
        return
    if critic.targets == "vtrace":
        if loss.old_log_probs == "rollout":
            raise ValueError("vtrace compares the recomputed log-probs with the recorded: set loss.old_log_probs: recomputed")
        if loss.correction.weight != "none" or loss.policy == "decoupled_ppo":
            raise ValueError(
                "vtrace's advantages already carry the importance weight: set loss.correction.weight none, and no decoupled_ppo"
            )
