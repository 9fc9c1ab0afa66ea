"""What the driver and a process of a user's role say to each other: JSON over HTTP, an item at a time. Light: the process imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RoleSpec(_Message):
    """What the process is told at its start."""

    role: str
    index: int
    port: int
    incarnation: int
    logic: str
    plugin_dir: Path
    params: dict[str, Any] = {}
    publishes: dict[str, dict[str, str]] = {}
    """stream → its schema"""
    max_body_bytes: int = 8 << 20


class Given(_Message):
    """One item of a queue, or the newest value of a `latest` stream. `state` and all of `latest` come with the first of a life."""

    stream: str
    seq: int
    value: Any
    tries: int = 0
    count: int
    latest: dict[str, Any] = {}
    """what changed since the last one"""
    begin: bool = False
    state: Any = None


class Made(_Message):
    """What became of it. With an `error` nothing else counts."""

    published: list[tuple[str, Any]] = []
    state: Any = None
    error: str | None = None
