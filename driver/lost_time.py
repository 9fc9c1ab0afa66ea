"""Where a run's time went: for which reasons each side waited, one after another, and how many seconds each kind of reason has cost.

A side that waits again within a second and for the same kind of reason goes on with the entry it had, so that a gate which closes with
every request is one line and not a thousand. Times are monotonic seconds, pushed in; memory is bounded.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass

ENTRIES = 300
AGAIN_S = 1.0
FULL = "full"  # the kind of a wait that loses nothing: engines have all the work they can hold


@dataclass(eq=False)
class Entry:
    """`times` waits of one side for one kind of reason, of `waited_s` in all between `began` and `ended` (None: it waits now)."""

    side: str
    kind: str
    reason: str
    began: float
    since: float  # of the wait that goes on
    ended: float | None = None
    waited_s: float = 0.0
    times: int = 1

    def seconds(self, now: float) -> float:
        return self.waited_s + (now - self.since if self.ended is None else 0.0)


class LostTime:
    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=ENTRIES)
        self._open: dict[str, Entry] = {}
        self._last: dict[tuple[str, str], Entry] = {}  # by side and kind: what may go on
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)

    def waits(self, side: str, kind: str, reason: str, now: float) -> None:
        """From now on for this reason. The newest words of a kind are the ones kept."""
        entry = self._open.get(side)
        if entry is not None and entry.kind == kind:
            entry.reason = reason
            return
        self.over(side, now)
        last = self._last.get((side, kind))
        if last is not None and last.ended is not None and now - last.ended < AGAIN_S and last in self._entries:
            last.reason, last.since, last.ended = reason, now, None
            last.times += 1
            self._open[side] = last
            return
        entry = Entry(side, kind, reason, now, now)
        self._entries.append(entry)
        self._open[side] = self._last[side, kind] = entry

    def over(self, side: str, now: float) -> None:
        """It does not wait any more."""
        entry = self._open.pop(side, None)
        if entry is not None:
            entry.waited_s += now - entry.since
            entry.ended = now
            self._seconds[side, entry.kind] += now - entry.since

    def seconds(self, now: float) -> dict[str, dict[str, float]]:
        """Since the start: by side, then by kind, the largest first."""
        totals = self._seconds.copy()
        for side, entry in self._open.items():
            totals[side, entry.kind] += now - entry.since
        found: dict[str, dict[str, float]] = {}
        for (side, kind), seconds in sorted(totals.items(), key=lambda item: -item[1]):
            found.setdefault(side, {})[kind] = round(seconds, 3)
        return found

    def newest(self, count: int) -> list[Entry]:
        """The newest last."""
        return list(self._entries)[-count:]
