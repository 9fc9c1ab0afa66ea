"""A user's own roles, as they stand under `roles:` in the configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_serializer, model_validator

from driver.schema import check_schema
from driver.section import Section

ANY = "any"
TAKEN = frozenset(("driver", "feed", "rollout", "engine", "reward", "batcher", "trainer", "courier", "evaluator", "store"))
NAME = r"^[a-z][a-z0-9_]{0,31}$"


class _Section(Section):
    model_config = ConfigDict(populate_by_name=True)


class _Stream(_Section):
    kind: Literal["queue", "latest"] = Field("queue", description="queue: each item once; latest: only the newest value counts")
    schema_: dict[str, str] = Field({}, alias="schema", description="field → int, float, str, bool, list, dict or any; with ? optional")

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        """`metrics: queue` for `metrics: {kind: queue}`."""
        return {"kind": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """As it stands in a configuration: a field of pydantic's can not be called schema."""
        return {"schema" if name == "schema_" else name: value for name, value in serialize(self).items()}

    @field_validator("schema_")
    @classmethod
    def _known_types(cls, value: dict[str, str]) -> dict[str, str]:
        check_schema(value)
        return value


class Subscribes(_Stream):
    pass


class Publishes(_Stream):
    capacity: int = Field(256, ge=1, le=1_000_000, description="items not read yet; then the role waits (queue)")


class RoleResources(_Section):
    devices: int = Field(0, ge=0, le=64, description="GPUs of each instance")
    device_memory_bytes: int | None = Field(None, ge=1, description="of each of its GPUs; without it no other instance shares the GPU")
    host_memory_bytes: int | None = Field(None, ge=1, description="high-water mark of an instance; without it a default is taken, and said")
    cores: int = Field(1, ge=1, description="CPU cores it may keep busy; more than the host has are refused")


class RoleConfig(_Section):
    logic: str = Field(description="path/file.py:Class or module:Class; see examples/own_role")
    instances: int = Field(1, ge=0, le=64, description="0: declared, and started by `headrace scale NAME 1`")
    subscribes: dict[str, Subscribes] = Field({})
    publishes: dict[str, Publishes] = Field({})
    resources: RoleResources = RoleResources()
    params: dict[str, Any] = Field({}, description="handed to the class as they are")
    deadline_s: float = Field(60.0, gt=0, description="an item that takes longer: the process is replaced, and gets it again")
    tries: int = Field(3, ge=1, description="an item that raises, or ends its process, this often is given up with its reason")

    @model_validator(mode="after")
    def _does_something(self) -> RoleConfig:
        if not self.subscribes:
            raise ValueError("a role with nothing to read never runs: give it `subscribes`, e.g. {metrics: queue}")
        return self


def check_names(roles: dict[str, RoleConfig]) -> None:
    """ValueError for a name that can not be a role's."""
    for name in roles:
        if name in TAKEN:
            raise ValueError(f"roles.{name}: that name is one of the run's own ({', '.join(sorted(TAKEN))}); choose another")
