"""A start finds the rows of what is ready or consumed in memory, parked, or in the snapshot, and says how many of which."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from driver.config import load_config
from driver.core import Core
from driver.events import BatchAssembled, Found, Leaf, SampleDiscarded, TrajectoryReady
from driver.feed import Feed
from driver.ledger_db import LedgerDB
from driver.ledger_state import traj_uid_of
from driver.prefix_log import PrefixLog
from driver.reconcile import CannotContinue, reconcile
from driver.row_snapshot import RowSnapshot, wanted_keys
from driver.training import rows_present
from store import EmbeddedStore, put_small
from tests.driver.conftest import fields, register

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"
V = "run/0/0/1"


class Start:
    """One start of a driver over a run directory, up to where its loops would begin."""

    def __init__(self, directory: Path, *settings: str) -> None:
        self.config = load_config(CONFIG, [f"run_dir={directory}/run", f"store.directory={directory}/store", *settings])
        self.db = LedgerDB(directory / "run" / "ledger.sqlite")
        self.ledger = self.db.load()
        self.store = EmbeddedStore(self.config.store_directory, self.config.store.capacity_bytes)
        self.core = Core(self.config, self.ledger, self.db, Feed(self.db, seed=0, shuffle=False, passes=1), self.store)
        self.prefixes = PrefixLog(directory / "run" / "prefixes.sqlite", self.db, every_s=2.0, every_tokens=1, verified=lambda _: True)
        self.snapshot = RowSnapshot(directory / "run" / "rows.sqlite", self.core, self.store, self.config.store.snapshot_every_s)
        self.settled: list[int] = []
        self.small_bytes = 0

    def reconcile(self) -> Found | None:
        return reconcile(self.core, self.store, lambda sample: self.settled.append(sample.uid), self.prefixes, self.snapshot)

    def ready(self, uid: int, index: int) -> None:
        name, most_bytes = traj_uid_of(uid, index), self.small_bytes
        refs = [put_small(self.store, f"run/{name}/{hop}", {"x": np.arange(2000.0)}, most_bytes) for hop in ("rollout", "reward")]
        leaf = Leaf(f"{name}a0000l0000", refs[0].to_wire(), refs[1].to_wire(), 12, 5, 1.0, True)
        self.core.apply(TrajectoryReady(traj_uid=name, leaves=(leaf,), reward=1.0, finish_reason="stop", time=2.0))

    def three_samples(self) -> None:
        """One consumed, one ready, one half ready: five trajectories with rows, one that runs and has two tokens logged."""
        for _ in range(3):
            self.core.apply(register(self.ledger))
        for uid, index in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0)):
            self.ready(uid, index)
        self.core.apply(BatchAssembled(batch_id=0, uids=(0,), plan=b"[]", time=3.0))
        buffer, *_ = self.prefixes.turn(traj_uid_of(2, 1), 0, [5], 1.0)
        buffer.asks(V, None)
        buffer.got([7, 8], [-0.5, -0.5], V)

    async def killed(self) -> None:
        await self.db.durable()
        await self.prefixes.flush(everything=True)
        self.db.close()


async def begun(directory: Path, *settings: str) -> Start:
    start = Start(directory, *settings)
    assert start.reconcile() is None, "the first start has found nothing"
    start.three_samples()
    return start


async def test_A1_after_a_kill_the_rows_are_in_memory(tmp_path, caplog):
    await (await begun(tmp_path)).killed()
    again = Start(tmp_path)
    with caplog.at_level(logging.INFO):
        found = again.reconcile()
    assert found == Found(memory=5, resumed=1, resumed_tokens=2)
    assert "5 in memory, 0 parked, 0 from the snapshot; without: 0 ready ones" in caplog.text
    assert "1 go on from 2 logged tokens, 0 from their prompts" in caplog.text
    assert again.settled == [1, 2]
    assert again.ledger.samples[2].trajectories[1].reason == "the driver was restarted"
    await again.db.durable()
    ((number, kept),) = again.db.query("SELECT number, found FROM restarts")
    assert number == again.ledger.restarts == 1 and b'"memory":5' in kept, "the ledger says it too"
    await again.killed()


async def test_A1_after_an_orderly_end_they_were_parked(tmp_path):
    start = await begun(tmp_path)
    start.store.park(start.config.directory / "parked")
    await start.killed()
    again = Start(tmp_path)
    assert again.reconcile() == Found(parked=5, resumed=1, resumed_tokens=2)
    assert len(again.store.keys()) == 10
    await again.killed()


async def test_A1_A2_after_a_host_crash_what_was_copied_comes_back_and_only_the_rest_is_made_again(tmp_path, caplog):
    start = Start(tmp_path, "store.snapshot_every_s=5")
    start.reconcile()
    start.three_samples()
    await start.snapshot.save()
    assert start.snapshot.facts() == start.snapshot.facts() | {"objects": 10, "failure": None, "every_s": 5.0}
    start.core.apply(register(start.ledger))
    start.ready(3, 0)  # after the copy
    before = {key: start.store.encoded(start.store.ref(key)) for key in start.store.keys()}  # noqa: SIM118
    await start.killed()
    start.store.remove()
    again = Start(tmp_path, "store.snapshot_every_s=5")
    found = again.reconcile()
    assert found == Found(snapshot=5, again=1, resumed=1, resumed_tokens=2, from_prompt=2)
    (lost,) = [t for t in again.ledger.samples[3].trajectories if t.reason and "snapshot" in t.reason]
    assert lost.state == "running" and lost.reason == "its rows are in neither memory, parked nor snapshot"
    consumed = again.ledger.samples[0].trajectories[0]
    assert rows_present(again.core, consumed.leaves), "the batch can be replayed"
    for key in again.store.keys():  # noqa: SIM118
        assert again.store.encoded(again.store.ref(key)) == before[key]
    await again.killed()


async def test_A1_without_a_snapshot_all_ready_rows_are_made_again_and_consumed_ones_are_left_to_the_trainer(tmp_path):
    start = await begun(tmp_path)
    await start.killed()
    start.store.remove()
    again = Start(tmp_path)
    assert again.reconcile() == Found(again=3, consumed_without_rows=2, resumed=1, resumed_tokens=2, from_prompt=3)
    assert {t.state for t in again.ledger.samples[0].trajectories} == {"consumed"}
    await again.killed()


async def test_A1_A2_rows_that_ride_in_the_ledger_survive_the_driver_and_the_host_without_a_snapshot(tmp_path, caplog):
    start = Start(tmp_path, "store.snapshot_every_s=5")
    start.reconcile()
    start.small_bytes = 1 << 20
    start.three_samples()
    await start.snapshot.save()
    assert start.store.keys() == [] and start.snapshot.facts() == start.snapshot.facts() | {"objects": 0, "failure": None}
    before = [t.leaves for sample in start.ledger.samples.values() for t in sample.trajectories]
    await start.killed()
    start.store.remove()
    again = Start(tmp_path)
    with caplog.at_level(logging.INFO):
        found = again.reconcile()
    assert found == Found(ledger=5, resumed=1, resumed_tokens=2) and "5 in the ledger, 0 in memory" in caplog.text
    rows = [t.leaves for sample in again.ledger.samples.values() for t in sample.trajectories]
    assert rows == before and sum(map(len, rows)) == 5
    assert all(rows_present(again.core, leaves) for leaves in rows) and not any(leaf.stored for (leaf,) in filter(None, rows))
    again.core.apply(SampleDiscarded(uid=1, reason="no reason", time=4.0))
    await again.db.durable()
    kept = dict(again.db.query("SELECT uid, sum(length(leaves)) FROM trajectories GROUP BY uid"))
    assert kept[1] is None and kept[0] > 2 * 16000, "they go when their trajectory ends"
    await again.killed()


async def test_a_snapshot_turned_off_is_still_used_once(tmp_path):
    start = Start(tmp_path, "store.snapshot_every_s=5")
    start.reconcile()
    start.three_samples()
    await start.snapshot.save()
    await start.killed()
    start.store.remove()
    again = Start(tmp_path)
    found = again.reconcile()
    assert found is not None and found.snapshot == 5 and again.snapshot.facts() is None
    await again.killed()


async def test_W2_a_second_restart_changes_nothing_more(tmp_path):
    await (await begun(tmp_path)).killed()
    second = Start(tmp_path)
    second.reconcile()
    await second.killed()
    third = Start(tmp_path)
    before = fields(third.ledger)
    assert third.reconcile() == Found(memory=5, resumed=1, resumed_tokens=2)
    assert fields(third.ledger) == before | {"restarts": 2}
    await third.killed()


async def test_orphans_are_freed_and_what_is_owned_is_not(tmp_path):
    start = await begun(tmp_path)
    start.store.put("run/s9/rollout", {"x": np.zeros(3)})
    await start.killed()
    again = Start(tmp_path)
    again.reconcile()
    owned = {key for keys in wanted_keys(again.core).values() for key in keys}
    assert set(again.store.keys()) == owned and len(owned) == 10
    await again.killed()


async def test_parked_rows_that_do_not_fit_are_refused_with_the_remedy_and_kept(tmp_path):
    start = await begun(tmp_path)
    parked = start.config.directory / "parked"
    start.store.park(parked)
    await start.killed()
    again = Start(tmp_path)
    again.store = EmbeddedStore(again.config.store_directory, 1 << 20)
    again.store.put("foreign", {"x": np.zeros(1_020_000, np.uint8)})
    with pytest.raises(CannotContinue, match=r"can not be put back.*raise store.capacity_bytes"):
        again.reconcile()
    assert (parked / "parked.tar").exists()
    await again.killed()


async def test_a_copy_that_fails_is_said_once_and_tried_again(tmp_path, caplog):
    start = Start(tmp_path, "store.snapshot_every_s=5")
    start.reconcile()
    start.three_samples()
    file: Any = start.snapshot._file
    pages = file._connection.execute("PRAGMA page_count").fetchone()[0]
    file._connection.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        await start.snapshot.save()
    assert start.snapshot.failure is not None and "free space" in start.snapshot.failure
    assert caplog.text.count("the snapshot of ready rows is behind") == 1
    file._connection.execute("PRAGMA max_page_count = 100000")
    await start.snapshot.save()
    assert start.snapshot.failure is None and start.snapshot.last is not None and start.snapshot.last.held == 10
    await start.killed()


def test_what_is_wanted_is_what_is_ready_or_consumed():
    at = {"size_bytes": 1, "location": "tmpfs:/nowhere"}
    leaf = Leaf("r", {"key": "a"} | at, {"key": "b"} | at, 1, 1, 0.0)
    states = ("running", "ready", "consumed", "finished")
    trajectories = [SimpleNamespace(traj_uid=state, state=state, leaves=(leaf,)) for state in states]
    core: Any = SimpleNamespace(ledger=SimpleNamespace(samples={0: SimpleNamespace(trajectories=trajectories)}))
    assert wanted_keys(core) == {"ready": ["a", "b"], "consumed": ["a", "b"]}
