"""Beginning a run beside others, as far as it goes without processes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driver.config import ConfigError, load_config
from driver.hosts import this_host
from driver.planned import plan_of
from driver.planner import make_plan
from driver.roles import Resources, Role
from driver.runs import Begun, Runs

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"


async def test_a_run_that_does_not_fit_beside_the_others_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = load_config(CONFIG, [f"run_dir={tmp_path}", "run_id=first"])
    plan_of(config)  # alone it fits
    most = Role("hungry", "a.py:A", Resources(host_memory_bytes=this_host().memory_bytes), process="hungry", own=True)
    first: Any = SimpleNamespace(
        core=SimpleNamespace(run_id="first"),
        config=config,
        state="running",
        processes=SimpleNamespace(plan=make_plan([most], [this_host()])),
    )
    runs = Runs(first)
    with pytest.raises(ConfigError, match=r"over-committed: .* hungry of run first"):
        await runs.begin(Begun("second", "first", {}, "own", True))
    assert not runs.waiting and list(runs.runs) == ["first"]
