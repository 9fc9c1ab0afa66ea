"""A start reads what is in flight and the counters, however much has ended; a check on request counts everything again."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.ledger import LIVE_BATCHES, P, Player, fill
from driver import ledger_load
from driver.cli import app
from driver.ledger_db import LedgerDB, LedgerError
from driver.ledger_load import check
from driver.observe import _page_sql
from trainer import checkpoints


def ledger_of(path: Path, samples: int, live: int) -> Path:
    fill(path, samples * P, n=2)
    db = LedgerDB(path)
    player = Player(db)
    for _ in range(live):
        player.register()
    player.finish_generation(samples * P)
    db.close()
    return path


def steps_of(path: Path, *queries: tuple[str, tuple[object, ...]]) -> int:
    """Virtual machine steps, in hundreds, that SQLite takes for the queries, or for a start when none are given."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        connection.set_progress_handler(step, 100)

        def query(sql: str, parameters: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
            return connection.execute(sql, parameters).fetchall()

        if not queries:
            ledger_load.load(query)
        for sql, parameters in queries:
            query(sql, parameters)
    connection.close()
    return steps


def test_a_start_takes_as_many_steps_on_20_times_as_many_finished_samples(tmp_path):
    small, large = (ledger_of(tmp_path / str(size) / "ledger.sqlite", size, live=40) for size in (2, 40))
    assert steps_of(large) <= 1.2 * steps_of(small) + 2
    assert check(large).well


def test_a_start_asks_as_many_queries_for_400_live_samples_as_for_4(tmp_path):
    asked = []
    for live in (4, 400):
        path = ledger_of(tmp_path / str(live) / "ledger.sqlite", 2, live)
        connection = sqlite3.connect(path)
        statements: list[str] = []
        connection.set_trace_callback(statements.append)
        ledger = ledger_load.load(lambda sql, parameters=(), connection=connection: connection.execute(sql, parameters).fetchall())
        connection.close()
        assert len(ledger.samples) == live
        asked.append(len(statements))
    assert asked[0] == asked[1]


def test_a_page_of_what_is_in_flight_or_was_discarded_takes_as_many_steps_on_20_times_as_many_finished_samples(tmp_path):
    small, large = (ledger_of(tmp_path / str(size) / "ledger.sqlite", size, live=10) for size in (5, 100))
    for state, outcome in (("running", None), ("ready", None), (None, "discarded"), ("finished", "evaluated")):
        page = (_page_sql(state, outcome), (-1, -1, -1, 4))
        assert steps_of(large, page) <= 1.2 * steps_of(small, page) + 2, (state, outcome)


def test_pages_by_state_and_outcome_hold_what_they_say(tmp_path):
    path = ledger_of(tmp_path / "ledger.sqlite", 2, live=3)
    with sqlite3.connect(path) as connection:
        everything = connection.execute(_page_sql(None, None), (-1, -1, -1, 10_000)).fetchall()
        for state in (None, "running", "ready", "consumed", "finished"):
            for outcome in (None, "trained", "evaluated", "discarded"):
                wanted = [row for row in everything if state in (None, row[2]) and outcome in (None, row[3])]
                assert connection.execute(_page_sql(state, outcome), (-1, -1, -1, 10_000)).fetchall() == wanted, (state, outcome)
                after = wanted[: len(wanted) // 2]
                if after:
                    at = after[-1][:2]
                    rest = connection.execute(_page_sql(state, outcome), (at[0], *at, 10_000)).fetchall()
                    assert rest == wanted[len(after) :], (state, outcome)
    connection.close()


ANEW, GO_ON = "begin a new run from", "can go on"
WRONG = {
    "UPDATE counters SET value = value - 1 WHERE name = 'trained'": ("outcome trained is counted", ANEW),
    "UPDATE counters SET value = value + 3 WHERE kind = 'staleness' AND name = '1'": ("staleness 1 is counted", GO_ON),
    "UPDATE trajectories SET outcome = NULL WHERE uid = 7": ("finished without an outcome", "archive/*.parquet"),
    "UPDATE samples SET over = 0 WHERE uid = 5": ("1 samples are not over and all their trajectories are finished", ANEW),
    "UPDATE samples SET batch_id = 90, over = 1 WHERE uid = 5": ("after their deadline", "report it"),
    "DELETE FROM trajectories WHERE uid = 3 AND idx = 0": ("is counted", ANEW),
    "UPDATE counters SET value = value + 1 WHERE name = 'running'": ("are counted as running", "headrace up refuses such a ledger"),
}


@pytest.mark.parametrize("damage", WRONG)
def test_A1_A3_the_check_counts_the_rows_again_and_says_what_is_wrong(tmp_path, damage):
    path = ledger_of(tmp_path / "ledger.sqlite", 2, live=3)
    runner = CliRunner()
    well = runner.invoke(app, ["ledger", "check", str(tmp_path)])
    assert well.exit_code == 0 and f"{2 * P + 3} samples" in well.output and "is well" in well.output
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    connection.close()
    found = runner.invoke(app, ["ledger", "check", str(tmp_path)])
    words, remedy = WRONG[damage]
    assert found.exit_code == 1 and words in found.output and "is not well" in found.output
    lines = [line for line in found.output.splitlines() if line.startswith("remedy ")]
    assert any(remedy in line for line in lines) and len(lines) == len(set(lines)), found.output
    assert "it has no whole checkpoint" in found.output or remedy != ANEW
    made = checkpoints.publish(checkpoints.begin(tmp_path / "checkpoints"), 2, 0, {"tp": 1}, {"torch": "", "megatron": ""})
    again = runner.invoke(app, ["ledger", "check", str(tmp_path)])
    assert f"--set model.path={made.path}/hf" in again.output or remedy != ANEW


def test_the_check_reads_beside_a_driver_that_writes(tmp_path):
    path = ledger_of(tmp_path / "ledger.sqlite", 2, live=3)
    db = LedgerDB(path)
    player = Player(db)
    player.register()
    assert check(path).well
    db.close()
    assert check(path).samples == 2 * P + 4


def test_the_check_says_that_there_is_no_ledger_or_that_it_is_none(tmp_path):
    runner = CliRunner()
    assert "there is no ledger" in runner.invoke(app, ["ledger", "check", str(tmp_path)]).output
    (tmp_path / "ledger.sqlite").write_bytes(b"no database, but long enough to be looked at" * 100)
    none = runner.invoke(app, ["ledger", "check", str(tmp_path)])
    assert none.exit_code == 1 and "can not be read" in none.output


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE counters SET value = value + 1 WHERE kind = 'state' AND name = 'running'",
        "UPDATE counters SET value = value + 1 WHERE kind = 'outcome' AND name = 'trained'",
        f"DELETE FROM trajectories WHERE uid = {2 * P + 1} AND idx = 0",
        f"UPDATE trajectories SET leaves = x'7b' WHERE uid = {2 * P}",
        "UPDATE meta SET value = x'7b' WHERE name = 'cursor'",
    ],
)
def test_A1_a_start_refuses_a_ledger_that_does_not_balance(tmp_path, damage):
    path = ledger_of(tmp_path / "ledger.sqlite", 2, live=LIVE_BATCHES)
    with sqlite3.connect(path) as connection:
        connection.execute(damage)
    connection.close()
    db = LedgerDB(path)
    with pytest.raises(LedgerError, match=r"(does not balance|can not be read).*restore a copy"):
        db.load()
    db.close()
