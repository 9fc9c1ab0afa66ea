"""From the rows of a global batch to a plan: mini-batches, ranks, micro-batches. Lengths in, indices out.

Invariants (each a property test): every row stands exactly once; a mini-batch is cut by sample, from an order that knows neither
layout nor lengths; no micro-batch exceeds the token budget; the same input gives the same plan. Row counts per rank may differ:
ranks are balanced by work, not by count, and a rank may get none.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlanRow:
    """A row as the plan sees it: who it is, whose sample it belongs to, how many tokens it has."""

    row_id: str
    uid: int
    length: int


def work(length: int) -> float:
    """Relative cost of a row: linear layers plus the quadratic share of attention (small at these lengths)."""
    return length + length * length / 4096.0


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


def split_ranks(rows: Sequence[PlanRow], ranks: int) -> list[list[PlanRow]]:
    """Longest first onto the rank with the least work so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    out: list[list[PlanRow]] = [[] for _ in range(ranks)]
    for row in sorted(rows, key=lambda r: (-r.length, r.row_id)):
        load, rank = heapq.heappop(loads)
        out[rank].append(row)
        heapq.heappush(loads, (load + work(row.length), rank))
    return out


def micro_batches(rows: Sequence[PlanRow], budget_tokens: int) -> list[list[PlanRow]]:
    """First-fit decreasing under the token budget. A row above the budget is a ValueError: it is refused at admission."""
    bins: list[tuple[int, list[PlanRow]]] = []
    for row in sorted(rows, key=lambda r: (-r.length, r.row_id)):
        if row.length > budget_tokens:
            raise ValueError(f"row {row.row_id} has {row.length} tokens, above the micro-batch budget of {budget_tokens}")
        for index, (used, members) in enumerate(bins):
            if used + row.length <= budget_tokens:
                members.append(row)
                bins[index] = (used + row.length, members)
                break
        else:
            bins.append((row.length, [row]))
    return [members for _, members in bins]


def plan(
    rows: Sequence[PlanRow], *, mini_batch_count: int, ranks: int, budget_tokens: int, seed: int, batch_id: int
) -> list[list[list[list[str]]]]:
    """`plan[mini_batch][rank][micro_batch]` is a list of row ids."""
    return [
        [[[row.row_id for row in micro] for micro in micro_batches(mine, budget_tokens)] for mine in split_ranks(part, ranks)]
        for part in mini_batches(rows, mini_batch_count, seed, batch_id)
    ]
