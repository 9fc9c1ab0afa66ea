"""One turn of one trajectory, on however many engines it takes: what was received is kept, and the next engine goes on from there.

    prompt ─▶ the engine that holds its prefix ─tokens─▶ kept ─┬─ a stop, or the budget ─▶ Generation
                     ▲                                         │
                     └── lost, aborted, not verified, silent ──┘ on from the last trusted token

Nothing is sampled anew from scratch in silence: what had to be given back is counted. What was received in a life of the driver before this
one is in the prefix log, and a turn begins with it. A turn ends in `GivenUp` with its reason when its budget of tries is used, or when the
prompt itself is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from driver.core import Core
from driver.events import TrajectoryRetried
from driver.extras import Extras
from driver.ledger_rows import Upsert
from driver.ledger_state import RUNNING, Trajectory
from driver.prefix_log import PrefixLog
from driver.prefixes import TurnBuffer, usable
from driver.push import Pusher
from driver.routing import Routing
from rollout.answer import EngineError, Generation, Prefix, joined
from rollout.client import Clock, EngineClient
from rollout.pool import EnginePool, Lease
from rollout.slot import EngineSlot
from rollout.tokens import TokenizerView

ENGINE_WAIT_S = 600.0
FIRST_PAUSE_S = 0.1  # before a third try without a token, and twice as long before each further one: with no engine left that answers, a
LONGEST_PAUSE_S = 5.0  # budget of tries would be gone in the second that it takes to notice that


class GivenUp(Exception):
    """This trajectory ends here; the text is its reason."""


@dataclass(frozen=True)
class Way:
    """How a request goes: to one engine, that served `version`, or through a router, to any of those that served `versions`."""

    client: EngineClient
    clock: Clock
    version: str | None
    versions: frozenset[str] | None

    def sure(self, prefix: Prefix) -> Prefix:
        """Of an answer that broke off. A first chunk of other weights than were served may hold tokens from before them."""
        if self.versions is None or (prefix.spans and prefix.spans[0][0] in self.versions):
            return prefix
        return Prefix()


def retry(core: Core, trajectory: Trajectory, kind: str, reason: str) -> None:
    """Count one more try of this kind, or give the trajectory up when its budget is used."""
    budget = core.config.rollout.data_retries if kind == "data" else core.config.rollout.infrastructure_retries
    used = trajectory.data_attempts if kind == "data" else trajectory.infrastructure_attempts
    if trajectory.state != RUNNING:
        raise GivenUp("its sample was discarded")
    if used >= budget:
        raise GivenUp(f"{kind}: {reason}")
    core.apply(TrajectoryRetried(traj_uid=trajectory.traj_uid, kind=kind, reason=reason))


class Pace:
    """How fast one request's tokens come: from its first chunk, before which it waited for a slot, to its last."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first_at: float | None = None
        self._last_at = 0.0
        self._tokens = 0

    def came(self, tokens: int) -> None:
        self._last_at = self._clock()
        if self._first_at is None:
            self._first_at = self._last_at
        else:
            self._tokens += tokens

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens after the first chunk, and their seconds."""
        return self._tokens, 0.0 if self._first_at is None else self._last_at - self._first_at


@dataclass
class Spent:
    """What one trajectory's requests took: on engines with their gates open, and in all. `lost`: one of them failed, and it says little."""

    engine_s: float = 0.0
    asked_s: float = 0.0
    lost: bool = False


def direct(lease: Lease) -> Way:
    """To the engine of the lease itself."""
    return Way(lease.client, lease.slot.clock, str(lease.slot.verified), None)


