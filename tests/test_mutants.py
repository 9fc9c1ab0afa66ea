"""The list of mutants is honest: each can still be applied, and its tests exist. Whether they notice is `make mutants`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutants import ROOT, Mutant, copy_of_tracked, judge, read, verdict

MUTANTS = read()


@cache
def functions(path: Path) -> set[str]:
    """The test functions of a file; nothing of it is run."""
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_can_be_applied_is_python_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert mutant.stale(ROOT) is None
    text = (ROOT / mutant.file).read_text()
    assert mutant.applied(text) != text
    compile(mutant.applied(text), mutant.file, "exec")
    assert mutant.faults and all(re.fullmatch(r"[A-Z]\d+", fault) for fault in mutant.faults)
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert (ROOT / path).is_file() and name.partition("[")[0] in functions(ROOT / path), test


def test_only_tests_that_fail_as_tests_are_a_kill() -> None:
    assert verdict(1, ["test_a: assert 1 == 2"], []) == (True, "test_a")
    for code, failures, errors in (
        (0, [], []),
        (None, [], []),
        (2, [], ["test_x.py: cannot be collected"]),
        (1, [], ["test_a: the fixture failed"]),
        (1, ["test_a: NameError: name 'loos' is not defined"], []),
        (4, [], []),
    ):
        assert not verdict(code, failures, errors)[0], (code, failures, errors)


def test_a_stale_mutant_is_named() -> None:
    absent = Mutant("gone", ("N1",), "trainer/loss.py", "no such text", "x", ())
    assert absent.stale(ROOT) == "gone: its text stands 0 times in trainer/loss.py, not once"
    assert "there is no file" in str(Mutant("lost", ("N1",), "trainer/lost.py", "", "", ()).stale(ROOT))


PRODUCT = "def half(x):\n    return x / 2\n"
SUITE = "from product import half\n\n\ndef test_half():\n    assert half(4) == 2\n"


@pytest.mark.parametrize(
    ("find", "replace", "killed", "words"),
    [
        ("x / 2", "x * 2", True, "test_half"),
        ("x / 2", "x // 2", False, "survived"),
        ("x / 2", "y / 2", False, "does not run"),
        ("def half", "def halves", False, "broke the tests"),
        ("x / 2", "x /", False, "is no Python"),
    ],
)
def test_a_mutant_is_judged_in_a_copy_and_taken_back(tmp_path: Path, find: str, replace: str, killed: bool, words: str) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "product.py").write_text(PRODUCT)
    (checkout / "test_product.py").write_text(SUITE)
    (checkout / "untracked.py").write_text("")
    for command in (["init", "-q"], ["add", "product.py", "test_product.py"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    copy = copy_of_tracked(tmp_path / "copy", checkout)
    found = judge(Mutant("m", ("N1",), "product.py", find, replace, ("test_product.py::test_half",)), copy, 60.0)
    assert found.killed == killed and words in found.words
    assert (copy / "product.py").read_text() == (checkout / "product.py").read_text() == PRODUCT
    assert not (copy / "untracked.py").exists()


def test_the_list_is_printed_and_a_name_that_is_not_in_it_is_said() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", str(ROOT / "tests/mutants.py"), *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=ROOT)

    listed = run("--list", "--only", "mean of means")
    assert listed.returncode == 0 and "trainer/loss.py" in listed.stdout
    assert run("--only", "no such mutant").returncode == 2
