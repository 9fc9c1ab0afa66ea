"""A plan becomes a step.

What is fixed for the whole global batch is prepared first. Then, for each mini-batch: one all-reduced count (of tokens, by sequence), taken
after all masks and before the first forward; every micro-batch's loss is its sum over that count; gradients are summed over ranks and
finalized once; then clip and Adam. So the split into ranks and micro-batches appears nowhere in the numbers. The metrics are sums and
counts by the same rule.

Without a critic only rows whose advantage is not 0 count: a row of no advantage, sent or left out, is the same step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from trainer.device import tensor
from trainer.forward import Forward, MicroBatches, every
from trainer.group import Group, Refused, Spoiled
from trainer.loss import Policy, Sums, Tokens, ValueTokens, denominator, loss_sums, units, value_sums
from trainer.memory import Peaks, binding
from trainer.model import Model
from trainer.prepare import BARE, Prepared, columns, prepare, values
from trainer.routes import Routing
from trainer.rows import Pack, Row, Unreadable, open_row
from trainer.spec import TrainerSpec
from trainer.wire import PlanRow, TrainReport, TrainRequest

NO_TOKEN = "no token to train: every mask is empty or every advantage is 0"


@dataclass
class Tally:
    """What one batch's mini-batches add up to."""

    sums: Sums = field(default_factory=Sums.nothing)
    counted: float = 0.0
    value: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))
    value_tokens: int = 0
    grad_norm: float | None = None
    critic_grad_norm: float | None = None
    gap_rows: int = 0
    applied: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """row_id -> why"""
    replayed: set[str] = field(default_factory=set)
    read_s: float = 0.0
    prepare_s: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0


@dataclass(frozen=True)
class Count:
    """What a mini-batch is divided by, the same on all ranks."""

    sequence_tokens: dict[str, int]
    """by sequence, its tokens in the loss"""
    divisor: float
    gap_rows: int

    @property
    def tokens(self) -> int:
        return sum(self.sequence_tokens.values())


