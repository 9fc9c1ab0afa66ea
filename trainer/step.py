"""A plan becomes a step.

For each mini-batch: one all-reduced count (of tokens, or of rows, as the loss's aggregation has it), taken after all masks and before the
first forward; every micro-batch's loss is its sum over that count; gradients are summed over ranks and finalized once; then clip and
Adam. So the split into ranks and micro-batches appears nowhere in the numbers. The metrics are sums and counts by the same rule.

Only rows whose advantage is not 0 count: a row of no advantage, sent or left out, is the same step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.group import Group
from trainer.loss import Sums, Tokens, denominator, loss_sums, units
from trainer.model import Model
from trainer.rows import Pack, Row, Unreadable, open_row, pack
from trainer.spec import TrainerSpec
from trainer.vocabulary import token_log_probs
from trainer.wire import PlanRow, TrainReport, TrainRequest

NO_TOKEN = "no token to train: every mask is empty or every advantage is 0"


@dataclass
class Tally:
    """What one batch's mini-batches add up to."""

    sums: Sums = field(default_factory=Sums.nothing)
    counted: float = 0.0
    grad_norm: float | None = None
    gap_rows: int = 0
    applied: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """row_id -> why"""
    read_s: float = 0.0
    forward_backward_s: float = 0.0
    optimizer_s: float = 0.0


