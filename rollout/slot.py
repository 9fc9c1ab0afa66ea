"""One life of one engine, as the pool sees it: its gate, its open requests, its last report, and whether it still moves.

Two clocks stand still while the gate is shut: `clock`, by which a request measures its progress, and `silent_s`, by which the engine's is
measured. An engine is silent while requests are open on it and it says nothing to any of them. Nor is it silent when its requests wait
behind those of others and its reports show that these go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rollout.answer import EngineError
from rollout.capabilities import Capabilities
from rollout.client import EngineClient
from rollout.load import Load, load_of, scale
from rollout.version import Version

State = Literal["starting", "open", "shut", "quarantined", "gone"]

NEXT_STATES: dict[State, tuple[State, ...]] = {
    "starting": ("open", "shut", "quarantined", "gone"),
    "open": ("shut", "quarantined", "gone"),
    "shut": ("open", "quarantined", "gone"),
    "quarantined": ("shut", "gone"),
    "gone": (),
}


class EngineSlot:
    """Only the pool writes to it, but for what was heard of the engine: `heard`, `reported`."""

    def __init__(self, engine_id: str, client: EngineClient, incarnation: int, capacity: int, monotonic: Callable[[], float]) -> None:
        self.engine_id = engine_id
        self.client = client
        self.incarnation = incarnation
        self.life = incarnation  # the number in its version texts; a run counts the lives of all its engines
        self.capacity = capacity
        self.state: State = "starting"
        self.reason = "registered, not verified yet"
        self.since_s = monotonic()  # in this state, by the pool's clock
        self._idle_since_s: float | None = self.since_s
        self.verified: Version | None = None
        self.was_open = False  # some push of this life was verified
        self.weights_sent = False
        self.push_error: Exception | None = None  # of the last push that failed
        self.capabilities: Capabilities | None = None  # None where nobody asked
        self.pid: int | None = None  # of its first process; None where another started it
        self.load: Load | None = None  # its last report
        self._scale = scale(capacity, None, 0.0)
        self.open_requests = 0
        self.served_requests = 0
        self.preferring_requests = 0  # those that would have this engine, for what it holds of them
        self.preferred_requests = 0  # and got it
        self._most_open = 0
        self.first_heard_s: float | None = None  # when the first token, or answer, came
        self.released = False  # sent away by us: what breaks off there is nobody's failure
        self._limits: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._monotonic = monotonic
        self._busy = Stopwatch(monotonic)
        self._shut = Stopwatch(monotonic)
        self._silent = Stopwatch(monotonic)

    @property
    def url(self) -> str:
        return self.client.url

    def clock(self) -> float:
        """Seconds that pass only while the gate is not shut: what a request's progress is measured by."""
        return self._monotonic() - self._shut.elapsed_s()

    def busy_s(self) -> float:
        """For how long, in all, at least one request was open."""
        return self._busy.elapsed_s()

    def silent_s(self) -> float:
        """For how long, with requests open and the gate not shut, the engine has said nothing. Time without requests does not count, and
        does not wipe it out either: a request that gave up proves nothing in the engine's favour."""
        return self._silent.elapsed_s()

    def state_s(self) -> float:
        """For how long it is in its state."""
        return self._monotonic() - self.since_s

    def idle_s(self) -> float:
        """For how long it has had no request; 0 while it has one."""
        return 0.0 if self._idle_since_s is None else self._monotonic() - self._idle_since_s

    def heard(self) -> None:
        """A token or an answer came from the engine, to whichever request."""
        if self.first_heard_s is None:
            self.first_heard_s = self._monotonic()
        self._silent.restart()

    def reported(self, reply: Any, trust_s: float) -> None:
        """What the engine says of its load (/v1/loads). EngineError, and nothing changes, when it makes no sense.

        Its numbers may be some steps old, so as many of our requests as were open at any time since the last report may be among those
        it counts: only what is beyond them is others'. Theirs that go on are progress too, for ours may wait behind them; where there
        are only ours, they would say it themselves.
        """
        load = load_of(reply, own=self._most_open, at_s=self._monotonic(), trust_s=trust_s)
        if self.load is not None and load.foreign and load.differs_from(self.load):
            self.heard()
        self.load = load
        self._scale = scale(self.capacity, load, load.at_s)
        self._most_open = self.open_requests

    def load_age_s(self) -> float | None:
        """How long ago it reported; None before that."""
        return None if self.load is None else self._monotonic() - self.load.at_s

    def first_token_age_s(self) -> float | None:
        """How long ago its first token came; None before that."""
        return None if self.first_heard_s is None else self._monotonic() - self.first_heard_s

    def has_room(self) -> bool:
        return self.state == "open" and self.open_requests < self.capacity

    def score(self, now_s: float) -> float:
        """How loaded it is; see `rollout.load`."""
        if now_s > self._scale.until_s:
            self._scale = scale(self.capacity, self.load, now_s)
        return self._scale.score(self.open_requests)

    async def emptied(self, deadline_s: float) -> bool:
        """Wait until no request is open here; False when some still are after the deadline."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def bounds(self, limit: asyncio.Timeout) -> Iterator[None]:
        """In this block `limit` runs out as soon as the engine is gone: nobody waits for one that left."""
        self._limits.add(limit)
        try:
            yield
        finally:
            self._limits.discard(limit)

    def _take(self) -> None:
        self.open_requests += 1
        self.served_requests += 1
        self._most_open = max(self._most_open, self.open_requests)
        self._idle_since_s = None
        self._empty.clear()
        self._run_clocks()

    def _give_back(self) -> None:
        self.open_requests -= 1
        if not self.open_requests:
            self._idle_since_s = self._monotonic()
            self._empty.set()
        self._run_clocks()

    def _go(self, state: State, reason: str) -> None:
        if self.state == "gone":
            # An engine may die at any moment: whoever works on it must be ready for that, as for any lost connection.
            raise EngineError("infrastructure", f"engine {self.engine_id}, incarnation {self.incarnation}, is gone: {self.reason}")
        if state not in NEXT_STATES[self.state]:
            raise ValueError(f"engine {self.engine_id} cannot go from {self.state} ({self.reason}) to {state} ({reason})")
        self.state = state
        self.reason = reason
        self.since_s = self._monotonic()
        self._run_clocks()
        if state == "gone":
            for limit in self._limits:
                if not limit.expired():  # one that has run out may still be on its way out of its block
                    limit.reschedule(asyncio.get_running_loop().time())

    def _run_clocks(self) -> None:
        self._busy.run(self.open_requests > 0)
        self._shut.run(self.state == "shut")
        self._silent.run(self.open_requests > 0 and self.state != "shut")


class Stopwatch:
    """Adds up the time during which it was told to run."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._total_s = 0.0
        self._since_s: float | None = None

    def run(self, on: bool) -> None:
        if on and self._since_s is None:
            self._since_s = self._monotonic()
        elif not on and self._since_s is not None:
            self._total_s += self._monotonic() - self._since_s
            self._since_s = None

    def restart(self) -> None:
        """From 0; it goes on running if it ran."""
        self._total_s = 0.0
        if self._since_s is not None:
            self._since_s = self._monotonic()

    def elapsed_s(self) -> float:
        return self._total_s + (0.0 if self._since_s is None else self._monotonic() - self._since_s)
