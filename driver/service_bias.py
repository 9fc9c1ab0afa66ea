"""REST: is what is trained what was sampled?"""

from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query

from driver.run import Run


def add_routes(app: FastAPI, run_dep: Any) -> None:
    """`GET /v1/runs/RUN/bias`."""

    @app.get("/v1/runs/{run}/bias", tags=["runs"], responses={404: {}})
    async def bias(
        run: run_dep, version: Annotated[int | None, Query(ge=0, description="of its window; default: of the newest closed one")] = None
    ) -> dict[str, Any]:
        """Shares sampled and trained and mean rewards, by length, task type and dataset, over windows of versions; and its alarms."""
        found: Run = run
        try:
            return found.bias.facts(version)
        except KeyError:
            kept = [str(first) for first in sorted(found.bias.meter.windows)]
            raise HTTPException(404, f"nothing is kept of version {version}; windows begin at {', '.join(kept) or 'none yet'}") from None
