"""REST: the runs of the service, and how another one is begun."""

from typing import Any, Literal

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from driver import observe
from driver.runs import Begun, RunExists, Runs


class BeginRun(BaseModel):
    """Begin a run from one that this service has."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    origin: str = Field(alias="from", description="the run whose configuration, and datasets, it takes")
    changes: dict[str, Any] = Field({}, alias="set", description='dotted keys and values: {"trainer.learning_rate": 0.001}')
    engines: Literal["own", "take_over"] = Field(
        "own",
        description="own: beside the other run, with engines of its own; take_over: the other run is cancelled, its engines and its reward "
        "service go on for this one",
    )
    datasets: bool = Field(True, description="copy the other run's datasets; they are walked from their first row")


def add_routes(app: FastAPI, runs: Runs) -> None:
    @app.get("/v1/runs", tags=["runs"])
    async def list_runs() -> list[dict[str, Any]]:
        """Every run's status; one that has not begun has only its state and the reason."""
        waiting = [{"run_id": name, "state": "waiting", "reason": reason} for name, reason in runs.waiting.items()]
        return [*(observe.status(run) for run in runs.runs.values()), *waiting]

    @app.post("/v1/runs", tags=["runs"], status_code=202, responses={400: {}, 409: {}})
    async def begin(body: BeginRun) -> dict[str, str]:
        """Begin a run from another. What is changed may be numbers and choices; code, files, hosts and keys are the service's own."""
        try:
            happens = await runs.begin(Begun(body.run_id, body.origin, body.changes, body.engines, body.datasets))
        except RunExists as error:
            raise HTTPException(409, str(error)) from None
        return {"run_id": body.run_id, "state": happens}
