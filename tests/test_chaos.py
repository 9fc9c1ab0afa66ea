"""The kill matrix (`make chaos N=300 SEED=0`): driver, engine, reward service and worker, trainer rank and its warm parent, killed and
stopped at every transition of the ledger and every step of the protocol (docs/recovery.md), and at N random moments.

After each attack A1, A2, A3 and W2 are checked from the ledger on the disk and from the trainer's own log of trained rows; at the end
every trajectory is finished once, nothing is discarded but the rows that are bad on purpose, the store is gone, and, where a checkpoint
of every version was kept, every row is scored again with the weights it names. A line is printed for each attack; attacks come in parts,
each a run of its own, so PART= repeats one of them. Without N and PART a short version runs.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos.accounts import check_end
from tests.chaos.attacks import (
    BOUND,
    EVALUATOR,
    EXPLAINED,
    KILL,
    N_PER_SAMPLE,
    REPAIR_S,
    STOP,
    STOP_FOR_GOOD,
    TERM,
    VICTIMS,
    Cell,
    Chaos,
    cells,
    data,
)
from tests.chaos.points import AFTER, BEFORE, LOST
from tests.fleet import BASE
from tests.rescore import rescore

N = int(os.environ.get("N", "0"))
SEED = int(os.environ.get("SEED", "0"))
PART = os.environ.get("PART")
PART_KILLS = 25
SHORT = 8
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(7200)
ROWS = 24  # so few that a run walks them several times: a row that was solved in one pass is left out of the next


IN_A_MINUTE = [
    Cell("driver", KILL, "BatchAssembled", LOST),
    Cell("engine", KILL, "TrajectoryReady", BEFORE),
    Cell("rank", KILL, "VersionCommitted", BEFORE),
    Cell("worker", STOP_FOR_GOOD),
    Cell("driver", STOP, "BatchApplied", AFTER),
    Cell("reward", KILL, "EvaluationBegan", AFTER),
    Cell("trainer", STOP, "VersionServed", BEFORE),
    Cell("driver", KILL, "EvaluationEnded", AFTER),
    Cell("engine", STOP),
    Cell("driver", KILL),
]


def finish(chaos: Chaos) -> None:
    chaos.drain()
    books = check_end(chaos.run_dir, N_PER_SAMPLE, BOUND, EXPLAINED)
    status = chaos.service.run()
    counted = status["trajectories"]
    assert counted["trained"] + counted["evaluated"] + counted["discarded"] == counted["registered"], counted
    assert counted["registered"] == sum(map(len, books.trajectories.values()))
    assert not chaos.service.store.exists(), "A1: the store holds nothing at rest"
    print(f"{len(books.results())} evaluations, {sum(row[3] for row in books.solved)} rows left out of {len(books.solved)} solved")
    print(f"not reached: {chaos.not_reached}" if chaos.not_reached else "every place was reached", flush=True)


def live_through(chaos: Chaos, attacks: list[Cell], rng: random.Random, *, in_a_row: float = 0.0) -> None:
    """`in_a_row`: how often the next attack does not wait for the repair of the one before."""
    try:
        chaos.start()
        assert chaos.service.submit(data(ROWS)).status_code == 201
        chaos.service.wait(lambda s: s["trained_version"] >= 2, "two batches", REPAIR_S)
        for cell in attacks:
            chaos.attack(cell, wait=rng.random() >= in_a_row)
        chaos.healthy()
        finish(chaos)
    finally:
        chaos.close()


def part_of(cells_: list[Cell], parts: int) -> list[tuple[int, list[Cell]]]:
    return [(part, cells_[part::parts]) for part in range(parts) if PART is None or int(PART) == part]


def at_every_transition() -> list[tuple[int, list[Cell]]]:
    matrix = cells(random.Random(SEED))
    if not N and PART is None:
        return [(0, random.Random(SEED).sample([cell for cell in matrix if cell.how != STOP_FOR_GOOD], SHORT))]
    return part_of(matrix, -(-len(matrix) // PART_KILLS))


def at_random_moments() -> list[tuple[int, list[Cell]]]:
    rng = random.Random(SEED)
    hows = (KILL, KILL, STOP, STOP_FOR_GOOD)
    parts = -(-(N or SHORT) // PART_KILLS)
    attacks = [Cell(rng.choice(victims(number % parts)), rng.choice(hows)) for number in range(N or SHORT)]
    return part_of(attacks, parts)


def victims(part: int) -> tuple[str, ...]:
    """At random moments evaluations run on the run's engines in one part, and on one of their own in the next."""
    return (*VICTIMS, EVALUATOR) if part % 2 else VICTIMS


