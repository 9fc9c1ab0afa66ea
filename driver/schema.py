"""What an item of a stream looks like: fields and their types, checked where it is published. Pure.

{"reward_mean": "float", "note": "str?"}      a `?` marks what may be missing or null; further fields are nobody's business
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
    "any": (object,),
}


def check_schema(schema: Mapping[str, str]) -> None:
    """ValueError for a type that there is not."""
    for name, kind in schema.items():
        plain = kind.removesuffix("?")
        if plain not in TYPES:
            near = difflib.get_close_matches(plain, TYPES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(TYPES)}, each with an optional ?"
            raise ValueError(f"field {name!r} has the type {kind!r}{hint}")


def misfit(item: Any, schema: Mapping[str, str]) -> str | None:
    """Why this is no item of that schema, in words; None when it is one."""
    if not isinstance(item, dict):
        return f"an item is a dict of fields, not a {type(item).__name__}"
    for name, kind in schema.items():
        value = item.get(name)
        if value is None:
            if not kind.endswith("?"):
                return f"its field {name!r} ({kind}) is missing"
            continue
        allowed = TYPES[kind.removesuffix("?")]
        # To Python a bool is an int; to whoever adds numbers up it is a mistake.
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed and object not in allowed):
            return f"its field {name!r} is {value!r}, and should be {kind}"
    return None


def lacking(wanted: Mapping[str, str], offered: Mapping[str, str]) -> str | None:
    """What a subscriber needs and the publisher does not promise; None when it is all there. Without a schema nothing is promised."""
    for name, kind in wanted.items():
        there = offered.get(name)
        if there is None:
            return f"a field {name!r}, which is not in the publisher's schema ({', '.join(offered) or 'it has none'})"
        plain, has = kind.removesuffix("?"), there.removesuffix("?")
        if plain not in ("any", has) and not (plain == "float" and has == "int"):
            return f"the field {name!r} as {kind}, and it is published as {there}"
        if there.endswith("?") and not kind.endswith("?"):
            return f"the field {name!r} always, and it is published as {there}"
    return None
