"""The rows that the ledger's events write: a state as a line of a table. `ledger_schema` makes the tables, `ledger_load` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from driver.ledger_state import COMMITTED, FINISHED, Batch, Sample, Trajectory


@dataclass(frozen=True)
class Upsert:
    """One row to write: table, then column values (the primary key among them)."""

    table: str
    values: dict[str, Any]


def meta(name: str, value: Any) -> Upsert:
    return Upsert("meta", {"name": name, "value": msgspec.json.encode(value)})


def sample_row(s: Sample) -> Upsert:
    return Upsert(
        "samples",
        {
            "uid": s.uid,
            "segment": s.segment,
            "row_index": s.row_index,
            "pass_index": s.pass_index,
            "version_tag": s.version_tag,
            "deadline_batch": s.deadline_batch,
            "batch_id": s.batch_id,
            "over": 0,
        },
    )


def trajectory_row(t: Trajectory, leaves: bool = True) -> Upsert:
    values = {
        "uid": t.uid,
        "idx": t.index,
        "state": t.state,
        "outcome": t.outcome,
        "reason": t.reason,
        "infrastructure_attempts": t.infrastructure_attempts,
        "data_attempts": t.data_attempts,
        "reward": t.reward,
        "finish_reason": t.finish_reason,
        "started_at": t.started_at,
        "ready_at": t.ready_at,
    }
    if leaves:  # those of an ended one are freed
        values["leaves"] = msgspec.json.encode(t.leaves) if t.leaves and t.state != FINISHED else None
    return Upsert("trajectories", values)


def batch_row(b: Batch, time: float | None) -> Upsert:
    values: dict[str, Any] = {
        "batch_id": b.batch_id,
        "state": b.state,
        "uids": msgspec.json.encode(b.uids),
        "plan": b.plan,
        "skipped": b.skipped,
    }
    if b.state == COMMITTED:
        values["plan"] = None  # its rows are freed: nothing left to replay
    if time is not None:
        values[f"{b.state}_at"] = time
    return Upsert("batches", values)
