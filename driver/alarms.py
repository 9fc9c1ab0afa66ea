"""Alarms that last, and the log: each is said when it begins, when it has become much worse, and when it is over; the status has it always.

An alarm that is true for a thousand batches would else stand in the log a thousand times, with other digits, and hide what is new there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

MUCH_WORSE = 1.5  # times what was said last


@dataclass(frozen=True)
class Alarm:
    """`name` is the same as long as it lasts, `words` have today's numbers; `size` says how bad it is, 0 where that cannot be said."""

    name: str
    words: str
    size: float = 0.0


class Said:
    """What the log says of the alarms of one run."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, Alarm] = {}  # as they were logged last

    def look(self, alarms: Iterable[Alarm]) -> None:
        """These are all that hold now."""
        now = {alarm.name: alarm for alarm in alarms}
        for name in [name for name in self._said if name not in now]:
            del self._said[name]
            self._log.info("over: %s", name)
        for name, alarm in now.items():
            before = self._said.get(name)
            if before is None:
                self._log.warning("%s", alarm.words)
            elif alarm.size > MUCH_WORSE * before.size:
                self._log.warning("worse: %s", alarm.words)
            else:
                continue
            self._said[name] = alarm
