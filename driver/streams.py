"""The streams between roles: who still has to see which item, and what the newest value is. Pure; `driver.stream_db` keeps it on disk.

A queue deals its items out: each subscribing role gets each item once, in order, and of a role's instances the next free one. What is
given to an instance stays in the queue until it is done; what an instance loses with its life goes to the front again. An item leaves when
every subscriber has done it, or given it up after its tries. So a queue's length is the lag of its slowest subscriber, and `room` is
what a publisher may still put there.

Every change returns what must be written. It is one commit with whatever else belongs to it: that an item is done, what was made of it,
and the state its role keeps. Either all of it happened, or the item is given again.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from driver.roles import Stream

Write = tuple[str, tuple[Any, ...]]
"""one of the statements of `driver.stream_db`, by name, and its values"""


@dataclass(frozen=True)
class Item:
    stream: str
    seq: int
    value: Any
    tries: int = 0
    """how often it was given before, and lost or failed"""


@dataclass
class Reader:
    """What one subscribing role has of a queue. `todo` is a heap of numbers, the oldest first."""

    todo: list[int] = field(default_factory=list)
    given: dict[int, str] = field(default_factory=dict)
    """number → the instance that is at it"""
    tries: dict[int, int] = field(default_factory=dict)
    since: int = 0
    """what was published before was not for it"""
    done: int = 0
    given_up: int = 0
    last_reason: str | None = None

    @property
    def waiting(self) -> int:
        return len(self.todo) + len(self.given)


class Queue:
    """One stream of kind `queue`. `items` are those that some reader has not done."""

    def __init__(self, stream: Stream, readers: Iterable[str]) -> None:
        self.stream = stream
        self.readers = {name: Reader() for name in readers}
        self.items: dict[int, Any] = {}
        self._wanted: dict[int, int] = {}
        """number → how many readers have not done it"""
        self.next_seq = 0
        self.last_key: int | None = None
        """of the publisher's own numbering, where it has one: what was published once is not published again"""

    @property
    def room(self) -> int:
        return self.stream.capacity - len(self.items)

    def publish(self, value: Any, key: int | None = None) -> list[Write]:
        """Nothing to write, and nothing published, when `key` is not above the last one. The caller has looked for room."""
        if key is not None and self.last_key is not None and key <= self.last_key:
            return []
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.last_key = key if key is not None else self.last_key
        self.hold(seq, value, self.readers)
        name = self.stream.name
        return [("item", (name, seq, value)), ("position", (name, self.next_seq, self.last_key))]

    def hold(self, seq: int, value: Any, readers: Collection[str]) -> None:
        """This item waits for these readers."""
        if not readers:
            return
        self.items[seq], self._wanted[seq] = value, len(readers)
        for name in readers:
            heapq.heappush(self.readers[name].todo, seq)

    def take(self, reader: str, instance: str) -> Item | None:
        """The oldest item that no instance of this role is at."""
        mine = self.readers[reader]
        if not mine.todo:
            return None
        seq = heapq.heappop(mine.todo)
        mine.given[seq] = instance
        return Item(self.stream.name, seq, self.items[seq], mine.tries.get(seq, 0))

    def done(self, reader: str, seq: int) -> list[Write]:
        mine = self.readers[reader]
        del mine.given[seq]
        mine.tries.pop(seq, None)
        mine.done += 1
        return [("done", (self.stream.name, reader, seq)), *self._forget(seq), self._counted(reader)]

    def lost(self, reader: str, seq: int, reason: str, tries: int) -> list[Write]:
        """Given and not done: to the front again, or given up when that was the last of its tries."""
        mine = self.readers[reader]
        mine.tries[seq] = mine.tries.get(seq, 0) + 1
        mine.last_reason = reason
        if mine.tries[seq] < tries:
            del mine.given[seq]
            heapq.heappush(mine.todo, seq)
            return []
        mine.given_up += 1
        mine.done -= 1  # `done` counts it again
        return self.done(reader, seq)

    def give_back(self, reader: str, instance: str) -> None:
        """What this instance was at, without blame: it was ended on purpose."""
        mine = self.readers[reader]
        for seq in [seq for seq, holder in mine.given.items() if holder == instance]:
            del mine.given[seq]
            heapq.heappush(mine.todo, seq)

    def _forget(self, seq: int) -> list[Write]:
        self._wanted[seq] -= 1
        if self._wanted[seq]:
            return []
        del self.items[seq], self._wanted[seq]
        return [("forget", (self.stream.name, seq))]

    def _counted(self, reader: str) -> Write:
        mine = self.readers[reader]
        return ("counted", (self.stream.name, reader, mine.since, mine.done, mine.given_up, mine.last_reason))


class Latest:
    """One stream of kind `latest`: its newest value, and how many there were."""

    def __init__(self, stream: Stream, version: int = 0, value: Any = None) -> None:
        self.stream = stream
        self.version = version
        self.value = value

    def publish(self, value: Any) -> list[Write]:
        """The same value again is no news."""
        if value == self.value:
            return []
        self.version, self.value = self.version + 1, value
        return [("latest", (self.stream.name, self.version, value))]


class Streams:
    """All streams of a run that user's roles write or read."""

    def __init__(self, queues: Mapping[str, Queue], latest: Mapping[str, Latest]) -> None:
        self.queues = dict(queues)
        self.latest = dict(latest)

    def fits(self, published: list[tuple[str, Any]]) -> str | None:
        """Why these can not be published now, all of them together; None when they can."""
        for name, queue in self.queues.items():
            count = sum(1 for stream, _ in published if stream == name)
            if count > queue.room:
                slowest = max(queue.readers, key=lambda reader: queue.readers[reader].waiting)
                return f"stream {name} is full ({len(queue.items)} of {queue.stream.capacity}): {slowest} is behind"
        return None

    def too_many(self, published: list[tuple[str, Any]]) -> str | None:
        """Why these could never be published together."""
        for name, queue in self.queues.items():
            count = sum(1 for stream, _ in published if stream == name)
            if count > queue.stream.capacity:
                return f"{count} items for {name} at once, whose capacity is {queue.stream.capacity}"
        return None

    def publish(self, published: list[tuple[str, Any]]) -> list[Write]:
        writes: list[Write] = []
        for name, value in published:
            writes += self.queues[name].publish(value) if name in self.queues else self.latest[name].publish(value)
        return writes
