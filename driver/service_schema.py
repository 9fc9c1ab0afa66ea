"""What REST takes and gives, as OpenAPI tells it: bodies that have a form of their own, and what every refusal looks like."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class PathSubmit(BaseModel):
    """A dataset file on the service's machine, under one of `service.data_roots`."""

    model_config = ConfigDict(extra="forbid")
    path: str


class EngineUrl(BaseModel):
    model_config = ConfigDict(extra="forbid")
    url: str = Field(description="http://HOST:PORT; the host must be one of service.engine_hosts")


_TEXT = {"type": "string"}
_REFUSAL = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message"], "properties": {"message": _TEXT, "line": {"type": "integer"}}}},
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": why, "content": {"application/json": {"schema": _REFUSAL}}}
    for status, why in (
        ("4XX", "refused: the message says what is wrong and what to do, and of an upload which line"),
        ("503", "the ledger can not be written, so nothing is taken"),
    )
}
"""Every answer that is not a success. As plain schemas: FastAPI would give models the route's own content type."""
ROWS_BODY = {
    "requestBody": {
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": PathSubmit.model_json_schema()},
        }
    }
}
"""The routes read it as a stream, so FastAPI does not see it."""


class Submitted(BaseModel):
    dataset_id: str
    rows_added: int
    rows: int
    closed: bool
    created: bool = Field(description="false: this idempotency key was seen before and nothing was added")
