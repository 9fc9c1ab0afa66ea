"""The live view out of the ledger's rows: what a start reads, and what a check compares.

A start reads the counters, and of samples, trajectories and batches only those that are not over, each in one query by an index: its time
grows with what is in flight, not with what was ever registered. The counters of what is in flight are held against the rows just read, so
a ledger that does not balance (A1) is never begun with.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from driver import feed_tables
from driver.events import Leaf
from driver.ledger import Ledger
from driver.ledger_schema import SCHEMA_VERSION, LedgerError, recount, remedy
from driver.ledger_state import (
    ASSEMBLED,
    CONSUMED,
    FINISHED,
    OUTCOME,
    READY,
    REASON,
    RUNNING,
    STALENESS,
    STATE,
    UNMADE,
    Batch,
    Sample,
    Trajectory,
    traj_uid_of,
)

Query = Callable[..., Any]
LIVE = (
    "SELECT s.uid, s.segment, s.row_index, s.pass_index, s.version_tag, s.deadline_batch, s.batch_id, t.idx, t.state, t.outcome, t.reason, "
    "t.infrastructure_attempts, t.data_attempts, t.leaves, t.reward, t.finish_reason, t.started_at, t.ready_at "
    "FROM samples s CROSS JOIN trajectories t ON t.uid = s.uid WHERE s.over = 0 ORDER BY s.uid, t.idx"
)
PENDING = "SELECT batch_id, state, uids, plan, skipped FROM batches WHERE batch_id >= ? AND state != ? ORDER BY batch_id"


class DoesNotBalance(ValueError):
    """A1 does not hold for the rows that were read."""


def load(query: Query) -> Ledger:
    """The live view. Raises DoesNotBalance, or what decoding a damaged row raises."""
    ledger = Ledger()
    meta = {name: msgspec.json.decode(value) for name, value in query("SELECT name, value FROM meta")}
    for name in ("next_uid", "next_batch", "trained_version", "committed_version", "serving_version", "epoch", "checkpoint", "ended"):
        setattr(ledger, name, meta.get(name, getattr(ledger, name)))
    feed_tables.load_walks(ledger, meta, query)
    discarded = meta.get("last_discard")
    ledger.last_discard = None if discarded is None else tuple(discarded)
    ledger.restarts = query("SELECT count(*) FROM restarts")[0][0]
    by_kind = {STATE: ledger.counts.by_state, OUTCOME: ledger.counts.by_outcome, REASON: ledger.counts.by_reason}
    for kind, name, value in query("SELECT kind, name, value FROM counters"):
        if kind == STALENESS:
            ledger.staleness[int(name)] = value
        else:
            by_kind[kind][name] = value
    ledger.counts.registered = sum(ledger.counts.by_state.values())
    ledger.samples_taken = sum(ledger.staleness.values())
    for sample in _live_samples(query):
        ledger.samples[sample.uid] = sample
        if sample.batch_id is None and not sample.evaluation:
            ledger.live_by_deadline[sample.deadline_batch] += 1
        ledger.settled_samples += sample.settled
        ledger.evaluating += len(sample.trajectories) * sample.evaluation
    for batch_id, state, uids, plan, skipped in query(PENDING, (ledger.committed_version, UNMADE)):
        ledger.batches[batch_id] = Batch(batch_id, state, tuple(msgspec.json.decode(uids)), plan, skipped)
    _check(ledger)
    return ledger


def _check(ledger: Ledger) -> None:
    counts = ledger.counts
    if not counts.balanced():
        raise DoesNotBalance(f"{counts.by_state[FINISHED]} trajectories are finished, but {dict(counts.by_outcome)} have an outcome")
    for state in (RUNNING, READY, CONSUMED):
        found = sum(len(sample.in_state(state)) for sample in ledger.samples.values())
        if found != counts.by_state[state]:
            raise DoesNotBalance(f"{counts.by_state[state]} trajectories are counted as {state}, and {found} are")
    for batch in ledger.batches.values():
        if batch.state == ASSEMBLED and batch.batch_id < ledger.trained_version:
            raise DoesNotBalance(f"batch {batch.batch_id} was not applied, and version {ledger.trained_version} is trained")
        if missing := [uid for uid in batch.uids if uid not in ledger.samples]:
            raise DoesNotBalance(f"batch {batch.batch_id} holds sample {missing[0]}, which is over or was never registered")


def _live_samples(query: Query) -> Iterator[Sample]:
    decode = msgspec.json.Decoder(tuple[Leaf, ...]).decode
    for facts, rows in itertools.groupby(query(LIVE), key=lambda row: row[:7]):
        uid, segment, row_index, pass_index, version_tag, deadline_batch, batch_id = facts
        sample = Sample(uid, segment, row_index, pass_index, version_tag, deadline_batch, [], batch_id)
        for row in rows:
            index, state, outcome, reason, infrastructure, data, leaves, reward, finish_reason, started_at, ready_at = row[7:]
            made = decode(leaves) if leaves else ()
            name = traj_uid_of(uid, index)
            trajectory = Trajectory(
                name, uid, index, state, outcome, reason, infrastructure, data, made, reward, finish_reason, started_at, ready_at
            )
            if index != len(sample.trajectories):
                raise DoesNotBalance(f"sample {uid} lacks its trajectory {len(sample.trajectories)}")
            sample.trajectories.append(trajectory)
        yield sample


# ---- on request ------------------------------------------------------------------------------------------------------------


COPY_OR_ANEW = "put back a copy of the run's directory from before it was damaged, or begin a new run from {origin}"
ANEW = f"headrace up refuses such a ledger: {COPY_OR_ANEW}"
ANEW_ALSO = f"what lies in it is not sure: {COPY_OR_ANEW}"
SHOWN_ONLY = "only what is shown of it is off: the run can go on"
IN_ARCHIVE = "the run can go on: what became of them stands by their ids in the run's archive/*.parquet"


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a ledger, and what to do: who asks knows the `{origin}` that a new run can begin from."""

    words: str
    remedy: str


