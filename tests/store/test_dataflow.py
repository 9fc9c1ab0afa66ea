"""docs/dataflow.md and store/schema.py say the same, both ways."""

from pathlib import Path

import pytest

from store.schema import FIELDS, FieldSpec

PAGE = Path(__file__).parents[2] / "docs" / "dataflow.md"
HEADER = ["field", "hop", "writer", "readers", "shape", "dtype", "owner", "ends", "meaning"]


def rows_of_the_page() -> list[list[str]]:
    rows, inside = [], False
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" |")] if line.startswith("|") else []
        inside = cells == HEADER or (inside and bool(cells))
        if inside and cells != HEADER and not line.startswith("|---"):
            rows.append(cells)
    return rows


def as_written(field: FieldSpec) -> list[str]:
    return [
        f"`{field.name}`",
        field.hop,
        field.writer,
        ", ".join(field.readers),
        f"[{', '.join(map(str, field.shape))}]",
        " or ".join(field.dtype.split("|")),
        field.owner,
        field.ends,
        field.meaning,
    ]


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.hop}-{field.name}")
def test_every_field_of_the_schema_stands_on_the_page_as_it_is(field: FieldSpec) -> None:
    assert as_written(field) in rows_of_the_page()


def test_the_page_has_no_field_that_the_schema_lacks() -> None:
    assert sorted(row[:2] for row in rows_of_the_page()) == sorted([f"`{field.name}`", field.hop] for field in FIELDS)


def test_no_field_is_written_twice() -> None:
    names = [(field.hop, field.name) for field in FIELDS]
    assert len(set(names)) == len(names)


def test_the_page_lists_what_lives_across_steps() -> None:
    kept = PAGE.read_text().split("## What lives across steps")[1]
    for thing in ("weights of the newest verified version", "checkpoint", "ledger", "parked store"):
        assert f"| {thing}" in kept
