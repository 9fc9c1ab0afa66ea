"""Why each side of a run waits: the constraint that binds, in one sentence with its numbers (L1).

Facts in, sentences out: no clock, no run, no I/O, so that each sentence has a test. `driver/observe.py` gathers the facts.

    trainer idle 41.0 s: 31 of 32 samples are ready; sample 812 misses 1 of 8, on engine-2, 18,211 tokens so far; staleness bound 3 …
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from driver.lost_time import FULL

UNDER_WAY = "under way"  # the kind of a push that goes on: every version has one
REPLAY = "replay"  # the trainer works, and makes nothing new
STALENESS, LAG = BOUND = ("staleness", "lag")  # kinds of rollout's wait: until a batch is trained; until its version is pushed
SIDES = ("trainer", "reward", "push", "rollout")  # the first of these that waits is the one a person asks about


@dataclass(frozen=True)
class Waiting:
    """One side's wait. `seconds` for this reason, `idle_s` in all since it last had work."""

    side: str
    kind: str
    reason: str
    seconds: float
    idle_s: float


@dataclass(frozen=True)
class Missing:
    """A trajectory that its sample is not ready without, and where it is, in words."""

    traj_uid: str
    place: str
    tokens: int
    age_s: float


@dataclass(frozen=True)
class Straggler:
    """The sample that the trainer waits for."""

    uid: int
    n: int
    missing: tuple[Missing, ...]


@dataclass(frozen=True)
class Engine:
    """`seconds` in this state; `idle_s` without any request, 0.0 while it has one."""

    engine_id: str
    state: str
    reason: str
    seconds: float
    open_requests: int
    idle_s: float


@dataclass(frozen=True)
class Push:
    """The newest version that engines should have; the engines it is on its way to, and those that lack it and cannot take it now."""

    version: int
    seconds: float
    under_way: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class Training:
    """What the trainer is at, in words, for how long, and how many of the `samples` of the next batch are ready."""

    what: str
    seconds: float
    ready: int
    samples: int


@dataclass(frozen=True)
class Facts:
    waits: tuple[Waiting, ...] = ()
    training: Training | None = None  # None: it does not work now
    straggler: Straggler | None = None
    engines: tuple[Engine, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)  # engines of the run that cannot be used, with the reason
    push: Push | None = None
    over: str | None = None  # why the run goes on no more

    def of(self, side: str) -> Waiting | None:
        return next((wait for wait in self.waits if wait.side == side), None)


@dataclass(frozen=True)
class Because:
    """What a side waits for. `seconds` since it waits."""

    side: str
    kind: str
    reason: str
    seconds: float
    whole: bool = False  # the reason is a sentence that names its side

    @property
    def sentence(self) -> str:
        return f"{self.side} {'busy' if self.kind == REPLAY else 'idle'} {self.seconds:.1f} s: {self.reason}"


def replaying(batch_id: int, replay: range, next_batch: int) -> str | None:
    """While the trainer makes versions again that it had made before it was lost. `replay`: the batches that it lacked when it came up."""
    if batch_id not in replay:
        return None
    of = min(len(replay), next_batch - replay.start)  # some may have been unmade since
    return f"replaying batch {batch_id - replay.start + 1} of {of} since checkpoint {replay.start} (batch_id {batch_id})"


def explain(facts: Facts) -> list[Because]:
    """One for each side that waits: trainer, reward, push, rollout, then the engines."""
    found = [_of_side(facts, wait) for side in SIDES if (wait := facts.of(side)) is not None]
    pushing = _push(facts)
    if pushing is not None:
        found.append(pushing)
    found += [because for engine in facts.engines if (because := _engine(facts, engine)) is not None]
    named = {because.side for because in found}
    found += [Because(engine_id, "absent", reason, 0.0) for engine_id, reason in facts.absent.items() if engine_id not in named]
    # An engine that is being replaced has a wait of its own, and perhaps no slot; so have a filter that takes everything, and a role.
    found += [
        Because(name, wait.kind, wait.reason, wait.idle_s, whole=True)
        for wait in facts.waits
        if wait.side not in SIDES and (name := wait.side.removeprefix("engine ")) not in named
    ]
    return found


