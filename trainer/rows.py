"""Rows by key: open, check, pack.

A rank opens the rows of its own micro-batches and keeps the leases for the whole update. A pack is one micro-batch as the model wants it:
sequences one after the other, sorted by length, and beside them a flat list of the tokens whose log-prob is wanted, each with its target,
its row's temperature and its own numbers (advantage, the log-prob it was sampled with, …). Tokens outside the mask are in no list, so
nothing about them, not even NaN, can reach a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from store import Lease, StoreError, Unavailable, open_ref
from store.rows import row_of
from trainer.fused import zigzag
from trainer.layout import sequence_unit
from trainer.model import packing
from trainer.routes import Routing, packed_routes
from trainer.wire import PlanRow, WireRef

COLUMNS = ("input_ids", "response_mask", "rollout_log_probs", "version_spans", "temperature")


class Unreadable(Exception):
    """A row that cannot be trained as it stands. `status` is HTTP's: 410 for a row that is gone, 422 for one that is wrong."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, eq=False)
class Row:
    """Views into the store; `lease` keeps them in place. S tokens, R = S - 1 response positions."""

    row_id: str
    lease: Lease | None
    input_ids: np.ndarray
    trained: np.ndarray
    """[n] the response positions with mask 1, but for those that the off-policy mask left out"""
    tokens: dict[str, np.ndarray]
    """by name, [n] float32: a number for each trained position"""
    spans: np.ndarray
    temperature: float
    advantage: float
    score: float = 0.0
    sequence: str = ""
    routes: np.ndarray | None = None
    """[at most R, layers, k] where the last of the first R tokens went, if that is to be replayed"""

    @property
    def size(self) -> int:
        return len(self.input_ids)

    def sampled_by(self, sampler: tuple[int, int] | None) -> bool:
        """Whether every token of the row was sampled by exactly this (epoch, version)."""
        return sampler is not None and len(self.spans) > 0 and bool((self.spans[:, :2] == sampler).all())


def open_row(planned: PlanRow, vocab_size: int, routing: Routing | None = None) -> Row:
    """`routing` is given when routes are to be replayed. Raises Unreadable."""
    try:
        lease = _opened(planned.rollout)
        if missing := [name for name in COLUMNS if name not in lease]:
            raise ValueError(f"the object has no column {', '.join(missing)}")
        columns = row_of(lease, planned.row)
        if routing is not None and planned.extras is not None:
            columns["routed_experts"] = _opened(planned.extras)["routed_experts"]  # the view keeps the object in place
    except StoreError as error:
        away = f" ({planned.rollout.location})" if isinstance(error, Unavailable) else ""  # which host it is that does not answer
        raise Unreadable(410, f"row {planned.row_id}: {error}{away}") from error
    except ValueError as error:
        raise Unreadable(422, f"row {planned.row_id}: {error}") from error
    ids, mask, spans = columns["input_ids"], columns["response_mask"], columns["version_spans"]
    temperature = float(columns["temperature"])
    fault = None
    if ids.shape != (planned.length,):
        fault = f"holds {ids.shape} tokens where the plan says {planned.length}"
    elif mask.shape != (planned.length - 1,) or columns["rollout_log_probs"].shape != mask.shape:
        fault = f"has a mask of {mask.shape} and log-probs of {lease['rollout_log_probs'].shape} for {planned.length} tokens"
    elif ids.min() < 0 or ids.max() >= vocab_size:
        fault = f"has a token outside the vocabulary of {vocab_size}"
    elif spans.ndim != 2 or spans.shape[1] != 4:
        fault = f"has version spans of shape {spans.shape}, not [K, 4]"
    elif not (np.isfinite(temperature) and temperature > 0.0):
        fault = f"has temperature {temperature}; log-probs are defined above 0 only"
    # A retracted request is computed again from its prompt, under the weights of that moment: only one version's routes are the sampler's.
    pure = len({tuple(span) for span in spans[:, :2].tolist()}) == 1 if spans.ndim == 2 else False
    routes = columns.get("routed_experts") if routing is not None and pure else None
    if routing is not None and routes is not None and not fault:
        fault = routing.fault(routes, len(mask))
    if fault:
        raise Unreadable(422, f"row {planned.row_id} {fault}")
    trained = np.flatnonzero(mask)
    behaviour = columns["rollout_log_probs"][trained]
    return Row(
        planned.row_id,
        lease,
        ids,
        trained,
        {"behaviour": behaviour},
        spans,
        temperature,
        planned.advantage,
        planned.score,
        planned.sequence or planned.row_id,
        routes,
    )


