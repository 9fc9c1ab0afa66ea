"""REST: the plan of a batch, with the work of every rank and what bounds it. As long as the plan is kept: until its batch is committed."""

import asyncio
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, HTTPException, Path

from driver.balance import PlanRow, Terms
from driver.events import Leaf
from driver.explain import explain
from driver.ledger_state import UNMADE
from driver.run import Run
from driver.training import decode_plan


def add_routes(app: FastAPI, run_dep: Any) -> None:
    """`GET /v1/runs/RUN/batches/BATCH/plan`."""

    @app.get("/v1/runs/{run}/batches/{batch_id}/plan", tags=["runs"], responses={404: {}, 410: {}})
    async def plan(run: run_dep, batch_id: Annotated[int, Path(ge=0, le=2**53)]) -> dict[str, Any]:
        """Which rows each rank has in which micro-batch, their tokens and work, the imbalance, and what bounds it."""
        batch = run.core.ledger.batches.get(batch_id)
        if batch is None:
            raise _not_kept(run, batch_id)
        samples = [run.core.ledger.samples[uid] for uid in batch.uids]
        leaves = {leaf.row_id: (sample.uid, leaf) for sample in samples for t in sample.trajectories for leaf in t.leaves}
        said = {"run_id": run.core.run_id, "batch_id": batch_id, "state": batch.state, "samples": len(samples), "rows": len(leaves)}
        return said | await asyncio.to_thread(_explained, batch.plan, run.core.store.location, leaves, run.terms)


def _explained(plan: bytes, location: str, leaves: dict[str, tuple[int, Leaf]], terms: Terms) -> dict[str, Any]:
    def known(row_id: str) -> PlanRow:
        uid, leaf = leaves[row_id]
        return PlanRow(row_id, uid, leaf.length, leaf.response_tokens)

    mini_batches = [
        [[[known(row.row_id) for row in micro] for micro in rank] for rank in mini.ranks] for mini in decode_plan(plan, location)
    ]
    explained = [explain(mini, terms) for mini in mini_batches]
    without = len(leaves) - sum(mini["rows"] for mini in explained)
    return {"rows_without_advantage": without, "terms": msgspec.to_builtins(terms), "mini_batches": explained}


def _not_kept(run: Run, batch_id: int) -> HTTPException:
    ledger = run.core.ledger
    kept = f"kept now: {', '.join(map(str, ledger.batches)) or 'none'}"
    every = run.config.checkpoint.every
    if batch_id >= ledger.next_batch:
        return HTTPException(404, f"run {run.core.run_id} has no batch {batch_id} yet, the next one is {ledger.next_batch}; {kept}")
    found = run.core.db.query("SELECT state FROM batches WHERE batch_id = ?", (batch_id,))
    if not found or found[0][0] == UNMADE:
        return HTTPException(404, f"run {run.core.run_id} has no batch {batch_id}; {kept}")
    return HTTPException(
        410,
        f"the plan of batch {batch_id} went when a checkpoint held the batch, with its rows; {kept}. A plan is kept for up to "
        f"checkpoint.every ({every}) batches: ask earlier, or raise that",
    )
