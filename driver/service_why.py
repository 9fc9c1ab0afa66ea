"""REST: where the time of a run went. `/why` itself is beside the other questions in `driver/service.py`."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query

from driver import observe
from driver.lost_time import ENTRIES
from driver.run import Run


def add_routes(app: FastAPI, runs: dict[str, Run], run_of: Callable[[str], Run]) -> None:
    RunDep = Annotated[Run, Depends(run_of)]

    @app.get("/v1/why/history", tags=["service"])
    async def all_history(last: Annotated[int, Query(ge=1, le=ENTRIES)] = observe.PAGE_ROWS) -> dict[str, Any]:
        return {run_id: observe.why_history(run, last) for run_id, run in runs.items()}

    @app.get("/v1/runs/{run}/why/history", tags=["runs"])
    async def history(run: RunDep, last: Annotated[int, Query(ge=1, le=ENTRIES)] = observe.PAGE_ROWS) -> dict[str, Any]:
        """The newest waits of each side with their seconds, oldest first, and all seconds lost by kind of reason since the start."""
        return observe.why_history(run, last)
