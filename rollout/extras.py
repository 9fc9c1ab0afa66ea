"""What an engine gives beside each token and is too large for an answer: it goes into the store, and the answer names the object.

    body of /generate    return_routed_experts: true, headrace_extras: {location, key}
    meta_info            routed_experts: {key, size_bytes, location, shape}, or {error} when it could not be put

Whoever stands at the engine's side does it, in the process that has the array: the embedded engine itself, the sidecar of a real SGLang
(`rollout.sglang.sidecar`). Without `headrace_extras` the answer carries the array as SGLang writes it. The object is the asker's once it is
answered for: it chose the key, and frees it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from typing import Any

import msgspec
import numpy as np

from store import Ref, StoreError, open_store
from store.schema import validate

log = logging.getLogger("headrace.extras")
REQUEST = "headrace_extras"
STORED = "headrace_extras"
"""In /server_info: whether this server puts extras into a store."""


class Place(msgspec.Struct, frozen=True):
    """Where one request's extras go."""

    location: str
    key: str


def smallest(routes: np.ndarray) -> np.ndarray:
    """The same numbers in the smallest dtype of the schema that holds them."""
    most = int(routes.max(initial=0))
    negative = routes.size and int(routes.min()) < 0
    return routes.astype(np.int32 if negative or most > 0xFFFF else np.uint16 if most > 0xFF else np.uint8, copy=False)


def put(place: Place, routes: np.ndarray) -> dict[str, Any]:
    """The answer's word for where it is. Never raises: a row can do without, an answer cannot."""
    try:
        columns = {"routed_experts": smallest(routes)}
        validate("extras", columns)
        return open_store(place.location).put(place.key, columns).to_wire() | {"shape": routes.shape}
    except (StoreError, ValueError) as error:
        log.warning("the routed experts of %s are not kept: %s", place.key, error)
        return {"error": str(error)}


async def answered(routes: np.ndarray, place: Place | None) -> Any:
    """`meta_info.routed_experts`. A put waits for locks and disks: it is done in a thread."""
    if place is None:
        return base64.b64encode(routes.astype("<i4").tobytes()).decode()
    putting = asyncio.ensure_future(asyncio.to_thread(put, place, routes))
    try:
        return await asyncio.shield(putting)
    except asyncio.CancelledError:
        # Nobody is told of the object: its asker is gone.
        putting.add_done_callback(lambda done: withdraw(place))
        raise


def withdraw(place: Place) -> None:
    """Take back what nobody was told of."""
    try:
        open_store(place.location).free([Ref(place.key, 0, place.location)])
    except (StoreError, ValueError) as error:
        log.debug("%s is not withdrawn: %s", place.key, error)
