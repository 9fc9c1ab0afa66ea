"""REST: which fraction of the bound each S would reach, by the model of `driver/whatif.py` on what the run has measured."""

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query

from driver.run import Run
from driver.whatif import BOUNDS
from driver.whatif_facts import NothingKnown, answer, ask, bounds_with, of_run

MOST_BOUNDS, LARGEST_BOUND = 16, 64
Bounds = Annotated[list[int], Query(alias="s", description="bounds to try, `?s=1&s=2`; the run's own is always among them")]


def add_routes(app: FastAPI, runs: dict[str, Run], run_of: Callable[[str], Run]) -> None:
    RunDep = Annotated[Run, Depends(run_of)]
    one_at_a_time = asyncio.Semaphore(1)  # each takes a core for a second or so

    async def answered(run: Run, bounds: list[int]) -> dict[str, Any]:
        if len(bounds) > MOST_BOUNDS or not all(0 <= bound <= LARGEST_BOUND for bound in bounds):
            raise HTTPException(422, f"at most {MOST_BOUNDS} bounds at a time, each from 0 to {LARGEST_BOUND}")
        bound = run.core.limits.bound
        try:
            asked = await asyncio.to_thread(of_run, run)
            async with one_at_a_time:
                return answer(asked, await ask(asked.facts, bounds_with(bound, bounds or BOUNDS)), bound)
        except NothingKnown as error:
            raise HTTPException(409, str(error)) from None
        except (ValueError, RuntimeError) as error:
            raise HTTPException(503, str(error)) from None

    @app.get("/v1/runs/{run}/whatif", tags=["runs"])
    async def whatif(run: RunDep, bounds: Bounds = []) -> dict[str, Any]:  # noqa: B006 (FastAPI copies it)
        """The fraction of min(C/E[L], B/tau) that each S reaches, with its mean and largest staleness; a second or so of computing."""
        return await answered(run, bounds)

    @app.get("/v1/staleness/whatif", tags=["service"])
    async def all_whatif(bounds: Bounds = []) -> dict[str, Any]:  # noqa: B006
        """The same for each run; one about which nothing is known yet says so."""
        found: dict[str, Any] = {}
        for run_id, run in list(runs.items()):
            try:
                found[run_id] = await answered(run, bounds)
            except HTTPException as error:
                if error.status_code == 422:
                    raise
                found[run_id] = {"error": error.detail}
        return found
