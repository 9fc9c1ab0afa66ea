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

EVEN = 5e-4  # ranks that meet in every micro-batch wait for each other by so much; what is below is not worth another search
ROUND = 0.02  # what a micro-batch more costs a rank besides its rows, in the work of one: a guess, not measured on GPUs

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


def deal(rows: Sequence[PlanRow], terms: Terms) -> list[list[list[PlanRow]]]:
    """One mini-batch to the ranks: `[rank][micro-batch]`, the most work first, and in each micro-batch the longest row first.

    Raises ValueError for a row above the budget, unless such rows are to be alone in a micro-batch.
    """
    rows = sorted(rows, key=lambda row: (-row.length, row.row_id))  # whatever order they came in
    sizes, work = list(map(terms.padded, rows)), list(map(terms.work, rows))
    if rows and sizes[0] > terms.budget_tokens and terms.long_rows == "refuse":
        raise ValueError(
            f"row {rows[0].row_id} has {sizes[0]} tokens, above batch.micro_batch_tokens ({terms.budget_tokens}): raise that, or set "
            "batch.long_rows: alone"
        )
    shares = (_meeting_in_every_micro_batch if terms.even else _by_rank)(sizes, work, terms)
    return [[[rows[index] for index in sorted(micro)] for micro in share] for share in shares]


def _packed(share: Sequence[int], sizes: Sequence[int], work: Sequence[float], budget_tokens: int, multiple_of: int = 1) -> packing.Bins:
    """These rows, longest first, in micro-batches, the most work first; as many as a multiple of `multiple_of`, some empty."""
    above = [[index] for index in share if sizes[index] > budget_tokens]
    rest = share[len(above) :]
    packed = packing.pack([sizes[i] for i in rest], budget_tokens, [work[i] for i in rest], len(above), multiple_of)
    return _heaviest_first(above + [[rest[place] for place in members] for members in packed], work)


def _meeting_in_every_micro_batch(sizes: Sequence[int], work: Sequence[float], terms: Terms) -> list[packing.Bins]:
    """Rounds of micro-batches of like work, one for each rank. They are packed for all ranks together, which makes the fewest; where few
    long rows do not go round, or little room is left, as for ranks that are balanced by themselves, in one round more if that pays."""
    ranks = terms.ranks
    made = _packed(range(len(work)), sizes, work, terms.budget_tokens, ranks)
    rounds = [_levelled(made[first : first + ranks], sizes, work, terms) for first in range(0, len(made), ranks)]
    fewest, mean = len(rounds), sum(work) / ranks
    enough = max(mean, max(work, default=0.0)) * (1.0 + EVEN)
    apart = packing.split(work, ranks) if _waited(rounds, work) > enough else []
    for more in (0, 1):
        price = more * ROUND * mean / max(1, fewest)
        if _waited(rounds, work) <= enough + price:
            break
        shares = [_packed(sorted(share), sizes, work, terms.budget_tokens, fewest + more) for share in apart]
        if max(map(len, shares)) == fewest + more:
            others = [_levelled([share[number] for share in shares], sizes, work, terms) for number in range(fewest + more)]
            if _waited(others, work) + price < _waited(rounds, work):
                rounds = others
    dealt: list[packing.Bins] = [[] for _ in range(ranks)]
    done = [0.0] * ranks
    for at_once in rounds:
        # The heaviest of them goes to the rank that has had least.
        for micro, rank in zip(at_once, sorted(range(ranks), key=lambda rank: (done[rank], rank)), strict=True):
            dealt[rank].append(micro)
            done[rank] += sum(work[index] for index in micro)
    return dealt


def _levelled(at_once: packing.Bins, sizes: Sequence[int], work: Sequence[float], terms: Terms) -> packing.Bins:
    packing.level(at_once, work, packing.FINE, sizes, terms.budget_tokens)
    return _heaviest_first(at_once, work)


def _waited(rounds: Sequence[packing.Bins], work: Sequence[float]) -> float:
    return sum(sum(work[index] for index in at_once[0]) for at_once in rounds)


def _by_rank(sizes: Sequence[int], work: Sequence[float], terms: Terms) -> list[packing.Bins]:
    return [_packed(sorted(share), sizes, work, terms.budget_tokens) for share in packing.split(work, terms.ranks)]


def _heaviest_first(bins: packing.Bins, work: Sequence[float]) -> packing.Bins:
    return sorted(bins, key=lambda micro: (-sum(work[index] for index in micro), min(micro, default=0)))


def plan(rows: Sequence[PlanRow], terms: Terms, *, mini_batch_count: int, seed: int, batch_id: int) -> list[list[list[list[str]]]]:
    """`plan[mini_batch][rank][micro_batch]` is a list of row ids."""
    return [
        [[[row.row_id for row in micro] for micro in share] for share in deal(part, terms)]
        for part in mini_batches(rows, mini_batch_count, seed, batch_id)
    ]
