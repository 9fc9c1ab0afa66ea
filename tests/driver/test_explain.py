"""`headrace explain`: the numbers of a plan, the sentence that says what bounds it, and what is said when there is none."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from typer.testing import CliRunner

from driver.balance import PlanRow, Terms, deal
from driver.cli import app as command_line
from driver.events import BatchApplied, BatchUnmade, VersionCommitted
from driver.explain import binds, explain, waited
from driver.row_cost import RowCost
from driver.service import create_app
from driver.training import Training
from reward.wire import Job, Result
from tests.driver.test_holds import Engine, Lab

GIANT = PlanRow("giant", 3, 4000)


def same(count: int, length: int = 100) -> list[PlanRow]:
    return [PlanRow(f"r{i:03d}", i, length) for i in range(count)]


def said(rows: list[PlanRow], terms: Terms) -> tuple[float, str, str]:
    shares = deal(rows, terms)
    work, count = binds(shares, terms)
    return explain(shares, terms)["imbalance"], work, count


def test_ranks_that_meet_at_the_end_wait_for_the_most_work_others_for_the_heaviest_at_each_index():
    work = [[5.0, 1.0], [2.0, 2.0], []]
    assert waited(work, even=False) == 6.0 and waited(work, even=True) == 7.0
    assert waited([[], []], even=False) == waited([[], []], even=True) == 0.0


def test_the_numbers_are_those_of_the_rows():
    terms = Terms(2, 256, RowCost(attention=1 / 100), unit=8)
    made = explain(deal([PlanRow("a", 7, 100), PlanRow("b", 8, 12)], terms), terms)
    assert (made["rows"], made["tokens"], made["work"]) == (2, 104 + 16, 104 + 104**2 / 100 + 16 + 16**2 / 100)
    first = made["ranks"][0]["micro_batches"][0]
    assert first["rows"] == [{"row_id": "a", "uid": 7, "tokens": 100, "work": 104 + 104**2 / 100}]
    assert first["of_budget"] == 104 / 256 and made["imbalance"] == pytest.approx(first["work"] / made["work"] * 2)
    assert sum(rank["of_mean"] for rank in made["ranks"]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("rows", "terms", "words"),
    [
        (same(64), Terms(4, 800), ["nothing binds"]),
        (same(3), Terms(4, 800), ["3 rows are fewer than 4 ranks", "1 have none", "raise batch.samples"]),
        ([GIANT, *same(4)], Terms(2, 4096), ["row giant of sample 3 (4000 tokens) alone is 1.82 of a rank's mean share"]),
        ([GIANT, *same(4)], Terms(2, 4096, even=True), ["row giant", "with trainer.ep the other ranks wait for it"]),
        (same(5), Terms(4, 800), ["5 rows on 4 ranks are too few"]),
    ],
)
def test_N5_what_keeps_the_work_from_being_even_is_said(rows, terms, words):
    imbalance, work, _ = said(rows, terms)
    assert all(part in work for part in words), work
    assert (imbalance < 1.01) == ("nothing binds" in work)


def test_N5_what_the_number_of_micro_batches_comes_from_is_said():
    assert said(same(8, 7), Terms(1, 8))[2] == "micro-batches: 8 with rows; batch.micro_batch_tokens (8) needs at least 8"
    above = said([GIANT, *same(4)], Terms(2, 800, long_rows="alone"))[2]
    assert "2 with rows" in above and "1 of them for rows above it, which are alone" in above
    empty = said(same(3), Terms(2, 100, even=True))[2]
    assert "1 empty ones, because with trainer.ep all ranks run as many" in empty
    assert "and 4 ranks at least 4" in said(same(8, 10), Terms(4, 800))[2]


def test_a_mini_batch_without_rows_says_to_look_at_the_rewards():
    assert "no row has an advantage" in explain([[], []], Terms(2, 64))["binds"][0]


class HalfRight:
    """Every other leaf is right: every group has an advantage."""

    async def score(self, jobs: list[Job], deadline_s: float) -> list[Result]:
        return [Result(leaf_id=job.leaf_id, ok=True, score=float(job.leaf_id.partition("t")[2][3] in "02")) for job in jobs]


@pytest.fixture
async def lab(tmp_path):
    made = Lab(tmp_path, "batch.samples=2", "batch.mini_batches=2", "trainer.dp=2", "stop.batches=20", "staleness.bound=3")
    made.scoring.attach(HalfRight())  # type: ignore[arg-type]
    await made.start(Engine(slow=set()), rows=4)
    await made.until(lambda: sum(s.settled for s in made.core.ledger.live()) >= 4, "two batches of two samples")
    yield made
    await made.close()


def assembled(lab: Lab, terms: Terms) -> int:
    nothing: Any = None
    training = Training(
        lab.core, nothing, canary_ids=[], on_snapshot=nothing, on_applied=nothing, archive=nothing, on_running_again=nothing,
        replace=nothing, holds=lab.holds, terms=terms,
    )  # fmt: skip
    batch_id = training._assemble()
    assert batch_id is not None
    return batch_id


async def asked(lab: Lab, terms: Terms, *argv: str) -> Any:
    """What the command line prints, of a service on this lab's run."""
    run = SimpleNamespace(core=lab.core, config=lab.core.config, terms=terms)
    app = create_app(SimpleNamespace(runs={"sort-digits": run}, waiting={}), token=None, loopback=True, shutdown=lambda: None)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    try:
        await lab.until(lambda: server.started, "the service answers")
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        flags = ["explain", *argv, "--url", url, "--run", "sort-digits"]
        return await asyncio.to_thread(lambda: CliRunner().invoke(command_line, flags))
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 60)


