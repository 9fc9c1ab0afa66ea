"""What every refusal of the REST API looks like, as OpenAPI tells it."""

from typing import Any

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
