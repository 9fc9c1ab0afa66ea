"""What is wrong with a value that somebody gave, in our words: which key, what was given, what is allowed.

Pydantic finds it and names the kind; its own texts speak of inputs, instances and patterns. A kind that is not known here is told in its
words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from driver.settings import SECRETS

SHOWN = 60  # characters of what was given
HIDDEN = frozenset(SECRETS).union(*SECRETS.values())  # also the sections, which may have been given as something else
_FORMS = {
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$": "write letters, digits, '_', '.' and '-', at most 64, beginning with a letter or a digit",
    r"^[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}$": "give what `next` of the page before says",
    r"^[0-9]{1,9}\.[0-9]{1,9}$": "give what `next` of the page before says",
    r"^([1-9][0-9]{0,8}|forever)$": "give a number of passes, or forever",
}
_QUOTED = re.compile(r"'([^']*)'")
_CHOICE = re.compile(r"\^\(([\w|]+)\)\$")
_WHOLE = "give a whole number"
_NUMBER = "give a number"
_TEXT = "give a text, in quotes"
_BOOL = "give true or false"
_WANTED: Mapping[str, str | Callable[[Mapping[str, Any]], str]] = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "give a smaller one",
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "give a finite number",
    "bool_type": _BOOL,
    "bool_parsing": _BOOL,
    "string_type": _TEXT,
    "path_type": "give a path, as a text",
    "list_type": "give a list: [one, another]",
    "tuple_type": "give a list: [one, another]",
    "set_type": "give a list: [one, another]",
    "dict_type": "give names with values: {name: value}",
    "model_type": "it is a section: give keys with values, {key: value}",
    "model_attributes_type": "give an object with its fields",
    "greater_than": lambda facts: f"it must be above {facts['gt']:g}",
    "greater_than_equal": lambda facts: f"it must be at least {facts['ge']:,}",
    "less_than": lambda facts: f"it must be below {facts['lt']:g}",
    "less_than_equal": lambda facts: f"it must be at most {facts['le']:,}",
    "too_short": lambda facts: f"give at least {facts['min_length']}",
    "too_long": lambda facts: f"give at most {facts['max_length']}",
    "string_too_short": lambda facts: f"give at least {facts['min_length']} characters",
    "string_too_long": lambda facts: f"give at most {facts['max_length']} characters",
}


def wrong(item: Mapping[str, Any], where: str) -> str:
    """One of the errors that pydantic found, at this key or parameter."""
    kind, facts = str(item["type"]), item.get("ctx") or {}
    if kind == "missing":
        return f"{where} is required"
    if kind == "json_invalid":
        return f"{where} is not JSON: {facts.get('error', item['msg'])}"
    given = "" if where.rpartition(".")[2] in HIDDEN else f" is {_shown(item.get('input'))}"
    if kind == "literal_error":
        return f"{where}{given}: {one_of(item.get('input'), _QUOTED.findall(facts['expected']))}"
    if kind == "string_pattern_mismatch":
        pattern = str(facts["pattern"])
        if (choice := _CHOICE.fullmatch(pattern)) is not None:
            return f"{where}{given}: {one_of(item.get('input'), choice[1].split('|'))}"
        return f"{where}{given}: {_FORMS.get(pattern, f'it must have the form {pattern}')}"
    wanted = _WANTED.get(kind)
    if wanted is None:
        return f"{where}: {item['msg'].removeprefix('Value error, ')}"
    return f"{where}{given}: {wanted if isinstance(wanted, str) else wanted(facts)}"


def one_of(given: object, known: Iterable[str]) -> str:
    """Which ones there are, and the nearest to what was given."""
    known = list(known)
    near = difflib.get_close_matches(str(given), known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}? known: {', '.join(known)}" if near else f"known: {', '.join(known)}"


def _shown(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
