"""Datasets inside a run: segments of rows in the ledger's database, and the walk that takes each row exactly once a pass.

A submit or an append is one *segment*, written whole or not at all: its rows first, then the line that makes it visible. Each dataset
has a walk of its own: a pass goes through its segments in order of arrival, each in an order seeded by (seed, pass, segment), so an
append in the middle of a pass moves nothing that came before, and no other dataset. Its second pass starts only when it is closed.
Which dataset the next row comes from is `driver/mix.py`'s arithmetic. A row that is left out (`leave_out`) is in no walk any more.

The walks live in the ledger and advance in the same commit that registers the sample: `next_place` is a function of what is durable,
so any number of restarts gives each row once a pass, in the order that no restart would have changed (W2).
"""

from __future__ import annotations

import asyncio
import bisect
import random
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from driver.datasets import DataRow
from driver.ledger_db import LedgerDB
from driver.ledger_rows import Upsert
from driver.mix import FeedError as FeedError
from driver.mix import Walk, choose, planned


@dataclass(frozen=True)
class Place:
    """The next row to register, and the credits of the datasets once it is."""

    dataset_id: str
    pass_index: int
    segment: int
    position: int
    row_index: int
    credits: Mapping[str, float] = field(default_factory=dict)


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
    segments: list[tuple[int, int]] = field(default_factory=list)  # (segment, rows), in order of arrival

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.segments)


def shuffled(seed: int, pass_index: int, segment: int, rows: int) -> array[int]:
    """The order of a segment's rows in one pass. Ledgers depend on it: a walk in the middle of a pass goes on in this order."""
    order = list(range(rows))
    random.Random(f"{seed}/{pass_index}/{segment}").shuffle(order)
    return array("Q", order)


TASK_TYPES = 65_536  # that are remembered
_NEW = Walk()
"""Of a dataset of which nothing was registered yet. Never changed."""


