"""What travels between the driver and the courier: names, ports and keys. No torch here: the driver builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.wire import WireRef, problems_in_words

Backend = Literal["gloo", "nccl"]
DeadlineS = Annotated[float, Field(gt=0.0)]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CourierSpec(_Message):
    """What a courier is told at its start, in one JSON file."""

    port: int = Field(ge=0, le=65535)
    incarnation: int = Field(1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ranks: int = Field(1, ge=1)
    """Of the trainer: with its device they say whether it computes on GPUs, and buckets then start from one."""

    @classmethod
    def read(cls, path: Path) -> CourierSpec:
        """Raises ValueError with what to correct."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read the courier's spec {path}: {error.strerror}") from error
        except ValidationError as error:
            raise ValueError(f"the courier's spec {path} is not valid: {problems_in_words(list(error.errors()))}") from error


class CourierHealth(_Message):
    role: Literal["courier"] = "courier"
    incarnation: int
    groups: int
    """That are open."""
    progress: int
    """Buckets sent."""


class OpenRequest(_Message):
    """Listen for one engine. `size` counts the courier. `timeout_s` bounds the joining and each bucket."""

    group: str
    size: int = Field(ge=2)
    backend: Backend | Literal["auto"]
    engine_device: str
    """cpu or cuda, as the engine says it."""
    address: str | None
    """That the engine shall connect to; null: this host's towards `engine_host`."""
    engine_host: str
    timeout_s: DeadlineS


class Opened(_Message):
    address: str
    port: int
    backend: Backend


class GroupRequest(_Message):
    group: str


class Bucket(_Message):
    """Bucket `number` of a push: the bytes of these tensors in this order, without a gap. `refs` are the objects that hold them."""

    number: int
    refs: list[WireRef]
    names: list[str]


class SendRequest(_Message):
    group: str
    push: str
    bucket: Bucket
    then: Bucket | None = None
    """The one after it, to be made ready while this one is sent."""


class ForgetRequest(_Message):
    """The push is over: nothing of it is needed any more."""

    push: str


class Done(_Message):
    pass
