"""Small breakages of the product, one at a time, each of which a named test must notice: `make mutants`.

`tests/mutants.toml` lists them. Each is applied in a private copy of the tracked files, never here, and only its own tests run there. A
mutant is killed when they fail as tests: one that cannot be imported, times out or breaks a fixture proves nothing. Exit status 0: all were
killed; 1: some were not; 2: the list is stale (its text is not found exactly once) or its tests are red without any mutant.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
NO_KILL = ("SyntaxError", "NameError", "ImportError", "ModuleNotFoundError")
"""A product that does not even run is noticed by anything."""
UNSHRUNK = """from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
"""
"""A plugin of pytest's: that an example fails is all we ask, and finding the smallest takes most of a minute."""
out = Console()


@dataclass(frozen=True)
class Mutant:
    name: str
    faults: tuple[str, ...]
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    """pytest's node ids"""

    def stale(self, root: Path) -> str | None:
        """Why it cannot be applied to the files below `root` any more; None when it can."""
        path = root / self.file
        if not path.is_file():
            return f"{self.name}: there is no file {self.file}"
        count = path.read_text().count(self.find)
        return None if count == 1 else f"{self.name}: its text stands {count} times in {self.file}, not once"

    def applied(self, text: str) -> str:
        return text.replace(self.find, self.replace)


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    killed: bool
    words: str
    seconds: float


def read(path: Path = LIST) -> list[Mutant]:
    made = [
        Mutant(m["name"], tuple(m["faults"]), m["file"], m["find"], m["replace"], tuple(m["tests"]))
        for m in tomllib.loads(path.read_text())["mutant"]
    ]
    assert len({mutant.name for mutant in made}) == len(made), "a name stands twice in the list"
    return made


