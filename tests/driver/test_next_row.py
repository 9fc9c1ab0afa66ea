"""A row that can never be sampled is left out once, for the life of the run, and is said to be; the others come as if it were not there."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driver import observe_data
from driver.feed import Feed
from driver.ledger_db import LedgerDB
from tests.driver.feeding import Fed, Lab, rows

LONG = "1" * 400
WHY = "the prompt is too long: it has 400 tokens, and rollout.context_length (32) leaves room for 30"


@pytest.fixture
def lab(tmp_path):
    made = Lab(tmp_path, "rollout.context_length=32", "rollout.sampling.max_new_tokens=8")
    made.dispatch._room = lambda: 1  # type: ignore[method-assign]
    made.dispatch._store_free_bytes = lambda reserved: 1 << 40  # type: ignore[method-assign]
    yield made
    made.close()


async def given_rows(lab: Lab, *prompts: str, close: bool = True) -> str:
    dataset_id, _, _ = await lab.core.feed.add(None, "d", rows(*prompts), None)
    if close:
        await lab.core.feed.close(dataset_id)
    return dataset_id


def sampled(lab: Lab, count: int) -> list[tuple[int, int]]:
    """(pass, row) of the next samples, each answered at once."""
    found = []
    for _ in range(count):
        sample = lab.core.ledger.samples[lab.sample(1.0, 0.0)]
        found.append((sample.pass_index, sample.row_index))
    return found


async def test_H3_a_prompt_that_can_never_fit_is_left_out_once_for_the_life_of_the_run(lab, tmp_path, caplog):
    await given_rows(lab, "a", LONG, "b")
    with caplog.at_level(logging.WARNING, "headrace.next_row"):
        assert sampled(lab, 6) == [(0, 0), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2)], "the data is walked for ever"
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("row 2 of dataset d000000 (segment 0) is left out of every pass: " + WHY)
    ledger = lab.core.ledger
    assert ledger.counts.by_outcome["discarded"] == 0 and ledger.next_uid == 6, "it was never registered"
    await lab.db.durable()
    assert lab.db.query("SELECT segment, row_index, reason FROM left_out_rows") == [(0, 1, WHY)]
    page = observe_data.left_out(lab, "d000000", (-1, -1), 100)  # type: ignore[arg-type]
    assert [(item["row_index"], item["why"]) for item in page["items"]] == [(1, WHY)] and page["next"] is None
    lab.db.close()
    again = LedgerDB(tmp_path / "ledger.sqlite")
    feed, ledger = Feed(again, seed=0, shuffle=False, passes=None), again.load()
    place = feed.next_place(ledger.cursor)
    assert (place.pass_index, place.row_index) == (3, 0) and feed.left_out("d000000") == 1
    ledger.cursor["d000000"].position = 1
    assert feed.next_place(ledger.cursor).row_index == 2, "a restart knows it by the ledger, and tokenizes nothing"
    again.close()
    lab.db = LedgerDB(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("close", [True, False])
async def test_H3_a_run_of_which_no_prompt_fits_says_so_and_does_not_spin(lab, close):
    await given_rows(lab, LONG, LONG, LONG, close=close)
    assert lab.dispatch._next() is None
    feed, wait = lab.core.feed, lab.core.waits["rollout"]
    assert feed.next_place(lab.core.ledger.cursor) is None and feed.exhausted(lab.core.ledger.cursor) == close
    assert wait.reason.startswith("none of the 3 rows can be used: all are left out, the last because the prompt is too long")
    assert wait.kind == ("input over" if close else "data")
    written = lab.db.written
    for _ in range(50):
        assert lab.dispatch._next() is None
    assert lab.db.written == written, "and writes no line more"


async def test_a_prompt_is_sent_when_it_leaves_room_for_one_token_and_one_token_more_is_left_out(lab):
    await given_rows(lab, "1" * 30, "1" * 31)
    sample, _ = lab.dispatch._next()
    assert sample.row_index == 0 and len(lab.dispatch._prompts[sample.uid]) == 30
    assert lab.dispatch.next_row.look() and lab.core.feed.left_out("d000000") == 1


async def test_a_prompt_that_can_not_be_tokenized_is_left_out_too(lab):
    dataset_id = await given_rows(lab, "a", "b")
    lab.dispatch.next_row._tokenizer = type("NoTemplate", (), {"prompt_ids": staticmethod(refuse)})()
    assert lab.dispatch._next() is None and lab.core.feed.left_out(dataset_id) == 2


def refuse(*_: object, **__: object) -> list[int]:
    raise ValueError("no chat template")


async def test_many_rows_that_do_not_fit_let_other_loops_have_their_turn(lab, monkeypatch):
    monkeypatch.setattr("driver.next_row.AT_ONCE_S", 60.0)
    await given_rows(lab, *[LONG] * 150, "a")
    assert not lab.dispatch.next_row.look(), "not all at once"
    assert lab.core.feed.left_out("d000000") == 100
    assert lab.dispatch.next_row.look() and lab.core.feed.left_out("d000000") == 150


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
async def test_W2_what_is_left_out_changes_neither_which_other_rows_come_nor_their_order(tmp_path_factory, sizes, data):
    path = tmp_path_factory.mktemp("fed")
    fed, whole = Fed(path / "a.sqlite", passes=3), Fed(path / "b.sqlite", passes=3)
    try:
        out = set()
        for segment, size in enumerate(sizes):
            names = [f"{segment}-{row}" for row in range(size)]
            for each in (fed, whole):
                await each.add(*names, to="d000000" if segment else None)
            out |= {(segment, row) for row in data.draw(st.sets(st.integers(0, size - 1)))}
        for each in (fed, whole):
            await each.feed.close("d000000")
        for segment, row in sorted(out):
            fed.feed.leave_out(segment, row, "too long", 1.0)
        seen = []
        while more := fed.register(data.draw(st.integers(1, 4))):
            seen += more
            if data.draw(st.booleans()):
                fed.restart()
        assert seen == [name for name in whole.register() if tuple(map(int, name.split("-"))) not in out]
        assert fed.exhausted
    finally:
        fed.db.close()
        whole.db.close()


async def test_O3_long_prompts_that_do_not_fit_do_not_hold_the_other_loops(lab, monkeypatch):
    await given_rows(lab, *[LONG] * 5, "a")
    clock = iter(range(1000))
    monkeypatch.setattr("driver.next_row.time.monotonic", lambda: next(clock))
    looks = [lab.dispatch.next_row.look() for _ in range(6)]
    assert looks == [False] * 5 + [True]
