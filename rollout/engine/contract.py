"""The words for a /generate body of wrong types: SGLang checks it against its published schema, and reports as Rust's serde does."""

from __future__ import annotations

import re
from typing import Any

import msgspec

EXPECTED = {
    "int": "i64",
    "float": "f64",
    "int | float": "f64",
    "bool": "a boolean",
    "str": "a string",
    "array": "a sequence",
    "object": "a map",
    "str | array": "a value or an array of values for StringOrList",
}


def contract_error(error: msgspec.ValidationError, body: Any, fields: tuple[str, ...]) -> str | None:
    """What SGLang says of a fault inside sampling_params, whose keys are `fields`; None for one elsewhere in `body`, the parsed JSON."""
    text = str(error)
    path = re.search(r" - at `\$(\.sampling_params.*)`$", text)
    if path is None:
        return None
    unknown = re.search(r"unknown field `(.*?)`", text)
    if unknown is not None:
        return f"unknown field `{unknown[1]}`, expected one of " + ", ".join(f"`{field}`" for field in fields)
    if "." not in path[1].removeprefix(".sampling_params"):
        return None  # not a set of parameters at all
    wanted = re.match(r"Expected `(.*?)(?: \| null)?`", text)
    value = _value_at(body, path[1])
    if wanted is None or value is None:
        return text
    return f"invalid type: {_described(value)}, expected {EXPECTED.get(wanted[1], wanted[1])}"


def _value_at(body: Any, path: str) -> Any:
    """`path` as msgspec writes it: .name, [0], or [...] for some entry of an object (then None: which one is not said)."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            return None
        body = body[name] if name else body[int(index)]
    return body


def _described(value: Any) -> str:
    match value:
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int():
            return f"integer `{value}`"
        case float():
            return f"floating point `{value}`"
        case str():
            return f'string "{value}"'
        case list():
            return "sequence"
        case dict():
            return "map"
    return "null"