def _opened(ref: WireRef) -> Lease:
    return open_ref(ref.ref())


@dataclass(frozen=True, eq=False)
class Pack:
    """One rank's share of a micro-batch. n wanted tokens, t tokens in all."""

    tokens: torch.Tensor
    """[1, t] int64"""
    packing: PackedSeqParams
    at: torch.Tensor
    """[n] where in t the logits stand that predict the wanted token"""
    target: torch.Tensor
    """[n] the wanted token"""
    temperature: torch.Tensor
    columns: dict[str, torch.Tensor]
    """by name, [n] float32: the wanted tokens' own numbers"""
    row: torch.Tensor
    """[n] which of the rows that were given to `pack`"""
    slot: torch.Tensor
    """[n] which of that row's wanted positions"""


def pack(
    rows: Sequence[Row],
    wanted: Sequence[np.ndarray],
    columns: Sequence[str] = (),
    *,
    cp_size: int = 1,
    cp_rank: int = 0,
    tp_size: int = 1,
) -> Pack:
    """`wanted[i]` are the response positions of rows[i] whose log-probs are asked for. `columns` are taken along from `Row.tokens`, which
    has them for the trained positions: name some only when these are what is wanted.

    No rows make the empty micro-batch: one token of which nothing is asked, for a rank that has none of its own.
    """
    unit = sequence_unit(tp_size, cp_size)
    order = sorted(range(len(rows)), key=lambda index: (-len(rows[index].input_ids), index))
    tokens, at, target, slot = (_Parts(np.int64) for _ in range(4))
    own = {name: _Parts(np.float32) for name in columns}
    row: list[int] = []
    padded_lengths: list[int] = []
    held: list[np.ndarray] = []
    start = 0
    for index in order:
        ids = rows[index].input_ids
        padded = -(-len(ids) // unit) * unit
        mine = zigzag(padded, cp_size, cp_rank)
        local = np.full(padded, -1)
        local[mine] = np.arange(len(mine))
        # The logits at position i predict token i + 1, which is response position i.
        chosen = np.flatnonzero(local[wanted[index]] >= 0)
        here = wanted[index][chosen]
        at.add(start + local[here])
        target.add(ids[here + 1])
        for name, parts in own.items():
            parts.add(rows[index].tokens[name][chosen])
        slot.add(chosen)
        row += [index] * len(here)
        tokens.add(np.pad(ids, (0, padded - len(ids)))[mine])
        padded_lengths.append(padded)
        held.append(mine)
        start += len(mine)
    if not rows:
        tokens.add(np.zeros(unit // cp_size))
        padded_lengths.append(unit)
    routes = packed_routes([rows[i].routes for i in order], [len(rows[i].input_ids) for i in order], held)
    temperatures = np.array([r.temperature for r in rows], dtype=np.float32)
    return Pack(
        tokens=tokens.joined()[None],
        packing=packing(padded_lengths, cp_size, routes),
        at=at.joined(),
        target=target.joined(),
        temperature=torch.from_numpy(temperatures[row]),
        columns={name: parts.joined() for name, parts in own.items()},
        row=torch.tensor(row, dtype=torch.int64),
        slot=slot.joined(),
    )


class _Parts:
    """Arrays to be one tensor. Joined in numpy: a torch call costs several times more, and there are many rows."""

    def __init__(self, dtype: type) -> None:
        self._dtype = dtype
        self._arrays: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> None:
        self._arrays.append(array)

    def joined(self) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, self._dtype), *self._arrays]).astype(self._dtype, copy=False))
