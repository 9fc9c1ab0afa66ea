"""W2 and W6: every row exactly once a pass, over any number of restarts and appends; a submit twice is one."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from driver.datasets import DatasetError, read_rows
from driver.feed import Feed, FeedError
from driver.ledger_db import LedgerDB


def rows(*names: str):
    return read_rows("".join(json.dumps({"prompt": name, "answer": ""}) + "\n" for name in names).encode())


def feed_of(db: LedgerDB, **more) -> Feed:
    return Feed(db, **({"seed": 1, "shuffle": True, "passes": 1} | more))


@pytest.fixture
def db(tmp_path):
    made = LedgerDB(tmp_path / "ledger.sqlite")
    yield made
    made.close()


def walk(feed: Feed, cursor=(0, 0, 0), at_most: int = 1000):
    """Register everything there is; returns the prompts and the cursor after."""
    seen = []
    while (place := feed.next_place(cursor)) is not None and len(seen) < at_most:
        seen.append(feed.row(place.segment, place.row_index).prompt)
        cursor = (place.pass_index, place.segment, place.position + 1)
    return seen, cursor


async def test_W2_each_prompt_exactly_once_a_pass_over_five_restarts(tmp_path):
    names = [f"p{i}" for i in range(23)]
    db = LedgerDB(tmp_path / "ledger.sqlite")
    dataset, _, _ = await feed_of(db).add(None, "d", rows(*names), None)
    await feed_of(db).close(dataset)
    seen, cursor = [], (0, 0, 0)
    for _ in range(5):
        db.close()
        db = LedgerDB(tmp_path / "ledger.sqlite")
        some, cursor = walk(feed_of(db, passes=2), cursor, at_most=10)
        seen += some
    assert set(Counter(seen).values()) == {2} and len(seen) == 46
    assert Counter(seen[:23]) == Counter(names), "a pass is a permutation"
    assert seen[:23] != seen[23:] and seen[:23] != names, "and another one each time"
    assert feed_of(db, passes=2).exhausted(cursor)
    db.close()


async def test_rows_appended_in_the_middle_of_a_pass_move_nothing(db):
    feed = feed_of(db, passes=None)
    dataset, _, _ = await feed.add(None, "d", rows("a", "b", "c"), None)
    first, cursor = walk(feed, at_most=2)
    await feed.add(dataset, dataset, rows("d", "e"), None)
    rest, cursor = walk(feed, cursor)
    assert Counter(first + rest) == Counter("abcde") and set(rest[1:]) == {"d", "e"}
    assert feed.next_place(cursor) is None and not feed.exhausted(cursor), "open: more may come"
    await feed.close(dataset)
    assert feed.next_place(cursor) is not None, "closed: the next pass begins"


async def test_unshuffled_rows_come_as_they_are(db):
    feed = feed_of(db, shuffle=False)
    await feed.add(None, "d", rows("c", "a", "b"), None)
    assert walk(feed)[0] == ["c", "a", "b"]


async def test_W6_one_idempotency_key_is_one_submit(db):
    feed = feed_of(db)
    first = await feed.add(None, "d", rows("a"), "key")
    assert await feed.add(None, "d", rows("a"), "key") == (first[0], 0, False)
    assert await feed_of(db).add(None, "d", rows("a"), "key") == (first[0], 0, False)
    assert feed.rows == 1


async def test_W6_an_idempotency_key_used_for_another_body_is_refused(db):
    feed = feed_of(db)
    await feed.add(None, "d", rows("a"), "key", "digest of a")
    with pytest.raises(FeedError, match="used for another body"):
        await feed_of(db).add(None, "d", rows("b"), "key", "digest of b")
    assert feed_of(db).rows == 1


async def test_O4_an_upload_that_fails_half_way_leaves_nothing(db):
    def breaking():
        yield from rows("a", "b")
        raise DatasetError("line 3: bad", 3)

    feed = feed_of(db)
    with pytest.raises(DatasetError):
        await feed.add(None, "d", breaking(), None)
    assert feed.datasets() == [] and walk(feed)[0] == []
    await feed.add(None, "d", rows("c"), None)
    assert walk(feed)[0] == ["c"] and walk(feed_of(db))[0] == ["c"]


async def test_a_closed_or_unknown_dataset_takes_no_rows(db):
    feed = feed_of(db)
    dataset, _, _ = await feed.add(None, "d", rows("a"), None)
    await feed.close(dataset)
    await feed.close(dataset)
    with pytest.raises(FeedError, match="closed"):
        await feed.add(dataset, dataset, rows("b"), None)
    with pytest.raises(FeedError, match="known: d000000"):
        await feed.close("nothing")