def sentence(facts: Facts) -> str:
    """The one that a person asks for: why the slower side waits, what it waits for in turn, which engines and roles are out of use, and
    whether the filter takes everything."""
    if facts.over is not None:
        return facts.over
    found = {because.side: because for because in explain(facts)}
    side = next((side for side in SIDES if side in found and found[side].kind not in (FULL, UNDER_WAY)), None)
    parts = [] if side is None else [found[side].sentence]
    if side == "trainer":
        upstream = next((s for s in ("reward", "rollout") if s in found and not _said_already(found["trainer"], found[s])), None)
        parts += [] if upstream is None else [f"{upstream}: {found[upstream].reason}"]
    # Shut is the moment of a push, which every engine has with every batch: no news to a person.
    lost = [b for s, b in found.items() if s not in SIDES and b.kind not in ("shut", "idle")]
    said = "; ".join(parts)
    parts += [b.reason if b.whole or b.reason.startswith(b.side) else f"{b.side} {b.reason}" for b in lost if b.side not in said]
    return "; ".join(parts) or "Nothing waits: engines and trainer are both at work."


def _said_already(trainer: Because, upstream: Because) -> bool:
    return upstream.reason in trainer.reason or upstream.kind == FULL


def _of_side(facts: Facts, wait: Waiting) -> Because:
    reason = wait.reason
    if wait.side == "rollout" and wait.kind in BOUND and facts.training is not None:
        reason += f"; {_training(facts.training, wait.kind)}"
    if wait.side == "trainer" and facts.straggler is not None and wait.kind in ("samples", "held"):
        reason = f"{_without_oldest(reason)}; {_straggler(facts.straggler, wait.kind)}"
        rollout = facts.of("rollout")
        if rollout is not None and rollout.kind in BOUND:
            reason += f"; and no new sample may start: {rollout.reason}"
    return Because(wait.side, wait.kind, reason, wait.idle_s)


def _training(training: Training, kind: str) -> str:
    """`trainer busy 8.2 s: batch 6; the next has its 32 samples, so training is the slower side`. A lag may be the push's."""
    busy, samples = f"trainer busy {training.seconds:.1f} s: {training.what}", training.samples
    if training.ready >= samples and kind == STALENESS:
        return f"{busy}; the next has its {samples} samples, so training is the slower side"
    return f"{busy}; {min(training.ready, samples)} of {samples} samples of the next are ready"


def _without_oldest(reason: str) -> str:
    """The reason up to where it names the sample, of which more is said."""
    return reason.partition("; the oldest unfinished")[0]


def _straggler(straggler: Straggler, kind: str) -> str:
    """`sample 812 misses 2 of 8: the longest on engine-2, 18,211 tokens so far`."""
    name = "it" if kind == "held" else f"sample {straggler.uid}"
    if not straggler.missing:
        return f"{name} is whole by now"
    most = max(straggler.missing, key=lambda missing: (missing.tokens, missing.age_s))
    tokens = f"{most.tokens:,} token{'s' if most.tokens > 1 else ''} so far"
    where = f"{most.place}, {tokens}" if most.tokens else f"{most.place} for {most.age_s:.1f} s"
    count = len(straggler.missing)
    return f"{name} misses {count} of {straggler.n}{', ' if count == 1 else ': the longest '}{where}"


def _push(facts: Facts) -> Because | None:
    push = facts.push
    if push is None:
        return None
    if push.under_way:
        return Because("push", UNDER_WAY, f"version {push.version} is on its way to {_names(push.under_way)}", push.seconds)
    if push.lacking:
        state = {engine.engine_id: engine for engine in facts.engines}
        told = [f"{name} ({state[name].state}: {state[name].reason})" if name in state else name for name in push.lacking]
        return Because("push", "engines", f"version {push.version} waits for {_names(told)}", push.seconds)
    return None


def _engine(facts: Facts, engine: Engine) -> Because | None:
    if engine.state != "open":
        # While it is shut its requests wait in it, which is what they lose.
        held = f", {engine.open_requests} requests are held" if engine.open_requests and engine.state == "shut" else ""
        return Because(engine.engine_id, engine.state, f"is {engine.state}: {engine.reason}{held}", engine.seconds)
    if engine.open_requests == 0:
        rollout = facts.of("rollout")
        return Because(engine.engine_id, "idle", f"has no request: {rollout.reason if rollout else 'none was sent to it'}", engine.idle_s)
    return None


def _names(names: tuple[str, ...] | list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