class Turns:
    """Asks engines for the turns of trajectories."""

    def __init__(
        self,
        core: Core,
        pool: EnginePool,
        pusher: Pusher,
        tokenizer: TokenizerView,
        routing: Routing | None,
        prefixes: PrefixLog | None = None,
    ) -> None:
        self._core = core
        self.extras = Extras(core, wanted=core.config.trainer.routing_replay, through_router=routing is not None)
        self.prefixes = prefixes or PrefixLog(Path(), core.db, every_s=None, every_tokens=1, verified=pusher.verified)
        self._pool = pool
        self._pusher = pusher
        self._tokenizer = tokenizer
        self._routing = routing
        self._first: dict[int, EngineSlot] = {}  # of live samples: who took its first request, and holds the prompt
        self._last: dict[str, EngineSlot] = {}  # of trajectories in flight: who took its last turn or part
        found = core.db.query("SELECT value FROM meta WHERE name = 'tokens_resampled'")
        self.tokens_resampled: int = msgspec.json.decode(found[0][0]) if found else 0  # over all lives of the driver
        self.progress: dict[str, int] = {}  # tokens so far, by trajectory in flight
        self.spent: dict[str, Spent] = {}  # by trajectory in flight
        self._due: set[str] = set()
        self._open: Counter[str] = Counter()  # turns that are being asked for, by trajectory

    @property
    def asking(self) -> int:
        """Trajectories that have a request at an engine, wait for one, or are about to: the others in flight want no slot now."""
        return len(self._open) + len(self._due)

    def asks(self, traj_uid: str) -> bool:
        """It has a request at an engine, or waits for one."""
        return traj_uid in self._open

    def due(self, traj_uid: str) -> None:
        """Its first turn will be asked for in a moment."""
        self._due.add(traj_uid)

    def where(self, traj_uid: str) -> EngineSlot | None:
        """Who took its last turn or part."""
        return self._last.get(traj_uid)

    @contextmanager
    def _asks(self, traj_uid: str) -> Iterator[Spent]:
        spent = self.spent.setdefault(traj_uid, Spent())
        self._due.discard(traj_uid)
        self._open[traj_uid] += 1
        began = time.monotonic()
        try:
            yield spent
        finally:
            spent.asked_s += time.monotonic() - began
            self._open[traj_uid] -= 1
            if not self._open[traj_uid]:
                del self._open[traj_uid]
            self._core.ring()  # between two turns there is room for another's

    def forget(self, trajectory: Trajectory) -> None:
        """It is in flight no more: because it has ended, or because the driver ends."""
        self._due.discard(trajectory.traj_uid)
        self.progress.pop(trajectory.traj_uid, None)
        self.spent.pop(trajectory.traj_uid, None)
        self._last.pop(trajectory.traj_uid, None)
        self.extras.forget(trajectory)
        if trajectory.state != RUNNING:
            self.prefixes.ended(trajectory.traj_uid)

    def begin_again(self, trajectory: Trajectory) -> None:
        """Its next turn is its first: nothing of the turns before is kept."""
        self.count_resampled(self.progress.pop(trajectory.traj_uid, 0))
        self.prefixes.ended(trajectory.traj_uid)

    def count_resampled(self, tokens: int) -> None:
        """Sampled, and given back: kept over restarts."""
        if tokens:
            self.tokens_resampled += tokens
            self._core.db.write([Upsert("meta", {"name": "tokens_resampled", "value": msgspec.json.encode(self.tokens_resampled)})])

    def forget_sample(self, uid: int) -> None:
        """None of it is running any more."""
        self._first.pop(uid, None)

    def _sampling(self, trajectory: Trajectory, turn: int, prompt_tokens: int) -> dict[str, Any]:
        config = self._core.config.rollout
        room = config.context_length - 1 - prompt_tokens
        sampling: dict[str, Any] = {
            "temperature": config.sampling.temperature,
            "max_new_tokens": min(config.sampling.max_new_tokens, room),
            "stream_interval": config.stream_interval,
        }
        if config.sampling.stop_token_ids:
            sampling["stop_token_ids"] = list(config.sampling.stop_token_ids)
        if config.deterministic:
            name = f"{self._core.run_id}/{self._core.config.seed}/{trajectory.traj_uid}/{turn}"
            sampling["sampling_seed"] = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 1
        return sampling

    async def generate(self, trajectory: Trajectory, turn: int, prompt_ids: list[int]) -> Generation:
        """One turn, on however many engines it takes: what was received is kept, and the next engine goes on from there."""
        with self._asks(trajectory.traj_uid) as spent:
            return await self._generate(trajectory, turn, prompt_ids, spent)

    async def _generate(self, trajectory: Trajectory, turn: int, prompt_ids: list[int], spent: Spent) -> Generation:
        config = self._core.config.rollout
        sampling = self._sampling(trajectory, turn, len(prompt_ids))
        budget = sampling["max_new_tokens"]
        stops = {*self._tokenizer.eos_ids, *config.sampling.stop_token_ids}
        kept = Prefix()
        buffer, logged, useless = self.prefixes.turn(trajectory.traj_uid, turn, prompt_ids, config.sampling.temperature)
        self.count_resampled(useless)
        if logged is not None:
            kept = usable(logged.prefix, stops, budget)
            self.count_resampled(len(logged.prefix.output_ids) - len(kept.output_ids))
            if logged.finish == "stop" and kept is logged.prefix:
                return Generation(kept.output_ids, kept.log_probs, kept.spans, "stop", len(prompt_ids))
            buffer.kept(kept)
            spent.lost = True  # what it took before the restart is not known
        avoid: tuple[str, ...] = ()
        fruitless = 0  # tries in a row
        place: dict[str, Any] | None = None
        for part in range(1_000_000):
            self.extras.lost(trajectory.traj_uid, place)
            if fruitless > 1:
                await asyncio.sleep(min(FIRST_PAUSE_S * 2 ** (fruitless - 2), LONGEST_PAUSE_S))
            if kept.output_ids and (kept.output_ids[-1] in stops or len(kept.output_ids) >= budget):
                whole = _complete(kept, stops, len(prompt_ids))
                buffer.kept(kept, whole.finish_reason)
                return whole
            tried = trajectory.infrastructure_attempts + trajectory.data_attempts
            rid = f"{self._core.run_id}.{self._core.ledger.epoch}.{trajectory.traj_uid}.{turn:04d}.{tried:06d}.{part:06d}"
            room = budget - len(kept.output_ids)
            asked = min(room, config.part_tokens or room)
            request = {**sampling, "max_new_tokens": asked}
            try:
                if self._routing is not None:
                    await self._routing.usable(ENGINE_WAIT_S)
                asker, prefer = f"trajectory {trajectory.traj_uid}", self._prefers(trajectory)
                async with self._pool.acquire(ENGINE_WAIT_S, asker, avoid=avoid, prefer=prefer) as lease:
                    slot, way = lease.slot, self.way(lease)
                    place = self.extras.ask(trajectory.traj_uid, rid, slot)
                    self._took(trajectory, slot)
                    buffer.asks(way.version, way.versions)
                    sent_at = way.clock()
                    pace = Pace(way.clock)
                    try:
                        answer = await way.client.generate(
                            [*prompt_ids, *kept.output_ids],
                            request,
                            rid,
                            stall_s=config.stall_s,
                            clock=way.clock,
                            version=way.version,
                            extras=place,
                            on_tokens=self._count(trajectory, len(kept.output_ids), slot, buffer, pace),
                        )
                        slot.heard()
                        spent.engine_s += way.clock() - sent_at
                        self._core.measured.decoded(*pace.decoded)
                    except EngineError as error:
                        spent.lost = True
                        if error.status is not None:  # a refusal is an answer
                            slot.heard()
                        received = await self._pusher.trusted(way.sure(error.prefix))
                        kept = _extend(kept, received)
                        buffer.kept(kept)
                        avoid = (slot.engine_id,)
                        fruitless = 0 if received.output_ids else fruitless + 1
                        if error.kind == "data":  # a key or a path that is refused says nothing of the prompt, nor of other engines
                            raise GivenUp(f"{error.kind}: {error}") from error
                        if not slot.released:
                            retry(self._core, trajectory, "infrastructure", str(error))
                        continue
                received = await self._pusher.trusted(answer)
                if len(received.output_ids) == len(answer.output_ids) and answer.finish_reason == "length" and asked < room:
                    kept = _extend(kept, received)  # one part of it
                    buffer.kept(kept)
                    fruitless = 0
                    continue
                if len(received.output_ids) == len(answer.output_ids) and answer.finish_reason != "abort":
                    whole = joined(kept, answer)
                    buffer.kept(whole, whole.finish_reason)
                    self.extras.came(trajectory.traj_uid, [*prompt_ids, *whole.output_ids], whole.meta)
                    return whole
                spent.lost = True
                # Aborted by the engine, or made by weights that failed their check: go on from what is good.
                self.count_resampled(len(answer.output_ids) - len(received.output_ids))
                kept = _extend(kept, received)
                buffer.kept(kept)
                fruitless = 0 if received.output_ids else fruitless + 1
                if not received.output_ids and not slot.released:
                    retry(self._core, trajectory, "infrastructure", f"{slot.engine_id} ended the request without a token")
            except TimeoutError as error:
                spent.lost = True
                retry(self._core, trajectory, "infrastructure", str(error))
        raise AssertionError("unreachable")

    def way(self, lease: Lease) -> Way:
        """How a request on this lease goes."""
        if self._routing is None:
            return direct(lease)
        versions = frozenset(str(slot.verified) for slot in self._pool.slots.values() if slot.state == "open")
        return Way(self._routing.client.engine, self._pool.clock, None, versions)

    def _prefers(self, trajectory: Trajectory) -> EngineSlot | None:
        """The engine that holds its last turn or, at its first, its siblings' prompt. A router has an opinion of its own."""
        if self._routing is not None:
            return None
        return self._last.get(trajectory.traj_uid) or self._first.get(trajectory.uid)

    def _took(self, trajectory: Trajectory, slot: EngineSlot) -> None:
        """Its next turn goes where this one went, and its siblings to where the first of them went, while that engine lives."""
        self._last[trajectory.traj_uid] = slot
        first = self._first.get(trajectory.uid)
        if first is None or first.state == "gone":
            self._first[trajectory.uid] = slot

    def _count(
        self, trajectory: Trajectory, before: int, slot: EngineSlot, buffer: TurnBuffer, pace: Pace
    ) -> Callable[[list[int], list[float], str], None]:
        self.progress[trajectory.traj_uid] = before

        def on_tokens(ids: list[int], log_probs: list[float], version: str) -> None:
            slot.heard()
            self.progress[trajectory.traj_uid] += len(ids)
            pace.came(len(ids))
            buffer.got(ids, log_probs, version)

        return on_tokens


def _extend(kept: Prefix, more: Prefix) -> Prefix:
    """`more` was generated after `kept`."""
    whole = joined(kept, Generation(more.output_ids, more.log_probs, more.spans))
    return Prefix(whole.output_ids, whole.log_probs, whole.spans)


def _complete(kept: Prefix, stops: set[int], prompt_tokens: int) -> Generation:
    """The engine was lost after the last token and before it said so: the answer is whole."""
    return Generation(
        kept.output_ids,
        kept.log_probs,
        kept.spans,
        finish_reason="stop" if kept.output_ids[-1] in stops else "length",
        prompt_tokens=prompt_tokens,
    )
