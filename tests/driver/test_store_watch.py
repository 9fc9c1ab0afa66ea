"""What lay in the store is lost while a run goes on: named, brought back from the snapshot, or made again, and the ledger says which."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from driver import store_watch
from driver.ledger_state import traj_uid_of
from driver.store_watch import StoreWatch
from store import EmbeddedStore, Unavailable
from tests.driver.test_reconcile import Start, begun


class Parted(EmbeddedStore):
    """In pieces that can be lost; `silent`: it does not answer."""

    pieces = frozenset({"host/1"})
    silent = False

    def parts(self) -> frozenset[str]:
        if self.silent:
            raise Unavailable("10.0.0.2 does not answer")
        return self.pieces

    def lose(self, piece: str) -> None:
        """All objects, and another piece in the place of this one."""
        self.free([self.ref(key) for key in self.keys()])
        self.pieces = frozenset({piece})


def watched(start: Start) -> tuple[StoreWatch, Parted, list[int]]:
    store = Parted(start.config.store_directory)
    start.core.store = store
    start.core.gate.store = store
    again: list[int] = []
    return StoreWatch(start.core, start.snapshot, lambda sample: again.append(sample.uid)), store, again


async def test_A1_B2_rows_that_are_lost_are_named_their_trajectories_run_again_and_no_more_is_lost(tmp_path: Path, caplog: Any) -> None:
    start = await begun(tmp_path)
    watch, store, again = watched(start)
    await watch.begin()
    store.lose("host/2")
    await watch._look()
    assert again == [1, 2] and +start.ledger.counts.by_state == {"running": 4, "consumed": 2}
    lost = start.ledger.samples[1].trajectories[0]
    assert lost.reason == "its rows were lost with the store: its memory is not there any more: host/1"
    (loss,) = watch.losses
    assert (loss.again, loss.consumed_without_rows, loss.snapshot, loss.kept) == (3, 2, 0, 0)
    assert "3 ready ones are made again, 2 consumed ones" in caplog.text
    assert start.core.gate.reason is None and start.core.gate.epoch == 1 and "store" not in start.core.waits
    await watch._look()
    assert len(watch.losses) == 1, "it is whole again"
    await start.db.durable()
    assert StoreWatch(start.core, start.snapshot, lambda _: None).losses == [loss], "the ledger says it too"
    watch.close()
    await start.killed()


async def test_A2_rows_that_were_copied_come_back_under_their_keys(tmp_path: Path) -> None:
    start = Start(tmp_path, "store.snapshot_every_s=5")
    start.reconcile()
    start.three_samples()
    await start.snapshot.save()
    watch, store, again = watched(start)
    await watch.begin()
    keys = set(store.keys())
    store.lose("host/2")
    await watch._look()
    assert again == [] and set(store.keys()) == keys and len(keys) == 10
    assert watch.losses[0].snapshot == 5 and start.ledger.counts.by_state == {"running": 1, "ready": 3, "consumed": 2}
    watch.close()
    await start.killed()


async def test_L1_a_store_that_is_cut_off_is_named_and_shut_and_nothing_is_lost_when_it_returns(tmp_path: Path) -> None:
    start = await begun(tmp_path)
    watch, store, again = watched(start)
    await watch.begin()
    store.silent = True
    await watch._look()
    assert (start.core.gate.reason, start.core.waits["store"].kind) == ("10.0.0.2 does not answer", "store")
    putting = asyncio.create_task(start.core.gate.put("run/new", {"x": np.zeros(2)}))
    await asyncio.sleep(0.01)
    assert not putting.done(), "back-pressure"
    store.silent = False
    await watch._look()
    await putting
    assert (again, watch.losses, start.core.gate.epoch) == ([], [], 0) and "store" not in start.core.waits
    watch.close()
    await start.killed()


async def test_L1_what_is_named_when_it_is_asked_for_again_was_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that has just come into reach again is not heard at once."""
    monkeypatch.setattr(store_watch, "CONFIRM_S", 0.0)
    start = await begun(tmp_path)
    watch, store, again = watched(start)
    await watch.begin()
    asked: list[int] = []
    monkeypatch.setattr(store, "parts", lambda: (asked.append(1), store.pieces if len(asked) > 1 else frozenset())[1])
    await watch._look()
    assert len(asked) == 2 and (again, watch.losses, start.core.gate.epoch) == ([], [], 0)
    watch.close()
    await start.killed()


async def test_L2_a_process_that_died_shuts_the_gate_at_once_and_only_its_next_life_opens_it(tmp_path: Path) -> None:
    start = await begun(tmp_path)
    watch, store, _ = watched(start)
    await watch.begin()
    watch.down("store-0", "store-0 (incarnation 1) was killed by SIGKILL after 9 s; its log is …\nlast words")
    assert start.core.gate.reason == "store-0 (incarnation 1) was killed by SIGKILL after 9 s"
    await watch._look()
    assert start.core.gate.reason is not None, "what answers now may be about to end"
    watch.up("store-0")
    store.silent = True
    await watch._look()
    assert "SIGKILL" in (start.core.gate.reason or ""), "that nobody answers yet is no better reason"
    store.silent = False
    await watch._look()
    assert start.core.gate.reason is None
    watch.close()
    await start.killed()


async def test_A1_a_trajectory_that_ended_while_its_rows_were_looked_for_is_left_alone(tmp_path: Path) -> None:
    start = await begun(tmp_path)
    watch, store, again = watched(start)
    await watch.begin()
    store.lose("host/2")
    real = watch._in_thread

    async def meanwhile(call: Any, *arguments: Any) -> Any:
        found = await real(call, *arguments)
        trajectory = start.ledger.trajectory(traj_uid_of(1, 0))
        if call == store.keys and trajectory is not None:  # its rows were wanted until now
            trajectory.state = "finished"
        return found

    watch._in_thread = meanwhile  # type: ignore[method-assign]
    await watch._look()
    assert again == [1, 2] and watch.losses[0].again == 2, "of the three that had been ready"
    watch.close()
    start.db.close()
