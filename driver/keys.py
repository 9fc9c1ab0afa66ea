"""Every key of a run's configuration with its default, its choices and what it is for: read off the models that check it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from driver.settings import RunConfig


@dataclass(frozen=True)
class Key:
    name: str
    """dotted, as `--set` takes it"""
    default: str
    choices: str
    meaning: str


def keys(prefix: str = "", model: type[BaseModel] = RunConfig) -> Iterator[Key]:
    """All of them below `prefix`, sections opened. Those of an optional section (a critic) or of a list of sections are listed though
    there is none by default."""
    for name, field in model.model_fields.items():
        dotted = f"{prefix}{name}"
        section = _section(field.annotation)
        if section is None or (not field.is_required() and field.default in (None, [])):
            yield Key(dotted, _default(field), _choices(field.annotation), field.description or "")
        if section is not None:
            yield from keys(f"{dotted}.", section)


def section_at(dotted: str) -> type[BaseModel] | None:
    """The model of a section; None when there is none of that name."""
    model: type[BaseModel] | None = RunConfig
    for part in dotted.split("."):
        field = model.model_fields.get(part) if model is not None else None
        model = _section(field.annotation) if field is not None else None
    return model


def _section(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *get_args(annotation)] if get_origin(annotation) is not dict else []
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, bool | type(None)):
        return {True: "true", False: "false", None: "null"}[field.default]
    return str(field.default)


def _choices(annotation: Any) -> str:
    """Of a Literal, inside a union or not; else the type in a word."""
    parts = [annotation, *get_args(annotation)]
    literal = next((each for each in parts if get_origin(each) is Literal), None)
    if literal is not None:
        return " ".join(map(str, get_args(literal)))
    names = [each.__name__ for each in parts if isinstance(each, type) and each is not type(None) and get_origin(each) is None]
    return names[0] if names else ""
