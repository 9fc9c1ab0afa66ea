"""REST of roles: how they are placed, how many there are, and the streams between them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict, Field

from driver.planner import PlanError
from driver.scale import NotScalable

if TYPE_CHECKING:
    from driver.run import Run
    from driver.streams import Latest, Queue


class ScaleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    role: str = Field(description="rollout, reward, or a role of the configuration's `roles`")
    count: int = Field(ge=0, le=1_000_000, description="instances from now on")


class ScaleReply(BaseModel):
    run_id: str
    role: str
    was: int
    count: int
    starting: list[str]
    ending: list[str]
    again: list[str] = Field(description="had been left alone after too many deaths")
    words: str


def add_role_routes(app: FastAPI, run_of: Callable[[str], Any]) -> None:
    RunDep = Annotated[Any, Depends(run_of)]

    @app.post("/v1/runs/{run}/scale", tags=["roles"], status_code=202)
    async def scale(run: RunDep, body: ScaleRequest) -> ScaleReply:
        """So many instances from now on, also after restarts. The same again changes nothing, but starts anew what was left alone.

        Answered when it is on disk and begun. Down: no request is lost, each goes on elsewhere from its last token. Up: an engine gets the
        current weights before its first request.
        """
        try:
            scaled = await run.processes.scale(body.role, body.count)
        except (NotScalable, PlanError) as error:
            raise HTTPException(409, str(error)) from None
        return ScaleReply(
            run_id=run.core.run_id,
            role=scaled.role,
            was=scaled.was,
            count=scaled.count,
            starting=list(scaled.starting),
            ending=list(scaled.ending),
            again=list(scaled.again),
            words=scaled.words,
        )

    @app.get("/v1/runs/{run}/roles", tags=["roles"])
    async def roles(run: RunDep) -> list[dict[str, Any]]:
        """Every role with its streams, its resources and its instances."""
        return [role_facts(run, role) for role in run.processes.plan.roles]

    @app.get("/v1/runs/{run}/streams", tags=["roles"])
    async def streams(run: RunDep) -> list[dict[str, Any]]:
        """Every stream: who writes and reads it, and for those of roles of your own what waits in it and its newest value."""
        return [stream_facts(run, route) for route in run.processes.plan.routes]


def role_facts(run: "Run", role: Any) -> dict[str, Any]:
    placed = [p for p in run.processes.plan.placements if p.role.name == role.name]
    states = {f"{p['role']}-{p['index']}": p["state"] for p in run.processes.facts}
    return {
        "role": role.name,
        "logic": role.logic,
        "instances": role.instances,
        "scalable": role.name in run.processes.wanted,
        "subscribes": [each.stream for each in role.subscribes],
        "publishes": [each.name for each in role.publishes],
        "resources": vars(role.resources),
        "processes": [
            {"process": p.name, "host": p.host, "devices": list(p.devices), "state": states.get(p.name, "not started")} for p in placed
        ],
    }


def stream_facts(run: "Run", route: Any) -> dict[str, Any]:
    facts = {
        "stream": route.stream.name,
        "kind": route.stream.kind,
        "schema": dict(route.stream.schema),
        "publisher": route.publisher,
        "subscribers": list(route.subscribers),
        "way": route.way,
    }
    live = run.own_roles.streams
    if route.stream.name in live.queues:
        return facts | _queue_facts(live.queues[route.stream.name])
    if route.stream.name in live.latest:
        return facts | _latest_facts(live.latest[route.stream.name])
    return facts


def _queue_facts(queue: "Queue") -> dict[str, Any]:
    readers = {
        name: {
            "waiting": reader.waiting,
            "at_work": sorted(set(reader.given.values())),
            "done": reader.done,
            "given_up": reader.given_up,
            "last_reason": reader.last_reason,
        }
        for name, reader in queue.readers.items()
    }
    return {"published": queue.next_seq, "waiting": len(queue.items), "capacity": queue.stream.capacity, "readers": readers}


def _latest_facts(latest: "Latest") -> dict[str, Any]:
    return {"version": latest.version, "value": latest.value}
