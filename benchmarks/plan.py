"""How even a plan is, how few micro-batches it has, and what it costs to make, beside verl's functions for the same.

python -m benchmarks.plan [--quick] [--json FILE] [--verl PYTHON]

Lengths are of two public traces and of four made-up sets, at most 8,192 tokens; the budget is twice that. Work is verl's own estimate for
both, 24,576 l + l², so neither is judged by a measure that the other does not know. Compared, case by case:

    ranks          max/mean work of `packing.split` and of `get_seqlen_balanced_partitions`, with any and with equal row counts
    micro-batches  the numbers of `packing.pack` and of `rearrange_micro_batches` for the same rows of each rank, and the lower bound
    even           ranks that share experts: the heaviest micro-batch at each index, summed up, over the mean work of a rank, of `deal`
                   and of verl's two functions with as many micro-batches on each rank; which are often more than ours, and then
                   easier to make even
    time           CPU milliseconds of `deal`, for all ranks; of verl's partitions and, as its ranks do this beside each other, of the rank
                   that takes longest for its micro-batches

Without an environment that has verl (`make verl`) only ours is measured.
"""

from __future__ import annotations

import csv
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import Aim, flags, median, report
from driver import packing
from driver.balance import PlanRow, Terms, deal
from driver.explain import waited
from driver.row_cost import RowCost

SETS = ("mild", "heavy", "lognormal", "pareto", "bimodal", "uniform")
LONGEST, BUDGET = 8192, 16384
COST = RowCost(attention=1 / 24576)
EQUAL = 1e-6  # a millionth is no difference
AIMS: dict[str, Aim] = {
    "cases in which a rank has more work than with verl": ("<=", 0),
    "cases with more micro-batches than verl": ("<=", 0),
    "micro-batches of a rank above the lower bound, most": ("<=", 1),
    "even: cases in which ranks wait longer than with verl": ("<=", 0),
    "CPU ms of a plan of 512 rows, most": ("<=", 5),
}


def draw(name: str, count: int, seed: int) -> list[int]:
    """Lengths of rows, in tokens."""
    rng = np.random.default_rng([seed, count, SETS.index(name)])
    if name in ("mild", "heavy"):
        with (Path(__file__).parent / "data" / f"lengths_{name}.csv").open() as file:
            drawn = rng.choice([float(row["output_tokens"]) for row in csv.DictReader(file)], count)
    elif name == "bimodal":
        drawn = np.where(rng.random(count) < 0.8, rng.normal(300, 60, count), rng.normal(6000, 600, count))
    else:
        drawn = {
            "lognormal": lambda: rng.lognormal(6.5, 1.0, count),
            "pareto": lambda: 100 * (1 + rng.pareto(1.2, count)),
            "uniform": lambda: rng.uniform(16, LONGEST, count),
        }[name]()
    return [int(length) for length in np.clip(np.round(drawn), 16, LONGEST)]


class Verl:
    """verl in a process of its own; every answer None when there is none."""

    def __init__(self, python: Path) -> None:
        self._process: subprocess.Popen[str] | None = None
        if python.is_file():
            argv = [str(python), "-W", "ignore", str(Path(__file__).with_name("verl_plan.py"))]
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    @property
    def there(self) -> bool:
        return self._process is not None

    def ask(self, **asked: Any) -> dict[str, Any] | None:
        """None also for what it refuses."""
        if self._process is None:
            return None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"verl's process ended with status {self._process.wait(10)}; make its environment anew: make verl")
        answer: dict[str, Any] = json.loads(line)
        return None if "refused" in answer else answer

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)


def timed(function: Callable[[], Any], rounds: int) -> tuple[Any, float]:
    """Its result, and the median of its CPU milliseconds."""
    took = []
    for _ in range(rounds):
        began = time.process_time()
        found = function()
        took.append(1000 * (time.process_time() - began))
    return found, median(took)


def max_over_mean(bins: Sequence[Sequence[int]], work: Sequence[float]) -> float:
    return max(sum(work[index] for index in members) for members in bins) * len(bins) / sum(work)


