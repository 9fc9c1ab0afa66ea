"""What the driver and the reward service say to each other: JSON over HTTP, one job and one result per leaf."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One leaf to score. `prompt` is text or chat messages; `fields` are the dataset row's other fields."""

    leaf_id: str
    task_type: str
    prompt: Any
    response: str
    answer: Any = None
    fields: dict[str, Any] = {}
    finish_reason: str = "stop"

    def row(self) -> dict[str, Any]:
        """What a scorer is given besides the response; a fresh dict, so that no scorer changes what another sees."""
        named = {"task_type": self.task_type, "prompt": self.prompt, "answer": self.answer, "finish_reason": self.finish_reason}
        return {**self.fields, **named}


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`score` and `error`: exactly one is set, and `ok` says which."""

    leaf_id: str
    ok: bool
    score: float | None = None
    is_correct: bool | None = None
    parts: dict[str, float | str] = {}
    seconds: float = 0.0
    scorer_version: str = ""
    error: str | None = None


class ScoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    jobs: list[Job]


class ScoreReply(msgspec.Struct, frozen=True):
    results: list[Result]


class Workers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many there are to be. Those too many end with what they are at."""

    count: Annotated[int, msgspec.Meta(ge=1)]


class Health(msgspec.Struct, frozen=True):
    """`progress` counts leaves answered since the start: it grows while the service works."""

    role: str
    incarnation: int
    progress: int
    busy_workers: int
    queued: int
    workers: int = 0