class Feed:
    def __init__(self, db: LedgerDB, *, seed: int, shuffle: bool, passes: int | None) -> None:
        self._db = db
        self._seed = seed
        self._shuffle = shuffle
        self._passes = passes
        listed = db.query("SELECT dataset_id, name, closed, created_at FROM datasets ORDER BY dataset_id")
        self._datasets: dict[str, _Entry] = {i: _Entry(name, bool(closed), at) for i, name, closed, at in listed}
        self._dataset_of: dict[int, str] = {}
        for segment, dataset_id, rows in db.query("SELECT segment, dataset_id, rows FROM segments ORDER BY segment"):
            self._datasets[dataset_id].segments.append((segment, rows))
            self._dataset_of[segment] = dataset_id
        keyed = "SELECT idempotency_key, dataset_id, digest FROM segments WHERE idempotency_key IS NOT NULL"
        self._keys: dict[str, tuple[str, str | None]] = {key: (dataset_id, digest) for key, dataset_id, digest in db.query(keyed)}
        self._orders: dict[int, tuple[int, array[int]]] = {}
        self._left_out: dict[int, set[int]] = {}  # rows by segment
        self._left_out_last = ""  # why
        for segment, row_index, reason in db.query("SELECT segment, row_index, reason FROM left_out_rows ORDER BY left_out_at"):
            self._left_out.setdefault(segment, set()).add(row_index)
            self._left_out_last = reason
        self._onward: dict[tuple[int, int], tuple[int, int]] = {}  # (segment, pass) -> a position, and the first from it that is walked
        self._adding = asyncio.Lock()
        self._next_segment = max(self._dataset_of, default=-1) + 1
        self._decoder = msgspec.json.Decoder(DataRow)
        self._task_types: OrderedDict[tuple[int, int], str] = OrderedDict()  # of the rows read last; written by threads too

    # ---- reading -----------------------------------------------------------------------------------------------------

    def datasets(self) -> list[Dataset]:
        """In order of arrival."""
        return [Dataset(i, entry.name, entry.closed, entry.rows) for i, entry in self._datasets.items()]

    @property
    def rows(self) -> int:
        return sum(entry.rows for entry in self._datasets.values())

    @property
    def closed(self) -> bool:
        """Input is closed: there is a dataset and none of them takes rows any more."""
        return bool(self._datasets) and all(entry.closed for entry in self._datasets.values())

    def next_place(self, cursor: Mapping[str, Walk]) -> Place | None:
        """The row to register next; None when there is none now (see `exhausted`, `weightless`)."""
        places = self._places(cursor)
        chosen = choose({dataset_id: cursor.get(dataset_id, _NEW) for dataset_id in places})
        if chosen is None:
            return None
        dataset_id, credits = chosen
        pass_index, segment, position, rows = places[dataset_id]
        row_index = self._order(pass_index, segment, rows)[position] if self._shuffle else position
        return Place(dataset_id, pass_index, segment, position, row_index, credits)

    def _order(self, pass_index: int, segment: int, rows: int) -> array[int]:
        """Kept for the present pass of each segment: 8 bytes a row."""
        kept = self._orders.get(segment)
        if kept is None or kept[0] != pass_index:
            kept = self._orders[segment] = (pass_index, shuffled(self._seed, pass_index, segment, rows))
        return kept[1]

    def exhausted(self, cursor: Mapping[str, Walk]) -> bool:
        """No further row will ever come: input closed and the last pass of every dataset walked."""
        return self.closed and not self._places(cursor)

    def weightless(self, cursor: Mapping[str, Walk]) -> list[str]:
        """Datasets that have rows left and give none, because their weight is 0."""
        return [dataset_id for dataset_id in self._places(cursor) if cursor.get(dataset_id, _NEW).weight == 0]

    def shares(self, cursor: Mapping[str, Walk]) -> dict[str, float]:
        """The planned share of each dataset that has a row now and is not behind one of higher priority."""
        return planned({dataset_id: cursor.get(dataset_id, _NEW) for dataset_id in self._places(cursor)})

    def passes(self, walk: Walk) -> int | None:
        """How often a dataset is walked; None: for ever."""
        return walk.passes if walk.own_passes else self._passes

    def walked(self, dataset_id: str, walk: Walk) -> int:
        """Rows of the present pass that lie behind."""
        segments = self._datasets[dataset_id].segments
        return sum(min(rows, walk.position) if segment == walk.segment else rows for segment, rows in segments if segment <= walk.segment)

    def _places(self, cursor: Mapping[str, Walk]) -> dict[str, tuple[int, int, int, int]]:
        """Of each dataset that has a row to give now, in order of arrival: its pass, segment, position and the segment's rows."""
        places = {}
        for dataset_id, entry in self._datasets.items():
            place = self._place(entry, cursor.get(dataset_id, _NEW))
            if place is not None:
                places[dataset_id] = place
        return places

    def _place(self, entry: _Entry, walk: Walk) -> tuple[int, int, int, int] | None:
        passes = self.passes(walk)
        if self._out_of(entry) == entry.rows:
            return None
        pass_index, segment, position = walk.pass_index, walk.segment, walk.position
        while passes is None or pass_index < passes:
            first = bisect.bisect_left(entry.segments, (segment, 0))
            for number, rows in islice(entry.segments, first, None):
                at = self._from(pass_index, number, position if number == segment else 0, rows)
                if at < rows:
                    return pass_index, number, at, rows
            if not entry.closed or not entry.segments:
                return None
            pass_index, segment, position = pass_index + 1, 0, 0
        return None

    def _from(self, pass_index: int, segment: int, position: int, rows: int) -> int:
        """The first position from this one on whose row is not left out; `rows` when there is none."""
        out = self._left_out.get(segment)
        if not out or position >= rows:
            return position
        known, onward = self._onward.get((segment, pass_index), (-1, 0))
        if known != position:
            onward = position
        if onward < rows:
            order = self._order(pass_index, segment, rows) if self._shuffle else range(rows)
            onward = next((at for at in range(onward, rows) if order[at] not in out), rows)
            self._onward.pop((segment, pass_index - 2), None)
            self._onward[segment, pass_index] = (position, onward)
        return onward

    def _out_of(self, entry: _Entry) -> int:
        return sum(len(self._left_out.get(segment, ())) for segment, _ in entry.segments) if self._left_out else 0

    def left_out(self, dataset_id: str) -> int:
        """Rows of a dataset that no pass comes to any more."""
        return self._out_of(self._datasets[dataset_id])

    def all_left_out(self) -> str | None:
        """In words, with the newest reason, when no row of any dataset can be used."""
        if not self.rows or sum(map(self._out_of, self._datasets.values())) < self.rows:
            return None
        return f"none of the {self.rows:,} rows can be used: all are left out, the last because {self._left_out_last}"

    def row(self, segment: int, row_index: int) -> DataRow:
        found = self._db.query("SELECT payload FROM dataset_rows WHERE segment = ? AND row_index = ?", (segment, row_index))
        assert found, f"row {row_index} of segment {segment} is missing"
        row = self._decoder.decode(found[0][0])
        self._task_types[segment, row_index] = row.task_type
        if len(self._task_types) > TASK_TYPES:
            self._task_types.popitem(last=False)
        return row

    def task_type(self, segment: int, row_index: int) -> str:
        """Of a row; of one that was read not long ago it costs no look into the database."""
        return self._task_types.get((segment, row_index)) or self.row(segment, row_index).task_type

    def dataset_of(self, segment: int) -> str:
        return self._dataset_of[segment]

    # ---- changing ----------------------------------------------------------------------------------------------------

    async def add(
        self,
        dataset_id: str | None,
        name: str,
        batches: Iterator[list[DataRow]],
        idempotency_key: str | None,
        digest: str | None = None,
        *,
        also: Callable[[str], Iterable[Upsert]] = lambda dataset_id: (),
    ) -> tuple[str, int, bool]:
        """Create a dataset (dataset_id None) or append to one. Returns (dataset_id, rows added, was new).

        The same idempotency key again adds nothing (W6); with another `digest` of the body it is a FeedError.
        DatasetError from `batches` leaves nothing behind. What `also` says of the dataset is written in the commit that makes the rows
        visible: a share that is given with a dataset is there when the first of its rows is.
        """
        async with self._adding:  # two uploads with one key at once: the second sees what the first wrote
            if idempotency_key is not None and idempotency_key in self._keys:
                known, before = self._keys[idempotency_key]
                if digest is not None and before is not None and digest != before:
                    raise FeedError(f"the idempotency key {idempotency_key!r} was used for another body; take a new key for new rows")
                if dataset_id not in (None, known):
                    raise FeedError(
                        f"the idempotency key {idempotency_key!r} was used for dataset {known}; take a new one for {dataset_id}"
                    )
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
            if self._shuffle:  # a million rows take most of a second: not in the loop that asks for the first of them
                self._orders[segment] = (0, await asyncio.to_thread(shuffled, self._seed, 0, segment, count))
            if dataset_id is not None and self._get(dataset_id).closed:  # meanwhile: its next pass may have begun without these rows
                raise FeedError(f"dataset {dataset_id} was closed before these rows were read; submit a new one")
            self._next_segment += 1
            writes = []
            if dataset_id is None:
                dataset_id = f"d{len(self._datasets):06d}"
                self._datasets[dataset_id] = _Entry(name, False, time.time())
                writes.append(self._row_of(dataset_id))
            row = {"segment": segment, "dataset_id": dataset_id, "rows": count, "idempotency_key": idempotency_key, "digest": digest}
            self._db.write([*writes, *also(dataset_id), Upsert("segments", row)])
            await self._db.durable()
            self._datasets[dataset_id].segments.append((segment, count))
            self._dataset_of[segment] = dataset_id
            if idempotency_key is not None:
                self._keys[idempotency_key] = (dataset_id, digest)
            return dataset_id, count, True

    def leave_out(self, segment: int, row_index: int, reason: str, time: float) -> None:
        """No pass comes to this row any more, for the life of the run."""
        self._left_out.setdefault(segment, set()).add(row_index)
        self._left_out_last = reason
        self._db.write([Upsert("left_out_rows", {"segment": segment, "row_index": row_index, "reason": reason, "left_out_at": time})])

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
