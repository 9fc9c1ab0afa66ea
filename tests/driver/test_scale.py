"""How many are wanted, over restarts; and processes on their way out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from driver.config import load_config
from driver.ledger_db import LedgerDB
from driver.planned import plan_of
from driver.planner import Host, PlanError
from driver.processes import Processes
from driver.scale import Leaving, NotScalable, Scaled, Wanted
from rollout.answer import EngineError
from rollout.pool import EnginePool
from rollout.version import Version


async def test_what_was_asked_for_holds_over_a_restart_until_the_configuration_says_another_number(tmp_path: Path) -> None:
    db = LedgerDB(tmp_path / "ledger.sqlite")
    db.load()
    wanted = Wanted(db, {"rollout": 1, "reward": 2})
    assert wanted.counts == {"rollout": 1, "reward": 2}
    wanted.ask("rollout", 4)
    assert wanted["rollout"] == 4 and wanted["reward"] == 2
    await db.durable()
    db.close()
    db = LedgerDB(tmp_path / "ledger.sqlite")
    db.load()
    assert Wanted(db, {"rollout": 1, "reward": 2})["rollout"] == 4, "the configuration is as it was"
    assert Wanted(db, {"rollout": 2, "reward": 2})["rollout"] == 2, "the later word counts"
    assert "gone" not in Wanted(db, {"reward": 2}), "a role that left the configuration is forgotten"
    db.close()


async def test_a_run_that_takes_over_has_the_number_that_was_asked_for_unless_its_configuration_says_another(tmp_path: Path) -> None:
    db = LedgerDB(tmp_path / "ledger.sqlite")
    db.load()
    before = Wanted(db, {"rollout": 1, "reward": 1})
    before.ask("rollout", 4)
    before.ask("reward", 2)
    await db.durable()
    db.close()
    nothing_before: Any = SimpleNamespace(query=lambda *_: [], write=lambda _: None)
    after = Wanted(nothing_before, {"rollout": 1, "reward": 3})
    after.follow(before)
    assert after.counts == {"rollout": 4, "reward": 3}


def test_the_words_say_what_happens() -> None:
    assert Scaled("rollout", 1, 2, ("engine-1",)).words == "rollout: 1 → 2; engine-1 will start"
    assert Scaled("rollout", 2, 2).words == "rollout: 2, as before"
    assert "engine-0 had died too often" in Scaled("rollout", 1, 1, again=("engine-0",)).words


async def test_whoever_leaves_is_looked_at_again_when_it_has_left_however_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    leaving = Leaving(lambda: done.append(1))

    async def well() -> None:
        await asyncio.sleep(0)

    async def badly() -> None:
        raise RuntimeError("no such process")

    for name, work in (("a", well()), ("b", badly())):
        leaving.add(name, asyncio.create_task(work))
    assert "a" in leaving and "b" in leaving
    await leaving.wait()
    await asyncio.sleep(0)
    assert done == [1, 1] and "a" not in leaving
    assert "b was not ended in order" in caplog.text


@pytest.fixture
def fleet(tmp_path: Path) -> Any:
    """`Processes` of a run whose launcher starts nothing and ends what it is told to, when it is let."""
    config = load_config(Path(__file__).parents[2] / "examples/sort_digits/config.yaml", [f"run_dir={tmp_path}"])
    disk: list[Any] = []

    async def durable() -> None: ...

    db = SimpleNamespace(query=lambda *_: [], write=disk.extend, durable=durable)
    core = SimpleNamespace(db=db, ring=lambda: None, waiting=lambda *_: None, ledger=SimpleNamespace(ended=None), run_id="run")
    run: Any = SimpleNamespace(
        config=config,
        core=core,
        pool=EnginePool(),
        scoring=SimpleNamespace(client=None),
        routing=None,
        log_directory=tmp_path,
        store=SimpleNamespace(location="tmpfs:/nowhere"),
        beside=dict,
        state="running",
    )
    processes = Processes(run)
    processes.plan = plan_of(config)

    class Launcher:
        def __init__(self) -> None:
            self.processes: dict[str, Any] = {}
            self.may_end = asyncio.Event()
            self.started: list[str] = []

        async def start(self, spec: Any) -> None:
            self.started.append(spec.name)
            self.processes[spec.name] = SimpleNamespace(spec=spec, state="ready", pid=1, url="")

        async def end(self, name: str, deadline_s: float) -> None:
            await self.may_end.wait()
            del self.processes[name]

    launcher: Any = Launcher()
    processes._launcher = launcher
    return SimpleNamespace(processes=processes, launcher=launcher, disk=disk, run=run)


async def settled(fleet: Any) -> list[str]:
    fleet.launcher.may_end.set()
    for _ in range(20):
        await asyncio.sleep(0)
    return sorted(name for name in fleet.launcher.processes if name.startswith("engine"))


async def test_up_and_down_and_up_again_before_the_first_has_ended_ends_at_the_last_word(fleet: Any) -> None:
    scaled = await fleet.processes.scale("rollout", 4)
    assert scaled.starting == ("engine-1", "engine-2", "engine-3")
    assert (await fleet.processes.scale("rollout", 1)).ending == ("engine-1", "engine-2", "engine-3")
    await asyncio.sleep(0)
    assert (await fleet.processes.scale("rollout", 3)).starting == ("engine-1", "engine-2")
    assert await settled(fleet) == ["engine-0", "engine-1", "engine-2"]
    assert fleet.launcher.started.count("engine-1") == 2 and fleet.launcher.started.count("engine-3") == 1
    stored = {row.values["name"]: msgspec.json.decode(row.values["value"]) for row in fleet.disk}
    assert stored["scale/rollout"] == {"count": 3, "configured": 1}


async def test_what_was_left_alone_starts_again_only_when_its_role_is_asked_for(fleet: Any) -> None:
    await fleet.processes.scale("rollout", 2)
    fleet.launcher.processes["engine-1"].state = "quarantined"
    assert (await fleet.processes.scale("reward", 3)).again == ()
    assert fleet.launcher.processes["engine-1"].state == "quarantined"
    assert (await fleet.processes.scale("rollout", 2)).again == ("engine-1",)
    assert fleet.launcher.processes["engine-1"].state == "ready"


@pytest.mark.parametrize(
    ("role", "count", "words"),
    [
        ("trainer", 2, "headrace down), set trainer.dp in its configuration"),
        ("rollouts", 2, "there is no role 'rollouts' to scale; there are rollout, reward"),
        ("rollout", 0, "rollout can have 1 to 64 instances here, not 0; to hold the run for a while: headrace pause"),
        ("rollout", 65, "rollout can have 1 to 64 instances here, not 65"),
        ("reward", 0, "reward can have 1 to 64"),
    ],
)
async def test_what_can_not_be_is_refused_in_a_sentence_and_changes_nothing(fleet: Any, role: str, count: int, words: str) -> None:
    with pytest.raises(NotScalable) as error:
        await fleet.processes.scale(role, count)
    assert words in str(error.value)
    assert not fleet.disk and not fleet.launcher.started and fleet.processes.wanted.counts == {"rollout": 1, "reward": 1}


async def test_a_number_that_the_host_can_not_hold_is_refused_before_anything_starts(fleet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Host("this host", 2, 2500 << 20)
    monkeypatch.setattr("driver.planned.this_host", lambda: small)
    with pytest.raises(PlanError, match="over-committed: rollout"):
        await fleet.processes.scale("rollout", 8)
    assert not fleet.disk and not fleet.launcher.started and fleet.processes.wanted["rollout"] == 1


async def test_a_run_that_has_ended_has_nothing_to_scale(fleet: Any) -> None:
    fleet.run.core.ledger.ended = "all batches trained"
    with pytest.raises(NotScalable, match="it has no processes to scale"):
        await fleet.processes.scale("rollout", 2)


@pytest.mark.parametrize("deaf", [False, True])
async def test_E16_an_engine_is_emptied_before_its_process_ends_and_one_that_does_not_hear_is_not_waited_for(
    fleet: Any, deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driver.processes.LEAVE_S", 0.05)
    await fleet.processes.scale("rollout", 2)
    pool, order = fleet.run.pool, []

    async def abort_all() -> None:
        order.append(f"aborted, with {slot.open_requests} open")
        if deaf:
            raise EngineError("infrastructure", "no answer")
        pool._return(slot)

    slot = pool.register("engine-1", SimpleNamespace(url="http://1", abort_all=abort_all), 1, 4)
    pool.open(slot, Version("run", 0, 0, 1))
    slot._take()
    fleet.launcher.may_end.set()
    await fleet.processes.scale("rollout", 1)
    while "engine-1" in fleet.launcher.processes:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert order == ["aborted, with 1 open"] and slot.released and slot.state == "gone"
    assert slot.open_requests == int(deaf) and not pool.slots and not pool.absent
