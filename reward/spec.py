"""What the reward service is told at its start, in one JSON file. Light to import: the driver builds it."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reward.rules import RuleName, make_rule

ANY_TASK = "*"


class ScorerSpec(BaseModel):
    """A rule with its parameters, or a function of the user's. `time_limit_s` holds for one job, or one call of a batched function."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rule: RuleName | None = None
    params: dict[str, Any] = {}
    function: str | None = None
    time_limit_s: float = Field(10.0, gt=0)

    @model_validator(mode="after")
    def _one_of(self) -> ScorerSpec:
        if (self.rule is None) == (self.function is None):
            raise ValueError("a scorer needs either `rule` (exact, numeric, partial) or `function` (module:attribute)")
        if self.rule is not None:
            make_rule(self.rule, self.params)
        elif self.params:
            raise ValueError("`params` belong to a rule; a function takes what it needs from the row's fields")
        return self

    @property
    def label(self) -> str:
        return self.rule or self.function or ""


class RewardSpec(BaseModel):
    """`scorers` by task type, `*` for all others. `plugin_dir` is where relative files and the user's own modules are looked up."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535)
    token: str | None = None
    workers: int = Field(1, ge=1)
    plugin_dir: Path = Path()
    scorers: dict[str, ScorerSpec] = Field(min_length=1)
    incarnation: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _guarded(self) -> RewardSpec:
        if not self.token and not _is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached from outside; set `token`, or listen on 127.0.0.1")
        return self

    def scorer_for(self, task_type: str) -> str | None:
        """The key of the scorer that serves this task type."""
        return task_type if task_type in self.scorers else ANY_TASK if ANY_TASK in self.scorers else None


def load_spec(path: Path) -> RewardSpec:
    """Raises ValueError with every mistake in it."""
    try:
        return RewardSpec.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read the spec {path}: {error.strerror}") from error
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'spec'}: {item['msg']}" for item in error.errors())
        raise ValueError(f"the spec {path} is wrong: {wrong}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
