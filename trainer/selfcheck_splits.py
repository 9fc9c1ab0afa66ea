"""Whether a policy loss is the same for every split, in float64 and without a model.

Made-up rows are one micro-batch; then the same rows in another order, in several micro-batches, beside an empty one, or with their tokens
on two context-parallel ranks. The loss, the gradient of every token and all metrics must agree up to float64's own rounding. Which change
makes them differ says what is wrong with the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trainer.loss import Policy, SumRows, Sums, Tokens, alone, denominator, loss_sums, units
from trainer.loss_spec import LossSpec

LIMIT = 1e-10
TRIALS = 12
_FLOAT32 = 1e-5
_STEERED = ("log_probs", "entropy")
"""The columns that have a gradient."""

KEPT = "the function draws random numbers, or keeps something from one call to the next: compute from tokens and spec alone"
PLACE = (
    "what a token gets depends on where it stands (an index, a cumulative sum, a sort, the first row): look at a token's own numbers and "
    "at tokens.row_means alone"
)
COMPANY = "a mean or count over the micro-batch: return one loss per token and let the aggregation divide"
NOTHING = "a mean, a maximum or a division over no tokens: a rank without rows runs an empty micro-batch, on which the losses are empty"
CUT = "a reduction over a row must go through tokens.row_means: a context-parallel rank has some of a row's tokens only"
ROUNDING = "the function computes in float32: keep the dtype of tokens.log_probs"


@dataclass(frozen=True)
class Finding:
    """One check: the largest relative error found, and what is probably wrong with the function if that is above the limit."""

    what: str
    error: float
    limit: float
    cause: str

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # not-a-number is not


@dataclass(frozen=True, eq=False)
class Row:
    """R response positions; columns are [R] float64, not-a-number where `mask` is False."""

    number: int
    columns: dict[str, torch.Tensor]
    mask: torch.Tensor
    advantage: float
    trajectory: int

    def on(self, side: int | None) -> torch.Tensor:
        """[R] the trained positions that context-parallel rank `side` of two has (the outer quarters, or the inner); None: all."""
        quarter = torch.arange(len(self.mask)) * 4 // len(self.mask)
        return self.mask if side is None else self.mask & (((quarter == 0) | (quarter == 3)) == (side == 0))


def guarded(policy: Policy, name: str) -> Policy:
    """The same, but whatever the user's code raises is a ValueError in words."""

    def call(tokens: Tokens, spec: LossSpec) -> Any:
        try:
            return policy(tokens, spec)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            where = f"{len(tokens.row)} tokens" if len(tokens.row) else "a micro-batch without tokens, which a rank without rows runs"
            raise ValueError(f"policy {name} failed on {where}: {type(error).__name__}: {error}") from error

    return call


def log_ratios(rng: np.random.Generator, spec: LossSpec, count: int) -> np.ndarray:
    """[count] of one row: inside the clip, outside or far outside, on one side, and never near its bound, where rounding decides."""
    up = rng.random() < 0.5
    bound = math.log1p(spec.clip_high) if up else -math.log1p(-min(spec.clip_low, 0.5))
    return (1.0 if up else -1.0) * bound * rng.choice([0.5, 2.0, 6.0]) * rng.uniform(0.8, 1.2, count)


