"""What staleness buys and costs: the demo's task at S = 0, 1, 2, 4, 8, with and without off-policy correction.

Each run is the demo's, to its last batch. Reward per sample: the mean over all that were trained, and over the last ten batches. Reward per
minute: how long it took until the mean of five batches reached TARGET, and the whole run. Correction is truncated importance sampling: a
token's loss times min(trainer's own probability at the batch's beginning over the engine's, 2), one more forward pass a batch.

With --losses instead: at S = 2, what of the correction does what, by six losses that differ in the clip, the weight and the mask alone.

Runs are kept in DIRECTORY as they end; started again, it makes those that are missing. Every seed makes all of them in turn, so that a
machine's moods fall on all.

    python -m benchmarks.worth [--losses] [--quick] [--json FILE] [--directory DIRECTORY] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common import versions
from driver.archive import read_metrics

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples/sort_digits/config.yaml"
DATA = ROOT / "examples/sort_digits/data.jsonl"
BOUNDS = (0, 1, 2, 4, 8)
RECOMPUTED = "trainer.loss.old_log_probs=recomputed"
WEIGHT, UNCAPPED = "trainer.loss.correction.weight=token", "trainer.loss.correction.cap=null"
MASK = ("trainer.loss.correction.mask=token", "trainer.loss.correction.low=0.8", "trainer.loss.correction.high=1.28")
LOSSES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "corrected": (RECOMPUTED, WEIGHT),
    "no clip": ("trainer.loss.clip_low=1", "trainer.loss.clip_high=1000000"),
    "weight without cap": (RECOMPUTED, WEIGHT, UNCAPPED),  # for one step a batch the same gradient as without a clip
    "weight and mask": (RECOMPUTED, WEIGHT, UNCAPPED, *MASK),
    "no weight": (RECOMPUTED,),
}
TARGET = 0.8
WINDOW = 5
LAST = 10


def one(bound: int, loss: str, seed: int, batches: int) -> dict[str, float | None]:
    """A whole run, in a directory that goes."""
    with tempfile.TemporaryDirectory() as name:
        settings = [
            f"staleness.bound={bound}",
            f"seed={seed}",
            f"stop.batches={batches}",
            f"run_dir={name}/run",
            "service.port=0",
            f"data={DATA}",
            f"store.directory=/dev/shm/headrace-bench-{time.time_ns():x}",
            *LOSSES[loss],
        ]
        argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), "--quiet", "--exit-when-done"]
        subprocess.run([*argv, *(part for setting in settings for part in ("--set", setting))], check=True, timeout=1800)
        rows = read_metrics(Path(name) / "run")
    rewards = [row["reward_mean"] for row in rows]
    means = [(statistics.mean(rewards[i - WINDOW : i]), rows[i - 1]) for i in range(WINDOW, len(rows) + 1)]
    reached = next((row for mean, row in means if mean >= TARGET), None)
    return {
        "reward_all": statistics.mean(rewards),
        "reward_last": statistics.mean(rewards[-LAST:]),
        "batches_to_target": None if reached is None else reached["batch_id"] + 1,
        "minutes_to_target": None if reached is None else (reached["time_s"] - rows[0]["time_s"]) / 60,
        "minutes": (rows[-1]["time_s"] - rows[0]["time_s"]) / 60,
        "staleness_mean": statistics.mean(row["staleness_mean"] for row in rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="S = 0 and 2, or with --losses 2, one seed, 12 batches")
    parser.add_argument("--losses", action="store_true", help="at S = 2, with six losses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--directory", type=Path, default=Path("runs/worth"), help="finished runs, to go on from")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    bounds: tuple[int, ...]
    bounds, seeds, batches = ((0, 2), 1, 12) if options.quick else (BOUNDS, options.seeds, 110)
    losses = ["plain", "corrected"]
    if options.losses:
        bounds, losses = (2,), list(LOSSES)
    directory = options.directory / f"{batches}"
    directory.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[int, str], list[dict[str, float | None]]] = {}
    for seed in range(seeds):
        for bound in bounds:
            for loss in losses:
                kept = directory / f"S{bound}-{loss.replace(' ', '-')}-{seed}.json"
                if not kept.exists():
                    kept.write_text(json.dumps(one(bound, loss, seed, batches)) + "\n")
                found.setdefault((bound, loss), []).append(json.loads(kept.read_text()))
    table = Table(title=f"worth: medians of {seeds} seed{'s' if seeds > 1 else ''}, {batches} batches each")
    figures: dict[str, float | None] = {}
    names = list(next(iter(found.values()))[0])
    for column in ("S", "loss", *names):
        table.add_column(column.replace("_", " "), justify="right")
    for (bound, loss), runs in found.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs]
            whole = [value for value in values if value is not None]
            figures[f"S{bound}_{loss.replace(' ', '_')}_{name}"] = middle = statistics.median(whole) if len(whole) == len(values) else None
            cells.append("not reached" if middle is None else f"{middle:.3g}")
        table.add_row(str(bound), loss, *cells)
    Console(width=160).print(table)
    print(versions(["torch", "megatron-core"]))
    if options.json is not None:
        options.json.write_text(json.dumps({"figures": figures, "quick": options.quick}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
