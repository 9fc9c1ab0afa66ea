"""One attack on a running service after the other: at an ordered place, or at a random moment; then the repair that a user would do.

A user starts a driver that is gone again, and ends and starts one that has stood still for long. Everything else the product must notice
and repair by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import httpx
import psutil

from driver.events import Event, RunEnded
from tests.chaos.accounts import Books, check
from tests.chaos.driver import LENGTHS
from tests.chaos.points import AFTER, BEFORE, DIRECTORY, DONE, LOST, ORDER, Order
from tests.chaos.trainer import STEP_S
from tests.service import ServiceUnderTest

N_PER_SAMPLE, SAMPLES, BOUND = 4, 4, 2
VICTIMS = ("driver", "engine", "reward", "worker", "trainer", "rank")
EVALUATOR = "evaluator"  # another victim, where an evaluation has an engine of its own
KILL, STOP, STOP_FOR_GOOD, TERM = "KILL", "STOP", "STOP for good", "TERM"
TERM_S = 75.0  # stop_deadline_s for the step and the checkpoint, and what the processes have to end
EVENTS = tuple(kind.__name__ for kind in get_args(Event) if kind is not RunEnded)
"""Every kind there is. RunEnded has its own test: a run ends once."""
DRIVER_STEPS = ("put", "free", "lock", "score", "train", "snapshot", "save", "archive", "pause", "set_version", "continue")
TRAINER_STEPS = ("account", "publish", "resume", "trainer lock")
PARKING_STEPS = ("park", "unpark")  # after a SIGTERM, and at the start after it
REPLAYS = ("RowsLost", "BatchUnmade", "EpochBegan", "resume")  # they come only where an applied batch is not in a checkpoint
OFTEN = ("SampleRegistered", "TrajectoryReady", "put", "score", "free", "lock", "trainer lock")
EXPLAINED = ("bad on purpose", "filtered: always right")
"""Words of the only reasons: rows that are bad or easy in the data. A kill explains none: with these budgets everything is tried again."""
REPAIR_S = 600.0  # a trainer was seen to take 200 s to its first answer on a machine with 40 processes at work
REACH_S, TRIES = 90.0, 2
RESTART_WINDOW_S, RESTARTS = 60.0, 3  # the launcher leaves a process alone that dies five times in a minute

REWARD = '''"""A chance, so that batches have something to learn; bad rows of two kinds, so that trajectories and samples are discarded; and
easy rows, so that some are left out of a pass."""

import random
import zlib


def score(response, row):
    if row["answer"] == "bad" or (row["answer"] == "often bad" and zlib.crc32(response.encode()) % 4):
        raise KeyError("bad on purpose")
    return 1.0 if row["answer"] == "easy" else random.random()
'''
KINDS = {7: "bad", 13: "often bad", 1: "easy", 5: "easy", 9: "easy", 17: "easy", 15: "long"}  # of twenty rows


def data(rows: int, first: int = 1000) -> bytes:
    """The lines of a dataset with some of each kind."""
    kinds = {n: KINDS.get(n % 20, str(n)) for n in range(first, first + rows)}
    digits = {n: str(n) * (100 if kind == "long" else 1) for n, kind in kinds.items()}  # a prompt that never fits is left out of all passes
    lines = ({"prompt": f"sort {digits[n]} =", "answer": kind, "task_type": "sort"} for n, kind in kinds.items())
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@dataclass(frozen=True)
class Cell:
    """One attack: who, how, and where; point and moment None: at a random moment."""

    victim: str
    how: str
    point: str | None = None
    moment: str | None = None

    def __str__(self) -> str:
        where = f"{self.moment} {self.point}" if self.point else "at random"
        return f"{self.how} of {self.victim} {where}"


def cells(rng: random.Random) -> list[Cell]:
    """The matrix: the driver killed at every moment of every transition and step, and stopped at each; everybody else hit there too. For
    a run with an evaluator of its own."""
    found: list[Cell] = []
    for point in (*EVENTS, *DRIVER_STEPS, *TRAINER_STEPS):
        moments = (BEFORE, LOST, AFTER) if point in EVENTS else (BEFORE, AFTER)
        found += [Cell("driver", KILL, point, moment) for moment in moments]
        found.append(Cell("driver", STOP, point, rng.choice(moments)))
        if point in ("RowsLost", "Restarted"):
            continue  # it comes before anybody else is started
        others = ("rank", "trainer") if point in TRAINER_STEPS else (*VICTIMS[1:], EVALUATOR)
        hows = [KILL, STOP, STOP_FOR_GOOD]
        found += [Cell(victim, hows[(number + rng.randrange(3)) % 3], point, rng.choice(moments)) for number, victim in enumerate(others)]
    found += [Cell("driver", KILL, point, moment) for point in PARKING_STEPS for moment in (BEFORE, AFTER)]
    rng.shuffle(found)
    return found


class Chaos:
    """A service under attack. `run_dir` may hold a run that was begun before."""

    def __init__(
        self,
        directory: Path,
        rng: random.Random,
        *settings: str,
        step_s: float = 0.3,
        bound: int = BOUND,
        lengths: Path | None = None,
        evaluators: int | None = None,
    ) -> None:
        """`evaluators`: a held-out set is evaluated too, on so many engines of its own (0: on the run's), and solved rows are left out."""
        directory.mkdir(parents=True, exist_ok=True)
        self.orders = directory / "orders"
        self.orders.mkdir(exist_ok=True)
        scorer = directory / "scorer.py"
        scorer.write_text(REWARD)
        if evaluators is not None:
            held_out = directory / "held_out.jsonl"
            held_out.write_bytes(data(6, 1022))
            settings += (
                f"evaluation={{data: {held_out}, every: 4, n: 2, engines: {evaluators}}}",
                "filter={max_pass_rate: 1, skip_solved: true}",
            )
        self.rng = rng
        self.bound = bound
        self.number = 0
        self.not_reached: list[str] = []
        self._deaths: dict[str, list[float]] = defaultdict(list)
        self.service = ServiceUnderTest(
            directory / "run",
            f"batch.samples={SAMPLES}",
            f"rollout.n={N_PER_SAMPLE}",
            f"staleness.bound={bound}",
            "rollout.engines=2",
            "rollout.stream_interval=2",
            "rollout.stall_s=8",
            "rollout.infrastructure_retries=100000",
            "rollout.data_retries=3",
            f"reward.scorers={{'*': {{function: '{scorer}:score', time_limit_s: 4}}}}",
            "reward.deadline_s=12",
            "trainer.critic={}",  # every row of a batch is trained, so that the trainer's log can be compared row by row
            "trainer.learning_rate=0.001",
            "trainer.loss.entropy_bonus=0.05",
            "trainer.schedule=constant",
            "trainer.step_deadline_s=20",
            "stop.batches=null",
            "stop.epochs=null",
            "push.deadline_s=15",
            "store.inline_bytes=400",  # of each row, the reward's object rides in the ledger and the tokens' lies in the store
            *settings,
            module="tests.chaos.driver",
            environment={DIRECTORY: str(self.orders), STEP_S: str(step_s)} | ({LENGTHS: str(lengths)} if lengths else {}),
        )

    # ---- the service as a user has it --------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return self.service.directory

    def start(self) -> None:
        """Also where an order kills it before it says where it listens."""
        for _ in range(3):
            try:
                self.service.up()
                return
            except AssertionError:
                if self._done() is None:
                    raise
        raise AssertionError("the service does not come up")

    def books(self) -> Books:
        return check(self.run_dir, N_PER_SAMPLE, self.bound)

    def healthy(self) -> None:
        """Both engines serve, and another batch is trained."""
        version: int | None = None
        until = time.monotonic() + REPAIR_S
        while True:
            status = self.service.run()
            assert status["state"] in ("running", "draining"), (status["state"], status["failure"], self.service.log()[-3000:])
            version = status["trained_version"] if version is None else min(version, status["trained_version"])
            states = [engine["state"] for engine in self.service.run("/engines")]
            if status["trained_version"] > version and sorted(states) in (["open", "open"], ["open", "shut"], ["shut", "shut"]):
                return
            assert time.monotonic() < until, (status["why"], states, self.service.log()[-4000:])
            time.sleep(0.1)

    def lose_the_host(self) -> None:
        """The driver is killed, and shared memory is gone."""
        self.service.kill()
        shutil.rmtree(self.service.store, ignore_errors=True)
        self.start()

    # ---- one attack --------------------------------------------------------------------------------------------------

    def attack(self, cell: Cell, *, wait: bool = True) -> None:
        """Everything that belongs to one line of output. With `wait` it returns when the run goes on as before."""
        self.number += 1
        self._spare(cell.victim)
        lasts_s = self.rng.choice((0.3, 1.0, 3.0, 3.0, 6.0)) if cell.how == STOP else 0.0
        done = self._random(cell) if cell.point is None else self._ordered(cell)
        if done is None:
            self.not_reached.append(str(cell))
        else:
            self._repair(cell, done, lasts_s)
        books = self.books()
        version, epoch = books.number("trained_version"), books.number("epoch")
        said = f"{cell}{f' for {lasts_s:g} s' if lasts_s else ''}" + ("" if done else ": not reached")
        print(f"{self.number}: {said}, version {version}, epoch {epoch}, {len(books.samples)} samples", flush=True)
        if wait:
            self.healthy()
            self.books()

    def _ordered(self, cell: Cell) -> dict[str, Any] | None:
        """With what brings the run to that place, where it does not come there by itself."""
        assert cell.point is not None and cell.moment is not None
        count = self.rng.randint(1, 12) if cell.point in OFTEN else 1
        order = Order(self.number, cell.point, cell.moment, count, cell.victim, cell.how.split()[0])
        for _ in range(TRIES):  # what was to be replayed may be committed just before it is lost
            self._provoke(cell, order)
            until = time.monotonic() + REACH_S
            while (done := self._done()) is None and time.monotonic() < until:
                assert self.service.process is not None
                if self.service.process.poll() is not None and self._done() is None:
                    raise AssertionError(f"the driver ended by itself: {self.service.log()[-3000:]}")
                time.sleep(0.02)
            if done is None:
                (self.orders / ORDER).unlink(missing_ok=True)
                done = self._done()
            if done is not None:
                return done
        return None

    def _provoke(self, cell: Cell, order: Order) -> None:
        assert self.service.process is not None
        if cell.point in REPLAYS:  # one batch of three is trained: the others take a while
            self._until_there("rank")
            self.service.wait(lambda s: s["trained_version"] == s["committed_version"] + 1 > 1, "a batch to replay", REPAIR_S)
        if cell.point != "unpark":
            order.write(self.orders)
        if cell.point in ("RowsLost", "BatchUnmade"):
            self.lose_the_host()
        elif cell.point == "Restarted":
            self.service.kill()
            self.start()
        elif cell.point == "MixChanged":
            dataset = self.service.run("/datasets")[0]["dataset_id"]
            with contextlib.suppress(httpx.TransportError):
                url = f"{self.service.url}/v1/runs/sort-digits/datasets/{dataset}"
                self.service.http.patch(url, json={"weight": 1.0 + self.number})
        elif cell.point in PARKING_STEPS:
            self.service.process.send_signal(signal.SIGTERM)
            self.service.process.wait(TERM_S)
            if cell.point == "unpark":
                order.write(self.orders)
                self.start()
        elif cell.point in ("EpochBegan", "resume"):
            self._signal("rank", KILL)
        elif cell.point == "TrajectoryRetried":
            self._signal("engine", KILL)

    def _random(self, cell: Cell) -> dict[str, Any] | None:
        time.sleep(self.rng.uniform(0.0, 2.5))
        self._until_there(cell.victim)
        pid = self._signal(cell.victim, cell.how.split()[0])
        return None if pid is None else {"pid": pid}

    def _until_there(self, victim: str) -> None:
        """It may be starting."""
        until = time.monotonic() + REPAIR_S
        while self.pid_of(victim) is None and time.monotonic() < until:
            time.sleep(0.1)

    def _signal(self, victim: str, how: str) -> int | None:
        """None when there is no such process at the moment, because it is being started."""
        pid = self.pid_of(victim)
        if pid is None:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{how}"])
            return pid
        return None

    def pid_of(self, victim: str) -> int | None:
        assert self.service.process is not None
        if victim == "driver":
            return self.service.process.pid
        role = {"worker": "reward", "rank": "trainer"}.get(victim, victim)
        found = [p for p in self.service.run("/processes") if p["role"] == role and p["state"] == "ready"]
        if not found:
            return None
        one = self.rng.choice(found)
        if victim == role:
            return int(one["pid"])
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(one["pid"]).children()
            return self.rng.choice(children).pid if children else None
        return None

    def _repair(self, cell: Cell, done: dict[str, Any], lasts_s: float) -> None:
        assert self.service.process is not None
        if cell.how == STOP:
            self.books()
            time.sleep(lasts_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(done["pid"], signal.SIGCONT)
        if cell.victim == "driver" and cell.how != STOP and done["pid"] == self.service.process.pid:
            if cell.how == STOP_FOR_GOOD:
                self.service.process.kill()
            code = self.service.process.wait(TERM_S if cell.how == TERM else 30)
            if cell.how == TERM:
                assert code == 0, self.service.log()[-3000:]
                assert not self.service.store.exists(), "what is ready was parked, and nothing is left in memory"
            self.books()  # as it lies on the disk, before anybody comes to mend it
            self.start()

    def _done(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self.orders / DONE).read_text())
        except FileNotFoundError:
            return None
        return found

    def _spare(self, victim: str) -> None:
        """A process that dies too often is left alone by the launcher, as it should be: so nobody is hit as often."""
        role = {"worker": "reward", "rank": "trainer"}.get(victim, victim)
        if role == "driver":
            return
        times = self._deaths[role]
        while len([at for at in times if time.monotonic() - at < RESTART_WINDOW_S]) >= RESTARTS:
            time.sleep(0.5)
        times.append(time.monotonic())

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        self.service.http.post(f"{self.service.url}/v1/runs/sort-digits/drain")
        self.service.wait(lambda s: s["state"] == "finished", "the end", 600)

    def close(self) -> None:
        if self.service.process is not None and self.service.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.service.process.pid, signal.SIGCONT)
        self.service.close()
