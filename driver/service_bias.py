"""REST: is what is trained what was sampled?"""

from typing import Any

from fastapi import FastAPI

from driver.run import Run


def add_routes(app: FastAPI, run_dep: Any) -> None:
    """`GET /v1/runs/RUN/bias`."""

    @app.get("/v1/runs/{run}/bias", tags=["runs"])
    async def bias(run: run_dep) -> dict[str, Any]:
        """Shares sampled and trained and mean rewards, by length, task type and dataset, over windows of versions; and its alarms."""
        found: Run = run
        return found.bias.facts()
