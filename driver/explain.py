"""A plan in words and numbers: who got what, how even that is, and what keeps it from being more even.

What a rank waits for is the measure: ranks that meet at a step's end wait for the most work in all; ranks that meet in every micro-batch
wait for the heaviest one at each index. Over the mean work of a rank that is the imbalance; 1 is perfect.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from driver.balance import PlanRow, Terms
from driver.packing import fewest

Shares = Sequence[Sequence[Sequence[PlanRow]]]
"""`[rank][micro-batch]`, the rows of one mini-batch."""
EVEN = 1.01  # what is left is not worth a word


def waited(work: Sequence[Sequence[float]], even: bool) -> float:
    """The work that a step takes, of `[rank][micro-batch]`."""
    if even:
        return sum(max(at_once) for at_once in itertools.zip_longest(*work, fillvalue=0.0))
    return max(map(sum, work), default=0.0)


def explain(shares: Shares, terms: Terms) -> dict[str, Any]:
    """One mini-batch. Work is in tokens, see `driver/row_cost.py`."""
    ranks = [[_micro(micro, terms) for micro in share] for share in shares]
    work = [[micro["work"] for micro in rank] for rank in ranks]
    mean = sum(map(sum, work)) / max(1, len(work))
    rows = [row for share in shares for micro in share for row in micro]
    return {
        "rows": len(rows),
        "tokens": sum(map(terms.padded, rows)),
        "work": sum(map(sum, work)),
        "imbalance": waited(work, terms.even) / mean if mean else 1.0,
        "binds": binds(shares, terms),
        "ranks": [
            {
                "rank": number,
                "rows": sum(len(micro["rows"]) for micro in rank),
                "tokens": sum(micro["tokens"] for micro in rank),
                "work": sum(work[number]),
                "of_mean": sum(work[number]) / mean if mean else 1.0,
                "micro_batches": rank,
            }
            for number, rank in enumerate(ranks)
        ],
    }


def _micro(rows: Sequence[PlanRow], terms: Terms) -> dict[str, Any]:
    tokens = sum(map(terms.padded, rows))
    return {
        "tokens": tokens,
        "of_budget": tokens / terms.budget_tokens,
        "work": sum(map(terms.work, rows)),
        "rows": [{"row_id": row.row_id, "uid": row.uid, "tokens": row.length, "work": terms.work(row)} for row in rows],
    }


def binds(shares: Shares, terms: Terms) -> list[str]:
    """In sentences: what keeps the work from being more even, and what the number of micro-batches comes from."""
    rows = [row for share in shares for micro in share for row in micro]
    if not rows:
        return ["no row has an advantage, so there is nothing to train: look at the rewards"]
    return [_work_binds(shares, rows, terms), _count_binds(shares, rows, terms)]


def _work_binds(shares: Shares, rows: Sequence[PlanRow], terms: Terms) -> str:
    work = [[sum(map(terms.work, micro)) for micro in share] for share in shares]
    mean = sum(map(sum, work)) / len(work)
    found = waited(work, terms.even) / mean
    if found <= EVEN:
        return f"work: nothing binds, the ranks wait for {found - 1.0:.2%} more than their mean"
    heaviest = max(rows, key=lambda row: (terms.work(row), row.row_id))
    share = terms.work(heaviest) / mean
    if len(rows) < len(work):
        return (
            f"work: {len(rows)} rows are fewer than {len(work)} ranks, and {len(work) - len(rows)} have none; raise batch.samples or "
            "rollout.n, or lower batch.mini_batches or trainer.dp"
        )
    if terms.even and share > 1.0 / max(map(len, work)):
        return (
            f"work: row {heaviest.row_id} of sample {heaviest.uid} ({heaviest.length} tokens) is {share:.2f} of a rank's mean share, and "
            "with trainer.ep the other ranks wait for it in its micro-batch"
        )
    if share > found / EVEN:
        return (
            f"work: row {heaviest.row_id} of sample {heaviest.uid} ({heaviest.length} tokens) alone is {share:.2f} of a rank's mean share; "
            "more rows a mini-batch (batch.samples, batch.mini_batches) would make it less"
        )
    return f"work: {len(rows)} rows on {len(work)} ranks are too few to be more even; more rows a mini-batch would be"


def _count_binds(shares: Shares, rows: Sequence[PlanRow], terms: Terms) -> str:
    used = sum(bool(micro) for share in shares for micro in share)
    sizes = [terms.padded(row) for row in rows]
    above = [size for size in sizes if size > terms.budget_tokens]
    within = [size for size in sizes if size <= terms.budget_tokens]
    least = len(above) + fewest(within, terms.budget_tokens)
    words = f"micro-batches: {used} with rows; batch.micro_batch_tokens ({terms.budget_tokens}) needs at least {least}"
    if above:
        words += f", {len(above)} of them for rows above it, which are alone"
    if least < len(shares) <= len(rows):
        words += f", and {len(shares)} ranks at least {len(shares)}"
    if empty := sum(not micro for share in shares for micro in share):
        words += f"; {empty} empty ones, because with trainer.ep all ranks run as many"
    return words
