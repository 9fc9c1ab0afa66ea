"""The messages between the service and a worker: MessagePack, each with its length before it. No pickle crosses."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from reward.outcome import Outcome
from reward.wire import Job

LENGTH = struct.Struct("<I")


class ScorerSetup(msgspec.Struct, frozen=True):
    rule: str | None
    params: dict[str, Any]
    function: str | None
    label: str


class Setup(msgspec.Struct, frozen=True):
    """First to a worker: all scorers it must be able to run."""

    plugin_dir: str
    scorers: dict[str, ScorerSetup]


class ScorerFacts(msgspec.Struct, frozen=True):
    version: str
    batched: bool


class Ready(msgspec.Struct, frozen=True):
    """First from a worker: what it loaded, or why it could not."""

    scorers: dict[str, ScorerFacts]
    error: str | None = None


class Task(msgspec.Struct, frozen=True):
    """Jobs for one scorer; the worker answers with one Outcome each."""

    scorer: str
    jobs: list[Job]


_encode = msgspec.msgpack.Encoder().encode
decode_setup = msgspec.msgpack.Decoder(Setup).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_outcome = msgspec.msgpack.Decoder(Outcome).decode


def frame(message: msgspec.Struct) -> bytes:
    body = _encode(message)
    return LENGTH.pack(len(body)) + body


def take_frames(buffer: bytearray) -> list[bytes]:
    """Every whole message at the front of `buffer`, taken out of it."""
    bodies, cursor = [], 0
    while len(buffer) >= cursor + LENGTH.size:
        end = cursor + LENGTH.size + LENGTH.unpack_from(buffer, cursor)[0]
        if len(buffer) < end:
            break
        bodies.append(bytes(buffer[cursor + LENGTH.size : end]))
        cursor = end
    del buffer[:cursor]
    return bodies
