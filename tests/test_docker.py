"""What can be said about the image without building it: its parts exist, its extras are declared, its shared memory is large enough."""

from __future__ import annotations

import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from driver.config import load_config

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"


@pytest.fixture(scope="module")
def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, comments dropped and continued lines joined."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["demo"]


def arguments(instructions: list[tuple[str, str]], name: str) -> list[str]:
    return [rest for instruction, rest in instructions if instruction == name]


def copied(instructions: list[tuple[str, str]]) -> list[str]:
    words = [[word for word in shlex.split(rest) if not word.startswith("--")] for rest in arguments(instructions, "COPY")]
    return [source for sources in words for source in sources[:-1]]


def size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.lower())
    assert match, f"{text!r} is not a size"
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]]


def test_every_instruction_is_one_docker_knows(instructions: list[tuple[str, str]]) -> None:
    assert {name for name, _ in instructions} <= {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "ENTRYPOINT", "CMD"}
    assert instructions[0] == ("FROM", "python:3.11-slim")


def test_every_source_of_a_copy_exists_and_is_not_ignored(instructions: list[tuple[str, str]]) -> None:
    kept = [line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for source in copied(instructions):
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source.rstrip("/"), pattern) for pattern in kept), (
            f"{source} is kept from the builder by Dockerfile.dockerignore"
        )


def test_all_packages_of_the_wheel_are_copied_before_it_is_installed(instructions: list[tuple[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [name for name, _ in instructions]
    install = next(i for i, (name, rest) in enumerate(instructions) if name == "RUN" and "pip install" in rest)
    before = {source.rstrip("/") for source in copied(instructions[:install])}
    assert before >= {*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], "pyproject.toml", project["project"]["readme"]}
    extras = re.search(r"\[([a-z0-9,]+)\]", instructions[install][1])
    assert extras and set(extras[1].split(",")) == {"trainer", "demo"} <= set(project["project"]["optional-dependencies"])
    assert names.index("USER") > install


def test_the_image_does_not_run_as_root(instructions: list[tuple[str, str]]) -> None:
    assert arguments(instructions, "USER")[-1] not in ("root", "0")


def test_the_image_starts_a_command_and_a_configuration_that_exist(instructions: list[tuple[str, str]]) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert yaml.safe_load(arguments(instructions, "ENTRYPOINT")[0]) == ["headrace"] and "headrace" in scripts
    up, config, *options = yaml.safe_load(arguments(instructions, "CMD")[0])
    assert up == "up" and options == ["--set", "data=data.jsonl", "--exit-when-done"]
    assert load_config(ROOT / Path(config).relative_to("/opt/headrace"), ["data=data.jsonl"]).data is not None


def test_O2_compose_gives_the_store_more_shared_memory_than_it_may_fill(demo: dict[str, Any]) -> None:
    config = load_config(ROOT / "examples" / "sort_digits" / "config.yaml")
    assert size_bytes(demo["shm_size"]) >= config.store.capacity_bytes * 1.5


def test_compose_builds_this_dockerfile_and_keeps_the_runs(demo: dict[str, Any]) -> None:
    context = (DOCKER / demo["build"]["context"]).resolve()
    assert context == ROOT and (context / demo["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
    volumes = yaml.safe_load((DOCKER / "compose.yaml").read_text())["volumes"]
    assert all(mount.partition(":")[0] in volumes for mount in demo["volumes"])


def test_no_file_here_names_a_host() -> None:
    for path in DOCKER.iterdir():
        assert not re.search(r"https?://|\bindex-url\b", path.read_text()), path
