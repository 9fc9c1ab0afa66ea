"""Which tokens of the trajectories in flight are worth keeping, and when they are due: arithmetic and lists, no clock, no I/O.

    request ──chunks──▶ pending ──due, and made by verified weights──▶ record ──▶ the log
                           ▲ what is kept at the end of a request replaces what its chunks said

A chunk that comes with other weights than the ones before it may hold tokens of both, and only the end of its answer says which: from
there on nothing of that request is pending until the answer has ended. A record says where in its turn it begins; a later one that begins
before the end of an earlier one takes its place from there. So the log is only ever appended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rollout.answer import Prefix, Span, merged


@dataclass(frozen=True)
class Record:
    """Tokens of one turn from position `start` on; spans are over positions of the turn. `finish`: the turn ended here, and how."""

    traj_uid: str
    turn: int
    start: int
    output_ids: list[int]
    log_probs: list[float]
    spans: list[Span]
    finish: str | None
    digest: bytes


@dataclass(frozen=True)
class Logged:
    """What the log holds of one turn."""

    prefix: Prefix
    finish: str | None
    digest: bytes


@dataclass
class TurnBuffer:
    """One turn in flight. `digest` names what its tokens are a continuation of."""

    traj_uid: str
    turn: int
    digest: bytes
    logged: int = 0  # tokens that are in the log
    received: int = 0  # tokens that have arrived, trusted or not
    finish: str | None = None
    _owner: Prefixes | None = None
    _ids: list[int] = field(default_factory=list)  # pending
    _log_probs: list[float] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list)
    _version: str | None = None  # of the request's tokens so far
    _among: frozenset[str] | None = None
    _unsure: bool = False
    _changed: bool = False  # a record is owed even without a token: a cut, or the end

    @property
    def pending(self) -> int:
        return len(self._ids)

    def asks(self, version: str | None, among: frozenset[str] | None) -> None:
        """A request is sent to an engine that serves `version`, or to any of those that serve one of `among`."""
        self._version, self._among, self._unsure = version, among, False

    def got(self, ids: list[int], log_probs: list[float], version: str) -> None:
        """A chunk, as the client has checked it."""
        self.received += len(ids)
        if self._version is None and self._among is not None and version not in self._among:
            self._unsure = True
        assert self._owner is not None
        if self._unsure or self._version not in (None, version) or not self._owner.keeps:
            self._unsure = True
            return
        self._version = version
        start = self.logged + len(self._ids)
        self._ids += ids
        self._log_probs += log_probs
        self._span(version, start, start + len(ids))
        self._owner.touched(self)

    def kept(self, prefix: Prefix, finish: str | None = None) -> None:
        """A request has ended: this is what is kept of the turn so far, all of it trusted."""
        assert self._owner is not None
        length = len(prefix.output_ids)
        self.received = length
        if not self._owner.keeps:
            return
        self._changed |= length < self.logged or finish is not None
        self.logged = min(self.logged, length)
        self.finish, self._unsure = finish, False
        self._ids, self._log_probs = prefix.output_ids[self.logged :], prefix.log_probs[self.logged :]
        self._spans = [(version, max(start, self.logged), end) for version, start, end in prefix.spans if end > self.logged]
        if self.owing:
            self._owner.touched(self)

    def take(self, verified: Callable[[str], bool]) -> Record | None:
        """What may be logged now, which counts as logged from here on."""
        sure = self.logged
        for version, _, end in self._spans:
            if not verified(version):
                break
            sure = end
        count = sure - self.logged
        whole = count == len(self._ids)
        if not count and not (self._changed and whole):
            return None
        spans = [(version, start, min(end, sure)) for version, start, end in self._spans if start < sure]
        record = Record(
            self.traj_uid,
            self.turn,
            self.logged,
            self._ids[:count],
            self._log_probs[:count],
            spans,
            self.finish if whole else None,
            self.digest,
        )
        del self._ids[:count], self._log_probs[:count]
        self._spans = [(version, max(start, sure), end) for version, start, end in self._spans if end > sure]
        self.logged, self._changed = sure, self._changed and not whole
        return record

    @property
    def owing(self) -> bool:
        return bool(self._ids) or self._changed

    def _span(self, version: str, start: int, end: int) -> None:
        if self._spans and self._spans[-1][0] == version:
            start = self._spans.pop()[1]
        self._spans.append((version, start, end))


class Prefixes:
    """Every turn in flight, and of which trajectories something is due."""

    def __init__(self, every_s: float | None, every_tokens: int, now: Callable[[], float]) -> None:
        self.keeps = every_s is not None  # else tokens are only counted
        self._every_s = every_s or 0.0
        self._every_tokens = every_tokens
        self._now = now
        self._turns: dict[str, dict[int, TurnBuffer]] = {}
        self._since: dict[str, float] = {}  # trajectories with something pending, the longest waiting first
        self.full: dict[str, None] = {}  # those with many tokens pending

    def begin(self, traj_uid: str, turn: int, digest: bytes, logged: int) -> TurnBuffer:
        buffer = TurnBuffer(traj_uid, turn, digest, logged=logged, received=logged, _owner=self)
        self._turns.setdefault(traj_uid, {})[turn] = buffer
        return buffer

    def touched(self, buffer: TurnBuffer) -> None:
        self._since.setdefault(buffer.traj_uid, self._now())
        if buffer.pending >= self._every_tokens:
            self.full[buffer.traj_uid] = None

    def end(self, traj_uid: str) -> None:
        """It is in flight no more."""
        self._turns.pop(traj_uid, None)
        self._since.pop(traj_uid, None)
        self.full.pop(traj_uid, None)

    def take(self, verified: Callable[[str], bool], *, everything: bool = False) -> list[Record]:
        """What is due: of a trajectory all its turns, the earlier ones first, for a turn means nothing without those before it."""
        now = self._now()
        due = list(self.full)
        for traj_uid, since in self._since.items():
            if not everything and now - since < self._every_s:
                break
            due.append(traj_uid)
        records = []
        for traj_uid in dict.fromkeys(due):
            self._since.pop(traj_uid, None)
            self.full.pop(traj_uid, None)
            for buffer in self._turns.get(traj_uid, {}).values():
                if (record := buffer.take(verified)) is not None:
                    records.append(record)
                if buffer.owing:  # weights whose push is not yet decided
                    self._since.setdefault(traj_uid, now)
                    break
        return records

    def lost(self) -> int:
        """Tokens that have arrived and are not in the log."""
        return sum(buffer.received - buffer.logged for turns in self._turns.values() for buffer in turns.values())


def assembled(records: Iterable[Record]) -> dict[int, Logged]:
    """The turns of one trajectory out of its records, in the order in which they were written. What comes after a gap is of no use."""
    turns: dict[int, Logged] = {}
    broken: set[int] = set()
    for record in records:
        before = turns.get(record.turn)
        if record.start == 0:  # begun, or begun anew: what followed from it goes
            before = Logged(Prefix(), None, record.digest)
            broken -= {turn for turn in broken if turn >= record.turn}
            turns = {turn: logged for turn, logged in turns.items() if turn < record.turn}
        follows = record.turn == 0 or (record.turn - 1 in turns and record.turn - 1 not in broken)
        if before is None or before.digest != record.digest or record.start > len(before.prefix.output_ids) or not follows:
            broken.add(record.turn)
        if record.turn in broken:
            continue
        assert before is not None
        at = record.start
        spans = [(version, start, min(end, at)) for version, start, end in before.prefix.spans if start < at]
        prefix = Prefix(
            [*before.prefix.output_ids[:at], *record.output_ids],
            [*before.prefix.log_probs[:at], *record.log_probs],
            merged([*spans, *record.spans]),
        )
        turns[record.turn] = Logged(prefix, record.finish, record.digest)
    return turns


def usable(prefix: Prefix, stops: set[int], budget: int) -> Prefix:
    """As much of it as the present configuration could have sampled: up to the first stop, and not beyond the budget."""
    end = next((i + 1 for i, token in enumerate(prefix.output_ids) if token in stops), len(prefix.output_ids))
    end = min(end, budget)
    if end == len(prefix.output_ids):
        return prefix
    spans = [(version, start, min(stop, end)) for version, start, stop in prefix.spans if start < end]
    return Prefix(prefix.output_ids[:end], prefix.log_probs[:end], spans)