async def test_the_command_prints_who_got_what_as_long_as_the_plan_is_kept(lab):
    terms = Terms(2, 256, RowCost(attention=1 / 100))
    batch_id = assembled(lab, terms)
    done = await asked(lab, terms, str(batch_id))
    assert done.exit_code == 0, done.output
    assert "batch 0 (assembled): 2 samples, 8 rows, 0 of them without an advantage" in done.output
    assert "mini-batch 0: " in done.output and "mini-batch 1: " in done.output and "micro-batches: " in done.output
    uids = [uid for batch in lab.core.ledger.batches.values() for uid in batch.uids]
    assert all(f"{uid}×2" in done.output for uid in uids), "two of its four rows on each rank"
    by_row = await asked(lab, terms, str(batch_id), "--rows")
    leaves = [leaf.row_id for uid in uids for t in lab.core.ledger.samples[uid].trajectories for leaf in t.leaves]
    assert all(by_row.output.count(row_id) == 1 for row_id in leaves)
    assert '"imbalance"' in (await asked(lab, terms, str(batch_id), "--json")).output


async def test_a_batch_that_is_not_there_or_committed_is_said_with_the_remedy(lab):
    terms = Terms(2, 256)
    assembled(lab, terms)
    assembled(lab, terms)
    lab.core.apply(BatchApplied(batch_id=0, epoch=0, skipped=None, report=b"{}", time=1.0))
    lab.core.apply(VersionCommitted(version=1, checkpoint="x", time=1.0))
    lab.core.apply(BatchUnmade(batch_id=1, lost=frozenset()))
    await lab.core.db.durable()
    gone = await asked(lab, terms, "0")
    assert gone.exit_code == 1 and "the plan of batch 0 went" in gone.stderr and "checkpoint.every (20)" in gone.stderr
    for number in ("1", "7"):
        unknown = await asked(lab, terms, number)
        assert unknown.exit_code == 1 and f"has no batch {number} yet, the next one is 1; kept now: none" in unknown.stderr
    assert (await asked(lab, terms, "--", "-1")).exit_code == 2
