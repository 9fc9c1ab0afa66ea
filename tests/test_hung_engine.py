"""An engine that hangs, in a whole service: its HTTP side answers everything, its loop makes no token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.service import ServiceUnderTest

SAMPLES, N, STALL_S = 16, 4, 6
ROWS = "".join(
    json.dumps({"prompt": f"sort {n} =", "answer": "".join(sorted(str(n))), "task_type": "sort"}) + "\n" for n in range(1000, 1050)
)


@pytest.mark.slow
def test_E14_L2_an_engine_that_makes_no_token_is_found_by_that_alone_and_replaced_and_its_trajectories_go_on_elsewhere(
    tmp_path: Path,
) -> None:
    """The one batch needs all its samples, so no push comes in between that could find the engine first."""
    service = ServiceUnderTest(
        tmp_path / "run",
        "stop.batches=1",
        f"batch.samples={SAMPLES}",
        f"rollout.n={N}",
        "rollout.engines=2",
        f"rollout.stall_s={STALL_S}",
        "rollout.loads_interval_s=0.2",
    )
    try:
        service.up()
        service.wait(lambda _: [engine["state"] for engine in service.run("/engines")] == ["open", "open"], "both engines")
        service.wait(lambda _: all(engine["load"] for engine in service.run("/engines")), "a report of each")
        for engine in service.run("/engines"):
            assert engine["load"] | {"age_s": 0} == {
                "running": 0,
                "waiting": 0,
                "foreign": 0,
                "kv_use": 0.0,
                "max_running": 128,
                "max_total_tokens": 128 * 64,
                "age_s": 0,
            }
        urls = {engine["engine_id"]: engine["url"] for engine in service.run("/engines")}
        assert service.http.post(urls["engine-0"] + "/slow_down", json={"forward_sleep_time": 3600}).status_code == 200
        assert service.submit(ROWS.encode()).status_code == 201
        status = service.wait(lambda s: "out of use" in s["why"].get("engine-0", {}).get("reason", ""), "the hung engine in /why")
        reason = status["why"]["engine-0"]["reason"]
        assert "engine-0 is out of use: it hangs: no token and no answer in" in reason
        assert f"rollout.stall_s is {STALL_S}" in reason and reason in service.run("/why")["sentence"]
        status = service.wait(lambda s: s["state"] == "finished", "the end")
        counted = status["trajectories"]
        assert counted["trained"] == counted["registered"] == SAMPLES * N, counted
        tries = [t["attempts"] for t in service.run("/trajectories", limit=100)["items"]]
        assert 0 < sum(more > 1 for more in tries) < len(tries), "the hung engine's trajectories, and no others, were sent again"
        log = service.log()
        assert "engine-0 (incarnation 1) was killed: it hangs: no token and no answer in" in log
        assert "heartbeats" not in log and "engine-1 (incarnation 1) was killed" not in log, "its /health was well, and so was the other"
    finally:
        service.close()
