"""Micro-batches through Megatron's schedule, and log-probs out of it.

One way for all: the training step, the log-probs before it, the reference model and the critic. A micro-batch is a list of rows; what is
wanted of each row is a list of its response positions; what comes back for them is made on the last pipeline stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from trainer.device import moved, tensor
from trainer.group import Group
from trainer.layout import even_micro_batches
from trainer.rows import Pack, Row, pack
from trainer.spec import TrainerSpec
from trainer.vocabulary import token_log_probs
from trainer.wanted import Wanted as WantedPositions

MicroBatches = Sequence[Sequence[Row]]
Wanted = Callable[[Row], np.ndarray]


class Part(Protocol):
    """A model as far as it is run: its chunk, and where its output layer learns which positions are wanted."""

    @property
    def chunk(self) -> Any: ...

    @property
    def wanted(self) -> WantedPositions: ...

    @property
    def replays(self) -> bool:
        """Whether tokens go to the experts that the engine sent them to: only the policy's weights are those that sampled."""
        ...


def trained(row: Row) -> np.ndarray:
    return row.trained


def every(row: Row) -> np.ndarray:
    """All response positions."""
    return np.arange(row.size - 1)


class Forward:
    """Called on all ranks together; `advanced` once per micro-batch, as a sign of life."""

    def __init__(self, spec: TrainerSpec, group: Group, vocab_size: int, advanced: Callable[[], None]) -> None:
        self._spec, self._group, self._vocab_size, self._advanced = spec, group, vocab_size, advanced
        self._schedule = get_forward_backward_func()

    def run(
        self,
        model: Part,
        share: MicroBatches,
        then: Callable[..., Any],
        wanted: Wanted = trained,
        columns: Sequence[str] = (),
        *,
        forward_only: bool = False,
    ) -> list[Any]:
        """This rank's micro-batches; on the last stage, what `then(rows, pack, output)` made of each. Without rows, an empty one is run."""
        share = self._evened(share if model.replays else [[replace(row, routes=None) for row in micro_batch] for micro_batch in share])
        packs = [
            pack(rows, list(map(wanted, rows)), columns, cp_size=self._spec.cp, cp_rank=self._group.cp_rank, tp_size=self._spec.tp)
            for rows in share
        ]

        def forward(batches: Iterator[tuple[list[Row], Pack]], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            rows, packed = next(batches)
            packed = moved(packed, self._group.device)
            model.wanted.positions = packed.at
            output = chunk(input_ids=packed.tokens, position_ids=None, attention_mask=None, packed_seq_params=packed.packing)
            self._advanced()
            return output, partial(then, rows, packed)

        return list(
            self._schedule(
                forward_step_func=forward,
                data_iterator=iter(list(zip(share, packs, strict=True))),
                model=[model.chunk],
                num_microbatches=len(share),
                seq_length=1,  # unused: lengths vary
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        )

    def _evened(self, share: MicroBatches) -> MicroBatches:
        """At least one micro-batch, and where the layout needs it as many as any rank has; those that are added are empty."""
        count = max(1, len(share))
        if even_micro_batches(self._spec.ep):
            count = int(self._group.maximum(torch.tensor(float(count))))
        return [*share, *([] for _ in range(count - len(share)))]

    def collect(
        self, model: Part, share: MicroBatches, make: Callable[[Pack, torch.Tensor], torch.Tensor], wanted: Wanted = trained
    ) -> dict[str, np.ndarray]:
        """By row id, [n] float64: what `make(pack, output)` [tokens] says of each wanted position. The same on all ranks of a replica."""
        rows = [row for micro_batch in share for row in micro_batch]
        ends = np.cumsum([0, *(len(wanted(row)) for row in rows)]).tolist()
        start_of = dict(zip((row.row_id for row in rows), ends, strict=False))
        flat = torch.zeros(ends[-1], dtype=torch.float64, device=self._group.device)

        def place(batch: list[Row], packed: Pack, output: torch.Tensor, non_loss_data: bool = True) -> None:
            starts = tensor([start_of[row.row_id] for row in batch], torch.int64, flat.device)
            flat[starts[packed.row] + packed.slot] = make(packed, output).double()

        with torch.no_grad():
            self.run(model, share, place, wanted, forward_only=True)
        found = self._group.sum_in_replica(flat.cpu()).numpy()
        return {row.row_id: found[a:b] for row, (a, b) in zip(rows, pairwise(ends), strict=True)}

    def log_probs(self, packed: Pack, output: torch.Tensor) -> torch.Tensor:
        """output [1, n, V / tp], used up -> log-probs [n] of the wanted tokens at their rows' temperatures."""
        return self.log_probs_and_entropy(packed, output)[0]

    def log_probs_and_entropy(self, packed: Pack, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both [n]; the entropy carries a gradient only if the loss has a bonus for it."""
        logits, steered = output.flatten(0, 1).float(), self._spec.loss.entropy_bonus != 0.0
        return token_log_probs(logits, packed.target, packed.temperature, self._vocab_size, self._group.tp_group, steered)

    def sum_rows(self, sums: torch.Tensor) -> torch.Tensor:
        """Context-parallel ranks have the same rows, in the same order, and each its own tokens of them."""
        if self._spec.cp > 1 and len(sums):
            dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
        return sums

    def fill(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Micro-batches under the token budget of the spec, in order; a row above it has one to itself."""
        batches: list[list[Row]] = []
        used = 0
        for row in rows:
            used += row.size
            if not batches or used > self._spec.micro_batch_tokens:
                batches.append([])
                used = row.size
            batches[-1].append(row)
        return batches
