"""What a wrong input prints: one sentence, a remedy, a status that is not 0, and nothing started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from driver.cli import app

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/sort_digits/config.yaml"


def run(*argv: str):
    return CliRunner().invoke(app, argv)


def up(tmp_path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    flags = [part for setting in (f"run_dir={tmp_path}/run", f"store.directory={tmp_path}/store", *settings) for part in ("--set", setting)]
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path)


def test_config_check_prints_the_whole_configuration():
    done = run("config", "check", str(CONFIG))
    assert done.exit_code == 0
    assert "bound: 2" in done.output and "infrastructure_retries" in done.output, "defaults too"


def test_O1_a_misspelled_key_is_named_with_the_nearest_one(tmp_path):
    done = up(tmp_path, "staleness.bonud=1")
    assert done.returncode == 2
    assert "unknown key 'staleness.bonud': did you mean 'bound'?" in done.stderr
    assert not (tmp_path / "run").exists(), "nothing was started"


def test_O2_a_taken_port_is_said_before_anything_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = up(tmp_path, f"service.port={port}")
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "service.port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_said_with_the_remedy(tmp_path):
    done = up(tmp_path, "model.path=/nowhere")
    assert done.returncode == 2 and "/nowhere does not exist" in done.stderr


def test_O2_a_store_that_does_not_fit_is_said_before_anything_starts(tmp_path):
    done = up(tmp_path, "service.port=0", f"store.capacity_bytes={1 << 60}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "shm" in done.stderr or "capacity" in done.stderr


def test_a_reward_that_can_not_be_loaded_ends_the_start_with_its_own_words(tmp_path):
    broken = tmp_path / "reward.py"
    broken.write_text("import nowhere_to_be_found\ndef score(response, row): return 1.0\n")
    scorers = json.dumps({"*": {"function": f"{broken}:score"}})
    flags = ["--set", f"reward.scorers={scorers}", "--set", "service.port=0", "--exit-when-done"]
    more = ["--set", f"run_dir={tmp_path}/run", "--set", f"store.directory={tmp_path}/store"]
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), *flags, *more]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere_to_be_found" in done.stderr and "reward.py" in done.stderr and "Traceback" not in done.stderr


def test_a_dataset_named_in_the_configuration_that_is_bad_is_said_with_its_line(tmp_path):
    data = tmp_path / "bad.jsonl"
    data.write_text('{"prompt": "sort 1 =", "answer": "1", "task_type": "sort"}\nnot json\n')
    done = up(tmp_path, "service.port=0", f"data={data}")
    assert done.returncode == 1
    assert "line 2" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["submit", "absent.jsonl"], "there is no file absent.jsonl"),
        (["status"], "no service is running here"),
        (["status", "--url", "http://127.0.0.1:9"], "is the service up?"),
        (["config", "check", "absent.yaml"], "no configuration file"),
    ],
)
def test_commands_without_a_service_say_what_to_do(tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEADRACE_URL", raising=False)
    done = run(*argv)
    assert done.exit_code in (1, 2)
    assert words in " ".join((done.output + getattr(done, "stderr", "")).split())


def test_importing_the_driver_brings_no_torch():
    program = "import driver.cli, driver.run, driver.service, driver.up, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=60).returncode == 0


def test_folders_of_the_users_named_like_ours_do_not_shadow_us(tmp_path):
    for name in ("driver", "trainer", "rollout", "reward", "store"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong one')\n")
    script = Path(sys.executable).with_name("headrace")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([script, "config", "check", str(CONFIG)], cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
