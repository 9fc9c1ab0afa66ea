"""The end of a run in numbers and in one picture, both from `metrics.jsonl`.

`summarise` computes what `demo_summary.json` holds; counts that only the ledger knows are passed in. `plot` draws four panels that
share one axis of batches. matplotlib is imported when a plot is asked for; without it the error names the extra to install.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from driver.archive import read_metrics

ENDS_BATCHES = 5  # reward_first and reward_last are means over this many batches


def summarise(run_dir: Path, *, staleness_bound: int, trained: int, discarded: int) -> dict[str, Any]:
    """The summary of a run; `trained` and `discarded` count trajectories in the ledger.

    Means and maxima over no value at all are None. `logprob_gap_max` is also None when a batch had rows to compare and no number came
    out: a gap that is not a number must not pass for a small one.
    """
    rows = read_metrics(run_dir)
    rewards = _numbers(rows, "reward_mean")
    return {
        "reward_first": _mean(rewards[:ENDS_BATCHES]),
        "reward_last": _mean(rewards[-ENDS_BATCHES:]),
        "versions": int(max(_numbers(rows, "trained_version"), default=0)),
        "max_staleness": max(_numbers(rows, "staleness_max"), default=None),
        "staleness_bound": staleness_bound,
        "trained": trained,
        "discarded": discarded,
        "logprob_gap_max": _gap(rows),
        "run_s": max(_numbers(rows, "time_s"), default=None),
        "batches": len(rows),
    }


def plot(run_dir: Path, path: Path, staleness_bound: int | None = None) -> None:
    """Write a PNG over the batches of a run: reward, staleness (with its bound), in flight against the watermark, busy shares."""
    rows = read_metrics(run_dir)
    if not rows:
        raise ValueError(f"{run_dir / 'metrics.jsonl'} holds no batch yet; there is nothing to plot")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'headrace[demo]'") from error

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)  # draws to memory, whatever display there is
    axes = figure.subplots(2, 2, sharex=True)
    reward, staleness, flight, busy = axes.flatten()
    _panel(reward, rows, "reward per batch", {"reward_mean": "mean reward", "reward_correct": "share correct"})
    _panel(staleness, rows, "staleness in batches", {"staleness_mean": "mean", "staleness_max": "max"})
    _panel(flight, rows, "trajectories", {"in_flight": "in flight", "watermark": "watermark"})
    _panel(busy, rows, "busy share", {"engine_busy": "engines", "trainer_busy": "trainer"})
    if staleness_bound is not None:
        staleness.axhline(staleness_bound, color="black", linewidth=1, linestyle="--", label=f"bound S = {staleness_bound}")
    staleness.yaxis.get_major_locator().set_params(integer=True)
    for axis in (reward, busy):
        axis.set_ylim(top=max(1.02, axis.get_ylim()[1]))
    for axis in axes.flatten():
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        axis.legend(loc="best", frameon=False, fontsize="small")
    for axis in axes[1]:
        axis.set_xlabel("batch")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]], title: str, lines: Mapping[str, str]) -> None:
    """One line per metric; a batch without a number leaves a gap. A single batch shows as a dot."""
    batches = [row["batch_id"] for row in rows]
    for name, label in lines.items():
        values = [_number(row, name) for row in rows]
        axis.plot(batches, [math.nan if value is None else value for value in values], label=label, marker="." if len(rows) < 30 else None)
    axis.set_title(title, loc="left", fontsize="medium")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def _number(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return value if isinstance(value, int | float) else None  # not-a-number was written as null


def _numbers(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [value for row in rows if (value := _number(row, name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _gap(rows: Sequence[Mapping[str, Any]]) -> float | None:
    compared = [row for row in rows if row.get("logprob_gap_rows")]
    gaps = _numbers(compared, "logprob_gap_max")
    return max(gaps) if gaps and len(gaps) == len(compared) else None