def measure(name: str, count: int, ranks: int, seed: int, verl: Verl, rounds: int) -> dict[str, Any]:
    lengths = draw(name, count, seed)
    rows = [PlanRow(f"{index:05d}", index, length) for index, length in enumerate(lengths)]
    terms, even = Terms(ranks, BUDGET, COST), Terms(ranks, BUDGET, COST, even=True)
    work = [terms.work(row) for row in rows]
    _, ms = timed(lambda: deal(rows, terms), rounds)
    shares = packing.split(work, ranks)
    case = {"set": name, "rows": count, "ranks": ranks, "seed": seed, "max_over_mean": max_over_mean(shares, work), "ms": ms}
    case["no_split_below"] = max(1.0, max(work) * ranks / sum(work))
    integers = [24576 * length + length**2 for length in lengths]
    theirs = verl.ask(work=integers, parts=ranks, equal=False, rounds=rounds)
    equal = verl.ask(work=integers, parts=ranks, equal=True, rounds=1) if count % ranks == 0 else None
    case["verl_max_over_mean"] = max_over_mean(theirs["found"], work) if theirs else None
    case["verl_equal_max_over_mean"] = max_over_mean(equal["found"], work) if equal else None
    packed(case, [[lengths[index] for index in share] for share in shares], work_of=COST, verl=verl, rounds=rounds)
    if theirs:
        case["verl_ms"] = 1000 * theirs["seconds"] + case.pop("verl_longest_ms")
    mean = sum(work) / ranks
    of_each, case["even_ms"] = timed(lambda: deal(rows, even), rounds)
    case["even_waited"] = waited([[sum(map(even.work, micro)) for micro in share] for share in of_each], even=True) / mean
    case["even_rounds"] = max(map(len, of_each))
    of_theirs = verl_even(theirs["found"], lengths, work, verl) if theirs else None
    case["verl_even_waited"] = waited(of_theirs, even=True) / mean if of_theirs else None
    case["verl_even_rounds"] = max(map(len, of_theirs)) if of_theirs else None
    return case


def packed(case: dict[str, Any], shares: list[list[int]], work_of: RowCost, verl: Verl, rounds: int) -> None:
    """The micro-batches of every rank, on the same rows."""
    ours = [len(packing.pack(share, BUDGET, [work_of.work(length, length) for length in share])) for share in shares if share]
    least = [packing.fewest(share, BUDGET) for share in shares if share]
    case["micro_batches"], case["fewest"] = sum(ours), sum(least)
    case["above_fewest"] = max(mine - bound for mine, bound in zip(ours, least, strict=True))
    if verl.there:
        theirs = [verl.ask(lengths=share, budget=BUDGET, at_least=None, rounds=rounds) for share in shares if share]
        assert all(theirs)
        case["verl_micro_batches"] = sum(len(each["found"]) for each in theirs if each)
        case["verl_longest_ms"] = max(1000 * each["seconds"] for each in theirs if each)


def verl_even(shares: list[list[int]], lengths: list[int], work: list[float], verl: Verl) -> list[list[float]] | None:
    """The work of each micro-batch of verl's ranks, each with as many of them as the one that needs most. None where a rank has too few
    rows for that."""
    least: int | None = None
    while True:
        made = [verl.ask(lengths=[lengths[i] for i in share], budget=BUDGET, at_least=least, rounds=1) for share in shares]
        if not all(made):
            return None
        counts = [len(each["found"]) for each in made if each]
        if len(set(counts)) == 1:
            return [
                [sum(work[share[place]] for place in micro) for micro in each["found"]]
                for share, each in zip(shares, made, strict=True)
                if each
            ]
        least = max(counts)


