"""Python's cyclic collector in a process with thousands of requests in flight.

What a request allocates dies with it, by its reference count. At Python's own threshold, 700 containers more than at the last look, the
collector would look at all that is in flight again and again: with 4,096 open requests that was half of the process's time
(benchmarks/README.md). So it looks seldom, and never at what was there before the first request.
"""

from __future__ import annotations

import gc

# Containers, net. 4,096 open requests that all get a chunk at once allocate about 80,000 for a moment; a million of garbage is 100 MB.
YOUNG, MIDDLE, OLD = 200_000, 20, 20


def settle() -> None:
    """Once, when everything is imported."""
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
