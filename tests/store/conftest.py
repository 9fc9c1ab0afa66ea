"""A store in the machine's real tmpfs, and processes that use it."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store import EmbeddedStore, default_root

REPOSITORY = Path(__file__).parents[2]
Child = subprocess.Popen[str]


@pytest.fixture
def root() -> Path:
    return default_root(f"test-{uuid.uuid4().hex[:12]}")


@pytest.fixture
def store(root: Path) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(root, 8 << 20)
    yield made
    made.remove()
    assert not root.exists()


@pytest.fixture
def spawn() -> Iterator[Callable[..., Child]]:
    """`spawn(code, *arguments)` runs a Python program; it talks by lines, and is killed when the test ends."""
    children: list[Child] = []

    def start(code: str, *arguments: object) -> Child:
        command = [sys.executable, "-c", code, *map(str, arguments)]
        child = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()
