"""What was freed and is still leased: kept, and tried again until it is gone.

A free that meets a reader is not an error and not forgotten. One thread tries the rest again for as long as there is any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from store import mooncake_client as codes
from store.base import StoreError, Unavailable

log = logging.getLogger("headrace.store")
AT_ONCE = 1024
LIMIT = 1 << 20  # names that wait: far more than a run has objects, and still not much memory
AGAIN_S = 0.25
_LATER = (codes.LEASED, codes.BEING_WRITTEN, codes.BUSY, *codes.MASTER_LOST)


class Frees:
    """`remove` is the master's, by names, and answers with codes."""

    def __init__(self, remove: Callable[[Sequence[str]], list[int]]) -> None:
        self._remove = remove
        self._pending: dict[str, None] = {}
        self._guard = threading.Lock()
        self._removing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._said: str | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, name: str) -> bool:
        return name in self._pending

    def free(self, names: Iterable[str]) -> None:
        """Raises Unavailable when more wait than can be kept."""
        names = list(names)
        with self._guard:
            if len(self._pending) + len(names) > LIMIT:
                raise Unavailable(f"{len(self._pending)} objects wait to be freed; is the store's master running?")
            self._pending |= dict.fromkeys(names)
        self.drain()
        with self._guard:
            if self._pending and self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="store frees", daemon=True)
                self._thread.start()

    def drain(self) -> int:
        """Try all of them once; how many are gone now. A master that does not answer leaves them waiting, and is said once."""
        gone = 0
        with self._removing:
            names = list(self._pending)
            for start in range(0, len(names), AT_ONCE):
                part = names[start : start + AT_ONCE]
                try:
                    answers = self._remove(part)
                except StoreError as error:
                    self._say(f"{error}; what is freed meanwhile is freed later")
                    break
                done = [name for name, code in zip(part, answers, strict=True) if code not in _LATER]
                for name, code in zip(part, answers, strict=True):
                    if code not in (0, codes.NOT_FOUND, *_LATER):
                        log.error("the store could not free %s (code %d): its bytes stay until the store ends", name, code)
                with self._guard:
                    for name in done:
                        del self._pending[name]
                gone += len(done)
            else:
                self._said = None
        return gone

    def finish(self, deadline_s: float) -> None:
        """Raises Unavailable when some are left at the deadline."""
        give_up = time.monotonic() + deadline_s
        while self._pending:
            self.drain()
            if self._pending and time.monotonic() > give_up:
                raise Unavailable(f"{len(self._pending)} objects could not be freed within {deadline_s:g} s: somebody still reads them")
            time.sleep(0.02)

    def close(self) -> None:
        self._ended.set()
        if self._pending:
            log.warning("%d freed objects are still leased, and stay until the store's owner frees them again", len(self._pending))

    def _run(self) -> None:
        while not self._ended.wait(AGAIN_S):
            self.drain()
            with self._guard:
                if not self._pending:
                    self._thread = None
                    return

    def _say(self, words: str) -> None:
        if words != self._said:
            log.warning("%s", words)
        self._said = words
