"""How datasets come into a run and how their shares are changed: the one way for REST, the configuration and a curriculum.

Promise: a submit is whole or nothing, its share with it; the same idempotency key again changes nothing (W6); a wrong share is refused
before a row is read. A share that was changed counts from the next sample on, is in the ledger before any sample that it chose (they are
written in this order), and is in the list of changes with who decided it and from which sample on.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from driver.datasets import read_rows, scorable
from driver.events import MixChanged
from driver.ledger_rows import Upsert
from driver.mix import Change, FeedError, Walk, check, check_one

if TYPE_CHECKING:
    from driver.core import Core
    from driver.run import Run

log = logging.getLogger("headrace.submits")
SUBMIT, CONFIGURATION, REQUEST, CURRICULUM = "submit", "configuration", "request", "curriculum"
SHOWN_CHANGES = 100


async def add(
    core: Core,
    source: Path,
    *,
    dataset_id: str | None,
    name: str,
    mapping: Mapping[str, str | None] | None = None,
    key: str | None = None,
    digest: str | None = None,
    share: Change | None = None,
    by: str = SUBMIT,
) -> tuple[str, int, bool]:
    """Submit a file as a new dataset (dataset_id None) or append it to one. Returns (dataset_id, rows added, was new)."""
    share = share or Change()
    check_one(share)
    if share.weight == 0 and not any(_weights(core).values()):
        raise FeedError("a first dataset of weight 0 would give no row: leave its weight out, or give it one above 0")

    def with_share(made: str) -> list[Upsert]:
        """Its arrival is in the list of changes too, with whatever share."""
        return core.ledger.apply(MixChanged(changes={made: share}, by=by, time=time.time())) if dataset_id is None else []

    batches = scorable(read_rows(source, mapping=mapping), core.config)
    added = await core.feed.add(dataset_id, name, batches, key, digest, also=with_share)
    core.ring()
    return added


async def change(core: Core, changes: Mapping[str, Change], *, by: str, why: str = "") -> None:
    """Give datasets other shares, from the next sample on; returns when that is durable. FeedError changes nothing."""
    check(core.ledger.cursor, [dataset.dataset_id for dataset in core.feed.datasets()], changes)
    core.apply(MixChanged(changes=dict(changes), by=by, why=why, time=time.time()))
    await core.db.durable()


async def submit_own(run: Run) -> None:
    """The configuration's datasets: submitted and closed at most once, however often the service starts. A share that the configuration
    gives anew holds from here on; one that was changed by a request stays while the configuration is as it was."""
    core = run.core
    said = _said_by_configuration(core)
    for data in run.config.data:
        dataset_id, rows, created = await add(
            core,
            data.path,
            dataset_id=None,
            name=data.called,
            mapping=data.mapping,
            key=f"config:{data.called}",
            share=data.share,
            by=CONFIGURATION,
        )
        await core.feed.close(dataset_id)
        if created:
            log.info("submitted %d rows of %s", rows, data.path)
        elif said.get(dataset_id, Change(1.0, 0)) != data.share:
            await change(core, {dataset_id: data.share}, by=CONFIGURATION)
            log.info("dataset %s has a new share in the configuration: %s", dataset_id, data.share)


def changes(core: Core, last: int = SHOWN_CHANGES) -> list[dict[str, Any]]:
    """The newest changes of shares, oldest first."""
    rows = core.db.query(
        "SELECT number, from_uid, decided_by, why, decided_at, trained_version, changes FROM mixes ORDER BY number DESC LIMIT ?", (last,)
    )
    names = ("number", "from_uid", "by", "why", "time", "trained_version")
    return [dict(zip(names, row, strict=False)) | {"changes": _shown(_decoded(row[-1]))} for row in reversed(rows)]


def digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def digest_in_thread(path: Path) -> str:
    return await asyncio.to_thread(digest_of, path)


def _weights(core: Core) -> dict[str, float]:
    return {dataset.dataset_id: core.ledger.cursor.get(dataset.dataset_id, Walk()).weight for dataset in core.feed.datasets()}


def _said_by_configuration(core: Core) -> dict[str, Change]:
    """What the configuration said last of each dataset; of one that is older than shares, nothing."""
    rows = core.db.query("SELECT changes FROM mixes WHERE decided_by = ? ORDER BY number", (CONFIGURATION,))
    return {dataset_id: said for (stored,) in rows for dataset_id, said in _decoded(stored).items()}


def _decoded(stored: bytes) -> dict[str, Change]:
    return msgspec.json.decode(stored, type=dict[str, Change])


def _shown(changed: Mapping[str, Change]) -> dict[str, dict[str, Any]]:
    return {
        dataset_id: {name: value for name, value in (("weight", each.weight), ("priority", each.priority)) if value is not None}
        | ({"epochs": each.passes} if each.own_passes else {})
        for dataset_id, each in changed.items()
    }
