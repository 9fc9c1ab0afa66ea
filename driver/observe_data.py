"""What a run shows of its datasets: where each walk is, planned and real shares, what the filter took, recent pass rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from driver.feed import Dataset
from driver.mix import Walk

if TYPE_CHECKING:
    from driver.run import Run


def datasets(run: Run) -> list[dict[str, Any]]:
    """In order of arrival. Shares are of samples: `share_planned` of the next ones, null where there is no row or one of higher priority
    goes first; `share_real` over the newest ones (at most 256), `registered` over the whole run."""
    core, judge = run.core, run.dispatch.judge
    planned = core.feed.shares(core.ledger.cursor)
    return [_dataset(run, dataset, planned.get(dataset.dataset_id), list(judge.recent)) for dataset in core.feed.datasets()]


def _dataset(run: Run, dataset: Dataset, planned: float | None, recent: list[str]) -> dict[str, Any]:
    feed, dataset_id = run.core.feed, dataset.dataset_id
    walk = run.core.ledger.cursor.get(dataset_id, Walk())
    passes = feed.passes(walk)
    return {
        "dataset_id": dataset_id,
        "name": dataset.name,
        "closed": dataset.closed,
        "rows": dataset.rows,
        "weight": walk.weight,
        "priority": walk.priority,
        "epochs": passes,
        "pass": walk.pass_index + 1,
        "rows_walked": feed.walked(dataset_id, walk),
        "share_planned": planned,
        "share_real": recent.count(dataset_id) / len(recent) if recent else None,
        "samples": walk.registered,
        "filtered_samples": walk.filtered,
        "skipped_rows": walk.skipped,
        "left_out_rows": feed.left_out(dataset_id),
        "recent": run.dispatch.judge.rates.of(dataset_id),
    }


def skipped(run: Run, dataset_id: str, after: tuple[int, int, int], limit: int) -> dict[str, Any]:
    """A page of the rows that were always right in a pass: which, by which sample, and whether the next pass left them out."""
    rows = run.core.db.query(
        "SELECT r.segment, r.row_index, r.pass_index, r.uid, r.trajectories, r.solved_at, r.skipped_at FROM solved_rows r "
        "JOIN segments s ON s.segment = r.segment WHERE s.dataset_id = ? AND (r.segment, r.row_index, r.pass_index) > (?, ?, ?) "
        "ORDER BY r.segment, r.row_index, r.pass_index LIMIT ?",
        (dataset_id, *after, limit),
    )
    items = [
        {
            "segment": segment,
            "row_index": row_index,
            "solved_in_pass": pass_index + 1,
            "uid": uid,
            "why": f"{trajectories} of {trajectories} trajectories of sample {uid} were right",
            "solved_at": solved_at,
            "skipped_at": skipped_at,
        }
        for segment, row_index, pass_index, uid, trajectories, solved_at, skipped_at in rows
    ]
    last = rows[-1][:3] if len(rows) == limit else None
    return {"items": items, "next": None if last is None else ".".join(map(str, last))}


def left_out(run: Run, dataset_id: str, after: tuple[int, int], limit: int) -> dict[str, Any]:
    """A page of the rows that no pass comes to, because they can never be sampled: which, and why."""
    rows = run.core.db.query(
        "SELECT r.segment, r.row_index, r.reason, r.left_out_at FROM left_out_rows r JOIN segments s ON s.segment = r.segment "
        "WHERE s.dataset_id = ? AND (r.segment, r.row_index) > (?, ?) ORDER BY r.segment, r.row_index LIMIT ?",
        (dataset_id, *after, limit),
    )
    items = [dict(zip(("segment", "row_index", "why", "left_out_at"), row, strict=True)) for row in rows]
    return {"items": items, "next": ".".join(map(str, rows[-1][:2])) if len(rows) == limit else None}


def left_out_rows(run: Run) -> int:
    return sum(run.core.feed.left_out(dataset.dataset_id) for dataset in run.core.feed.datasets())


def filtered_samples(run: Run) -> int:
    return sum(walk.filtered for walk in run.core.ledger.cursor.values())


def gauges(run: Run) -> dict[str, float]:
    cursor = run.core.ledger.cursor
    return {
        "headrace_filter_filtered_samples_total": float(filtered_samples(run)),
        "headrace_filter_in_a_row_samples": float(run.dispatch.judge.streak.samples),
        "headrace_feed_registered_samples_total": float(sum(walk.registered for walk in cursor.values())),
        "headrace_feed_left_out_rows_total": float(left_out_rows(run)),
        "headrace_feed_skipped_rows_total": float(sum(walk.skipped for walk in cursor.values())),
    }
