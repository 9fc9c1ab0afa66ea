"""Before a batch's first step: what its later steps compare with, computed once, with the weights that the batch found.

    rows ──▶ old log-probs ──▶ weight, mask ──────────────────────▶ columns of the rows' trained tokens
         ──▶ reference log-probs ──▶ (KL off the reward) ──┐           ▲
         ──▶ values ──────────────────────────────────────▶ advantages, returns

Each rank does it for its own rows, over the plan's own micro-batches; nothing is computed that the losses do not use. Masks come before
every count, and neither they nor the advantages know how the rows are split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from trainer import targets
from trainer.forward import Forward, MicroBatches
from trainer.group import Group
from trainer.model import Model
from trainer.rows import Pack, Row
from trainer.spec import TrainerSpec
from trainer.wire import TrainRequest

BARE = ("behaviour",)
"""The columns of rows as they come from the store: with these alone there is nothing to prepare."""
TOTALS = (
    "tokens",
    "masked_tokens",
    "masked_rows",
    "weight",
    "weight_squared",
    "off_policy_kl",
    "returns",
    "returns_squared",
    "value_error_squared",
)


@dataclass(frozen=True)
class Prepared:
    """`rows` are this rank's, by id, with all their columns. `totals` are over the whole global batch, each row once."""

    rows: dict[str, Row]
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TOTALS, 0.0))


def columns(spec: TrainerSpec) -> tuple[str, ...]:
    """What `prepare` gives the trained tokens of every row."""
    names = [*BARE]
    if spec.loss.old_log_probs == "recomputed":
        names += ["old"]
    if spec.loss.correction.weight != "none":
        names += ["weight"]
    if spec.loss.kl.wanted:
        names += ["reference"]
    if spec.critic is not None:
        names += ["advantage", "values", "returns"]
    return tuple(names)


def prepare(
    spec: TrainerSpec,
    group: Group,
    forward: Forward,
    model: Model,
    rows: dict[str, Row],
    shares: Sequence[MicroBatches],
    request: TrainRequest,
) -> Prepared:
    """All ranks together. `shares` are this rank's rows as planned, mini-batch by mini-batch; a row may stand in several."""
    micro_batches = _each_once(shares)
    found: dict[str, dict[str, np.ndarray]] = {}
    if spec.loss.old_log_probs == "recomputed" or spec.loss.kl.in_reward:
        found["old"] = forward.collect(model, micro_batches, forward.log_probs)
    if spec.loss.kl.wanted:
        assert model.reference is not None
        found["reference"] = forward.collect(model.reference, micro_batches, forward.log_probs)
    if spec.critic is not None:
        assert model.critic is not None
        found["values"] = forward.collect(model.critic, micro_batches, values)
    made = {row_id: _with_columns(spec, row, {name: by_row[row_id] for name, by_row in found.items()}) for row_id, row in rows.items()}
    mine = [row_id for row_id, rank in _first_rank(request).items() if rank == group.dp_rank]
    if spec.critic is not None and spec.critic.whiten:
        made = _whitened(group, made, mine)
    totals = np.sum([np.zeros(len(TOTALS)), *(_row_totals(rows[row_id], made[row_id]) for row_id in mine)], axis=0)
    summed = group.sum(torch.from_numpy(totals) * (group.cp_rank == 0)).tolist()
    return Prepared(made, dict(zip(TOTALS, summed, strict=True)))


def values(packed: Pack, output: torch.Tensor) -> torch.Tensor:
    """The critic's output [1, n, 1] -> [n], the value before each wanted token."""
    return output[0, :, 0].float()


def _each_once(shares: Sequence[MicroBatches]) -> list[list[Row]]:
    seen: set[str] = set()
    out = []
    for micro_batch in (micro_batch for share in shares for micro_batch in share):
        fresh = [row for row in micro_batch if row.row_id not in seen]
        seen.update(row.row_id for row in fresh)
        if fresh:
            out.append(fresh)
    return out


def _first_rank(request: TrainRequest) -> dict[str, int]:
    """By row id: the data-parallel rank that has it first, so that a row of several mini-batches is counted once."""
    first: dict[str, int] = {}
    for mini_batch in request.mini_batches:
        for rank, micro_batches in enumerate(mini_batch.ranks):
            for row in (row for micro_batch in micro_batches for row in micro_batch):
                first.setdefault(row.row_id, rank)
    return first


def _with_columns(spec: TrainerSpec, row: Row, found: dict[str, np.ndarray]) -> Row:
    """All columns of one row, and without the tokens that the off-policy mask leaves out."""
    if not len(row.trained):
        return replace(row, tokens=dict.fromkeys(columns(spec), row.tokens["behaviour"]))
    made = {"behaviour": row.tokens["behaviour"].astype(np.float64), **found}
    keep = np.ones(len(row.trained), bool)
    if spec.loss.correction.active:
        made["weight"], keep = targets.correction(made["old"] - made["behaviour"], spec.loss.correction)
    if spec.critic is not None:
        penalty = made["old"] - made["reference"] if spec.loss.kl.in_reward else None
        rewards = targets.token_rewards(len(row.trained), row.score, penalty, spec.loss.kl)
        if spec.critic.targets == "vtrace":
            made["advantage"], made["returns"] = targets.vtrace(rewards, made["values"], made["old"] - made["behaviour"], spec.critic)
        else:
            made["advantage"], made["returns"] = targets.gae(rewards, made["values"], spec.critic)
    return replace(row, trained=row.trained[keep], tokens={name: column[keep].astype(np.float32) for name, column in made.items()})


def _whitened(group: Group, rows: dict[str, Row], mine: list[str]) -> dict[str, Row]:
    """Advantages with mean 0 and deviation 1 over all kept tokens of the global batch; two sums, so that nothing cancels."""

    def total(power: int, centre: float) -> tuple[float, float]:
        parts = [rows[row_id].tokens["advantage"].astype(np.float64) - centre for row_id in mine]
        local = torch.tensor(
            [float(sum(len(part) for part in parts)), float(sum((part**power).sum() for part in parts))], dtype=torch.float64
        )
        count, summed = group.sum(local * (group.cp_rank == 0)).tolist()
        return count, summed

    count, summed = total(1, 0.0)
    mean = summed / max(count, 1.0)
    deviation = (total(2, mean)[1] / max(count, 1.0)) ** 0.5
    return {
        row_id: replace(row, tokens={**row.tokens, "advantage": ((row.tokens["advantage"] - mean) / (deviation + 1e-8)).astype(np.float32)})
        for row_id, row in rows.items()
    }


def _row_totals(before: Row, row: Row) -> np.ndarray:
    """In the order of TOTALS."""
    tokens = {name: column.astype(np.float64) for name, column in row.tokens.items()}
    masked = len(before.trained) - len(row.trained)
    weight = tokens.get("weight", np.ones(len(row.trained)))
    log_ratio = tokens["old"] - tokens["behaviour"] if "old" in tokens else np.zeros(0)
    returns = tokens.get("returns", np.zeros(0))
    error = returns - tokens["values"] if "returns" in tokens else np.zeros(0)
    with np.errstate(over="ignore"):
        kl = np.expm1(log_ratio) - log_ratio
    return np.array(
        [
            len(row.trained),
            masked,
            float(masked > 0 and not len(row.trained)),
            weight.sum(),
            (weight**2).sum(),
            kl.sum(),
            returns.sum(),
            (returns**2).sum(),
            (error**2).sum(),
        ]
    )
