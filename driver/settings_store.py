"""Where a run's rows and weights lie: the settings under `store:`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from driver.section import Section
from store.mooncake_segment import LEAST_BYTES

Kind = Literal["embedded", "mooncake"]
MASTER = re.compile(r"(?P<host>[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


class MooncakeConfig(Section):
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

    @field_validator("segment_bytes")
    @classmethod
    def _not_too_small(cls, value: int | None) -> int | None:
        if value is not None and 0 < value < LEAST_BYTES:
            raise ValueError(
                f"{value:,} is too small: Mooncake mounts at least {LEAST_BYTES:,} bytes; raise it, or give 0 and the memory of other hosts"
            )
        return value

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
            raise ValueError(
                "store.mooncake.segment_bytes is 0 and the run starts its own master: there is no memory; name store.mooncake.master, or "
                "leave segment_bytes out"
            )
        if self.port is not None and self.master is not None:
            raise ValueError(
                f"store.mooncake.port ({self.port}) is that of the run's own master, and store.mooncake.master ({self.master}) is somebody "
                "else's: remove one"
            )
        return self


class StoreConfig(Section):
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

    def misfit(self, kind: Kind, *, alone: bool) -> str | None:
        """What can not be with this kind, and what to do. `alone`: there are no other hosts."""
        mooncake = self.mooncake
        if kind == "embedded" and mooncake != MooncakeConfig():
            names = ", ".join(f"store.mooncake.{name}" for name, value in mooncake if value is not None)
            return f"{names} has no effect on the embedded store: remove it, or set store.kind: mooncake"
        segment = mooncake.segment_bytes
        if kind == "mooncake" and alone and mooncake.master is None and segment is not None and segment < self.capacity_bytes:
            return (
                f"store.mooncake.segment_bytes ({segment:,}) is what this host gives, and no other host gives anything: it must be at "
                f"least store.capacity_bytes ({self.capacity_bytes:,}). Raise it, leave it out, or lower store.capacity_bytes"
            )
        return None
