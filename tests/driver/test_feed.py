"""W2 and W6: every row exactly once a pass, over any number of restarts, appends and changed shares; a submit twice is one."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver.datasets import DatasetError
from driver.events import MixChanged, RowSolved
from driver.feed import Feed, FeedError, shuffled
from driver.feed_tables import load_walks
from driver.ledger import Ledger
from driver.ledger_db import LedgerDB
from driver.ledger_rows import Upsert
from driver.mix import Change, Walk
from tests.driver.feeding import Fed, rows


@pytest.fixture
def fed(tmp_path):
    made = Fed(tmp_path / "ledger.sqlite")
    yield made
    made.db.close()


def again(fed: Fed) -> Feed:
    return Feed(fed.db, seed=1, shuffle=True, passes=1)


async def test_W2_each_prompt_exactly_once_a_pass_over_five_restarts(tmp_path):
    names = [f"p{i}" for i in range(23)]
    fed = Fed(tmp_path / "ledger.sqlite", passes=2)
    await fed.feed.close(await fed.add(*names))
    seen = []
    for _ in range(5):
        fed.restart()
        seen += fed.register(10)
    assert set(Counter(seen).values()) == {2} and len(seen) == 46
    assert Counter(seen[:23]) == Counter(names), "a pass is a permutation"
    assert seen[:23] != seen[23:] and seen[:23] != names, "and another one each time"
    assert fed.exhausted
    fed.db.close()


async def test_rows_appended_in_the_middle_of_a_pass_move_nothing(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite", passes=None)
    dataset = await fed.add("a", "b", "c")
    first = fed.register(2)
    await fed.add("d", "e", to=dataset)
    rest = fed.register()
    assert Counter(first + rest) == Counter("abcde") and set(rest[1:]) == {"d", "e"}
    assert fed.feed.next_place(fed.ledger.cursor) is None and not fed.exhausted, "open: more may come"
    await fed.feed.close(dataset)
    assert fed.feed.next_place(fed.ledger.cursor) is not None, "closed: the next pass begins"
    fed.db.close()


def test_W2_the_order_of_a_pass_is_the_one_that_ledgers_in_the_middle_of_it_were_written_with():
    assert list(shuffled(7, 1, 2, 10)) == [1, 8, 4, 2, 6, 0, 9, 3, 7, 5]


async def test_unshuffled_rows_come_as_they_are(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite", shuffle=False)
    await fed.add("c", "a", "b")
    assert fed.register() == ["c", "a", "b"]
    fed.db.close()


# ---- several datasets ------------------------------------------------------------------------------------------------------


async def test_datasets_are_mixed_by_weight_and_each_has_its_own_passes(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite", shuffle=False)
    many = await fed.add(*[f"a{i}" for i in range(9)], share=Change(3.0))
    few = await fed.add("b0", "b1", "b2", share=Change(1.0, passes=2, own_passes=True))
    for dataset in (many, few):
        await fed.feed.close(dataset)
    assert fed.feed.shares(fed.ledger.cursor) == {many: 0.75, few: 0.25}
    assert fed.register(8) == ["a0", "a1", "b0", "a2", "a3", "a4", "b1", "a5"]
    assert fed.register() == ["a6", "a7", "b2", "a8", "b0", "b1", "b2"] and fed.exhausted
    fed.db.close()


async def test_a_priority_chooses_only_the_next_new_sample_and_holds_while_it_has_rows(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite", shuffle=False)
    await fed.add("a0", "a1", "a2", "a3")
    assert fed.register(1) == ["a0"]
    urgent = await fed.add("b0", "b1", share=Change(0.001, 7))
    assert fed.register(3) == ["b0", "b1", "a1"], "it has no more rows, though it is open"
    await fed.add("b2", to=urgent)
    assert fed.register() == ["b2", "a2", "a3"]
    fed.db.close()


async def test_a_dataset_of_weight_0_waits_and_does_not_let_the_run_end(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite")
    a, b = await fed.add("a"), await fed.add("b")
    for dataset in (a, b):
        await fed.feed.close(dataset)
    fed.mix(**{b: 0.0})
    assert fed.register() == ["a"] and fed.feed.weightless(fed.ledger.cursor) == [b] and not fed.exhausted
    fed.mix(**{b: 0.5})
    assert fed.register() == ["b"] and fed.exhausted
    fed.db.close()


async def test_a_share_given_with_a_dataset_is_there_with_its_first_row_after_a_crash(fed):
    dataset = await fed.add("a", share=Change(2.5, -3, None, True))
    fed.restart()  # nothing was registered
    walk = fed.ledger.cursor[dataset]
    assert (walk.weight, walk.priority, walk.passes, walk.own_passes) == (2.5, -3, None, True)
    assert fed.feed.passes(walk) is None and fed.ledger.mixes == 1


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("register"), st.integers(1, 7)),
        st.tuples(st.just("restart"), st.just(0)),
        st.tuples(st.just("append"), st.integers(0, 2)),
        st.tuples(st.just("close"), st.integers(0, 2)),
        st.tuples(st.just("weights"), st.integers(0, 5)),
        st.tuples(st.just("priority"), st.integers(0, 2)),
    ),
    max_size=25,
)
WEIGHTS = [(1.0, 1.0, 1.0), (3.0, 1.0, 0.5), (0.0, 1.0, 7.0), (0.1, 0.2, 0.3), (1e-9, 1.0, 1e9), (1.0, 0.0, 0.0)]


async def play(path: Path, operations: list[tuple[str, int]], *, restarts: bool) -> tuple[list[str], Fed, Counter[str]]:
    """The prompts in order of registration, to the end of all passes; and every row there is."""
    fed = Fed(path, passes=2)
    there: Counter[str] = Counter()
    datasets = []
    for letter in "abc":
        names = [f"{letter}{i}" for i in range(5)]
        there.update(names)
        datasets.append(await fed.add(*names))
    seen: list[str] = []
    for number, (what, argument) in enumerate(operations):
        if what == "register":
            seen += fed.register(argument)
        elif what == "restart" and restarts:
            fed.restart()
        elif what == "append" and not fed.feed.datasets()[argument].closed:
            names = [f"{'abc'[argument]}+{number}.{i}" for i in range(3)]
            there.update(names)
            await fed.add(*names, to=datasets[argument])
        elif what == "close":
            await fed.feed.close(datasets[argument])
        elif what == "weights":
            fed.mix(**dict(zip(datasets, WEIGHTS[argument], strict=True)))
        elif what == "priority":
            fed.db.write(fed.ledger.apply(MixChanged(changes={datasets[argument]: Change(priority=number)}, by="request", time=1.0)))
    for dataset in datasets:
        await fed.feed.close(dataset)
    fed.mix(**dict.fromkeys(datasets, 1.0))
    seen += fed.register()
    return seen, fed, there


@settings(max_examples=25, deadline=None)
@given(OPERATIONS)
def test_W2_any_restarts_appends_and_changed_shares_give_each_row_once_a_pass_and_the_same_walk_as_without_restarts(operations):
    async def both() -> None:
        with tempfile.TemporaryDirectory() as directory:
            seen, fed, there = await play(Path(directory) / "one.sqlite", operations, restarts=True)
            assert fed.exhausted and Counter(seen) == Counter({name: 2 for name in there}), "each row once in each of two passes"
            for letter in "abc":
                own = [name for name in seen if name[0] == letter]
                rows_of_it = sum(name[0] == letter for name in there)
                assert len(set(own[:rows_of_it])) == rows_of_it, "the first pass is whole before the second begins"
            assert sum(walk.registered for walk in fed.ledger.cursor.values()) == len(seen)
            fed.db.close()
            straight, other, _ = await play(Path(directory) / "two.sqlite", operations, restarts=False)
            other.db.close()
            assert straight == seen

    asyncio.run(both())


async def test_W2_the_one_cursor_of_an_older_ledger_is_carried_over(tmp_path):
    """It went through all datasets one after another: those before it are walked in this pass, those behind it are not."""
    fed = Fed(tmp_path / "ledger.sqlite", passes=2)
    for letter in "abc":
        await fed.feed.close(await fed.add(*[f"{letter}{i}" for i in range(4)]))
    fed.db.write([Upsert("meta", {"name": "cursor", "value": b"[0, 1, 3]"})])  # a whole, b but for its last
    await fed.db.durable()
    fed.restart()
    assert {walk.pass_index for walk in fed.ledger.cursor.values()} == {0}
    late = await fed.add("d0", "d1", share=Change(1.0))  # before anything was registered: begins at its beginning all the same
    await fed.feed.close(late)
    fed.restart()
    seen = Counter(fed.register())
    assert seen == Counter({f"a{i}": 1 for i in range(4)} | {f"c{i}": 2 for i in range(4)} | {"d0": 2, "d1": 2} | _of_b(seen))
    assert sum(count for name, count in seen.items() if name[0] == "b") == 1 + 4 and fed.exhausted
    fed.db.close()


async def test_a_ledger_without_the_tables_of_shares_is_read_as_one_in_which_nothing_changed(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite")
    await fed.add("a", "b")
    assert len(fed.register(1)) == 1
    await fed.db.durable()

    def without(sql: str, *more: Any) -> list[tuple[Any, ...]]:
        assert "FROM mixes" not in sql and "FROM solved_rows" not in sql
        return [] if "sqlite_master" in sql else fed.db.query(sql, *more)

    meta = {name: msgspec.json.decode(value) for name, value in fed.db.query("SELECT name, value FROM meta")}
    read = Ledger()
    load_walks(read, meta, without)
    assert read.cursor == fed.ledger.cursor and read.mixes == 0 and read.solved == {}
    fed.db.close()


async def test_datasets_that_another_run_takes_over_keep_their_shares_and_are_walked_from_the_first_row(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite", shuffle=False)
    dataset = await fed.add("a", "b", share=Change(3.0, 2, None, True))
    assert fed.register(1) == ["a"]
    await fed.db.durable()
    other = LedgerDB(tmp_path / "other.sqlite")
    other.take_datasets(tmp_path / "ledger.sqlite")
    other.close()
    fed.db.close()
    taken = Fed(tmp_path / "other.sqlite", shuffle=False)
    assert taken.ledger.cursor == {dataset: Walk(3.0, 2, None, True)} and taken.register(2) == ["a", "b"]
    taken.db.close()


def _of_b(seen: Counter[str]) -> dict[str, int]:
    return {name: count for name, count in seen.items() if name[0] == "b"}


async def test_W2_a_solved_row_is_left_out_of_the_next_pass_only_and_the_account_says_so(tmp_path):
    fed = Fed(tmp_path / "ledger.sqlite", passes=3, shuffle=False)
    await fed.feed.close(await fed.add("a", "b", "c"))
    assert fed.register(3) == ["a", "b", "c"]
    fed.db.write(fed.ledger.apply(RowSolved(uid=1, of=1, time=2.0)))
    fed.restart()
    assert fed.register(2) == ["a", "c"]
    fed.restart()
    assert fed.register() == ["a", "b", "c"] and fed.exhausted
    await fed.db.durable()
    assert fed.db.query("SELECT row_index, pass_index, uid, skipped_at FROM solved_rows") == [(1, 0, 1, 1.0)]
    assert fed.ledger.cursor["d000000"].skipped == 1
    fed.db.close()


# ---- submits -----------------------------------------------------------------------------------------------------------------


async def test_W6_one_idempotency_key_is_one_submit(fed):
    first = await fed.feed.add(None, "d", rows("a"), "key")
    assert await fed.feed.add(None, "d", rows("a"), "key") == (first[0], 0, False)
    assert await again(fed).add(None, "d", rows("a"), "key") == (first[0], 0, False)
    assert fed.feed.rows == 1


async def test_W6_an_idempotency_key_used_for_another_body_is_refused(fed):
    await fed.feed.add(None, "d", rows("a"), "key", "digest of a")
    with pytest.raises(FeedError, match="used for another body"):
        await again(fed).add(None, "d", rows("b"), "key", "digest of b")
    assert again(fed).rows == 1


async def test_W6_an_idempotency_key_of_one_dataset_adds_nothing_to_another_and_says_so(fed):
    first, second = [(await fed.feed.add(None, name, rows(name), name))[0] for name in "ab"]
    await fed.feed.add(first, "a", rows("c"), "key", "digest")
    with pytest.raises(FeedError, match=f"was used for dataset {first}; take a new one for {second}"):
        await again(fed).add(second, "b", rows("c"), "key", "digest")
    assert await again(fed).add(first, "a", rows("c"), "key", "digest") == (first, 0, False)


async def test_W6_a_submit_sent_again_changes_no_share(fed):
    dataset = await fed.add("a", key="key", share=Change(2.0))
    fed.mix(**{dataset: 5.0})
    assert await fed.add("a", key="key", share=Change(2.0)) == dataset
    assert fed.ledger.cursor[dataset].weight == 5.0 and fed.ledger.mixes == 2


async def test_O4_an_upload_that_fails_half_way_leaves_nothing(fed):
    def breaking():
        yield from rows("a", "b")
        raise DatasetError("line 3: bad", 3)

    with pytest.raises(DatasetError):
        await fed.feed.add(None, "d", breaking(), None, also=lambda made: pytest.fail("no share of what is not there"))
    assert fed.feed.datasets() == [] and fed.register() == []
    await fed.add("c")
    assert again(fed).rows == 1 and fed.register() == ["c"]


async def test_a_closed_or_unknown_dataset_takes_no_rows(fed):
    dataset = await fed.add("a")
    await fed.feed.close(dataset)
    await fed.feed.close(dataset)
    with pytest.raises(FeedError, match="closed"):
        await fed.add("b", to=dataset)
    with pytest.raises(FeedError, match="known: d000000"):
        await fed.feed.close("nothing")


async def test_W2_a_dataset_closed_while_rows_for_it_are_read_does_not_get_them(fed):
    """Its next pass may have begun: they would be in one pass and not in the other."""
    dataset = await fed.add("a")

    def slow():
        for batch in rows("b"):
            asyncio.run_coroutine_threadsafe(fed.feed.close(dataset), loop).result()
            yield batch

    loop = asyncio.get_running_loop()
    with pytest.raises(FeedError, match="was closed before these rows were read"):
        await fed.feed.add(dataset, dataset, slow(), None)
    assert fed.feed.rows == 1


async def test_O3_the_task_type_of_a_row_that_was_read_is_known_without_a_look_into_the_database(fed, monkeypatch):
    await fed.add("a", "b", "c")
    segment = fed.feed.next_place(fed.ledger.cursor).segment
    read = fed.feed.row(segment, 0)
    monkeypatch.setattr("driver.feed.TASK_TYPES", 2)
    asked = []
    query = fed.db.query
    monkeypatch.setattr(fed.db, "query", lambda sql, values=(): asked.append(values) or query(sql, values))
    assert fed.feed.task_type(segment, 0) == read.task_type and not asked
    assert [fed.feed.task_type(segment, index) for index in (1, 2)] == [read.task_type] * 2
    assert asked == [(segment, 1), (segment, 2)]
    fed.feed.task_type(segment, 0)
    assert asked[2:] == [(segment, 0)], "only so many are remembered"
