"""What a machine lacks is found before a run needs it, with the remedy, and nothing else is a reason to fail."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from driver import doctor, machine, up
from driver.cli import app
from driver.config import load_config
from driver.doctor import examine
from driver.life import free_port
from driver.up import CannotStart
from store import EmbeddedStore, default_root
from tests.fleet import fleet

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"


def found(*settings: str, config: Path | None = CONFIG) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in examine(config, ["service.port=0", *settings])}


def missing(findings: dict[str, doctor.Finding]) -> list[str]:
    return [what for what, finding in findings.items() if finding.state == "missing"]


def said(run_id: str) -> str:
    return " ".join(finding.words for finding in examine(CONFIG, ["service.port=0", f"run_id={run_id}"]) if finding.what == "left behind")


def test_the_demo_can_run_here_and_what_it_does_not_need_may_be_absent():
    findings = found()
    assert missing(findings) == [] and findings["SGLang"].state in ("ok", "absent")
    assert "GiB free" in findings["shared memory"].words and findings["trainer"].words.startswith("torch ")


def test_a_run_on_sglang_without_one_fails_with_the_remedy():
    findings = found("rollout.engine=sglang", "rollout.sglang.python=/nowhere/python")
    assert missing(findings) == ["configuration"]
    assert "no Python /nowhere/python; run `make sglang`" in findings["configuration"].words
    assert "machine" in findings, "the rest is said too"


def test_too_little_shared_memory_counts_the_copy_that_a_push_makes(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 0.5.23\n")
    python.chmod(0o755)
    settings = [f"store.capacity_bytes={64 << 20}", f"store.directory=/dev/shm/headrace-test-doctor-{os.getpid()}"]
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=(64 << 20) // 4096, f_frsize=4096))
    assert missing(found(*settings)) == []
    real = found(*settings, "rollout.engine=sglang", f"rollout.sglang.python={python}")
    assert missing(real) == ["shared memory"] and "--shm-size" in real["shared memory"].words


def test_too_few_files_a_missing_package_and_a_taken_port(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(doctor, "TRAINER_PACKAGES", ("torch", "no-such-package"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        findings = found(f"service.port={taken.getsockname()[1]}")
    assert missing(findings) == ["trainer", "open files", "port"]
    assert "no-such-package not installed; pip install" in findings["trainer"].words and "256 a process" in findings["open files"].words
    alone = found(config=None)
    assert missing(alone) == [] and alone["trainer"].state == "absent", "nothing is needed without a configuration"


def test_O2_up_refuses_what_doctor_finds_missing_before_anything_is_made(monkeypatch, tmp_path):
    config = load_config(CONFIG, ["service.port=0", f"run_dir={tmp_path}/run", "rollout.max_open_requests=1024"])
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(up, "Run", lambda _: pytest.fail("a run was made"))
    with pytest.raises(CannotStart, match=r"open files: 1,024 a process, [\d,]+ needed; raise the hard limit \(ulimit -Hn"):
        asyncio.run(up.serve(config, exit_when_done=True, quiet=True))
    assert not (tmp_path / "run").exists()


def test_shared_memory_that_the_run_s_own_store_has_taken_is_no_lack_of_it(monkeypatch, tmp_path):
    settings = [f"store.directory={tmp_path}/store", f"store.capacity_bytes={64 << 20}"]
    EmbeddedStore(tmp_path / "store", 64 << 20).put("row", {"a": np.zeros(40 << 20, np.uint8)})
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=(30 << 20) // 4096, f_frsize=4096))
    assert missing(found(*settings)) == []
    assert missing(found(*settings[1:])) == ["shared memory"]


def test_a_store_that_a_killed_run_left_is_named_unless_it_is_this_run_s_own():
    root = default_root("left-behind")
    store = EmbeddedStore(root, 1 << 20)
    try:
        assert str(root) in said(run_id="another")
        assert str(root) not in said(run_id="left-behind")
    finally:
        store.remove()


@pytest.mark.parametrize(
    ("settings", "status"), [([], 0), (["--set", "rollout.sglang.python=/nowhere", "--set", "rollout.engine=sglang"], 1)]
)
def test_the_command_says_it_with_its_status(settings, status):
    done = CliRunner().invoke(app, ["doctor", str(CONFIG), "--set", "service.port=0", *settings])
    assert done.exit_code == status and "shared memory" in done.output


def test_O5_engines_elsewhere_are_asked_what_they_can_do(tmp_path):
    with fleet(tmp_path, 1, None, slow_s=0.0) as (engine,):
        engine.wait(60)
        nowhere = f"http://127.0.0.1:{free_port()}"
        findings = found("rollout.engines=0", f"rollout.engine_urls=[{engine.proxy.url}, '{nowhere}']", f"rollout.router_url={nowhere}")
    words = findings[f"engine {engine.proxy.url}"].words
    assert "embedded, as SGLang 0.5.23; tp 1, weights by store" in words and "frees no memory" in words
    assert missing(findings) == [f"engine {nowhere}", "router"]
    assert "connection refused" in findings[f"engine {nowhere}"].words and "can not be reached" in findings["router"].words


def test_O2_a_store_on_a_disk_is_warned_of_by_doctor_and_plan_with_the_file_system_and_the_remedy(monkeypatch, tmp_path):
    mounts = [SimpleNamespace(mountpoint=str(mount), fstype=kind, opts="rw") for mount, kind in (("/", "ext4"), ("/dev/shm", "tmpfs"))]
    monkeypatch.setattr(machine.psutil, "disk_partitions", lambda all: mounts)
    monkeypatch.setattr(Path, "is_mount", lambda path: str(path) in ("/", "/dev/shm"))
    disk = ["service.port=0", f"store.directory={tmp_path}/store"]
    finding = found(*disk)["store"]
    assert finding.state == "absent" and f"{tmp_path}/store lies on ext4 (mounted at /), not in memory" in finding.words
    assert "leave store.directory out for /dev/shm" in finding.words
    assert "store" not in found("service.port=0"), "the default is memory"
    for words, settings in ((True, disk), (False, disk[:1])):
        flags = [part for each in settings for part in ("--set", each)]
        done = CliRunner().invoke(app, ["plan", str(CONFIG), *flags])
        assert done.exit_code == 0 and ("lies on ext4" in done.output) == words, done.output
