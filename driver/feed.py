"""Datasets inside a run: segments of rows in the ledger's database, and the cursor that walks them exactly once a pass.

A submit or an append is one *segment*, written whole or not at all: its rows first, then the line that makes it visible. A pass goes
through the segments in order of arrival, each in an order seeded by (seed, pass, segment), so an append in the middle of a pass
moves nothing that came before. The cursor lives in the ledger and advances in the same commit that registers the sample, so any
number of restarts gives each row once a pass (W2). The second pass starts only when every dataset is closed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from driver.datasets import DataRow
from driver.ledger import Upsert
from driver.ledger_db import LedgerDB


class FeedError(ValueError):
    """A sentence for the user."""


@dataclass(frozen=True)
class Place:
    """The next row to register."""

    pass_index: int
    segment: int
    position: int
    row_index: int


@dataclass(frozen=True)
class Dataset:
    dataset_id: str
    name: str
    closed: bool
    rows: int


@dataclass
class _Entry:
    name: str
    closed: bool
    created_at: float


@lru_cache(maxsize=64)
def _order(seed: int, pass_index: int, segment: int, rows: int) -> list[int]:
    order = list(range(rows))
    random.Random(f"{seed}/{pass_index}/{segment}").shuffle(order)
    return order


class Feed:
    def __init__(self, db: LedgerDB, *, seed: int, shuffle: bool, passes: int | None) -> None:
        self._db = db
        self._seed = seed
        self._shuffle = shuffle
        self._passes = passes
        self._segments: list[tuple[int, str, int]] = list(db.query("SELECT segment, dataset_id, rows FROM segments ORDER BY segment"))
        self._datasets: dict[str, _Entry] = {
            i: _Entry(name, bool(closed), at)
            for i, name, closed, at in db.query("SELECT dataset_id, name, closed, created_at FROM datasets")
        }
        keyed = "SELECT idempotency_key, dataset_id, digest FROM segments WHERE idempotency_key IS NOT NULL"
        self._keys: dict[str, tuple[str, str | None]] = {key: (dataset_id, digest) for key, dataset_id, digest in db.query(keyed)}
        self._adding = asyncio.Lock()
        used = [s for s, _, _ in self._segments]
        self._next_segment = max(used, default=-1) + 1
        self._decoder = msgspec.json.Decoder(DataRow)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def datasets(self) -> list[Dataset]:
        sizes: dict[str, int] = {}
        for _, dataset_id, rows in self._segments:
            sizes[dataset_id] = sizes.get(dataset_id, 0) + rows
        return [Dataset(i, entry.name, entry.closed, sizes.get(i, 0)) for i, entry in self._datasets.items()]

    @property
    def rows(self) -> int:
        return sum(rows for _, _, rows in self._segments)

    @property
    def closed(self) -> bool:
        """Input is closed: there is a dataset and none of them takes rows any more."""
        return bool(self._datasets) and all(entry.closed for entry in self._datasets.values())

    def next_place(self, cursor: tuple[int, int, int]) -> Place | None:
        """The row at or after this cursor; None when there is none now (see `exhausted`)."""
        pass_index, segment, position = cursor
        while self._passes is None or pass_index < self._passes:
            for number, _, rows in self._segments:
                if number < segment:
                    continue
                at = position if number == segment else 0
                if at < rows:
                    row_index = _order(self._seed, pass_index, number, rows)[at] if self._shuffle else at
                    return Place(pass_index, number, at, row_index)
            if not self.closed or not self.rows:
                return None
            pass_index, segment, position = pass_index + 1, 0, 0
        return None

    def exhausted(self, cursor: tuple[int, int, int]) -> bool:
        """No further row will ever come: input closed and the last pass walked."""
        return self.closed and self.next_place(cursor) is None

    def row(self, segment: int, row_index: int) -> DataRow:
        found = self._db.query("SELECT payload FROM dataset_rows WHERE segment = ? AND row_index = ?", (segment, row_index))
        assert found, f"row {row_index} of segment {segment} is missing"
        return self._decoder.decode(found[0][0])

    def dataset_of(self, segment: int) -> str:
        return next(d for s, d, _ in self._segments if s == segment)

    # ---- changing ----------------------------------------------------------------------------------------------------

    async def add(
        self, dataset_id: str | None, name: str, batches: Iterator[list[DataRow]], idempotency_key: str | None, digest: str | None = None
    ) -> tuple[str, int, bool]:
        """Create a dataset (dataset_id None) or append to one. Returns (dataset_id, rows added, was new).

        The same idempotency key again adds nothing (W6); with another `digest` of the body it is a FeedError.
        DatasetError from `batches` leaves nothing behind.
        """
        async with self._adding:  # two uploads with one key at once: the second sees what the first wrote
            if idempotency_key is not None and idempotency_key in self._keys:
                known, before = self._keys[idempotency_key]
                if digest is not None and before is not None and digest != before:
                    raise FeedError(f"the idempotency key {idempotency_key!r} was used for another body; take a new key for new rows")
                return known, 0, False
            if dataset_id is not None and self._get(dataset_id).closed:
                raise FeedError(f"dataset {dataset_id} is closed; submit a new one")
            segment = self._next_segment
            count = 0
            # An upload cut off by a crash left rows under this number at most: they were never seen and are overwritten now.
            while (batch := await asyncio.to_thread(next, batches, None)) is not None:  # parsing a big file must not stop the loops
                self._db.write(
                    Upsert("dataset_rows", {"segment": segment, "row_index": count + i, "payload": msgspec.json.encode(row)})
                    for i, row in enumerate(batch)
                )
                count += len(batch)
                await self._db.durable()
            if count == 0:
                raise FeedError("the dataset has no rows")
            self._next_segment += 1
            writes = []
            if dataset_id is None:
                dataset_id = f"d{len(self._datasets):06d}"
                self._datasets[dataset_id] = _Entry(name, False, time.time())
                writes.append(self._row_of(dataset_id))
            row = {"segment": segment, "dataset_id": dataset_id, "rows": count, "idempotency_key": idempotency_key, "digest": digest}
            self._db.write([*writes, Upsert("segments", row)])
            await self._db.durable()
            self._segments.append((segment, dataset_id, count))
            if idempotency_key is not None:
                self._keys[idempotency_key] = (dataset_id, digest)
            return dataset_id, count, True

    async def close(self, dataset_id: str) -> None:
        """No more rows for this dataset. Closing twice is the same as once."""
        self._get(dataset_id).closed = True
        self._db.write([self._row_of(dataset_id)])
        await self._db.durable()

    def _row_of(self, dataset_id: str) -> Upsert:
        entry = self._datasets[dataset_id]
        return Upsert(
            "datasets", {"dataset_id": dataset_id, "name": entry.name, "closed": int(entry.closed), "created_at": entry.created_at}
        )

    def _get(self, dataset_id: str) -> _Entry:
        if dataset_id not in self._datasets:
            raise FeedError(f"there is no dataset {dataset_id}; known: {', '.join(self._datasets) or 'none'}")
        return self._datasets[dataset_id]
