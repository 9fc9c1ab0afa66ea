"""Where a run's rows and weights lie: the settings under `store:`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Kind = Literal["embedded", "mooncake"]
MASTER = re.compile(r"(?P<host>[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MooncakeConfig(_Section):
    """Keys of kind mooncake; with the embedded store they are refused."""

    master: str | None = Field(None, description="HOST:PORT of a master that somebody else runs; null: the run starts its own")
    port: int | None = Field(None, ge=1, le=65535, description="of the run's own master; null: a free one, kept in RUN_DIR/store.json")
    http_port: int | None = Field(
        None, ge=1, le=65535, description="of the master's HTTP; null: 9003 of somebody else's master, else a free one, kept as `port` is"
    )
    address: str | None = Field(
        None, description="this host as the others reach it; null: 127.0.0.1 without `hosts`, else as the route to the first of them says"
    )
    segment_bytes: int | None = Field(
        None, ge=0, description="what this host gives; null: store.capacity_bytes; 0: nothing, all lies on other hosts (needs `master`)"
    )

    @field_validator("master")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        found = None if value is None else MASTER.fullmatch(value)
        if value is not None and (found is None or not 0 < int(found["port"]) < 65536):
            raise ValueError(f"{value!r} is no address of a mooncake_master: write HOST:PORT, like 10.0.0.4:50051; null starts one")
        return value

    @model_validator(mode="after")
    def _somebody_gives_memory(self) -> MooncakeConfig:
        if self.segment_bytes == 0 and self.master is None:
            raise ValueError("segment_bytes is 0 and the run starts its own master: there is no memory; name a `master`, or leave it out")
        if self.port is not None and self.master is not None:
            raise ValueError("port is that of the run's own master, and `master` names somebody else's: remove one")
        return self


class StoreConfig(_Section):
    kind: Kind | None = Field(
        None,
        description="embedded: shared memory of this host; mooncake: of many hosts; null: mooncake with `hosts`, else embedded",
    )
    directory: Path | None = Field(None, description="embedded: default /dev/shm/headrace-UID-RUN; must be a memory file system")
    capacity_bytes: int = Field(1 << 30, ge=1 << 20)
    inline_bytes: int = Field(
        4096,
        ge=0,
        description="a row's object of at most so many bytes rides in the ledger and in the plan instead of lying in the store; 0: none",
    )
    snapshot_every_s: float | None = Field(
        None,
        gt=0,
        description="ready and consumed rows are copied to RUN_DIR/rows.sqlite this often, for a host, or a process of Mooncake, that goes "
        "down; null: after that they are generated again",
    )
    mooncake: MooncakeConfig = MooncakeConfig()

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        """`store: mooncake` for `store: {kind: mooncake}`."""
        return {"kind": value} if isinstance(value, str) else value

    def misfit(self, kind: Kind) -> str | None:
        """What can not be with this kind, and what to do."""
        if kind == "embedded" and self.mooncake != MooncakeConfig():
            return "the keys under mooncake have no effect on the embedded store: remove them, or set store.kind: mooncake"
        return None