def copy_of_tracked(destination: Path, root: Path = ROOT) -> Path:
    """The tracked files as they are in the checkout, changes that are not committed included."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, destination / name)
    return destination


def run_tests(tests: tuple[str, ...], root: Path, limit_s: float) -> tuple[int | None, list[str], list[str]]:
    """(pytest's exit code, None after `limit_s`; the failures; the errors of fixtures and of collecting) of these tests of a copy."""
    if not (plugin := root.parent / "unshrunk.py").exists():  # copies share it
        plugin.write_text(UNSHRUNK)
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root.parent}", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    scratch = root.parent / f"{root.name}-pytest"
    report = root.parent / f"{root.name}.xml"
    report.unlink(missing_ok=True)
    argv = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "unshrunk",
        "--hypothesis-seed=0",
        "--tb=short",
    ]
    argv += [f"--basetemp={scratch}", f"--junitxml={report}", *tests]
    process = subprocess.Popen(argv, cwd=root, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        code: int | None = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # its fixtures take down what they started
        code = None
        try:
            process.wait(20.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if not report.is_file():
        return code, [], []
    cases = list(ElementTree.parse(report).iter("testcase"))
    failures, errors = (
        [f"{case.get('name')}: {case.find(kind).get('message')} {case.find(kind).text}" for case in cases if case.find(kind) is not None]  # type: ignore[union-attr]
        for kind in ("failure", "error")
    )
    return code, failures, errors


def judge(mutant: Mutant, root: Path, limit_s: float) -> Verdict:
    """Applies it in the copy, runs its tests, and takes it back."""
    path, started = root / mutant.file, time.monotonic()
    text = path.read_text()
    path.write_text(mutant.applied(text))
    try:
        compile(path.read_text(), mutant.file, "exec")
        code, failures, errors = run_tests(mutant.tests, root, limit_s)
        killed, words = verdict(code, failures, errors)
    except SyntaxError as error:
        killed, words = False, f"is no Python: {error}"
    finally:
        path.write_text(text)
    return Verdict(mutant, killed, words, time.monotonic() - started)


def verdict(code: int | None, failures: list[str], errors: list[str]) -> tuple[bool, str]:
    """(whether that was a kill, in a few words)."""
    if code is None:
        return False, "timed out"
    if code == 0:
        return False, "survived"
    if code != 1 or errors or not failures:
        return False, f"broke the tests instead of failing them: {errors[0][:200] if errors else f'pytest ended with {code}'}"
    if broken := next((name for name in NO_KILL if name in failures[0]), None):
        return False, f"does not run ({broken}): {failures[0][:200]}"
    return True, failures[0].partition(":")[0]


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Private copies, one for each job."""
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="headrace-mutants-") as directory:
        for number in range(count):
            free.put(copy_of_tracked(Path(directory) / f"copy{number}"))
        yield free


def main(
    only: Annotated[
        list[str] | None, typer.Option(help="run just those with this fault id, or with this in their name or file; may be repeated")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="print the list and run nothing")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="so many at once")] = 1,
    limit_s: Annotated[float, typer.Option(help="a mutant's tests may take so long")] = 180.0,
) -> None:
    """Break the product in small ways and see that the tests notice."""
    chosen = [m for m in read() if not only or any(part in m.faults or part in f"{m.name} {m.file}" for part in only)]
    if not chosen:
        out.print(f"no mutant is named like {' or '.join(only or [])}; --list shows them")
        raise typer.Exit(2)
    if stale := [words for mutant in chosen if (words := mutant.stale(ROOT))]:
        out.print("[red]the list is stale[/red]: correct it, or take out what is no more\n" + "\n".join(stale), highlight=False)
        raise typer.Exit(2)
    if list_only:
        for mutant in chosen:  # whole lines, to be searched
            print(mutant.name, " ".join(mutant.faults), mutant.file, *mutant.tests, sep="\n    ")
        return
    with copies(jobs) as free:
        started = time.monotonic()
        every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        root = free.get()
        code, failures, errors = run_tests(every, root, 10 * limit_s)
        free.put(root)
        if code != 0:
            out.print(f"[red]red without a mutant[/red] (pytest ended with {code}):", highlight=False)
            out.print("\n".join([*failures, *errors])[:3000], markup=False, highlight=False)
            raise typer.Exit(2)
        out.print(f"without a mutant their tests are green ({time.monotonic() - started:.0f} s)", highlight=False)
        verdicts = list(_judged(chosen, free, jobs, limit_s))
    _print(verdicts)
    raise typer.Exit(0 if all(verdict.killed for verdict in verdicts) else 1)


def _judged(mutants: list[Mutant], free: SimpleQueue[Path], jobs: int, limit_s: float) -> Iterator[Verdict]:
    """As they come, a line for each."""

    def one(mutant: Mutant) -> Verdict:
        root = free.get()
        try:
            return judge(mutant, root, limit_s)
        finally:
            free.put(root)

    with ThreadPoolExecutor(jobs) as pool:
        for number, future in enumerate(as_completed([pool.submit(one, mutant) for mutant in mutants]), 1):
            found = future.result()
            mark = "[green]killed[/green]" if found.killed else "[red]NOT KILLED[/red]"
            out.print(f"{number:3} of {len(mutants)}  {mark}  {found.mutant.name}  {found.seconds:.0f} s", highlight=False)
            yield found


def _print(verdicts: list[Verdict]) -> None:
    table = Table(box=None)
    for column in ("mutant", "faults", "", "by, or why not"):
        table.add_column(column, overflow="fold")
    order = {mutant.name: number for number, mutant in enumerate(read())}
    for found in sorted(verdicts, key=lambda verdict: order[verdict.mutant.name]):
        mark = "[green]killed[/green]" if found.killed else "[red]not killed[/red]"
        table.add_row(found.mutant.name, " ".join(found.mutant.faults), mark, found.words.replace("[", r"\["))
    out.print(table)
    left = sum(not found.killed for found in verdicts)
    out.print(
        f"{len(verdicts) - left} of {len(verdicts)} killed in {sum(found.seconds for found in verdicts):.0f} s of tests", highlight=False
    )


if __name__ == "__main__":
    typer.run(main)
