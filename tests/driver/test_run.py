"""How a run ends when its disk does not take what it should."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from driver.ledger_db import LedgerError
from driver.run import Run, _first_failure
from driver.run_store import RunStore


def ending(directory: Path, *, ended: str | None = None, failure: str | None = None) -> Any:
    sizes = SimpleNamespace(capacity_bytes=1 << 20)
    run_store = RunStore(SimpleNamespace(store_kind="embedded", store_directory=directory / "store", store=sizes))  # type: ignore[arg-type]
    run_store.store.put("run/row", {"x": np.zeros(3)})
    core = SimpleNamespace(ledger=SimpleNamespace(ended=ended), db=SimpleNamespace(failure=failure))
    return SimpleNamespace(core=core, config=SimpleNamespace(directory=directory), run_store=run_store, failure=failure)


def test_W1_rows_that_can_not_be_parked_stay_in_memory_and_that_is_the_runs_failure(tmp_path):
    run = ending(tmp_path)
    (tmp_path / "parked").write_text("in the way")
    Run._keep_rows(run)
    assert run.run_store.store.keys() == ["run/row"] and not run.run_store.gone
    assert "can not be kept" in run.failure and "free space" in run.failure


def test_W1_rows_are_kept_though_the_run_ended_when_the_ledger_could_not_write_that_it_did(tmp_path):
    run = ending(tmp_path, ended="all batches trained", failure="the ledger can not be written")
    Run._keep_rows(run)
    assert (tmp_path / "parked/parked.tar").exists() and not (tmp_path / "store").exists()
    assert run.failure == "the ledger can not be written", "the first reason is the one that is shown"


def test_A1_a_run_that_ended_keeps_nothing(tmp_path):
    run = ending(tmp_path, ended="all batches trained")
    Run._keep_rows(run)
    assert not (tmp_path / "parked").exists() and not (tmp_path / "store").exists() and run.run_store.gone


async def test_W1_a_ledger_that_failed_ends_a_run_that_writes_nothing_just_now():
    run: Any = SimpleNamespace(core=SimpleNamespace(db=SimpleNamespace(failure="the ledger can not be written: disk full")))
    with pytest.raises(LedgerError, match="disk full"):
        await asyncio.wait_for(Run._tick_loop(run), 10.0)


async def test_W1_a_full_disk_under_any_loop_is_said_with_what_to_do(tmp_path):
    async def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    task = asyncio.create_task(full(), name="training")
    await asyncio.wait([task])
    assert _first_failure([task], tmp_path) == (
        f"training: [Errno 28] No space left on device; free space on the disk of {tmp_path} or make it writable, then start again"
    )