@dataclass(frozen=True)
class Checked:
    """What `headrace ledger check` found."""

    schema: int
    samples: int
    trajectories: int
    damage: tuple[Trouble, ...]
    """What SQLite says of the file's pages."""
    wrong: tuple[Trouble, ...]
    """Counters that are not what the rows say, and rows that do not go together."""

    @property
    def well(self) -> bool:
        return not self.damage and not self.wrong


def check(path: Path) -> Checked:
    """Read the whole ledger, also beside a driver that writes it, and change nothing. Minutes for millions. Raises LedgerError."""
    if not path.is_file():
        raise LedgerError(f"there is no ledger {path}; give a run's directory, such as runs/RUN_ID")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    except sqlite3.Error as error:
        raise LedgerError(f"{path} can not be read ({error}); {remedy(error)}") from error
    try:
        connection.execute("BEGIN")  # one state of it, whatever is written meanwhile
        schema = connection.execute("PRAGMA user_version").fetchone()[0]
        if schema != SCHEMA_VERSION:
            raise LedgerError(f"{path} has schema {schema} and this Headrace knows {SCHEMA_VERSION}; `headrace up` migrates an older one")
        pages = [row[0] for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
        damage = tuple(Trouble(words, f"look at its disk first (dmesg, free space); {ANEW_ALSO}") for words in pages)
        samples = connection.execute("SELECT count(*) FROM samples").fetchone()[0]
        trajectories = connection.execute("SELECT count(*) FROM trajectories").fetchone()[0]
        return Checked(schema, samples, trajectories, damage, tuple(_wrong(connection)))
    except (sqlite3.Error, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise LedgerError(f"{path} can not be read to its end ({error}); {remedy(error)}") from error
    finally:
        connection.close()


def _wrong(connection: sqlite3.Connection) -> Iterator[Trouble]:
    def query(sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return connection.execute(sql, parameters).fetchall()

    counted = {(kind, name): value for kind, name, value in query("SELECT kind, name, value FROM counters") if value}
    rows = recount(connection)
    for key in sorted({*counted, *rows}):
        if counted.get(key, 0) != rows.get(key, 0):
            words = f"{key[0]} {key[1]} is counted {counted.get(key, 0)} times, the rows say {rows.get(key, 0)}"
            yield Trouble(words, SHOWN_ONLY if key[0] in (REASON, STALENESS) else ANEW_ALSO)
    over = "SELECT count(*) FROM samples s WHERE over = {} (SELECT 1 FROM trajectories t WHERE t.uid = s.uid AND t.state != 'finished')"
    for sql, what, advice in (
        (over.format("1 AND EXISTS"), "samples are over and have trajectories that are not finished", ANEW_ALSO),
        (over.format("0 AND NOT EXISTS"), "samples are not over and all their trajectories are finished", ANEW_ALSO),
        (
            "SELECT count(*) FROM samples WHERE batch_id > deadline_batch",
            "samples were trained after their deadline (A3)",
            "their weights were older than the bound allows, which Headrace promises never to train: report it, with this file. The run "
            "can go on; to be sure, begin anew from a checkpoint older than the first of these batches (batch_id > deadline_batch in the "
            "table samples)",
        ),
        (
            "SELECT count(*) FROM trajectories "
            "WHERE state = 'finished' AND (outcome IS NULL OR (outcome = 'discarded' AND reason IS NULL))",
            "trajectories are finished without an outcome, or discarded without a reason",
            IN_ARCHIVE,
        ),
    ):
        if (n := query(sql)[0][0]) != 0:
            yield Trouble(f"{n} {what}", advice)
    try:
        load(query)
    except DoesNotBalance as error:
        yield Trouble(str(error), ANEW)
