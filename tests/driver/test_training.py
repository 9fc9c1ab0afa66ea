"""What the trainer says it did is what the ledger takes over after a crash between the two."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from driver.events import BatchApplied, BatchAssembled
from driver.ledger import Ledger
from driver.store_gate import StoreGate
from driver.training import CheckpointMissing, Training, skipped_reason
from store import Gone
from tests.driver.conftest import ready, register

NOTHING: Any = None


def test_A2_a_step_that_the_trainer_skipped_is_not_taken_over_as_trained(tmp_path):
    path = tmp_path / "trained_rows.jsonl"
    lines = [
        {"batch_id": 0, "epoch": 0, "row_ids": ["a"], "skipped": None},
        {"batch_id": 1, "epoch": 0, "row_ids": ["b"], "skipped": None},
        {"batch_id": 1, "epoch": 1, "row_ids": [], "skipped": "loss is not finite"},  # the replay is what the checkpoint holds
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"batch_id": 1, "ep')
    assert skipped_reason(path, 0) is None
    assert skipped_reason(path, 1) == "loss is not finite"


async def test_A2_W7_a_checkpoint_of_batches_that_the_ledger_never_knew_is_refused_by_name(tmp_path):
    """The ledger is an older copy, or lost the end of its WAL: what those batches were made of is not known, and would be trained twice."""
    (tmp_path / "trained_rows.jsonl").write_text(json.dumps({"batch_id": 0, "epoch": 0, "row_ids": [], "skipped": None}) + "\n")
    ledger = Ledger()
    ledger.apply(register(ledger, n=1))
    ledger.apply(ready(0, 0))
    ledger.apply(BatchAssembled(batch_id=0, uids=(0,), plan=b"[]", time=1.0))
    core: Any = SimpleNamespace(
        ledger=ledger, config=SimpleNamespace(directory=tmp_path), apply=ledger.apply, bell=lambda: None, gate=StoreGate(NOTHING)
    )
    nothing: Any = None
    training = Training(
        core,
        nothing,
        canary_ids=[],
        on_snapshot=nothing,
        on_applied=nothing,
        archive=nothing,
        on_running_again=nothing,
        replace=nothing,
        holds=nothing,
        terms=nothing,
    )
    with pytest.raises(CheckpointMissing, match=r"step_2 holds version 2, but the ledger knows no batch 1.*older copy"):
        await training._reconcile(2, "step_2")
    assert ledger.trained_version == 1, "the batch that it knows was trained, and is in the checkpoint"


async def test_A5_W1_weights_are_published_only_when_the_ledger_has_on_disk_that_they_were_made():
    """Else a restart could make them again, a little different, under a name that tokens already carry."""
    on_disk = asyncio.Event()
    ledger = Ledger()
    core: Any = SimpleNamespace(
        ledger=ledger,
        run_id="run",
        config=SimpleNamespace(push=SimpleNamespace(bucket_bytes=1)),
        db=SimpleNamespace(durable=on_disk.wait),
        bell=lambda: None,
        gate=StoreGate(NOTHING),
    )
    published: list[Any] = []
    nothing: Any = None
    training = Training(
        core,
        nothing,
        canary_ids=[],
        on_snapshot=published.append,
        on_applied=nothing,
        archive=nothing,
        on_running_again=nothing,
        replace=nothing,
        holds=nothing,
        terms=nothing,
    )

    async def snapshot(*_arguments: Any) -> Any:
        return SimpleNamespace(buckets=[], tensors={}, canary=SimpleNamespace(input_ids=[], log_probs=[]))

    training._client = SimpleNamespace(snapshot=snapshot)  # type: ignore[assignment]
    task = asyncio.create_task(training._snapshot())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not published
    on_disk.set()
    await task
    assert len(published) == 1


async def test_A2_after_a_loss_of_the_store_what_was_applied_is_committed_and_only_what_is_still_to_be_trained_is_made_again(tmp_path):
    ledger = Ledger()
    for uid in range(2):
        ledger.apply(register(ledger, n=2))
        for index in range(2):
            ledger.apply(ready(uid, index))
        ledger.apply(BatchAssembled(batch_id=uid, uids=(uid,), plan=b"[]", time=1.0))
    ledger.apply(BatchApplied(batch_id=0, epoch=0, skipped=None, report=b"{}", time=2.0))
    gate = StoreGate(NOTHING)
    core: Any = SimpleNamespace(ledger=ledger, apply=ledger.apply, bell=lambda: None, gate=gate)
    again: list[int] = []
    training = Training(
        core,
        NOTHING,
        canary_ids=[],
        on_snapshot=NOTHING,
        on_applied=NOTHING,
        archive=NOTHING,
        on_running_again=lambda sample: again.append(sample.uid),
        replace=NOTHING,
        holds=NOTHING,
        terms=NOTHING,
    )
    done: list[str] = []

    def does(name: str) -> Any:
        async def call() -> None:
            done.append(name)

        return call

    training._commit, training._snapshot = does("commit"), does("snapshot")  # type: ignore[method-assign]
    core.store = SimpleNamespace(open=lambda ref, columns: SimpleNamespace(close=lambda: None))
    await training._mend()
    assert done == [], "nothing was lost"

    def gone(ref: Any, columns: Any) -> Any:
        raise Gone("lost")

    core.store.open = gone
    gate.lost()
    await training._mend()
    assert done == ["commit", "snapshot"] and again == [1]
    assert ledger.batches[0].state == "applied" and 1 not in ledger.batches and ledger.next_batch == 1
    assert [t.state for t in ledger.samples[1].trajectories] == ["running", "running"]


async def commits(free: Any) -> tuple[Training, asyncio.Task[None]]:
    """A trainer's side whose next step is to free the rows of a version that is committed."""
    ledger = Ledger()
    store: Any = SimpleNamespace(free=free)
    core: Any = SimpleNamespace(
        ledger=ledger,
        apply=ledger.apply,
        db=SimpleNamespace(durable=lambda: asyncio.sleep(0)),
        gate=StoreGate(store),
        bell=lambda: None,
    )
    nothing: Any = None
    training = Training(
        core,
        nothing,
        canary_ids=[],
        on_snapshot=nothing,
        on_applied=nothing,
        archive=nothing,
        on_running_again=nothing,
        replace=nothing,
        holds=nothing,
        terms=nothing,
    )
    return training, asyncio.create_task(training._record_commit(0, "step_0"))


async def test_O3_the_loop_goes_on_while_the_rows_of_a_commit_are_freed():
    began, may_end = threading.Event(), threading.Event()

    def free(refs: Any) -> None:
        began.set()
        assert may_end.wait(30), "the loop stood still for it"

    _, recording = await commits(free)
    assert await asyncio.to_thread(began.wait, 30)
    may_end.set()
    await recording


async def test_W1_a_commit_that_is_abandoned_has_let_go_of_the_store():
    """What comes next parks the rows, or takes the store away."""
    began, may_end, freed = threading.Event(), threading.Event(), threading.Event()

    def free(refs: Any) -> None:
        began.set()
        assert may_end.wait(30)
        freed.set()

    training, training._recording = await commits(free)
    assert await asyncio.to_thread(began.wait, 30)
    abandoning = asyncio.create_task(training.abandon())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not abandoning.done()
    may_end.set()
    await abandoning
    assert freed.is_set() and training._recording.cancelled()
