"""The summary and the picture of a run, from metrics.jsonl as a run writes it."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from driver.archive import MetricsLog
from driver.report import plot, summarise


def batch(batch_id: int, **changes: Any) -> dict[str, Any]:
    row = {
        "batch_id": batch_id,
        "time_s": 1.5 * (batch_id + 1),
        "reward_mean": batch_id / 10,
        "reward_correct": batch_id / 200,
        "staleness_mean": 0.8,
        "staleness_max": 1,
        "in_flight": 100 + 5 * math.sin(batch_id),
        "watermark": 128,
        "ready": 16,
        "engine_busy": 0.9,
        "trainer_busy": 0.7,
        "logprob_gap_max": 1e-6 * (batch_id + 1),
        "logprob_gap_rows": 12,
        "trained_version": batch_id + 1,
        "serving_version": batch_id,
        "discarded_total": 0,
    }
    return row | changes


def write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    log = MetricsLog(run_dir)
    for row in rows:
        log.write(row)
    log.close()


def test_the_summary_has_the_keys_of_demo_summary(tmp_path: Path) -> None:
    write(tmp_path, [batch(i, staleness_max=i % 3) for i in range(10)])
    assert summarise(tmp_path, staleness_bound=2, trained=1280, discarded=3) == {
        "reward_first": pytest.approx(0.2),  # of 0.0 to 0.4
        "reward_last": pytest.approx(0.7),  # of 0.5 to 0.9
        "versions": 10,
        "max_staleness": 2,
        "staleness_bound": 2,
        "trained": 1280,
        "discarded": 3,
        "logprob_gap_max": pytest.approx(1e-5),
        "run_s": 15.0,
        "batches": 10,
    }


def test_a_batch_written_again_by_a_replay_counts_once(tmp_path: Path) -> None:
    write(tmp_path, [batch(0, reward_mean=9.0), batch(0, reward_mean=0.25)])
    assert summarise(tmp_path, staleness_bound=0, trained=0, discarded=0)["reward_first"] == 0.25


def test_a_run_without_batches_has_a_summary_without_numbers(tmp_path: Path) -> None:
    found = summarise(tmp_path, staleness_bound=1, trained=0, discarded=0)
    assert found["batches"] == found["versions"] == 0 and found["reward_first"] is found["reward_last"] is found["run_s"] is None


def test_N4_a_missing_or_endless_reward_does_not_enter_the_means(tmp_path: Path) -> None:
    write(tmp_path, [batch(0, reward_mean=None), batch(1, reward_mean=float("inf")), batch(2, reward_mean=0.5)])
    found = summarise(tmp_path, staleness_bound=1, trained=0, discarded=0)
    assert found["reward_first"] == found["reward_last"] == 0.5


def test_a_log_prob_gap_that_is_not_a_number_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path, [batch(0), batch(1, logprob_gap_max=float("nan"))])
    assert summarise(tmp_path, staleness_bound=1, trained=0, discarded=0)["logprob_gap_max"] is None
    write(tmp_path, [batch(1, logprob_gap_max=None, logprob_gap_rows=0)])  # nothing to compare: nothing to hide
    assert summarise(tmp_path, staleness_bound=1, trained=0, discarded=0)["logprob_gap_max"] == pytest.approx(1e-6)


@pytest.mark.parametrize("batches", [1, 120])
def test_the_plot_is_a_png_of_readable_size(tmp_path: Path, batches: int) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, [batch(i, reward_mean=None if i == 3 else 1 - math.exp(-i / 40)) for i in range(batches)])
    path = tmp_path / "out" / "curves.png"
    plot(tmp_path, path, staleness_bound=2)
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG") and struct.unpack(">II", header[16:24]) == (1320, 840)
    assert path.stat().st_size > 20_000


def test_a_plot_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no batch yet"):
        plot(tmp_path, tmp_path / "curves.png")


def test_without_matplotlib_the_error_names_the_extra_and_the_import_stays_light(tmp_path: Path) -> None:
    write(tmp_path, [batch(0)])
    program = (
        "import sys, pathlib, driver.report as report\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules)\n"
        "sys.modules['matplotlib'] = None\n"
        "try: report.plot(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1], 'x.png'))\n"
        "except ValueError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=60, capture_output=True, text=True)
    assert "headrace[demo]" in ended.stdout