class Stepper:
    """Runs plans on a model. Every method is called on all ranks together; `advanced` once per micro-batch, as a sign of life."""

    def __init__(self, spec: TrainerSpec, group: Group, model: Model, advanced: Callable[[], None]) -> None:
        self._spec, self._group, self._model, self._advanced = spec, group, model, advanced
        self._schedule = get_forward_backward_func()

    def train(self, request: TrainRequest) -> TrainReport:
        """Raises Refused, before anything has changed, when a row cannot be read or the plan does not fit the layout."""
        started = time.perf_counter()
        self._group.agree(self._fault(request))
        tally = Tally()
        shares = [mini_batch.ranks[self._group.dp_rank] for mini_batch in request.mini_batches]
        opened = self._open([row for share in shares for micro_batch in share for row in micro_batch])
        tally.read_s = time.perf_counter() - started
        self._model.set_learning_rate(request.lr, self._spec.optimizer.weight_decay)
        for index, share in enumerate(shares):
            rows = [[replace(opened[row.row_id], advantage=row.advantage) for row in micro_batch] for micro_batch in share]
            self._mini_batch(request, index, rows, tally)
        return self._report(request, tally, time.perf_counter() - started)

    def log_probs(self, rows: Sequence[PlanRow]) -> dict[str, list[float]]:
        """Of every response position, at the row's temperature. Raises Refused."""
        opened = self._open(rows)
        return dict(zip(opened, self._log_probs(list(opened.values())), strict=True))

    def sequence_log_probs(self, input_ids: list[int]) -> list[float]:
        """log p(input_ids[i + 1] | input_ids[: i + 1]) at temperature 1, computed alone."""
        ids = np.array(input_ids, dtype=np.int64)
        unsampled = np.zeros(len(ids) - 1, dtype=np.float32)
        row = Row("canary", None, ids, np.zeros(0, dtype=np.int64), unsampled, np.zeros((0, 4)), 1.0, 0.0)
        return self._log_probs([row])[0]

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
                    opened[row.row_id] = open_row(row, self._model.hf_config.vocab_size)
        except Unreadable as error:
            fault = (error.status, str(error))
        self._group.agree(fault)
        return opened

    def _mini_batch(self, request: TrainRequest, index: int, share: list[list[Row]], tally: Tally) -> None:
        started = time.perf_counter()
        row_ids = [row.row_id for row in request.mini_batches[index].rows()]
        # Once a step was applied, the weights at hand are no longer those that sampled.
        sampler = None if tally.applied else (request.epoch, request.batch_id)
        rows = [row for micro_batch in share for row in micro_batch]
        counted = units(self._spec.loss, [len(row.trained) for row in rows if row.advantage != 0.0 and len(row.trained)])
        pure = sum(1 for row in rows if len(row.trained) and row.sampled_by(sampler))
        # Context-parallel ranks share rows: only the first counts them.
        mine = torch.tensor([counted, pure], dtype=torch.float64) * (self._group.cp_rank == 0)
        count, gap_rows = self._group.sum(mine).tolist()
        if not count:
            self._advanced()
            tally.skipped.update(dict.fromkeys(row_ids, NO_TOKEN))
            return
        count = denominator(self._spec.loss, count)
        self._model.zero_gradients()
        results = self._forward_backward(share or [[]], partial(self._loss, count, sampler))
        local = sum(results, Sums.nothing())
        sums = Sums(self._group.sum(local.total), self._group.maximum(local.highest))
        forwarded = time.perf_counter()
        tally.forward_backward_s += forwarded - started
        self._model.optimizer.prepare_grads()
        grad_norm = float(self._model.optimizer.get_grad_norm())
        loss = float(sums.total[0]) / count
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self._model.optimizer.step()
            tally.applied += row_ids
            tally.sums, tally.counted, tally.grad_norm = tally.sums + sums, tally.counted + count, grad_norm
            tally.gap_rows += int(gap_rows)
        else:
            reason = f"not finite: loss {loss}, gradient norm {grad_norm}"
            tally.skipped.update(dict.fromkeys(row_ids, reason))
            self._dump(request, index, row_ids, {"reason": reason, **_by_name(sums), "grad_norm": grad_norm})
        tally.optimizer_s += time.perf_counter() - forwarded

    def _loss(self, count: float, sampler: tuple[int, int] | None, rows: list[Row], packed: Pack, output: torch.Tensor) -> Any:
        """(loss over the global count, no count for Megatron to divide by, this micro-batch's sums)."""
        log_probs, entropy = self._token_log_probs(packed, output)
        length = torch.tensor([len(row.trained) for row in rows], dtype=torch.int64)
        tokens = Tokens(log_probs, packed.behaviour, packed.advantage, entropy, packed.row, length)
        same = torch.tensor([row.sampled_by(sampler) for row in rows], dtype=torch.bool)[packed.row]
        loss, sums = loss_sums(self._spec.loss, tokens, same, self._sum_rows)
        return loss / count, torch.zeros((), dtype=torch.int), sums

    def _sum_rows(self, sums: torch.Tensor) -> torch.Tensor:
        """Context-parallel ranks have the same rows, in the same order, and each its own tokens of them."""
        if self._spec.cp > 1 and len(sums):
            dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        return sums

    def _log_probs(self, rows: list[Row]) -> list[list[float]]:
        ends = np.cumsum([0, *(len(row.input_ids) - 1 for row in rows)]).tolist()
        start_of = dict(zip((row.row_id for row in rows), ends, strict=False))
        flat = torch.zeros(ends[-1], dtype=torch.float64)

        def place(batch: list[Row], packed: Pack, output: torch.Tensor, non_loss_data: bool = True) -> None:
            starts = torch.tensor([start_of[row.row_id] for row in batch])
            log_probs, _ = self._token_log_probs(packed, output)
            flat[starts[packed.row] + packed.slot] = log_probs.double()

        with torch.no_grad():
            self._run(self._fill(rows), place, lambda row: np.arange(len(row.input_ids) - 1), forward_only=True)
        # Every data-parallel replica computed all of it.
        flat = self._group.sum(flat * (self._group.dp_rank == 0))
        return [flat[a:b].tolist() for a, b in pairwise(ends)]

    def _fill(self, rows: list[Row]) -> list[list[Row]]:
        """Micro-batches under the token budget, in order; a row above it has one to itself."""
        batches: list[list[Row]] = []
        used = 0
        for row in rows:
            used += len(row.input_ids)
            if not batches or used > self._spec.micro_batch_tokens:
                batches.append([])
                used = len(row.input_ids)
            batches[-1].append(row)
        return batches

    def _token_log_probs(self, packed: Pack, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """output [1, n, V / tp], used up -> log-probs [n] of the wanted tokens and entropies [n], both at the row's temperature."""
        logits, steered = output.flatten(0, 1).float(), self._spec.loss.entropy_bonus != 0.0
        vocab_size = self._model.hf_config.vocab_size
        return token_log_probs(logits, packed.target, packed.temperature, vocab_size, self._group.tp_group, steered)

    def _forward_backward(self, share: list[list[Row]], loss: Callable[..., Any]) -> list[Sums]:
        return self._run(share, loss, lambda row: row.trained, forward_only=False)

    def _run(self, share: list[list[Row]], then: Callable[..., Any], wanted: Callable[[Row], np.ndarray], forward_only: bool) -> list[Any]:
        """This rank's micro-batches through Megatron's schedule; on the last stage, what `then(rows, pack, output)` made of each."""
        packs = [
            pack(rows, list(map(wanted, rows)), cp_size=self._spec.cp, cp_rank=self._group.cp_rank, tp_size=self._spec.tp) for rows in share
        ]

        def forward(batches: Iterator[tuple[list[Row], Pack]], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            rows, packed = next(batches)
            self._model.wanted.positions = packed.at
            output = chunk(input_ids=packed.tokens, position_ids=None, attention_mask=None, packed_seq_params=packed.packing)
            self._advanced()
            return output, partial(then, rows, packed)

        return list(
            self._schedule(
                forward_step_func=forward,
                data_iterator=iter(list(zip(share, packs, strict=True))),
                model=[self._model.chunk],
                num_microbatches=len(share),
                seq_length=1,  # unused: lengths vary
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        )

    def _report(self, request: TrainRequest, tally: Tally, step_s: float) -> TrainReport:
        applied = list(dict.fromkeys(tally.applied))
        skipped = [row_id for row_id in tally.skipped if row_id not in set(applied)]
        sums = _by_name(tally.sums)
        tokens = int(sums["tokens"])

        def mean(name: str, count: float = tokens) -> float | None:
            return _finite(sums[name] / count) if count else None

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
            read_s=tally.read_s,
            forward_backward_s=tally.forward_backward_s,
            optimizer_s=tally.optimizer_s,
            step_s=step_s,
        )

    def _dump(self, request: TrainRequest, index: int, row_ids: list[str], facts: dict[str, Any]) -> None:
        if self._group.rank:
            return
        directory = self._spec.run_dir / "dumps"
        directory.mkdir(parents=True, exist_ok=True)
        dump = {"batch_id": request.batch_id, "epoch": request.epoch, "mini_batch": index, "row_ids": row_ids, "lr": request.lr, **facts}
        (directory / f"batch_{request.batch_id:08d}_{index}.json").write_text(json.dumps(dump, indent=1))


def _by_name(sums: Sums) -> dict[str, float]:
    names = (*Sums.TOTALS, *Sums.HIGHEST)
    return dict(zip(names, (*sums.total.tolist(), *sums.highest.tolist()), strict=True))


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
