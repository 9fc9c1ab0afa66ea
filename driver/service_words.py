"""What the REST API says of a call that does not fit its schema: the parameter or field, what was given, what is allowed.

A query parameter that a call does not have is refused like a field that its body does not have: ignored in silence, `?limt=5` would answer
another question than was asked. What there is, is read from the same OpenAPI that /docs shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError

from driver.words import one_of, wrong

_PLACES = {"query": "query parameter ", "path": "", "header": "header ", "body": "the body's "}


async def known_parameters(request: Request) -> None:
    """422 for a query parameter that this call does not have, or that is given twice. For all routes alike, but /health and /metrics: those
    who scrape may add something of their own."""
    route = request.scope["route"]
    if not route.path.startswith("/v1/"):
        return
    app: FastAPI = request.app
    operation = app.openapi()["paths"].get(route.path, {}).get(request.method.lower(), {})
    schemas = {each["name"]: each["schema"] for each in operation.get("parameters", ()) if each["in"] == "query"}
    known = sorted(schemas)
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            there = one_of(name, known) if known else "this call takes none"
            raise HTTPException(422, f"unknown query parameter {name[:100]!r}: {there}")
        if given.count(name) > 1 and not _is_list(schemas[name]):
            raise HTTPException(422, f"query parameter {name} is given {given.count(name)} times: give it once")


def _is_list(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "array" or any(map(_is_list, schema.get("anyOf", ())))


def in_words(error: RequestValidationError, request: Request) -> str:
    """All that is wrong with a call."""
    return "; ".join(_problem(item, request) for item in error.errors())


def _problem(item: Mapping[str, Any], request: Request) -> str:
    source, *path = (str(part) for part in item["loc"])
    where = f"{_PLACES.get(source, source + ' ')}{'.'.join(path)}" if path and item["type"] != "json_invalid" else "the body"
    if item["type"] != "extra_forbidden":
        return wrong(item, where)
    field = getattr(request.scope.get("route"), "body_field", None)
    fields = getattr(getattr(getattr(field, "field_info", None), "annotation", None), "model_fields", {})
    known = sorted(facts.alias or name for name, facts in fields.items())
    return f"unknown field {'.'.join(path)!r} in the body: {one_of(path[-1], known)}"
