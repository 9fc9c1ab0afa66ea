"""Write the "sort the digits" data: `data.jsonl` to train on and `heldout.jsonl` to evaluate on.

A row is {"prompt": "sort 52914 =", "answer": "12459", "task_type": "sort"}. Numbers have 3 to 10 digits, short ones more often, so
responses have the long tail that makes asynchrony worth while. The held-out prompts are drawn first and never appear in the training
file; inside the training file a short number may repeat, since only a thousand of three digits exist. The same seed gives the same files.

    python examples/sort_digits/make_data.py [--rows 2500] [--heldout 256] [--seed 0] [--directory DIR]
"""

import argparse
import json
import random
from collections.abc import Container, Iterable
from pathlib import Path

SHORTEST, LONGEST = 3, 10
GROW_PROBABILITY = 0.6


def draw_digits(rng: random.Random) -> str:
    """One number as text, its length geometric between SHORTEST and LONGEST."""
    length = SHORTEST
    while length < LONGEST and rng.random() < GROW_PROBABILITY:
        length += 1
    return "".join(rng.choice("0123456789") for _ in range(length))


def row_of(digits: str) -> dict[str, str]:
    return {"prompt": f"sort {digits} =", "answer": "".join(sorted(digits)), "task_type": "sort"}


def draw_rows(count: int, rng: random.Random, excluded: Container[str] = frozenset(), unique: bool = False) -> list[dict[str, str]]:
    """`count` rows whose prompts are not in `excluded`; with `unique`, no prompt twice."""
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    while len(rows) < count:
        row = row_of(draw_digits(rng))
        if row["prompt"] in excluded or (unique and row["prompt"] in seen):
            continue
        seen.add(row["prompt"])
        rows.append(row)
    return rows


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2500)
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()

    rng = random.Random(options.seed)
    heldout = draw_rows(options.heldout, rng, unique=True)
    rows = draw_rows(options.rows, rng, excluded={row["prompt"] for row in heldout})
    options.directory.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.directory / "data.jsonl", rows)
    write_jsonl(options.directory / "heldout.jsonl", heldout)
    print(f"wrote {len(rows)} rows to {options.directory / 'data.jsonl'} and {len(heldout)} to {options.directory / 'heldout.jsonl'}")


if __name__ == "__main__":
    main()