def draw(rng: np.random.Generator, spec: LossSpec, count: int) -> list[Row]:
    """Ragged rows with holes in their masks; some without a trained token or an advantage, some leaves of one trajectory."""
    rows: list[Row] = []
    for number in range(count):
        size = int(rng.integers(1, 40))
        mask = rng.random(size) < (0.8 if rng.random() < 0.9 else 0.0)
        another_leaf = number > 2 and rng.random() < 0.4
        trajectory = rows[-1].trajectory if another_leaf else number
        advantage = rows[-1].advantage if another_leaf else float(rng.normal()) * float(rng.random() < 0.8)
        if number < 2:  # at least one row of either sign is there to be trained
            mask[0], advantage = True, (1.0, -0.7)[number]
        behaviour = -rng.exponential(1.0, size)
        old = behaviour + (rng.normal(0.0, 0.2, size) if spec.old_log_probs == "recomputed" else 0.0)
        columns = {
            "log_probs": old + log_ratios(rng, spec, size),
            "behaviour": behaviour,
            "old": old,
            "weight": np.exp(rng.normal(0.0, 0.3, size)) if spec.correction.weight != "none" else np.ones(size),
            "reference": old + rng.normal(0.0, 0.3, size),
            "entropy": rng.exponential(1.0, size),
        }
        tensors = {name: torch.from_numpy(np.where(mask, column, np.nan)) for name, column in columns.items()}
        for name in _STEERED:
            tensors[name].requires_grad_()
        rows.append(Row(number, tensors, torch.from_numpy(mask), advantage, trajectory))
    return rows


@dataclass(frozen=True)
class MiniBatch:
    """What every micro-batch of it knows of the whole."""

    spec: LossSpec
    policy: Policy
    rows: Sequence[Row]

    def sequence_tokens(self) -> dict[int, int]:
        """By sequence, its tokens in the loss."""
        found: dict[int, int] = {}
        for row in self.rows:
            if row.advantage and bool(row.mask.any()):
                found[self.sequence(row)] = found.get(self.sequence(row), 0) + int(row.mask.sum())
        return found

    def sequence(self, row: Row) -> int:
        return row.trajectory if self.spec.sequence == "trajectory" else row.number

    def sums(self, rows: Sequence[Row], side: int | None = None, sum_rows: SumRows = alone) -> tuple[torch.Tensor, Sums]:
        """Of one micro-batch, or of what a context-parallel rank has of it."""
        takes = [row.on(side) for row in rows]
        index = torch.tensor([i for i, take in enumerate(takes) for _ in range(int(take.sum()))], dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.float64)
        names = ("log_probs", "behaviour", "old", "weight", "reference", "entropy")
        columns = {n: torch.cat([none, *(row.columns[n][take] for row, take in zip(rows, takes, strict=True))]) for n in names}
        lengths = self.sequence_tokens()
        advantage = torch.tensor([row.advantage for row in rows], dtype=torch.float64)[index]
        reference = columns.pop("reference")
        tokens = Tokens(
            **columns,
            reference=reference if self.spec.kl.wanted else None,
            advantage=advantage,
            counts=advantage != 0.0,
            row=index,
            row_tokens=torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.int64),
            sequence_tokens=torch.tensor([lengths.get(self.sequence(row), 0) for row in rows], dtype=torch.int64),
            sum_rows=sum_rows,
        )
        return loss_sums(self.spec, tokens, torch.zeros(len(index), dtype=torch.bool), self.policy)

    def step(self, micro_batches: Sequence[Sequence[Row]]) -> dict[str, torch.Tensor]:
        return self._numbers([self.sums(rows) for rows in micro_batches])

    def cut_step(self) -> dict[str, torch.Tensor]:
        """One micro-batch whose rows lie on two context-parallel ranks.

        The two run one after the other, again and again: each time with the true sum for one more of their calls of `sum_rows`.
        """
        totals: list[torch.Tensor] = []
        while True:
            made, sent = [], []
            for side in (0, 1):
                calls: list[torch.Tensor] = []
                made.append(self.sums(self.rows, side, partial(_summed, totals, calls)))
                sent.append(calls)
            if len(sent[0]) != len(sent[1]):
                raise ValueError(
                    f"the policy loss calls tokens.row_means {len(sent[0])} times on one context-parallel rank and {len(sent[1])} times on "
                    "another: they would wait for each other; call it the same number of times whatever the tokens"
                )
            if len(sent[0]) == len(totals):
                return self._numbers(made)
            totals.append(sent[0][len(totals)] + sent[1][len(totals)])

    def _numbers(self, made: Sequence[tuple[torch.Tensor, Sums]]) -> dict[str, torch.Tensor]:
        """All that must be the same."""
        count = denominator(self.spec, units(self.spec, list(self.sequence_tokens().values())))
        loss = torch.stack([loss for loss, _ in made]).sum() / count
        leaves = [row.columns[name] for row in self.rows for name in _STEERED]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        sums = sum((sums for _, sums in made), Sums.nothing())
        metrics = zip((*Sums.TOTALS, *Sums.HIGHEST), torch.cat([sums.total, sums.highest]).split(1), strict=True)
        return {"the loss": loss.detach()[None], "a gradient": torch.cat(gradients), **dict(metrics)}


