"""Does a process that says it is well also get on? Pure: told what its health says, and when.

A process may answer for its health from a thread that has nothing else to do, while its work stands still: a rank that waits for one that
was stopped, a pool whose workers hang. So it is judged by what it does, as an engine by its tokens: busy, and the number that grows
with its work has not grown for `stall_s`. One that has nothing to do may stand as long as it likes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Progress:
    def __init__(self, stall_s: float | None) -> None:
        """`stall_s` None: not judged."""
        self._stall_s = stall_s
        self._last: object = None
        self._since_s: float | None = None

    def stands_for_s(self, health: Mapping[str, Any], now_s: float) -> float | None:
        """For how long its work has stood still, once that is longer than it may; None while all is well."""
        progress = health.get("progress")
        if self._stall_s is None or not is_busy(health) or progress is None:
            self._since_s = None
            return None
        if self._since_s is None or progress != self._last:
            self._last, self._since_s = progress, now_s
            return None
        stood_s = now_s - self._since_s
        return stood_s if stood_s >= self._stall_s else None

    def again(self) -> None:
        """Something was done about it: judged anew from here."""
        self._since_s = None


def is_busy(health: Mapping[str, Any]) -> bool:
    """As each of our processes says it: the trainer, the reward service, the process of a role."""
    return bool(health.get("state") == "busy" or health.get("busy") or health.get("busy_workers"))