class Stepper:
    """Runs plans on a model. Every method is called on all ranks together; `advanced` once per micro-batch, as a sign of life."""

    def __init__(
        self, spec: TrainerSpec, group: Group, model: Model, policy: Policy, advanced: Callable[[], None], peaks: Peaks | None = None
    ) -> None:
        self._spec, self._group, self._model, self._policy, self._advanced = spec, group, model, policy, advanced
        self._peaks = peaks or Peaks()
        self._policy_fault: str | None = None
        self._forward = Forward(spec, group, model.hf_config.vocab_size, advanced)
        self._columns = columns(spec)
        self._routing = Routing.of(model.hf_config) if spec.routing_replay else None

    def train(self, request: TrainRequest) -> TrainReport:
        """Raises Refused, before anything has changed, when a row cannot be read or the plan does not fit the layout."""
        started = time.perf_counter()
        self._group.agree(self._fault(request))
        tally = Tally()
        shares = [mini_batch.ranks[self._group.dp_rank] for mini_batch in request.mini_batches]
        opened = self._open([row for share in shares for micro_batch in share for row in micro_batch])
        opening = time.perf_counter()
        tally.read_s = opening - started
        tally.replayed = self._replayed(request, opened)
        prepared = self._prepared(request, opened, shares)
        tally.prepare_s = time.perf_counter() - opening
        self._model.set_learning_rate(request.lr, self._spec.optimizer.weight_decay)
        if self._model.critic is not None:
            self._model.critic.set_learning_rate(request.critic_lr, self._spec.optimizer.weight_decay)
        for index, share in enumerate(shares):
            rows = [[replace(prepared.rows[row.row_id], advantage=row.advantage) for row in micro_batch] for micro_batch in share]
            self._mini_batch(request, index, rows, tally)
        return self._report(request, tally, prepared, time.perf_counter() - started)

    def _prepared(self, request: TrainRequest, opened: dict[str, Row], shares: list[list[list[PlanRow]]]) -> Prepared:
        if self._columns == BARE:
            return Prepared(opened)
        planned = [[[opened[row.row_id] for row in micro_batch] for micro_batch in share] for share in shares]
        with self._peaks.phase("log_probs"):
            return prepare(self._spec, self._group, self._forward, self._model, opened, planned, request)

    def log_probs(self, rows: Sequence[PlanRow]) -> dict[str, list[float]]:
        """Of every response position, at the row's temperature. Raises Refused."""
        opened = self._open(rows)
        with self._peaks.phase("log_probs"):
            return self._log_probs(list(opened.values()))

    def sequence_log_probs(self, input_ids: list[int]) -> list[float]:
        """log p(input_ids[i + 1] | input_ids[: i + 1]) at temperature 1, computed alone."""
        nothing = np.zeros(0, dtype=np.int64)
        row = Row("canary", None, np.array(input_ids, dtype=np.int64), nothing, {}, np.zeros((0, 4)), 1.0, 0.0)
        return self._log_probs([row])["canary"]

    def _log_probs(self, rows: list[Row]) -> dict[str, list[float]]:
        """Every data-parallel replica computes all of it."""
        found = self._forward.collect(self._model, self._forward.fill(rows), self._forward.log_probs, every)
        return {row_id: array.tolist() for row_id, array in found.items()}

    def _fault(self, request: TrainRequest) -> tuple[int, str] | None:
        for mini_batch in request.mini_batches:
            ids = [row.row_id for row in mini_batch.rows()]
            if len(mini_batch.ranks) != self._spec.dp:
                return 422, f"the plan is for {len(mini_batch.ranks)} data-parallel ranks, this trainer has {self._spec.dp}: plan it anew"
            if len(ids) != len(set(ids)):
                return 422, "the plan has a row twice in one mini-batch; inside a mini-batch each row comes once"
        return None

    def _open(self, planned: Sequence[PlanRow]) -> dict[str, Row]:
        """By row id. The leases live as long as the result."""
        opened: dict[str, Row] = {}
        fault = None
        try:
            for row in planned:
                if row.row_id not in opened:
                    opened[row.row_id] = open_row(row, self._model.hf_config.vocab_size, self._routing)
        except Unreadable as error:
            fault = (error.status, str(error))
        self._group.agree(fault)
        return opened

    def _mini_batch(self, request: TrainRequest, index: int, share: list[list[Row]], tally: Tally) -> None:
        started = time.perf_counter()
        planned = request.mini_batches[index].rows()
        row_ids = [row.row_id for row in planned]
        # Once a step was applied, the weights at hand are no longer those that sampled.
        sampler = None if tally.applied else (request.epoch, request.batch_id)
        count = self._count(planned, share, sampler)
        if not count.tokens:
            self._advanced()
            tally.skipped.update(dict.fromkeys(row_ids, NO_TOKEN))
            return
        with self._peaks.phase("forward_backward"):
            sums, value = self._gradients(share, count, sampler)
        self._agree_on_policy()
        forwarded = time.perf_counter()
        tally.forward_backward_s += forwarded - started
        models = [self._model] if self._model.critic is None else [self._model, self._model.critic]
        norms = [model.gradient_norm() for model in models]
        losses = [float(sums.total[0]) / count.divisor, float(value[0]) / count.tokens]
        if all(map(math.isfinite, [*losses, *norms])):
            with self._peaks.phase("optimizer"):
                for model in models:
                    model.optimizer.step()
            tally.applied += row_ids
            tally.sums, tally.counted, tally.grad_norm = tally.sums + sums, tally.counted + count.divisor, norms[0]
            tally.value, tally.value_tokens = tally.value + value, tally.value_tokens + count.tokens
            tally.critic_grad_norm = norms[1] if len(norms) > 1 else None
            tally.gap_rows += count.gap_rows
        else:
            reason = f"not finite: loss {losses[0]}, gradient norm {norms[0]}"
            if self._model.critic is not None:
                reason += f", value loss {losses[1]}, its gradient norm {norms[1]}"
            tally.skipped.update(dict.fromkeys(row_ids, reason))
            self._dump(request, index, row_ids, {"reason": reason, **_by_name(sums), "grad_norm": norms[0]})
        tally.optimizer_s += time.perf_counter() - forwarded

    def _agree_on_policy(self) -> None:
        """Raises Spoiled on all ranks when the user's function failed on one. Earlier mini-batches of the batch may have been stepped."""
        if not self._spec.loss.own_policy:
            return
        try:
            self._group.agree((422, self._policy_fault) if self._policy_fault else None)
        except Refused as refused:
            raise Spoiled(refused.status, refused.message) from refused

    def _count(self, planned: Sequence[PlanRow], share: MicroBatches, sampler: tuple[int, int] | None) -> Count:
        """One sum over all ranks, after every mask: the tokens in the loss by sequence, and the rows that this version sampled."""
        names = list(dict.fromkeys(self._sequence(row) for row in planned))
        place = {name: number for number, name in enumerate(names)}
        mine = torch.zeros(len(names) + 1, dtype=torch.float64)
        for row in (row for micro_batch in share for row in micro_batch):
            if self._counts(row):
                mine[place[self._sequence(row)]] += len(row.trained)
            mine[-1] += bool(len(row.trained)) and row.sampled_by(sampler)
        # Context-parallel ranks share rows: only the first counts them.
        *tokens, gap_rows = map(int, self._group.sum(mine * (self._group.cp_rank == 0)).tolist())
        all_units = units(self._spec.loss, [length for length in tokens if length])
        return Count(dict(zip(names, tokens, strict=True)), denominator(self._spec.loss, all_units), gap_rows)

    def _sequence(self, row: PlanRow | Row) -> str:
        return (row.sequence or row.row_id) if self._spec.loss.sequence == "trajectory" else row.row_id

    def _counts(self, row: Row) -> bool:
        return self._spec.critic is not None or row.advantage != 0.0

    def _gradients(self, share: list[list[Row]], count: Count, sampler: tuple[int, int] | None) -> tuple[Sums, torch.Tensor]:
        """All sums of the mini-batch over all ranks, the policy's and the critic's; the gradients are where the optimizers look."""
        self._model.zero_gradients()
        results = self._forward.run(self._model, share, partial(self._loss, count, sampler), columns=self._columns)
        local = sum(results, Sums.nothing())
        sums = Sums(self._group.sum(local.total), self._group.maximum(local.highest))
        value = torch.zeros(3, dtype=torch.float64)
        if (critic := self._model.critic) is not None:
            critic.zero_gradients()
            value = sum(self._forward.run(critic, share, partial(self._value_loss, count), columns=self._columns), value)
            value = self._group.sum(value)
        return sums, value

    def _replayed(self, request: TrainRequest, opened: dict[str, Row]) -> set[str]:
        """The rows, on whatever rank, whose routes are replayed."""
        if self._routing is None:
            return set()
        ids = list(dict.fromkeys(row.row_id for mini_batch in request.mini_batches for row in mini_batch.rows()))
        here = [row_id in opened and opened[row_id].routes is not None for row_id in ids]
        everywhere = self._group.maximum(torch.tensor(here, dtype=torch.float32)).tolist()
        return {row_id for row_id, replayed in zip(ids, everywhere, strict=True) if replayed}

    def _loss(self, count: Count, sampler: tuple[int, int] | None, rows: list[Row], packed: Pack, output: torch.Tensor) -> Any:
        """(loss over the global count, no count for Megatron to divide by, this micro-batch's sums)."""
        log_probs, entropy = self._forward.log_probs_and_entropy(packed, output)
        own, row, on = packed.columns, packed.row, self._group.device
        old = own.get("old", own["behaviour"])
        tokens = Tokens(
            log_probs=log_probs,
            behaviour=own["behaviour"],
            old=old,
            advantage=own["advantage"] if "advantage" in own else tensor([r.advantage for r in rows], torch.float32, on)[row],
            weight=own["weight"] if "weight" in own else torch.ones_like(old),
            reference=own.get("reference"),
            entropy=entropy,
            counts=tensor([self._counts(r) for r in rows], torch.bool, on)[row],
            row=row,
            row_tokens=tensor([len(r.trained) for r in rows], torch.int64, on),
            sequence_tokens=tensor([count.sequence_tokens[self._sequence(r)] for r in rows], torch.int64, on),
            sum_rows=self._forward.sum_rows,
        )
        same = tensor([r.sampled_by(sampler) for r in rows], torch.bool, on)[row]
        loss, sums = self._policy_sums(tokens, same)
        return loss / count.divisor, torch.zeros((), dtype=torch.int), sums

    def _policy_sums(self, tokens: Tokens, same: torch.Tensor) -> tuple[torch.Tensor, Sums]:
        """A function of the user's that fails here fails alone: the other ranks are in the midst of their collectives, so this one goes on
        with a loss that is not a number, until all have come to where they agree."""
        try:
            return loss_sums(self._spec.loss, tokens, same, self._policy)
        except Exception as error:
            if not self._spec.loss.own_policy:
                raise
            self._policy_fault = f"policy {self._spec.loss.policy} failed on {len(tokens.row)} tokens: {type(error).__name__}: {error}"
            return tokens.log_probs.sum() * math.nan, Sums.nothing()

    def _value_loss(self, count: Count, rows: list[Row], packed: Pack, output: torch.Tensor) -> Any:
        """As `_loss`, for the critic: the mean over all tokens in the loss."""
        assert self._spec.critic is not None
        own = packed.columns
        loss, sums = value_sums(self._spec.critic.value_clip, ValueTokens(values(packed, output), own["values"], own["returns"]))
        return loss / count.tokens, torch.zeros((), dtype=torch.int), sums

    def _report(self, request: TrainRequest, tally: Tally, prepared: Prepared, step_s: float) -> TrainReport:
        applied = list(dict.fromkeys(tally.applied))
        skipped = [row_id for row_id in tally.skipped if row_id not in set(applied)]
        sums = _by_name(tally.sums)
        tokens = int(sums["tokens"])

        def mean(name: str, count: float = tokens) -> float | None:
            return _finite(sums[name] / count) if count else None

        replayed = None if self._routing is None else len(tally.replayed.intersection(applied))

        memory_bytes = self._peaks.report()
        return TrainReport(
            batch_id=request.batch_id,
            trained_version=request.batch_id + 1,
            skipped=None if applied else next(iter(tally.skipped.values()), NO_TOKEN),
            row_ids=applied,
            skipped_row_ids=skipped,
            rows=len(applied),
            tokens=tokens,
            loss=mean("loss", tally.counted),
            grad_norm=tally.grad_norm,
            clip_fraction=mean("clipped"),
            entropy=mean("entropy"),
            kl=mean("kl"),
            ratio_max=_finite(sums["ratio"]),
            logprob_gap_max=_finite(sums["gap"]),
            logprob_gap_rows=tally.gap_rows,
            reference_kl=mean("reference_kl") if self._spec.loss.kl.wanted else None,
            **_prepared_metrics(self._spec, prepared.totals),
            value_loss=_finite(float(tally.value[0]) / tally.value_tokens) if self._spec.critic and tally.value_tokens else None,
            value_clip_fraction=float(tally.value[1]) / tally.value_tokens if self._spec.critic and tally.value_tokens else None,
            critic_grad_norm=tally.critic_grad_norm,
            replayed_rows=replayed,
            unreplayed_rows=None if replayed is None else len(applied) - replayed,
            read_s=tally.read_s,
            prepare_s=tally.prepare_s,
            forward_backward_s=tally.forward_backward_s,
            optimizer_s=tally.optimizer_s,
            step_s=step_s,
            memory_bytes=memory_bytes,
            memory_phase=binding(memory_bytes),
        )

    def _dump(self, request: TrainRequest, index: int, row_ids: list[str], facts: dict[str, Any]) -> None:
        if self._group.rank:
            return
        directory = self._spec.run_dir / "dumps"
        directory.mkdir(parents=True, exist_ok=True)
        dump = {"batch_id": request.batch_id, "epoch": request.epoch, "mini_batch": index, "row_ids": row_ids, "lr": request.lr, **facts}
        (directory / f"batch_{request.batch_id:08d}_{index}.json").write_text(json.dumps(dump, indent=1))


