"""REST: another S or P while the run goes on."""

from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from driver.config import ConfigError, check_store
from driver.limits import Limits
from driver.run import Run
from driver.settings import BatchConfig, RunConfig, StalenessConfig
from driver.words import wrong


class NewLimits(BaseModel):
    """What is left out stays as it is."""

    model_config = ConfigDict(extra="forbid")
    bound: int | None = Field(None, ge=0, le=1_000_000, description="S, for samples registered from now on")
    samples: int | None = Field(None, ge=1, le=1_000_000, description="P; a smaller one waits until what lives fits into such batches")


def add_routes(app: FastAPI, run_dep: Any) -> None:
    """`PUT /v1/runs/RUN/staleness`."""

    @app.put("/v1/runs/{run}/staleness", tags=["runs"], responses={400: {}, 404: {}, 409: {}})
    async def change(run: run_dep, body: NewLimits) -> dict[str, Any]:
        """Change S (staleness.bound) or P (batch.samples) of a running run; it holds over restarts, until the configuration changes."""
        found: Run = run
        core = found.core
        if core.ledger.ended is not None:
            raise HTTPException(409, f"run {core.run_id} has ended ({core.ledger.ended}); start one with another run_id")
        now = core.limits
        wanted = Limits(now.bound if body.bound is None else body.bound, now.samples if body.samples is None else body.samples)
        try:
            check_store(changed(core.config, wanted), core.config.model.path)
        except (ConfigError, ValidationError) as error:
            first = error.errors()[0] if isinstance(error, ValidationError) else None
            raise HTTPException(400, str(error) if first is None else wrong(first, ".".join(map(str, first["loc"])) or "this")) from None
        core.change_limits(wanted)
        await core.db.durable()
        samples_now = core.samples_per_batch
        return {"run_id": core.run_id, "bound": wanted.bound, "samples": wanted.samples, "samples_now": samples_now}


def changed(config: RunConfig, limits: Limits) -> RunConfig:
    """The configuration as if it said this; ValidationError when it may not."""
    batch = BatchConfig.model_validate(config.batch.model_dump() | {"samples": limits.samples})
    staleness = StalenessConfig.model_validate(config.staleness.model_dump() | {"bound": limits.bound})
    return config.model_copy(update={"batch": batch, "staleness": staleness})
