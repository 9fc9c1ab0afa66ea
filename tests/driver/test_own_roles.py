"""Users' roles as real processes: killed in the middle, hung, broken, slow."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driver.config import load_config
from driver.core import Core
from driver.launcher import Died, LocalLauncher, ProcessEvent, Quarantined, Ready, Restarts
from driver.ledger import Ledger
from driver.own_roles import OwnRoles
from driver.planned import plan_of
from driver.process_specs import Specs
from driver.stream_db import StreamDB, StreamError
from rollout.client import make_http

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"
LOGIC = '''
import os, time
from pathlib import Path


def note(role, text):
    with open(Path(role.params["notes"]) / f"{role.name}.txt", "a") as file:
        file.write(f"{role.index} {text}\\n")


def wait_for(role, name):
    path = Path(role.params["notes"]) / name
    while not path.exists():
        time.sleep(0.01)


class Sum:
    """Adds up; stands at number 5 until it is let go on."""
    def __init__(self, role):
        self.role = role

    def handle(self, stream, item):
        note(self.role, item["batch_id"])
        if item["batch_id"] == 5:
            wait_for(self.role, "go")
        state = self.role.state or {"count": 0, "sum": 0.0}
        self.role.state = {"count": state["count"] + 1, "sum": state["sum"] + item["reward_mean"]}
        return {"sums": self.role.state}


class Broken(Sum):
    def handle(self, stream, item):
        if item["batch_id"] == 2:
            self.role.state = {"count": 1000, "sum": 0.0}
            raise KeyError("no such field")
        if item["batch_id"] == 3:
            return {"sums": {"count": "many", "sum": 0.0}}
        if item["batch_id"] == 5:
            os._exit(7)
        if item["batch_id"] == 6:
            return {"other": {}}
        return Sum.handle(self, stream, item)


class Hangs(Sum):
    def handle(self, stream, item):
        note(self.role, item["batch_id"])
        if item["batch_id"] == 1 and not (Path(self.role.params["notes"]) / "hung").exists():
            (Path(self.role.params["notes"]) / "hung").touch()
            time.sleep(60)
        return None


def first(role, stream, item):
    note(role, item["batch_id"])
    return [("pairs", {"n": item["batch_id"]}), ("pairs", {"n": item["batch_id"]})]


def second(role, stream, item):
    wait_for(role, "go")
    note(role, f"{item['n']} of {role.count}")


def follows(role, stream, item):
    note(role, f"{stream} {item['trained_version']}")
    assert role.latest["versions"] == item
'''
SUMS = "publishes: {sums: {kind: latest, schema: {count: int, sum: float}}}"


class Lab:
    """What a run has that its roles need, with a launcher of real processes."""

    def __init__(self, tmp_path: Path, roles: str) -> None:
        (tmp_path / "logic.py").write_text(LOGIC)
        self.notes = tmp_path
        filled = roles.replace("LOGIC", f"{tmp_path}/logic.py").replace("NOTES", f"params: {{notes: '{tmp_path}'}}")
        self.config = load_config(CONFIG, [f"run_dir={tmp_path}/run", f"roles={filled}"])
        (tmp_path / "run/processes").mkdir(parents=True, exist_ok=True)
        nothing: Any = None
        empty: Any = SimpleNamespace(query=lambda *_: [])
        self.core = Core(self.config, Ledger(), empty, nothing, nothing)
        self.wanted = {name: role.instances for name, role in self.config.roles.items()}
        self.batches: deque[dict[str, Any]] = deque()
        self.launcher = LocalLauncher(self._heard, Restarts(first_s=0.05, longest_s=0.1, deaths=20))
        self.run: Any = SimpleNamespace(
            config=self.config,
            core=self.core,
            http=make_http(),
            history=SimpleNamespace(recent=self.batches),
            log_directory=tmp_path / "logs",
            processes=SimpleNamespace(wanted=self.wanted, replace=self._replace, works=lambda role: True),
        )
        self.own = OwnRoles(self.run)
        self.plan = plan_of(self.config)
        self.own.open(self.plan)
        self.specs = Specs(self.run, self.wanted, lambda name: 0)  # type: ignore[arg-type]

    def _heard(self, event: ProcessEvent) -> None:
        name = f"{event.role}-{event.index}"
        if isinstance(event, Ready):
            self.own.attach(event.role, event.index, event.url)
        elif isinstance(event, Died | Quarantined):
            self.own.detach(name, event.reason.splitlines()[0])

    async def _replace(self, name: str, reason: str) -> None:
        self.launcher.processes[name].kill(reason)

    async def __aenter__(self) -> Lab:
        self.task = asyncio.create_task(self.own.run())
        await asyncio.sleep(0)
        for placement in self.plan.placements:
            if placement.role.own:
                await self.launcher.start(self.specs.of(placement))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.launcher.stop(1.0)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.own.close()
        await self.run.http.aclose()

    def trained(self, *batch_ids: int) -> None:
        for batch_id in batch_ids:
            while self.batches and self.batches[-1]["batch_id"] >= batch_id:  # a replay
                self.batches.pop()
            self.batches.append({"batch_id": batch_id, "reward_mean": float(batch_id), "trained_version": batch_id + 1, "staleness_max": 0})
        self.core.ring()

    def noted(self, role: str) -> list[str]:
        path = self.notes / f"{role}.txt"
        return path.read_text().splitlines() if path.exists() else []

    async def until(self, condition: Any, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not condition():
                assert not self.task.done(), self.task.exception()
                await asyncio.sleep(0.01)


async def test_A2_L2_a_role_killed_in_the_middle_of_an_item_gets_it_again_and_it_counts_once(tmp_path: Path) -> None:
    async with Lab(tmp_path, f"{{adds: {{logic: LOGIC:Sum, NOTES, subscribes: {{metrics: queue}}, {SUMS}}}}}") as lab:
        lab.trained(*range(9))
        await lab.until(lambda: "0 5" in lab.noted("adds"))
        sums = lab.own.streams.latest["sums"]
        assert sums.value == {"count": 5, "sum": 10.0}
        first_pid = lab.launcher.processes["adds-0"].pid
        os.kill(first_pid, signal.SIGKILL)
        await lab.until(lambda: lab.noted("adds").count("0 5") == 2)
        assert sums.value == {"count": 5, "sum": 10.0}, "half an item is no item"
        lab.trained(7, 8)  # made again after a loss of the trainer: no news
        (tmp_path / "go").touch()
        await lab.until(lambda: sums.value["count"] == 9)
        await lab.own.finish(10)
        assert sums.value == {"count": 9, "sum": 36.0}
        assert Counter(lab.noted("adds")) == {f"0 {n}": 2 if n == 5 else 1 for n in range(9)}
        reader = lab.own.streams.queues["metrics"].readers["adds"]
        assert (reader.done, reader.given_up, reader.waiting) == (9, 0, 0) and "SIGKILL" in str(reader.last_reason)
    # and the driver's own death: what is on disk goes on
    db = StreamDB(tmp_path / "run/streams.sqlite")
    assert db.states["adds", 0] == {"count": 9, "sum": 36.0}
    assert db.load(lab.plan).queues["metrics"].last_key == 8
    db.close()


async def test_L1_an_item_that_raises_or_kills_its_process_or_makes_nonsense_is_given_up_with_its_reason_and_leaves_no_state(
    tmp_path: Path,
) -> None:
    async with Lab(tmp_path, f"{{bad: {{logic: LOGIC:Broken, NOTES, tries: 2, subscribes: {{metrics: queue}}, {SUMS}}}}}") as lab:
        reader, sums = lab.own.streams.queues["metrics"].readers["bad"], lab.own.streams.latest["sums"]

        async def fails(batch_id: int, given_up: int, reason: str) -> None:
            lab.trained(batch_id)
            await lab.until(lambda: reader.given_up == given_up)
            assert reason in str(reader.last_reason)

        lab.trained(0, 1)
        await fails(2, 1, "KeyError")
        await fails(3, 2, "its field 'count' is 'many'")
        lab.trained(4)
        await lab.until(lambda: reader.done == 3)
        assert sums.value == {"count": 3, "sum": 5.0}, "0, 1 and 4, in the same process"
        await fails(5, 3, "exit code 7")
        await fails(6, 4, "publishes declares sums")
        lab.trained(7)
        await lab.until(lambda: reader.done == 4)
        assert sums.value == {"count": 4, "sum": 12.0}


async def test_E14_L2_a_role_that_hangs_at_an_item_is_replaced_and_the_item_is_done_by_its_next_life(tmp_path: Path) -> None:
    async with Lab(tmp_path, "{slow: {logic: LOGIC:Hangs, NOTES, deadline_s: 1, subscribes: {metrics: queue}}}") as lab:
        lab.trained(0, 1, 2)
        reader = lab.own.streams.queues["metrics"].readers["slow"]
        await lab.until(lambda: reader.done == 3)
        assert lab.noted("slow") == ["0 0", "0 1", "0 1", "0 2"] and lab.launcher.processes["slow-0"].incarnation == 2
        assert "it hangs: item 1 of metrics" in str(reader.last_reason)


async def test_items_are_dealt_out_to_instances_and_a_full_stream_holds_its_publisher_back(tmp_path: Path) -> None:
    roles = (
        "{first: {logic: LOGIC:first, NOTES, subscribes: {metrics: queue}, publishes: {pairs: {kind: queue, capacity: 5}}}, "
        "second: {logic: LOGIC:second, NOTES, instances: 2, subscribes: {pairs: queue}}}"
    )
    async with Lab(tmp_path, roles) as lab:
        lab.trained(*range(10))
        pairs, metrics = lab.own.streams.queues["pairs"], lab.own.streams.queues["metrics"]
        await lab.until(lambda: "stream pairs is full" in str(lab.core.waits.get("role first")))
        assert len(pairs.items) == 4 and metrics.readers["first"].done == 2, "two pairs are in, and the third would not fit"
        assert lab.noted("first") == ["0 0", "0 1", "0 2"], "and no more is read"
        await lab.until(lambda: len(set(pairs.readers["second"].given.values())) == 2)
        (tmp_path / "go").touch()
        await lab.until(lambda: pairs.readers["second"].done == 20)
        assert Counter(line.split()[1] for line in lab.noted("second")) == {str(n): 2 for n in range(10)}
        assert {line.split()[0] for line in lab.noted("second")} == {"0", "1"} and lab.noted("second")[0].endswith("of 2")
        assert "role first" not in lab.core.waits
        # one too many ends with the item it is at
        await lab.own.release("second-1", 5.0)
        lab.wanted["second"] = 1
        lab.trained(10)
        await lab.until(lambda: pairs.readers["second"].done == 22)
        assert all(line == "0 10 of 1" for line in lab.noted("second")[20:])


async def test_the_newest_value_is_told_once_and_what_came_between_is_skipped(tmp_path: Path) -> None:
    async with Lab(tmp_path, "{f: {logic: LOGIC:follows, NOTES, subscribes: {versions: latest}}}") as lab:
        await lab.until(lambda: lab.noted("f") == ["0 versions 0"])
        for version in (1, 2, 3):
            lab.core.ledger.trained_version = version
        lab.core.ring()
        await lab.until(lambda: lab.noted("f")[-1] == "0 versions 3")
        assert lab.noted("f") == ["0 versions 0", "0 versions 3"]


async def test_a_logic_that_is_not_there_ends_its_process_with_a_sentence(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "{f: {logic: 'no.such.module:f', subscribes: {versions: latest}}}")
    async with lab:
        with pytest.raises(Exception, match=r"role f: .*no module"):
            await lab.launcher.processes["f-0"].wait_ready(20)


async def test_H8_a_disk_that_takes_no_more_ends_the_run_with_a_sentence_and_not_in_silence(tmp_path: Path) -> None:
    async with Lab(tmp_path, "{f: {logic: LOGIC:follows, NOTES, subscribes: {metrics: queue}}}") as lab:
        assert lab.own._db is not None
        lab.own._db._connection.execute("PRAGMA query_only = ON")
        lab.trained(0)
        await asyncio.wait([lab.task], timeout=20)
        error: BaseException | None = lab.task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, StreamError) and "free space or make it writable" in str(error)