def _prepared_metrics(spec: TrainerSpec, totals: dict[str, float]) -> dict[str, Any]:
    """The report's fields about what was prepared."""
    tokens, masked = totals["tokens"], totals["masked_tokens"]
    off_policy = spec.loss.old_log_probs == "recomputed" and tokens > 0.0
    square = totals["returns_squared"] / tokens if tokens else 0.0
    spread = square - (totals["returns"] / tokens) ** 2 if tokens else 0.0
    # Returns are float32: equal ones differ in their last bit, and what is left of their squares is rounding, another in every split.
    varied = spread > 1e-12 * square
    explained = 1.0 - totals["value_error_squared"] / tokens / spread if spec.critic is not None and varied else None
    weighted = off_policy and totals["weight_squared"] > 0.0
    return {
        "off_policy_kl": _finite(totals["off_policy_kl"] / tokens) if off_policy else None,
        "effective_sample_size": _finite(totals["weight"] ** 2 / totals["weight_squared"] / tokens) if weighted else None,
        "masked_tokens": int(masked),
        "masked_rows": int(totals["masked_rows"]),
        "explained_variance": _finite(explained) if explained is not None else None,
    }


def _by_name(sums: Sums) -> dict[str, float]:
    names = (*Sums.TOTALS, *Sums.HIGHEST)
    return dict(zip(names, (*sums.total.tolist(), *sums.highest.tolist()), strict=True))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
