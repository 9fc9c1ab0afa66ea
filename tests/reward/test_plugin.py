"""Functions by name: ours win, the user's do not collide, and every mistake is a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from reward.plugin import OUR_PACKAGES, PluginError, load, version_of

REPOSITORY = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_found_from_the_directory_and_by_its_absolute_path(tmp_path: Path) -> None:
    path = write(tmp_path / "deep" / "mine.py", "def score(response, row):\n    return 2.0\n")
    assert load("deep/mine.py:score", tmp_path)("", {}) == 2.0
    assert load(f"{path}:score", Path("/")) is load("deep/mine.py:score", tmp_path)
    assert len(version_of(load("deep/mine.py:score", tmp_path))) == 16


def test_two_files_of_one_base_name_do_not_collide(tmp_path: Path) -> None:
    for name in "ab":
        write(
            tmp_path / name / "score.py",
            f"from dataclasses import dataclass\n@dataclass\nclass Kept:\n    x: str = '{name}'\ndef f(): return Kept().x\n",
        )
    first, second = load("a/score.py:f", tmp_path), load("b/score.py:f", tmp_path)
    assert (first(), second()) == ("a", "b") and version_of(first) != version_of(second)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("mine.py", "does not name a function; write module:attribute or path/to/file.py:attribute"),
        ("mine.py:", "does not name a function"),
        (":f", "does not name a function"),
        ("mine.py:a b", "does not name a function"),
        ("absent.py:f", "there is no file .*absent.py; a relative path counts from"),
        ("mine.py:g", "has no 'g'; it has f"),
        ("mine.py:number", "is a int, which cannot be called"),
        ("broken.py:f", "broken.py raised ZeroDivisionError: division by zero"),
        ("wrong.py:f", "wrong.py raised SyntaxError"),
        ("needy.py:f", "needy.py raised ModuleNotFoundError: No module named 'a_thing_nobody_has'"),
        ("leaving.py:f", "leaving.py raised SystemExit: 1"),
        ("no_such_module:f", "there is no module 'no_such_module'; install it, put it beside the configuration, or write path"),
        ("driver.my_reward:f", "driver is a package of Headrace and wins over a folder of yours; rename the folder, or write driver/"),
        ("json:my_score", "json/__init__.py has no 'my_score'; it has"),
    ],
)
def test_O1_a_mistake_names_the_thing_and_the_remedy(tmp_path: Path, target: str, said: str) -> None:
    write(tmp_path / "mine.py", "number = 3\ndef f(response, row): return 1\n")
    write(tmp_path / "broken.py", "1 / 0\n")
    write(tmp_path / "wrong.py", "def f(:\n")
    write(tmp_path / "needy.py", "import a_thing_nobody_has\n")
    write(tmp_path / "leaving.py", "import sys; sys.exit(1)\n")
    with pytest.raises(PluginError, match=said):
        load(target, tmp_path)


def test_a_file_that_failed_is_run_again_once_it_is_mended(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "1 / 0\n")
    with pytest.raises(PluginError):
        load("mine.py:f", tmp_path)
    path.write_text("def f(): return 5\n")
    assert load("mine.py:f", tmp_path)() == 5


def test_our_packages_win_over_folders_of_the_same_name(tmp_path: Path) -> None:
    """In a process of its own, started as ours are, with the user's directory as the current one."""
    for name in (*OUR_PACKAGES, "theirs"):
        write(tmp_path / name / "__init__.py", f"def f(): return 'theirs {name}'\n")
    code = (
        "import sys; from pathlib import Path; from reward.plugin import add_to_path, load; here = Path.cwd(); add_to_path(here)\n"
        "print(load('theirs:f', here)())\n"
        "import driver, trainer, rollout, reward, store\n"
        "print([m.__name__ for m in (driver, trainer, rollout, reward, store) if str(here) in str(list(m.__path__)[0])])\n"
        "print(load('store/__init__.py:f', here)())\n"
        "import store.base; print(store.base.Ref.__name__)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.stdout.splitlines() == ["theirs theirs", "[]", "theirs store", "Ref"], ran.stderr
