"""What the ledger's file holds of datasets beside their rows: the walks (in `meta`), the changes of shares, the solved rows, and
those that are left out of every pass.

The tables came after version 1 of the schema. They are made when a ledger is opened, and a ledger without them is read as one in which
nothing was changed or solved; so is one that has a single cursor for all datasets, as it was kept before datasets were mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from driver.ledger import Ledger
from driver.mix import Cursor, Walk

TABLES = """
CREATE TABLE IF NOT EXISTS mixes (number INTEGER PRIMARY KEY, from_uid INTEGER NOT NULL, decided_by TEXT NOT NULL, why TEXT NOT NULL,
  decided_at REAL NOT NULL, trained_version INTEGER NOT NULL, changes BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS solved_rows (segment INTEGER NOT NULL, row_index INTEGER NOT NULL, pass_index INTEGER NOT NULL, uid INTEGER,
  trajectories INTEGER, solved_at REAL, skipped_at REAL, PRIMARY KEY (segment, row_index, pass_index)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS left_out_rows (segment INTEGER NOT NULL, row_index INTEGER NOT NULL, reason TEXT NOT NULL,
  left_out_at REAL NOT NULL, PRIMARY KEY (segment, row_index)) WITHOUT ROWID;
"""
KEYS = {"mixes": ("number",), "solved_rows": ("segment", "row_index", "pass_index"), "left_out_rows": ("segment", "row_index")}
Query = Callable[..., list[tuple[Any, ...]]]


def load_walks(ledger: Ledger, meta: Mapping[str, Any], query: Query) -> None:
    """Fill in what the live view keeps of datasets. `meta` is that table, decoded."""
    ledger.cursor = _cursor(meta, query)
    there = {name for (name,) in query("SELECT name FROM sqlite_master WHERE name IN ('mixes', 'solved_rows')")}
    if "mixes" in there:
        ledger.mixes = query("SELECT count(*) FROM mixes")[0][0]
    if "solved_rows" in there:
        solved = query("SELECT segment, row_index, max(pass_index) FROM solved_rows WHERE skipped_at IS NULL GROUP BY 1, 2")
        ledger.solved = {(segment, row_index): pass_index for segment, row_index, pass_index in solved}


def begun_anew(walk: bytes) -> bytes:
    """A walk with the same share, at the first row: for a run that takes over the dataset of another."""
    was = msgspec.json.decode(walk, type=Walk)
    return msgspec.json.encode(Walk(weight=was.weight, priority=was.priority, passes=was.passes, own_passes=was.own_passes))


def _cursor(meta: Mapping[str, Any], query: Query) -> Cursor:
    """By dataset. The one place for all of them is that of every dataset that has none of its own yet: what lay before it is walked, what
    lies behind it is not."""
    own = {name.partition("/")[2]: msgspec.convert(value, Walk) for name, value in meta.items() if name.startswith("cursor/")}
    if "cursor" not in meta:
        return own
    pass_index, segment, position = meta["cursor"]
    sizes = query(
        "SELECT d.dataset_id, count(s.uid) FROM datasets d LEFT JOIN segments g ON g.dataset_id = d.dataset_id "
        "LEFT JOIN samples s ON s.segment = g.segment GROUP BY 1"
    )
    old = {i: Walk(pass_index=pass_index, segment=segment, position=position, registered=count) for i, count in sizes}
    return old | own