def figures_of(cases: Sequence[dict[str, Any]], beside: bool) -> dict[str, float]:
    def count(worse: Callable[[dict[str, Any]], bool]) -> float:
        return float(sum(map(worse, cases)))

    figures: dict[str, float] = {"cases": float(len(cases))}
    if beside:
        compared = [case for case in cases if case["verl_even_waited"] is not None]
        longer = [case for case in compared if case["even_waited"] > case["verl_even_waited"] * (1 + EQUAL)]
        as_many = [case for case in longer if case["verl_even_rounds"] <= case["even_rounds"]]
        figures |= {
            "cases in which a rank has more work than with verl": count(
                lambda case: case["max_over_mean"] > min(case["verl_max_over_mean"], case["verl_equal_max_over_mean"] or 9e9) * (1 + EQUAL)
            ),
            "cases with more micro-batches than verl": count(lambda case: case["micro_batches"] > case["verl_micro_batches"]),
            "cases with fewer": count(lambda case: case["micro_batches"] < case["verl_micro_batches"]),
            "even: cases that verl takes too": float(len(compared)),
            "even: cases in which ranks wait longer than with verl": float(len(longer)),
            "even: ... though verl has no more micro-batches": float(len(as_many)),
        }
    figures["micro-batches of a rank above the lower bound, most"] = float(max(case["above_fewest"] for case in cases))
    for rows in sorted({case["rows"] for case in cases}):
        here = [case for case in cases if case["rows"] == rows]
        figures[f"CPU ms of a plan of {rows} rows, median"] = median([case["ms"] for case in here])
        figures[f"CPU ms of a plan of {rows} rows, most"] = max(case["ms"] for case in here)
        if beside:
            figures[f"CPU ms of verl's for {rows} rows, median"] = median([case["verl_ms"] for case in here])
    return figures


def show(cases: Sequence[dict[str, Any]], beside: bool) -> None:
    """For each set and number of ranks: the mean over seeds and numbers of rows of what is above what no split can be below."""
    table = Table(title="max/mean work above the bound (max of 1 and the largest row), mean of the cases; and even: waited over the mean")
    for column in (
        "set",
        "ranks",
        "cases",
        "ours",
        "verl",
        "verl, equal counts",
        "even: ours",
        "even: verl",
        "micro-batches",
        "verl's",
        "bound",
    ):
        table.add_column(column, justify="left" if column == "set" else "right")

    def mean(here: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None], form: str) -> str:
        known = [found for found in map(value, here) if found is not None]
        return format(sum(known) / len(known), form) if known else ""

    def above_least(key: str, case: dict[str, Any]) -> float | None:
        return None if case.get(key) is None else case[key] / case["no_split_below"] - 1.0

    for name, ranks in itertools.product(SETS, sorted({case["ranks"] for case in cases})):
        here = [case for case in cases if case["set"] == name and case["ranks"] == ranks]
        if not here:
            continue
        above = [
            mean(here, partial(above_least, key), ".1e") for key in ("max_over_mean", "verl_max_over_mean", "verl_equal_max_over_mean")
        ]
        both = [case for case in here if not beside or case["verl_even_waited"] is not None]
        table.add_row(
            name,
            str(ranks),
            str(len(here)),
            *above,
            *(mean(both, itemgetter(key), ".4f") for key in ("even_waited", "verl_even_waited")),
            *(str(sum(case.get(key, 0) for case in here)) for key in ("micro_batches", "verl_micro_batches", "fewest")),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--verl", type=Path, default=Path(".venv-verl/bin/python"), help="the Python that has verl")
    options = parser.parse_args()
    counts, all_ranks, seeds = ((64, 512), (4, 16), 1) if options.quick else ((64, 128, 256, 512, 1024, 2048, 4096), (4, 8, 16, 32, 64), 2)
    verl = Verl(options.verl)
    if not verl.there:
        Console().print(f"no verl at {options.verl}: only ours is measured; `make verl` makes its environment", highlight=False)
    cases = []
    for name, count, ranks, seed in itertools.product(SETS, counts, all_ranks, range(seeds)):
        cases.append(measure(name, count, ranks, seed, verl, rounds=5 if count <= 512 else 1))
        if not options.quick:
            Console(stderr=True).print(f"{name} {count} rows {ranks} ranks, seed {seed}: {cases[-1]['ms']:.1f} ms", highlight=False)
    verl.close()
    show(cases, verl.there)
    figures = figures_of(cases, verl.there)
    aims = {name: aim for name, aim in AIMS.items() if name in figures}
    status = report("plan", figures, aims, options, ["numpy"])
    if options.json is not None:
        options.json.write_text(json.dumps(json.loads(options.json.read_text()) | {"cases": cases}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
