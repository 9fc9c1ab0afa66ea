"""From one experiment to the next on the same engines and datasets, against ending the service and starting another.

Both begin with a run that trains. *Taken over*: POST /v1/runs with engines: take_over. *Anew*: SIGTERM, `headrace up` with another run_id,
the dataset submitted. The clock runs from the request, or the signal, to the first trajectory of the next run that is ready, and to its
first batch.

    python -m benchmarks.switch [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Aim, arguments, median, report
from tests.service import ServiceUnderTest

AIMS: dict[str, Aim] = {"taken_over_batch_s": ("<=", 30.0)}
SETTINGS = ("stop.batches=100000", "stop.epochs=null", "trainer.schedule=constant")


def until(service: ServiceUnderTest, run: str, began: float) -> tuple[float, float]:
    """Seconds to the run's first ready trajectory and to its first trained batch."""
    ready: float | None = None
    while True:
        status: dict[str, Any] = next((one for one in service.get("/v1/runs") if one["run_id"] == run), {})
        counted = status.get("trajectories", {})
        if ready is None and counted and counted["registered"] > counted["running"]:
            ready = time.monotonic() - began
        if ready is not None and status["trained_version"] >= 1:
            return ready, time.monotonic() - began
        assert status.get("state") != "failed" and time.monotonic() - began < 300, status
        time.sleep(0.02)


def main() -> int:
    options = arguments(__doc__)
    rounds = 1 if options.quick else 7
    seen: dict[str, list[tuple[float, float]]] = {"taken_over": [], "anew": []}
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            service = ServiceUnderTest(Path(name) / f"first{number}", *SETTINGS)
            other = ServiceUnderTest(Path(name) / f"other{number}", *SETTINGS)
            try:
                service.up()
                service.submit()
                service.wait(lambda s: s["trained_version"] >= 3, "three batches")
                began = time.monotonic()
                body = {"run_id": f"next{number}", "from": "sort-digits", "engines": "take_over", "set": {"trainer.learning_rate": 0.0001}}
                assert service.http.post(f"{service.url}/v1/runs", json=body).status_code == 202
                seen["taken_over"].append(until(service, f"next{number}", began))
                began = time.monotonic()
                assert service.terminate() == 0
                other.up()
                other.submit()
                seen["anew"].append(until(other, "sort-digits", began))
            finally:
                service.close()
                other.close()
    figures = {}
    for way, times in seen.items():
        figures[f"{way}_ready_s"] = median([ready for ready, _ in times])
        figures[f"{way}_batch_s"] = median([batch for _, batch in times])
    figures["taken_over_over_anew"] = figures["taken_over_batch_s"] / figures["anew_batch_s"]
    return report("From one run to the next", figures, AIMS, options, ["torch", "megatron-core"])


if __name__ == "__main__":
    sys.exit(main())
