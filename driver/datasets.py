"""Datasets as users bring them: JSONL or Parquet in, `DataRow`s out, and a bad file refused whole with the place and the remedy.

Promise: `read_rows` hands out nothing before every row of the source has been checked, so no dataset is ever half loaded, and a
file of any size is read in bounded memory. `DatasetError` names the line (JSONL) or row (Parquet), counted from 1, and what to do.

Mechanism: two passes over the same stream of rows. JSONL is read line by line, Parquet batch by batch; duplicate ids are found with a
temporary SQLite table that spills to disk. Blank lines, a byte-order mark and CRLF are accepted.
"""

from __future__ import annotations

import codecs
import difflib
import io
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import orjson

from driver.settings import RunConfig

Format = Literal["jsonl", "parquet"]
Source = bytes | str | os.PathLike[str]

DEFAULT_TASK_TYPE = "default"
MAX_LINE_BYTES = 16 << 20
BATCH_ROWS = 500
BATCH_BYTES = 16 << 20
MAX_DEPTH = 100  # of lists and objects in each other: whoever reads a row later has less of the stack left than who took it in
_TARGETS = ("prompt", "messages", "answer", "task_type", "id")
_PARQUET_MAGIC = b"PAR1"
_LONG_INTEGER = re.compile(rb"[0-9]{19}")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class DatasetError(ValueError):
    """What is wrong with a dataset and what to do; `line` is the line or row counted from 1, where there is one."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class DataRow(msgspec.Struct, frozen=True):
    """One row: either `prompt` or `messages` is set. `fields` holds every other field under the name it has in the file."""

    row_index: int
    prompt: str | None
    messages: list[dict[str, Any]] | None
    answer: Any
    task_type: str
    fields: dict[str, Any]


def read_rows(source: Source, format: Format | None = None, mapping: Mapping[str, str | None] | None = None) -> Iterator[list[DataRow]]:
    """Batches of rows in file order, after the whole source has been validated (two passes).

    `source` is the content or a path; `format` is seen from the content when not given. `mapping` says which field of the file is the
    prompt, messages, answer, task_type and id: {"prompt": "question", "answer": "label"}; a name may be dotted for a nested field
    ("reward_model.ground_truth"). Unmapped, the fields of these names are taken; `{"answer": None}` says that there is no answer.
    Only a mapped id is checked for duplicates.
    """
    validate(source, format, mapping)
    batch: list[DataRow] = []
    batch_bytes = 0
    for row, _, size_bytes in _rows(source, format, mapping):
        batch.append(row)
        batch_bytes += size_bytes
        if len(batch) >= BATCH_ROWS or batch_bytes >= BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
    if batch:
        yield batch


def validate(source: Source, format: Format | None = None, mapping: Mapping[str, str | None] | None = None) -> int:
    """Check every row as `read_rows` would and return how many there are; raises DatasetError at the first that is wrong."""
    id_field = (mapping or {}).get("id")
    count = 0
    with closing(sqlite3.connect("")) as connection:  # "": a private database that spills to a temporary file
        connection.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, place TEXT NOT NULL) WITHOUT ROWID")
        for row, place, _ in _rows(source, format, mapping):
            count += 1
            if id_field is not None:
                _note_id(connection, _lookup(row.fields, id_field), id_field, place)
    if count == 0:
        raise DatasetError("the dataset has no rows; send at least one")
    return count


def scorable(batches: Iterator[list[DataRow]], config: RunConfig) -> Iterator[list[DataRow]]:
    """The same batches; DatasetError at the first row whose task type no scorer of the run takes."""
    scorers = config.reward.scorers
    for batch in batches:
        for row in batch:
            if row.task_type not in scorers and "*" not in scorers:
                known = ", ".join(scorers)
                raise DatasetError(
                    f"row {row.row_index + 1} has task_type {row.task_type!r}, which no scorer takes; known: {known}. "
                    "Set the row's task_type, map another field to it, or add a scorer for '*' to reward.scorers",
                    row.row_index + 1,
                )
        yield batch


def resolve_under(path: str | os.PathLike[str], roots: Sequence[Path]) -> Path:
    """The real path of a dataset file, all symbolic links followed, if it lies under one of the roots; else DatasetError.

    A relative path is looked for in each root in turn. What lies outside is answered the same whether or not it exists.
    """
    if not roots:
        raise DatasetError("reading datasets by path is off: add the folder to service.data_roots, or upload the file")
    listed = ", ".join(str(root) for root in roots)
    for root in roots:
        try:
            real_root = root.resolve(strict=True)
            real = (real_root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # missing, a NUL in the name, a loop of links
            continue
        if real.is_relative_to(real_root) and real.is_file():
            return real
    raise DatasetError(f"{os.fspath(path)!r} is not a file under service.data_roots ({listed}); move it there, or upload it")


# ---- from a source to checked rows ---------------------------------------------------------------------------------------------------


def _rows(source: Source, format: Format | None, mapping: Mapping[str, str | None] | None) -> Iterator[tuple[DataRow, str, int]]:
    """Every row with its place in words and its size in bytes, as read."""
    targets = _check_mapping(mapping or {})
    with _open(source) as stream:
        kind = _format_of(stream, source, format)
        records = _jsonl_records(stream) if kind == "jsonl" else _parquet_records(stream)
        noun = "line" if kind == "jsonl" else "row"
        for row_index, (number, record, size_bytes) in enumerate(records):
            place = f"{noun} {number}"
            try:
                yield _to_row(row_index, record, targets), place, size_bytes
            except _Fault as fault:
                raise DatasetError(f"{place}: {fault}", number) from None


def _open(source: Source) -> BinaryIO:
    if isinstance(source, bytes):
        return io.BytesIO(source)
    path = Path(source)
    if not path.is_file():
        raise DatasetError(f"there is no dataset file {path}" if not path.exists() else f"{path} is not a regular file")
    try:
        return path.open("rb")
    except OSError as error:
        raise DatasetError(f"{path} can not be read: {error.strerror}") from error


def _format_of(stream: BinaryIO, source: Source, format: Format | None) -> Format:
    """The content decides: Parquet files begin with PAR1, and no JSONL does."""
    head = stream.read(4)
    stream.seek(0)
    if not head:
        raise DatasetError("the dataset is empty (0 bytes); send at least one row")
    if format not in (None, "jsonl", "parquet"):
        raise DatasetError(f"unknown dataset format {format!r}; known: jsonl, parquet")
    found: Format = "parquet" if head == _PARQUET_MAGIC else "jsonl"
    named = format or ("parquet" if not isinstance(source, bytes) and Path(source).suffix.lower() in (".parquet", ".pq") else None)
    if named is not None and named != found:
        raise DatasetError(
            f"this was announced as {named} but the content is not (it {'begins' if found == 'parquet' else 'does not begin'} with PAR1)"
        )
    return found


def _jsonl_records(stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any], int]]:
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise DatasetError(f"line {number} is longer than {MAX_LINE_BYTES >> 20} MiB; write one JSON object per line", number)
        if number == 1:
            if line.startswith(_UTF16_MARKS):
                raise DatasetError("line 1 is not UTF-8 (it looks like UTF-16); save the file as UTF-8", 1)
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise DatasetError(f"line {number} {_what_is_wrong(line, error)}", number) from None
        if not isinstance(record, dict):
            raise DatasetError(f"line {number} is {_kind(record)}, not a JSON object; write one {{...}} per line", number)
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and _is_deep(record):
            raise DatasetError(f"line {number} has lists and objects more than {MAX_DEPTH} deep; write such a field as text", number)
        if _LONG_INTEGER.search(line):
            _check_integers(line, number)
        yield number, record, len(line)


def _is_deep(record: dict[str, Any]) -> bool:
    level: list[Any] = [record]
    for _ in range(MAX_DEPTH):
        below = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in below if isinstance(child, list | dict)]
    return bool(level)


def _check_integers(line: bytes, number: int) -> None:
    """orjson turns an integer beyond 64 bits into a float, which would silently be another answer."""

    def check(text: str) -> None:
        if not -(2**63) <= int(text) < 2**64:
            raise DatasetError(f"line {number} holds the integer {text}, beyond 64 bits; write it as a text", number)

    json.loads(line, parse_int=check)


def _what_is_wrong(line: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as decode_error:
        return f"is not UTF-8 (byte 0x{line[decode_error.start]:02x} at position {decode_error.start + 1}); save the file as UTF-8"
    return f"is not JSON: {error.msg} at column {error.colno}; write one complete {{...}} per line"


def _parquet_records(stream: BinaryIO) -> Iterator[tuple[int, dict[str, Any], int]]:
    import pyarrow as pa  # a quarter of a second that a start without Parquet is spared
    import pyarrow.parquet as pq

    number = 0
    try:
        file = pq.ParquetFile(stream)
        for batch in file.iter_batches(batch_size=BATCH_ROWS):
            size_bytes = batch.nbytes // max(1, batch.num_rows)
            for record in batch.to_pylist():
                number += 1
                # Times, decimals and bytes become text, so that a row is JSON whatever file it came from.
                yield number, msgspec.to_builtins(record), size_bytes
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"the Parquet file is damaged after row {number}: {error}; write it again") from error
    except (ValueError, OverflowError) as error:  # what Python has no value for: nanoseconds, the year 30000, text that is not UTF-8
        raise DatasetError(f"the Parquet file can not be read after row {number}: {error}; write such a column as text") from error


# ---- from a record to a row ----------------------------------------------------------------------------------------------------------


class _Fault(Exception):
    """What is wrong with one record; the caller knows the place."""


def _check_mapping(mapping: Mapping[str, str | None]) -> Mapping[str, str | None]:
    for target, name in mapping.items():
        if target not in _TARGETS:
            near = difflib.get_close_matches(target, _TARGETS, n=1, cutoff=0.0)[0]
            raise DatasetError(f"mapping: unknown target {target!r}, did you mean {near!r}? known: {', '.join(_TARGETS)}")
        if name is None and target != "answer":
            raise DatasetError(f"mapping: {target} needs the name of a field; only answer may be null (there is none)")
    if "prompt" in mapping and "messages" in mapping:
        raise DatasetError("mapping: map either prompt or messages, not both")
    return mapping


def _to_row(row_index: int, record: dict[str, Any], mapping: Mapping[str, str | None]) -> DataRow:
    used: set[str] = set()

    def take(target: str) -> Any:
        name = mapping.get(target, target)
        assert name is not None
        value = _lookup(record, name)
        if value is _MISSING:
            raise _Fault(_missing(name, target if target in mapping else None, record))
        used.add(name)
        return value

    wanted = (
        "messages" if "messages" in mapping or ("prompt" not in mapping and "prompt" not in record and "messages" in record) else "prompt"
    )
    prompt, messages = _prompt_or_messages(take(wanted), wanted)
    answer = None if mapping.get("answer", "") is None else take("answer")
    task_type = take("task_type") if "task_type" in mapping or "task_type" in record else DEFAULT_TASK_TYPE
    if not isinstance(task_type, str) or not task_type:
        raise _Fault(f"task_type is {_kind(task_type)}; it must be a name")
    if "id" in mapping and take("id") is None:
        raise _Fault(f"the id {mapping['id']!r} is null; give every row one")
    used.discard(mapping.get("id") or "")  # an id stays among the fields, under its own name
    fields = {name: value for name, value in record.items() if name not in used}
    return DataRow(row_index, prompt, messages, answer, task_type, fields)


_MISSING: Any = object()


def _lookup(record: Mapping[str, Any], name: str) -> Any:
    """The field of this name; else, for a dotted name, the nested one; else _MISSING."""
    if name in record:
        return record[name]
    node: Any = record
    for part in name.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _MISSING
        node = node[part]
    return node


def _missing(name: str, mapped_to: str | None, record: Mapping[str, Any]) -> str:
    mapped = f" (mapped to {mapped_to})" if mapped_to else ""
    if not record:
        return f"the field {name!r}{mapped} is missing, the object has none"
    near = difflib.get_close_matches(name, list(record), n=1, cutoff=0.6)
    present = f"the nearest present is {near[0]!r}" if near else f"present are {', '.join(map(repr, record))}"
    remedy = "correct the mapping or the row" if mapped_to else f"rename one, or map it: {name}={near[0] if near else 'FIELD'}"
    return f"the field {name!r}{mapped} is missing; {present}: {remedy}"


def _prompt_or_messages(value: Any, name: str) -> tuple[str | None, list[dict[str, Any]] | None]:
    """A text is a prompt, a list is a conversation, under either name."""
    if isinstance(value, str) and value:
        return value, None
    if not isinstance(value, list) or not value:
        raise _Fault(f"{name} is {_kind(value)}; it must be a text or a list of messages, and not empty")
    for position, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Fault(f'{name}[{position}] is not a message; write {{"role": "user", "content": "..."}}')
        if not isinstance(message.get("content"), str | list | None):
            raise _Fault(f"{name}[{position}].content is {_kind(message['content'])}; it must be a text or a list of parts")
    return None, value


def _kind(value: Any) -> str:
    """A JSON value in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    empty = isinstance(value, str | list | dict) and not value
    for kind, word in ((str, "text"), (list, "list"), (dict, "object"), (int | float, "number")):
        if isinstance(value, kind):
            return f"an empty {word}" if empty else f"an {word}" if word[0] in "aeiou" else f"a {word}"
    return type(value).__name__


def _note_id(connection: sqlite3.Connection, value: Any, field: str, place: str) -> None:
    key = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    try:
        connection.execute("INSERT INTO ids VALUES (?, ?)", (key, place))
    except sqlite3.IntegrityError:
        (first,) = connection.execute("SELECT place FROM ids WHERE id = ?", (key,)).fetchone()
        number = int(place.split()[-1])
        raise DatasetError(f"{place}: the {field} {key.decode()} was seen before, at {first}; ids must be unique", number) from None
