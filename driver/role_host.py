"""The process of a user's role: `python -P -m driver.role_host --spec FILE`. Your class runs here and nowhere else.

    class Summary:
        def __init__(self, role):            # role.index, role.count, role.params, role.state, role.latest
            self.role = role

        def handle(self, stream, item):      # one item, in order
            self.role.state = {"seen": item["batch_id"]}
            return {"summary": {"batches": item["batch_id"] + 1}}

What `handle` returns is published: a dict of stream and item, or a list of such pairs, or None. It counts, together with `role.state`, only
when the driver has it on disk; a process that dies before gets the item again, with the state of before. `role.state` is anything that
JSON can hold. An exception is the item's: it is given again, and after `tries` given up with that reason. `role.latest` has the newest
values of the subscribed `latest` streams. Items go one at a time, in a thread of their own; `/health` answers beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from driver.role_wire import Given, Made, RoleSpec
from driver.schema import misfit
from reward.plugin import PluginError, add_to_path, load

UNUSABLE = 2


class RoleContext:
    """What your class is given. `index` and `count` say which of how many instances it is; `count` follows `headrace scale`."""

    def __init__(self, name: str, index: int, params: dict[str, Any]) -> None:
        self.name = name
        self.index = index
        self.count = 1
        self.params = params
        self.state: Any = None
        self.latest: dict[str, Any] = {}


class Host:
    """Holds the user's object. It is made with the first item, when its state is known."""

    def __init__(self, spec: RoleSpec) -> None:
        add_to_path(spec.plugin_dir)
        self._spec = spec
        self._logic = load(spec.logic, spec.plugin_dir)
        self._context = RoleContext(spec.role, spec.index, spec.params)
        self._handle: Callable[[str, Any], Any] | None = None
        self.progress = 0
        self.busy = False

    def take(self, given: Given) -> Made:
        """One item, from beginning to end. In the thread that runs the user's code."""
        context = self._context
        if given.begin:
            context.state = given.state
        context.count = given.count
        context.latest |= given.latest
        before = orjson.dumps(context.state)
        try:
            if self._handle is None:
                self._handle = self._made()
            published = list(_pairs(self._handle(given.stream, given.value)))
            for stream, item in published:
                if why := self._unpublishable(stream, item):
                    raise ValueError(why)
            orjson.dumps(context.state)
        except Exception as error:
            traceback.print_exc()
            context.state = orjson.loads(before)  # nothing of a failed item stays
            return Made(error=f"{type(error).__name__}: {error}")
        self.progress += 1
        return Made(published=published, state=context.state)

    def _made(self) -> Callable[[str, Any], Any]:
        logic = self._logic
        if not isinstance(logic, type):
            return lambda stream, item: logic(self._context, stream, item)
        handle = getattr(logic(self._context), "handle", None)
        if not callable(handle):
            raise TypeError(f"{self._spec.logic} has no method handle(stream, item)")
        bound: Callable[[str, Any], Any] = handle
        return bound

    def _unpublishable(self, stream: str, item: Any) -> str | None:
        schema = self._spec.publishes.get(stream)
        if schema is None:
            known = ", ".join(self._spec.publishes) or "none"
            return f"it published to {stream!r}; roles.{self._spec.role}.publishes declares {known}"
        why = misfit(item, schema)
        return None if why is None else f"what it published to {stream!r} does not fit its schema: {why}"


def _pairs(returned: Any) -> list[tuple[str, Any]]:
    if returned is None:
        return []
    if isinstance(returned, Mapping):
        return list(returned.items())
    if isinstance(returned, list | tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in returned):
        return list(returned)
    raise TypeError(f"handle returned a {type(returned).__name__}; return a dict of stream and item, a list of such pairs, or None")


def build_app(host: Host, spec: RoleSpec) -> Starlette:
    thread = ThreadPoolExecutor(1, "logic")

    async def health(request: Request) -> Response:
        return _json({"role": spec.role, "incarnation": spec.incarnation, "progress": host.progress, "busy": host.busy})

    async def item(request: Request) -> Response:
        given = Given.model_validate(orjson.loads(await request.body()))
        host.busy = True
        try:
            made = await asyncio.get_running_loop().run_in_executor(thread, host.take, given)
        finally:
            host.busy = False
        return _json(made.model_dump())

    return Starlette(routes=[Route("/health", health), Route("/v1/item", item, methods=["POST"])])


def _json(message: Any) -> Response:
    return Response(orjson.dumps(message), media_type="application/json")


def main() -> int:
    parser = argparse.ArgumentParser(prog="driver.role_host", description="One instance of a role of yours.")
    parser.add_argument("--spec", type=Path, required=True)
    spec = RoleSpec.model_validate_json(parser.parse_args().spec.read_bytes())
    try:
        host = Host(spec)
    except PluginError as error:
        print(f"role {spec.role}: {error}", flush=True)
        return UNUSABLE
    uvicorn.run(build_app(host, spec), host="127.0.0.1", port=spec.port, log_level="warning", access_log=False, lifespan="off", http="h11")
    return 0


if __name__ == "__main__":
    sys.exit(main())
