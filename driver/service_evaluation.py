"""REST: evaluations of a run, and one that is asked for."""

from collections.abc import Callable
from typing import Any

from fastapi import Depends, FastAPI, HTTPException

from driver.evaluation import Evaluator
from driver.run import Run


def add_evaluation_routes(app: FastAPI, run_of: Callable[[str], Run]) -> None:
    def evaluator_of(run: str) -> Evaluator:
        found = run_of(run).evaluator
        if found is None:
            raise HTTPException(404, f"run {run} evaluates nothing; give evaluation.data in its configuration")
        return found

    EvaluatorDep = Depends(evaluator_of)

    @app.get("/v1/runs/{run}/evaluations", tags=["evaluation"], responses={404: {}})
    async def evaluations(evaluator: Evaluator = EvaluatorDep) -> dict[str, Any]:
        """Every result with its version, oldest first; what runs now, and what is due."""
        return evaluator.facts()

    @app.post("/v1/runs/{run}/evaluate", tags=["evaluation"], status_code=202, responses={404: {}, 409: {}})
    async def evaluate(run: str, evaluator: Evaluator = EvaluatorDep) -> dict[str, Any]:
        """Evaluate the newest version, whether it is due or not. Training goes on."""
        if run_of(run).core.ledger.ended is not None:
            raise HTTPException(409, f"run {run} has ended and its engines with it")
        try:
            return {"run_id": run, "version": evaluator.demand()}
        except LookupError as error:
            raise HTTPException(409, str(error)) from None
