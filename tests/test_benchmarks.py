"""The benchmarks run for minutes; that their runs can start at all is checked here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.overlap import CONFIG, settings_of
from driver.config import load_config


@pytest.mark.parametrize("bound", [0, 2])
def test_the_configuration_of_the_overlap_benchmark_is_accepted(tmp_path, bound):
    config = load_config(CONFIG, settings_of(bound, 40, tmp_path))
    assert config.staleness.bound == bound and config.stop.batches == 40


@pytest.mark.parametrize("name", ["overlap", "start"])
def test_every_benchmark_knows_quick_and_json(name):
    root = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    argv = [sys.executable, "-m", f"benchmarks.{name}", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=root, env=env)
    assert done.returncode == 0 and "--quick" in done.stdout and "--json" in done.stdout