def _summed(totals: list[torch.Tensor], calls: list[torch.Tensor], sums: torch.Tensor) -> torch.Tensor:
    calls.append(sums)
    return totals[len(calls) - 1] if len(calls) <= len(totals) else sums


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference in any number, relative to the largest of its name; infinite when one of the two is not finite.

    The loss may be a sum of large terms that cancel: its difference is taken relative to the largest gradient, if that is more.
    """
    worst = 0.0
    steepest = float(expected["a gradient"].abs().max())
    for name, theirs in expected.items():
        mine = found[name]
        difference = float(torch.where(mine == theirs, 0.0, (mine - theirs).abs()).max())
        scale = max(float(theirs.abs().max()), steepest if name in ("the loss", "loss") else 0.0, 1e-300)
        worst = max(worst, difference / scale if math.isfinite(difference) else math.inf)
    return worst


def _cut_at_random(rng: np.random.Generator, rows: list[Row]) -> list[list[Row]]:
    """Two to six micro-batches, or as many as there are rows."""
    inner = rng.choice(np.arange(1, len(rows)), min(len(rows) - 1, int(rng.integers(1, 6))), replace=False)
    return [rows[a:b] for a, b in pairwise([0, *sorted(inner.tolist()), len(rows)])]


Change = Callable[[np.random.Generator, MiniBatch, list[Row]], dict[str, torch.Tensor]]
CHANGES: dict[str, tuple[Change, str]] = {
    "computed again": (lambda rng, whole, rows: whole.step([rows]), KEPT),
    "rows in another order": (lambda rng, whole, rows: whole.step([[rows[i] for i in rng.permutation(len(rows))]]), PLACE),
    "split into micro-batches": (lambda rng, whole, rows: whole.step(_cut_at_random(rng, rows)), COMPANY),
    "every row alone": (lambda rng, whole, rows: whole.step([[row] for row in rows]), COMPANY),
    "beside an empty micro-batch": (lambda rng, whole, rows: whole.step([rows, []]), NOTHING),
    "rows on two context-parallel ranks": (lambda rng, whole, rows: whole.cut_step(), CUT),
}
"""In the order of how much a failure explains: what fails further up probably makes what is below fail too."""


def check(policy: Policy, spec: LossSpec, count: int, seed: int) -> list[Finding]:
    """Each change on random rows, `count` of them (at least 2). Raises ValueError for a function that cannot be used."""
    rng = np.random.default_rng(seed)
    worst = dict.fromkeys(CHANGES, 0.0)
    for _ in range(TRIALS):
        rows = draw(rng, spec, count)
        whole = MiniBatch(spec, guarded(policy, spec.policy), rows)
        expected = whole.step([rows])
        if not all(bool(torch.isfinite(expected[name]).all()) for name in ("the loss", "a gradient")):
            raise ValueError(f"policy {spec.policy} is not finite: the loss of {len(rows)} random rows is {float(expected['the loss'])}")
        for what, (change, _) in CHANGES.items():
            worst[what] = max(worst[what], error(change(rng, whole, rows), expected))
    rounding = max(worst.values()) < _FLOAT32
    return [Finding(what, worst[what], LIMIT, ROUNDING if rounding else cause) for what, (_, cause) in CHANGES.items()]
