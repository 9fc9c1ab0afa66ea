"""From the rows of a global batch to a plan: mini-batches, ranks, micro-batches. Lengths in, row ids out.

    rows ──by sample, seeded──▶ mini-batches ──each by itself──▶ by work to ranks ──each by itself──▶ under the budget to micro-batches
                                               └─ even: ──▶ under the budget to micro-batches of all ranks ──▶ dealt to the ranks

Invariants (each a property test): every row stands exactly once in a mini-batch; a mini-batch is cut by sample, from an order that
knows neither layout nor lengths; no micro-batch exceeds the token budget, but for a row that exceeds it by itself and is let in alone;
where ranks meet in every micro-batch they all have as many, some of them empty; the same input, in any order, gives the same plan. Row
counts per rank may differ: ranks are balanced by work, not by count, and a rank may get none.

Ranks that meet only at a step's end wait for the most work in all; ranks that meet in every micro-batch wait for the heaviest one at each
index, so there micro-batches of like work are dealt out together, across all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from driver import packing
from driver.row_cost import TOKENS, RowCost
from trainer.layout import even_micro_batches, sequence_unit

if TYPE_CHECKING:
    from driver.settings import RunConfig


@dataclass(frozen=True)
class PlanRow:
    """A row as the plan sees it: who it is, whose sample it belongs to, its tokens, and how many of them are trained (None: all)."""

    row_id: str
    uid: int
    length: int
    trained: int | None = None


@dataclass(frozen=True)
class Terms:
    """What a layout asks of a plan, and what the configuration says.

    `unit`: lengths are padded to multiples of it, and count as that. `even`: ranks meet in every micro-batch and need as many each.
    """

    ranks: int
    budget_tokens: int
    cost: RowCost = TOKENS
    unit: int = 1
    even: bool = False
    long_rows: Literal["refuse", "alone"] = "refuse"

    @classmethod
    def of(cls, config: RunConfig, model: Mapping[str, Any]) -> Terms:
        """`model` is the model's config.json."""
        trainer, batch = config.trainer, config.batch
        return cls(
            trainer.dp,
            batch.micro_batch_tokens,
            RowCost.of_model(model),
            sequence_unit(trainer.tp, trainer.cp),
            even_micro_batches(trainer.ep),
            batch.long_rows,
        )

    def padded(self, row: PlanRow) -> int:
        return -(-row.length // self.unit) * self.unit

    def work(self, row: PlanRow) -> float:
        return self.cost.work(self.padded(row), row.length if row.trained is None else row.trained)


def mini_batches(rows: Sequence[PlanRow], count: int, seed: int, batch_id: int) -> list[list[PlanRow]]:
    """Cut by sample into `count` parts of nearly equal numbers of samples, in an order seeded by (seed, batch_id)."""

    def draw(uid: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{batch_id}/{uid}".encode(), digest_size=8).digest()

    uids = sorted({row.uid for row in rows}, key=lambda uid: (draw(uid), uid))
    part_of = {uid: index * count // max(1, len(uids)) for index, uid in enumerate(uids)}
    parts: list[list[PlanRow]] = [[] for _ in range(count)]
    for row in rows:
        parts[part_of[row.uid]].append(row)
    return parts


def split_ranks(rows: Sequence[PlanRow], terms: Terms) -> list[list[PlanRow]]:
    """To each rank about as much work."""
    rows = _ordered(rows)
    return [[rows[index] for index in sorted(share)] for share in packing.split([terms.work(row) for row in rows], terms.ranks)]


def micro_batches(rows: Sequence[PlanRow], terms: Terms, multiple_of: int = 1) -> list[list[PlanRow]]:
    """Few micro-batches under the budget, of about equal work, the most first; as many as a multiple of `multiple_of`, some empty.

    Raises ValueError for a row above the budget, unless such rows are to be alone in a micro-batch.
    """
    rows = _ordered(rows)
    alone = [row for row in rows if terms.padded(row) > terms.budget_tokens]
    if alone and terms.long_rows == "refuse":
        raise ValueError(
            f"row {alone[0].row_id} has {terms.padded(alone[0])} tokens, above batch.micro_batch_tokens ({terms.budget_tokens}): raise "
            "that, or set batch.long_rows: alone"
        )
    rest = rows[len(alone) :]
    sizes, work = [terms.padded(row) for row in rest], [terms.work(row) for row in rest]
    packed = packing.pack(sizes, terms.budget_tokens, work, len(alone), multiple_of)
    made = [[row] for row in alone] + [[rest[index] for index in sorted(members)] for members in packed]
    return sorted(made, key=lambda micro: (-sum(map(terms.work, micro)), micro[0].row_id if micro else ""))


def deal(rows: Sequence[PlanRow], terms: Terms) -> list[list[list[PlanRow]]]:
    """One mini-batch to the ranks: `[rank][micro-batch]`."""
    if not terms.even:
        return [micro_batches(share, terms) for share in split_ranks(rows, terms)]
    made = micro_batches(rows, terms, multiple_of=terms.ranks)
    dealt: list[list[list[PlanRow]]] = [[] for _ in range(terms.ranks)]
    done = [0.0] * terms.ranks
    for first in range(0, len(made), terms.ranks):
        # The heaviest of those that are run together goes to the rank that has had least.
        for micro, rank in zip(made[first : first + terms.ranks], sorted(range(terms.ranks), key=lambda r: (done[r], r)), strict=True):
            dealt[rank].append(micro)
            done[rank] += sum(map(terms.work, micro))
    return dealt


def plan(rows: Sequence[PlanRow], terms: Terms, *, mini_batch_count: int, seed: int, batch_id: int) -> list[list[list[list[str]]]]:
    """`plan[mini_batch][rank][micro_batch]` is a list of row ids."""
    return [
        [[[row.row_id for row in micro] for micro in share] for share in deal(part, terms)]
        for part in mini_batches(rows, mini_batch_count, seed, batch_id)
    ]


def _ordered(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Longest first, whatever order they came in."""
    return sorted(rows, key=lambda row: (-row.length, row.row_id))
