"""Whole runs of a mixture of experts, `trainer.routing_replay` on: real service, engine, reward pool and trainer on a tiny Qwen3-MoE.

What the engine chose is in the store and in no other words than its own, and the trainer sends the tokens of every row there again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver.archive import read_metrics
from driver.ledger_load import load
from store import Ref, open_ref
from store.rows import row_of
from tests.rollout.engine.conftest import make_checkpoint
from tests.rollout.engine.test_experts import CHOSEN, LAYERS, SHAPE, routed_by
from tests.service import ServiceUnderTest
from tests.test_endings import run_to_the_end
from tests.test_whole import check_accounts

BATCHES, SAMPLES, N = 8, 4, 4
TOLERANCE = 1e-4  # of an engine's log-prob and the trainer's, at the same weights
SCORER = """
import zlib


def score(response, row):
    return zlib.crc32((row["answer"] + response).encode()) % 5 / 4
"""
SETTINGS = (
    f"stop.batches={BATCHES}",
    f"batch.samples={SAMPLES}",
    f"rollout.n={N}",
    "checkpoint.every=100",  # rows stay until they are committed, for the test to look at
    "trainer.learning_rate=0.001",
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3Moe", tmp_path_factory.mktemp("model"), **SHAPE)


def moved(tmp_path: Path, model: Path) -> tuple[str, ...]:
    """Rewards of any kind, for the weights to move; random ones give the routers no reason to stay."""
    (tmp_path / "scorer.py").write_text(SCORER)
    return (*SETTINGS, f"model.path={model}", f"reward.scorers={{'*': {{function: '{tmp_path}/scorer.py:score'}}}}")


def rows_with_routes(service: ServiceUnderTest) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Of all that the ledger still has: a row's columns, and where its tokens went."""
    connection = sqlite3.connect(f"file:{service.directory}/ledger.sqlite?mode=ro", uri=True)
    try:
        ledger = load(lambda sql, values=(): connection.execute(sql, values).fetchall())
    finally:
        connection.close()
    found = []
    for leaf in (leaf for sample in ledger.samples.values() for trajectory in sample.trajectories for leaf in trajectory.leaves):
        if leaf.extras is not None:
            with open_ref(Ref.from_wire(leaf.rollout)) as lease, open_ref(Ref.from_wire(leaf.extras)) as extras:
                columns = {name: column.copy() for name, column in row_of(lease, leaf.row).items()}
                found.append((columns, extras["routed_experts"].copy()))
    return found


def test_A1_A2_B1_a_run_with_replay_trains_every_row_the_way_it_was_sampled_and_leaves_nothing(tmp_path: Path, model: Path) -> None:
    """It is killed on the way: what it finds again has its routing, too."""
    service = ServiceUnderTest(tmp_path / "run", *moved(tmp_path, model), "trainer.routing_replay=true", "staleness.bound=2")
    try:
        service.up()
        assert service.submit().status_code == 201
        service.wait(lambda s: s["trained_version"] >= 4, "four batches")
        service.kill()
        before = list(read_metrics(service.directory))
        kept = rows_with_routes(service)
        service.up()
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        check_accounts(service, status)
        assert not status["trajectories"]["discarded"] and service.run("/queues")["store"]["used_bytes"] == 0
    finally:
        service.close()
    expected: Callable[[list[int]], np.ndarray] = routed_by(model)
    first, later = 0, 0
    for columns, routes in kept:
        ids = columns["input_ids"].tolist()
        assert routes.shape == (len(ids) - 1, LAYERS, CHOSEN) and routes.dtype == np.uint8
        same = np.array_equal(np.sort(routes, axis=-1), expected(ids))
        if set(columns["version_spans"][:, 1].tolist()) == {0}:
            assert same, "the first weights' choice, as transformers makes it"
            first += 1
        else:
            later += not same
    assert first >= SAMPLES * N and later > 0, "later weights choose otherwise: replay is not for nothing"
    lines = {line["batch_id"]: line for line in read_metrics(service.directory)}
    assert sorted(lines) == list(range(BATCHES))
    assert all(line["replayed_rows"] + line["unreplayed_rows"] == line["rows"] for line in lines.values())
    print("\nreplayed and not, by batch:", [(line["replayed_rows"], line["unreplayed_rows"]) for line in lines.values()])
    assert sum(line["replayed_rows"] for line in lines.values()) > sum(line["unreplayed_rows"] for line in lines.values())
    gaps = [line["logprob_gap_max"] for line in (*before, *lines.values()) if line["logprob_gap_max"] is not None]
    assert gaps and max(gaps) < TOLERANCE


def test_M5_replay_keeps_the_ratio_of_moved_weights_from_the_routers_choice(tmp_path: Path, model: Path) -> None:
    """The same rows, bit for bit, with the choice replayed and without. At the weights that sampled them nothing differs; behind the first
    of four optimizer steps a live router sends tokens elsewhere."""
    reports: dict[bool, list[dict[str, Any]]] = {}
    for replay in (True, False):
        directory = tmp_path / str(replay)
        directory.mkdir()
        rows = [{"prompt": f"sort {n} =", "answer": str(n)} for n in range(100, 120)]
        settings = (*moved(directory, model), "rollout.deterministic=true", "staleness.bound=0", "shuffle=false", "stop.batches=2")
        run = run_to_the_end(directory, rows, *settings, "batch.mini_batches=4", f"trainer.routing_replay={json.dumps(replay)}")
        reports[replay] = list(read_metrics(run))
        assert {line["logprob_gap_max"] is not None and line["logprob_gap_max"] < TOLERANCE for line in reports[replay]} == {True}
    (replayed, *_), (live, *_) = reports[True], reports[False]
    assert (replayed["replayed_rows"], replayed["unreplayed_rows"]) == (SAMPLES * N, 0)
    assert live["replayed_rows"] is None and replayed["tokens"] == live["tokens"]
    print("\nkl and largest ratio:", *(f"{one['kl']:.4f} {one['ratio_max']:.2f}" for one in (replayed, live)))
    assert live["kl"] > 1.25 * replayed["kl"] > 0