def test_W1_A1_A2_every_kind_of_process_killed_and_stopped_at_some_transitions_and_at_random(tmp_path: Path) -> None:
    """The matrix in a minute, for every change of the code."""
    rng = random.Random(SEED)
    chaos = Chaos(tmp_path / "it", rng, "checkpoint.every=2", "checkpoint.keep_last=2", evaluators=0)
    live_through(chaos, IN_A_MINUTE, rng, in_a_row=0.5)
    books = chaos.books()
    assert chaos.not_reached == [] and len(books.lines) > 10


@slow
@pytest.mark.parametrize(("part", "attacks"), at_every_transition(), ids=lambda value: value if isinstance(value, int) else "")
def test_W1_A1_A2_killed_at_every_transition_of_the_ledger(tmp_path: Path, part: int, attacks: list[Cell]) -> None:
    rng = random.Random(f"{SEED}/{part}/transitions")
    live_through(Chaos(tmp_path / "it", rng, "checkpoint.every=3", "checkpoint.keep_last=2", evaluators=1), attacks, rng, in_a_row=0.3)


@slow
@pytest.mark.parametrize(("part", "attacks"), at_random_moments(), ids=lambda value: value if isinstance(value, int) else "")
def test_W1_A1_A2_A5_killed_at_random_moments(tmp_path: Path, part: int, attacks: list[Cell]) -> None:
    rng = random.Random(f"{SEED}/{part}/random")
    chaos = Chaos(tmp_path / "it", rng, "checkpoint.every=1", "checkpoint.keep_last=100000", step_s=0.5, evaluators=part % 2)
    live_through(chaos, attacks, rng, in_a_row=0.3)
    found = rescore(chaos.run_dir, BASE)
    print(
        f"{found.rows} rows, {found.tokens} tokens, {found.spans} spans scored again; {found.not_kept} spans of weights that were lost "
        f"before they were saved; largest gap {found.gap_max:.1e}; {found.told_apart} told apart from the neighbouring version"
    )
    assert found.wrong == [], found.wrong[:10]
    assert found.told_apart > found.spans // 4, "the versions are too alike for this to mean something"


@slow
def test_W1_A1_A2_killed_when_the_run_ends(tmp_path: Path) -> None:
    """The last transition of a run comes once: killed before it, in its commit, and after it, the run ends the same."""
    chaos = Chaos(tmp_path / "it", random.Random(SEED), "checkpoint.every=3", evaluators=0)
    try:
        chaos.start()
        assert chaos.service.submit(data(ROWS)).status_code == 201
        chaos.service.wait(lambda s: s["trained_version"] >= 2, "two batches", REPAIR_S)
        chaos.service.http.post(f"{chaos.service.url}/v1/runs/sort-digits/drain")
        for moment in (BEFORE, LOST, AFTER):
            chaos.attack(Cell("driver", KILL, "RunEnded", moment), wait=False)
        chaos.service.wait(lambda s: s["state"] == "finished", "the end", REPAIR_S)
        finish(chaos)
        assert chaos.not_reached == []
    finally:
        chaos.close()


@slow
def test_H6_told_to_end_in_the_middle_of_a_reward_a_push_a_step_and_a_save_it_ends_in_order_and_goes_on(tmp_path: Path) -> None:
    """Within its deadline, with exit status 0 and nothing in memory; what was trained is saved, so nothing is replayed afterwards."""
    rng = random.Random(SEED)
    chaos = Chaos(tmp_path / "it", rng, "checkpoint.every=3", "stop_deadline_s=45", evaluators=0)
    places = ("score", BEFORE), ("set_version", BEFORE), ("account", BEFORE), ("save", BEFORE), ("publish", AFTER), ("archive", AFTER)
    live_through(chaos, [Cell("driver", TERM, point, moment) for point, moment in places], rng)
    assert chaos.not_reached == [] and chaos.books().number("epoch") == 0
