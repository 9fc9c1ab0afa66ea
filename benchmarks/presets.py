"""What the staleness presets cost and give: the real ledger, batcher, policy and bias meter in a simulated world (`tests/worlds.py`).

No process, no clock: a figure is the same on any machine. Generation and training are in balance, n = 8, C = 256 slots, P = 32 samples,
lengths from both traces, no lag. `fraction` is of min(C / E[L], B / tau). `hold_s` is the mean length. `lost` is the part of all slot
time that went into trajectories that were discarded. `longest` is the share of the longest tenth as the bias meter shows it, trained
over sampled.
"""

from __future__ import annotations

import statistics
import sys

from benchmarks.common import arguments, report
from driver.bias import rows
from driver.policy import Preset
from tests.worlds import TRACES, World, drawing

SLOTS, SAMPLES, N = 256, 32, 8


def simulate(trace: str, bound: int, preset: str, batches: int) -> dict[str, float]:
    mean = statistics.fmean(TRACES[trace])
    step_s = SAMPLES * N * mean / SLOTS
    world = World(
        drawing(trace),
        bound=bound,
        samples_per_batch=SAMPLES,
        slots=SLOTS,
        preset=Preset(preset, n=N, hold_s=mean, partial_k=N - 1),
        step_s=step_s,
        checkpoint_every=1,
        window_versions=10,
        checked=False,
    )
    world.run(steps=batches)
    warm = batches // 10
    per_s = (batches - warm) * SAMPLES * N / (world.stepped[-1] - world.stepped[warm - 1])
    oldest = min(s.version_tag for s in world.ledger.samples.values())
    total = world.meter.total(world.meter.closed(oldest))
    longest = rows(total, "length")[-1]
    return {
        "fraction": per_s / min(SLOTS / mean, SAMPLES * N / step_s),
        "lost": world.wasted / (world.wasted + world.generated),
        "longest": longest.share_trained / longest.share_sampled,
        "trained": total.whole.trained / total.whole.sampled,
        "max_staleness": float(max(age for _, age in world.staleness)),
    }


def main() -> int:
    options = arguments(__doc__)
    batches, bounds = (30, (1,)) if options.quick else (120, (1, 3))
    figures = {}
    for trace in TRACES:
        for bound in bounds:
            for preset in ("strict", "deadline", "partial"):
                for name, value in simulate(trace, bound, preset, batches).items():
                    figures[f"{trace}_S{bound}_{preset}_{name}"] = value
    return report("the staleness presets, simulated", figures, {}, options, ["headrace"])


if __name__ == "__main__":
    sys.exit(main())
