"""A release that freed nothing is never reported as done. nvidia-smi is a script on PATH; the processes it tells of are real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from driver import release
from driver.release import Release
from rollout.capabilities import capabilities_of
from rollout.pool import EngineSlot

SLEEPS = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid, flush=True)"
GIB_IN_MIB = 1024


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """An engine's process and its child's: of a real server it is a child that holds the GPU."""
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPS + "; time.sleep(60)"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout
    child = int(parent.stdout.readline())
    yield parent.pid, child
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write what nvidia-smi does from now on, as a shell script; it must have been asked as the real one is."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory), prepend=":")

    def script(text: str) -> None:
        path = directory / "nvidia-smi"
        wanted = "--query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
        path.write_text(f'#!/bin/sh\n[ "$*" = "{wanted}" ] || exit 9\n{text}\n')
        path.chmod(0o755)

    return script


class Engine:
    url = "http://scripted"

    def __init__(self, on_release: Callable[[], None] = lambda: None, on_this_host: bool = True, kvcache: Any = 4.0) -> None:
        self.on_release = on_release
        self.on_this_host = on_this_host
        self.kvcache = kvcache
        self.releases = 0

    async def release(self, tags: list[str]) -> None:
        assert tags == ["kv_cache"]
        self.releases += 1
        self.on_release()

    async def server_info(self) -> dict[str, Any]:
        return {"internal_states": [{"memory_usage": {"weight": 9.0, "kvcache": self.kvcache}}]}


async def released(engine: Engine, pid: int | None, **facts: Any) -> str | None:
    slot = EngineSlot("engine-0", engine, 1, 8, time.monotonic)  # type: ignore[arg-type]
    slot.pid = pid
    slot.capabilities = capabilities_of({"version": "0.5.23", "enable_memory_saver": True} | facts, {})
    said = await (await Release.of(slot)).do()
    assert engine.releases == 1, "released in any case"
    return said


def told(child: int, used_mib: int) -> str:
    """Another process on the same GPU, and the engine's child on two."""
    return f"echo '1, 70000'\necho '{child}, {used_mib}'\necho '{child}, 100'"


@pytest.mark.parametrize(("fell_mib", "done"), [(4 * GIB_IN_MIB, True), (410, True), (409, False), (0, False), (-300, False)])
async def test_a_release_counts_when_the_gpu_memory_of_the_engines_processes_fell_by_a_tenth_of_the_cache(smi, family, fell_mib, done):
    pid, child = family
    smi(told(child, 9000))
    said = await released(Engine(lambda: smi(told(child, 9000 - fell_mib))), pid)
    assert said == (None if done else "release: memory did not fall by a tenth of the 4.00 GiB that the KV cache takes")


async def test_a_server_without_the_memory_saver_releases_nothing(family):
    said = await released(Engine(), family[0], enable_memory_saver=False)
    assert said == "release: SGLang was started without --enable-memory-saver, its KV cache stays in memory"
    assert await released(Engine(), None, enable_memory_saver=False, embedded=True) is None, "the embedded engine frees it"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 3", "nvidia-smi ended with exit code 3"),
        ("echo 'No devices were found'", "nvidia-smi does not tell the memory of processes"),
        ("echo 'CHILD, [N/A]'", "nvidia-smi does not tell the memory of processes"),
        ("echo '1, 70000'", "nvidia-smi lists no process of this engine"),
        ("exec sleep 60", "nvidia-smi gave no answer in 0.3 s"),
    ],
)
async def test_what_nvidia_smi_does_not_say_in_time_could_not_be_checked(smi, family, monkeypatch, script, words):
    monkeypatch.setattr(release, "SMI_S", 0.3)
    smi(script.replace("CHILD", str(family[1])))
    assert await released(Engine(), family[0]) == f"release: could not be checked, {words}"


async def test_without_nvidia_smi_or_a_process_of_ours_it_could_not_be_checked(smi, family, monkeypatch, tmp_path):
    not_checked = "release: could not be checked, "
    smi(told(family[1], 9000))
    assert await released(Engine(on_this_host=False), family[0]) == not_checked + "the engine is on another host"
    assert "was not started here" in (await released(Engine(), None) or "")
    for kvcache in (None, 0.0):
        assert "does not say how much memory" in (await released(Engine(kvcache=kvcache), family[0]) or "")
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    assert await released(Engine(), gone.pid) == not_checked + f"process {gone.pid} is gone"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "nvidia-smi can not be run" in (await released(Engine(), family[0]) or "")
