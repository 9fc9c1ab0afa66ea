"""What it saves that the rows of a trajectory lie in one object: against an object a row, for one leaf and for eight.

python -m benchmarks.rows [--quick] [--json FILE]

The same leaves are put, opened row by row and freed in turn, in both ways, through the real store; a trajectory's rewards come with them.
"""

from __future__ import annotations

import uuid

import numpy as np

from benchmarks.common import Stopwatch, arguments, median, report
from store import EmbeddedStore, Ref, default_root
from store.rows import packed, row_of

TOKENS = 600
LEAVES = (1, 8)


def row(rng: np.random.Generator) -> dict[str, np.ndarray]:
    positions = TOKENS - 1
    return {
        "input_ids": rng.integers(0, 50_000, TOKENS).astype(np.int32),
        "response_mask": np.ones(positions, np.uint8),
        "rollout_log_probs": rng.normal(-1.0, 0.1, positions).astype(np.float32),
        "version_spans": np.array([[0, 1, 0, positions]]),
        "temperature": np.array(1.0, np.float32),
    }


def reward(rows: int) -> dict[str, np.ndarray]:
    return {"score": np.ones(rows, np.float32), "is_correct": np.ones(rows, np.uint8)}


def passed(store: EmbeddedStore, rows: list[dict[str, np.ndarray]], objects: list[list[int]]) -> tuple[float, float, int, int]:
    """Seconds to put and free, and to open each row; bytes and objects in the store. `objects` are the rows of each object."""
    watch = Stopwatch()
    refs: list[tuple[Ref, list[int]]] = []
    rewards = []
    for numbers in objects:
        name = uuid.uuid4().hex
        refs.append((store.put(f"bench/{name}/rollout", packed([rows[number] for number in numbers])), numbers))
        rewards.append(store.put(f"bench/{name}/reward", reward(len(numbers))))
    put_s, watch = watch.seconds(), Stopwatch()
    for ref, numbers in refs:
        for number in range(len(numbers)):
            assert len(row_of(store.open(ref), number)["input_ids"]) == TOKENS
    open_s = watch.seconds()
    stats = store.stats()
    watch = Stopwatch()
    store.free([*(ref for ref, _ in refs), *rewards])
    return put_s + watch.seconds(), open_s, stats.used_bytes, stats.objects


def main() -> int:
    options = arguments(__doc__)
    store = EmbeddedStore(default_root(f"bench-rows-{uuid.uuid4().hex[:8]}"), 64 << 20)
    figures: dict[str, float] = {}
    try:
        for leaves in LEAVES:
            rows = [row(np.random.default_rng(number)) for number in range(leaves)]
            ways = {"together": [list(range(leaves))], "apart": [[number] for number in range(leaves)]}
            found: dict[str, list[tuple[float, float, int, int]]] = {way: [] for way in ways}
            for _ in range(50 if options.quick else 1000):
                for way, objects in ways.items():
                    found[way].append(passed(store, rows, objects))
            for way, each in found.items():
                name = f"{leaves}_leaves_{way}"
                figures[f"{name}_put_and_free_us"] = 1e6 * median([put_s for put_s, _, _, _ in each])
                figures[f"{name}_open_us"] = 1e6 * median([open_s for _, open_s, _, _ in each])
                figures[f"{name}_bytes"], figures[f"{name}_objects"] = each[0][2:]
    finally:
        store.remove()
    return report("rows", figures, {}, options, ["numpy"])


if __name__ == "__main__":
    raise SystemExit(main())
