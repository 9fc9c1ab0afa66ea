"""Queues that lose nothing and give nothing twice, whatever dies: against real SQLite."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from driver.planner import Host, make_plan
from driver.roles import MiB, Resources, Role, Stream, Subscription
from driver.stream_db import StreamDB, StreamError
from driver.streams import Latest, Queue, Streams

MARK = Resources(host_memory_bytes=MiB)
CAPACITY, TRIES = 4, 2
OPERATIONS = st.sampled_from(["publish", "take a", "take b", "done", "lost", "back", "crash"])


def graph(readers: tuple[str, ...] = ("a", "b")):
    source = Role("source", "s", MARK, (Stream("x", "queue", capacity=CAPACITY), Stream("v", "latest")), process="source", own=True)
    own = [Role(name, name, MARK, subscribes=(Subscription("x", "queue"),), process=name, own=True) for name in readers]
    return make_plan([source, *own], [Host("a", 8, 100 * MiB)])


@settings(max_examples=40, deadline=None)
@example([("publish", 0), ("take a", 0), ("done", 0), ("crash", 0)])  # done by one reader, and not by the other
@example([("publish", 0), ("take a", 0), ("crash", 0), ("take a", 1), ("lost", 0)])
@given(st.lists(st.tuples(OPERATIONS, st.integers(0, 5)), max_size=60))
def test_A2_each_item_is_done_once_by_each_reader_or_given_up_with_a_reason_through_any_crash(schedule: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory) / "streams.sqlite"
        db, plan = StreamDB(path), graph()
        queue = db.load(plan).queues["x"]
        done: Counter[tuple[str, int]] = Counter()
        held: list[tuple[str, int]] = []
        published = 0

        def finish(reader: str, seq: int, lost: bool) -> None:
            was = queue.readers[reader].given_up
            db._commit(queue.lost(reader, seq, "died", TRIES) if lost else queue.done(reader, seq))
            done[reader, seq] += not lost or queue.readers[reader].given_up > was

        for operation, which in schedule:
            if operation == "publish" and queue.room > 0:
                db._commit(queue.publish({"n": published}))
                published += 1
            elif operation.startswith("take"):
                reader = operation[-1]
                waiting = sorted(queue.readers[reader].todo)
                item = queue.take(reader, f"{reader}-{which}")
                assert (item is None) == (not waiting)
                if item is not None:
                    assert item.seq == waiting[0] and item.value == {"n": item.seq}, "the oldest first"
                    assert (reader, item.seq) not in held, "nobody else is at it"
                    held.append((reader, item.seq))
            elif operation in ("done", "lost") and held:
                finish(*held.pop(which % len(held)), lost=operation == "lost")
            elif operation == "back":
                for reader in "ab":
                    queue.give_back(reader, f"{reader}-{which}")
                held = [(reader, seq) for reader, seq in held if seq in queue.readers[reader].given]
            elif operation == "crash":
                db.close()
                db, held = StreamDB(path), []
                queue = db.load(plan).queues["x"]
            assert 0 <= queue.room <= CAPACITY and max(done.values(), default=1) <= 1
        while any(reader.waiting for reader in queue.readers.values()):
            for name in ("a", "b"):
                if (item := queue.take(name, f"{name}-0")) is not None:
                    held.append((name, item.seq))
            while held:
                finish(*held.pop(), lost=False)
        assert done == Counter({(reader, seq): 1 for reader in "ab" for seq in range(published)})
        assert not queue.items and queue.room == CAPACITY
        db.close()
        for table in ("items", "done"):
            assert sqlite3.connect(path).execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), "nothing is left on disk"


def test_an_item_is_given_up_after_its_tries_and_its_reason_is_kept() -> None:
    queue = Queue(Stream("x", "queue"), ["a"])
    queue.publish({"n": 0})
    for number in range(TRIES):
        item = queue.take("a", "a-0")
        assert item is not None and item.tries == number
        queue.lost("a", item.seq, f"KeyError {number}", TRIES)
    reader = queue.readers["a"]
    assert (reader.done, reader.given_up, reader.last_reason, queue.room) == (0, 1, "KeyError 1", queue.stream.capacity)
    assert queue.take("a", "a-0") is None


def test_what_a_publisher_has_numbered_is_published_once_however_often_it_comes() -> None:
    queue = Queue(Stream("x", "queue"), ["a"])
    assert queue.publish("batch 0", key=0) and queue.publish("batch 1", key=1)
    assert not queue.publish("batch 0 again, after a replay", key=0) and not queue.publish("batch 1 again", key=1)
    assert queue.next_seq == 2 and queue.publish("batch 4", key=4)


def test_a_reader_that_is_new_reads_what_comes_from_now_on_and_one_that_left_holds_nothing(tmp_path: Path) -> None:
    db = StreamDB(tmp_path / "s.sqlite")
    queue = db.load(graph(("a",))).queues["x"]
    for number in range(2):
        db._commit(queue.publish({"n": number}))
    db.close()
    db = StreamDB(tmp_path / "s.sqlite")
    both = db.load(graph(("a", "b"))).queues["x"]
    assert both.readers["a"].waiting == 2 and both.readers["b"].waiting == 0
    db._commit(both.publish({"n": 2}))
    assert both.readers["b"].waiting == 1
    db.close()
    db = StreamDB(tmp_path / "s.sqlite")
    alone = db.load(graph(("b",))).queues["x"]
    assert sorted(alone.items) == [2] and alone.room == CAPACITY - 1
    db.close()


def test_a_full_stream_says_who_is_behind_and_what_never_fits_is_no_wait() -> None:
    queue = Queue(Stream("x", "queue", capacity=2), ["a", "slow"])
    streams = Streams({"x": queue}, {"v": Latest(Stream("v", "latest"))})
    assert streams.fits([("x", 1), ("x", 2), ("v", 3)]) is None
    for number in range(2):
        queue.publish(number)
    item = queue.take("a", "a-0")
    assert item is not None
    queue.done("a", item.seq)
    assert streams.fits([("x", 1)]) == "stream x is full (2 of 2): slow is behind"
    assert streams.fits([("v", 1)]) is None, "reading and writing a latest never waits"
    assert "3 items for x at once" in str(streams.too_many([("x", 1)] * 3))


def test_the_newest_value_has_a_version_and_the_same_again_is_no_news(tmp_path: Path) -> None:
    db = StreamDB(tmp_path / "s.sqlite")
    latest = db.load(graph()).latest["v"]
    for value, version in (({"n": 1}, 1), ({"n": 1}, 1), ({"n": 2}, 2)):
        db._commit(latest.publish(value))
        assert latest.version == version
    db.close()
    db = StreamDB(tmp_path / "s.sqlite")
    assert db.load(graph()).latest["v"].value == {"n": 2}
    db.close()


async def test_a_disk_that_takes_nothing_is_said_and_half_of_a_commit_is_never_there(tmp_path: Path) -> None:
    db = StreamDB(tmp_path / "s.sqlite")
    queue = db.load(graph()).queues["x"]
    writes = queue.publish({"n": 0})
    with pytest.raises(StreamError, match="free space or make it writable"):
        await db.commit([*writes, ("counted", ("x", None, 0, 0, 0, None))])
    assert sqlite3.connect(tmp_path / "s.sqlite").execute("SELECT count(*) FROM items").fetchone() == (0,)
    db.close()
