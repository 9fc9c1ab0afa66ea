"""What a wrong input prints: one sentence, a remedy, a status that is not 0, and nothing started."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from driver import cli, commands_engines
from driver.cli import _serving, app
from driver.events import BatchApplied, BatchAssembled, RunEnded, VersionCommitted
from driver.ledger_db import LedgerDB
from driver.service import create_app
from driver.terminal import Service
from tests.driver.conftest import ready, register

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


def test_a_page_that_is_no_service_of_ours_is_not_printed():
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html><body>hello</body></html>")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = run("status", "--url", f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    said = done.output + getattr(done, "stderr", "")
    assert done.exit_code == 1 and "not the address of a Headrace service" in said and "<html>" not in said


ENGINE = {"url": "", "capabilities": None, "incarnation": 1, "elsewhere": True, "state_s": 12.4, "open_requests": 0, "capacity": 0}


def test_engines_are_listed_with_what_is_wrong_and_ids_are_whole(monkeypatch):
    away = ENGINE | {"engine_id": "10.0.0.5:30000", "state": "away", "reason": "connection refused: [none]", "version": None}
    served = ENGINE | {
        "engine_id": "engine-0",
        "state": "open",
        "reason": "serves it",
        "version": "r/0/3/1",
        "capacity": 8,
        "open_requests": 2,
    }
    item = {name: "x" * 9 for name in ("state", "outcome", "reward", "version_tag", "batch_id", "attempts")}
    page = {"items": [item | {"traj_uid": "s0000000000000012t0003", "reason": "long " * 80}], "next": None}
    replies = {"/engines": [away, served], "/trajectories": page}
    monkeypatch.setattr(Service, "call", lambda _self, _method, path, **_: replies[f"/{path.rpartition('/')[2]}"])
    lines = run("engines", "--url", "http://x", "--run", "r").output.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [["10.0.0.5:30000", "away", "12", "s"], ["engine-0", "open", "12", "s"]]
    assert "connection refused: [none]" in lines[1] and "r/0/3/1" in lines[2] and "2 of 8" in lines[2] and "serves it" not in lines[2]
    assert "s0000000000000012t0003" in run("list", "--url", "http://x", "--run", "r").output


@pytest.mark.parametrize(("flags", "argv"), [([], ["-P", "-m", "rollout.engine"]), (["--sglang"], ["-P", "-m", "sglang.launch_server"])])
def test_an_engine_is_started_by_hand_with_the_flags_that_a_run_gives_its_own(monkeypatch, flags, argv):
    started = []
    monkeypatch.setattr(commands_engines.os, "execve", lambda *call: started.append(call))
    monkeypatch.setattr(
        commands_engines, "located", lambda spec, _: spec.model_copy(update={"python": Path("/sglang/python"), "device": "cpu"})
    )
    base = CONFIG.parent / "base"
    done = run("engine", *flags, "--model-path", str(base), "--port", "30001", "--host", "0.0.0.0", "--", "--api-key", "k")
    assert done.exit_code == 0, done.output
    ((_, command, environment),) = started
    assert command[1:4] == argv and command[-2:] == ["--api-key", "k"]
    given = {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}
    assert (given["--host"], given["--port"], given["--context-length"], given["--dtype"]) == ("0.0.0.0", "30001", "256", "float32")
    assert ("SGLANG_USE_CPU_ENGINE" in environment) == bool(flags)
    done = run("engine", "--model-path", "/nowhere")
    assert done.exit_code == 2 and "no Hugging Face checkpoint directory" in done.output + getattr(done, "stderr", "")


def test_up_in_the_background_goes_on_over_what_a_dead_service_left(tmp_path):
    path = tmp_path / "service.json"
    assert _serving(path) is None
    path.write_text('{"pid": 1, "ur')
    assert _serving(path) is None, "cut short"
    path.write_text(json.dumps({"pid": os.getpid(), "url": "", "run_id": "r"}))
    assert _serving(path) is not None
    os.utime(path, (1.0, 1.0))
    assert _serving(path) is None, "its process number is another's since"


@pytest.mark.parametrize("url", ["ftp://host:1", "http://[::1"])
def test_what_is_no_address_is_said_to_be_none_with_the_form_it_should_have(url):
    done = run("status", "--url", url)
    assert done.exit_code != 0 and "write it like http://HOST:PORT" in " ".join(done.output.split())


@pytest.mark.parametrize("url", ["127.0.0.1:8791", "localhost:8700", "notaurl", "//host:1"])
def test_an_address_without_a_scheme_is_said_to_lack_it_and_shown_with_it(url):
    done = run("status", "--url", url)
    assert done.exit_code == 1 and f"has no scheme: write http://{url.lstrip('/')}" in " ".join((done.output + done.stderr).split())


COMMANDS = (
    ["status"],
    ["status", "--watch"],
    ["datasets"],
    ["submit", str(CONFIG)],
    ["append", str(CONFIG), "d000000"],
    ["close", "d000000"],
    ["mix", "d000000", "--weight", "2"],
    ["list"],
    ["show", "s0t0"],
    ["ps"],
    ["logs"],
    ["pause"],
    ["scale", "rollout", "2"],
    ["streams"],
    ["explain", "0"],
    ["bias"],
    ["engines"],
    ["evaluations"],
    ["why"],
    ["whatif"],
    ["begin", "b", "--from", "r"],
    ["runs"],
    ["down"],
)


@pytest.mark.parametrize("argv", COMMANDS, ids=lambda argv: argv[0] + "-w" * ("--watch" in argv))
def test_every_command_tells_a_wrong_token_from_none(monkeypatch, argv):
    service = create_app(SimpleNamespace(runs={}, waiting={}), token="secret", loopback=True, shutdown=lambda: None)
    asked = lambda base_url, headers, **_: TestClient(service, base_url=base_url, headers=headers)  # noqa: E731
    monkeypatch.setattr("driver.terminal.httpx.Client", asked)
    named = [] if argv[0] in ("runs", "down", "begin") else ["--run", "r"]
    for token, words in (
        ("wrong", "the token that was sent is not this service's"),
        (None, "no token was sent, and this service wants one"),
    ):
        env = {"HEADRACE_TOKEN": token, "COLUMNS": "300"}
        done = CliRunner().invoke(app, [*argv, "--url", "http://service", *named], env=env)
        said = " ".join((done.output + done.stderr).split())
        source = "it was taken from HEADRACE_TOKEN" if token else "HEADRACE_TOKEN is not set"
        assert done.exit_code == 1 and words in said and source in said, said


def detached(tmp_path: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    flags = [part for setting in (f"store.directory={tmp_path}/store", *settings) for part in ("--set", setting)]
    argv = [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), "-d", *flags]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd=tmp_path)


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("setting", ["service.port={port}", "store.capacity_bytes=1152921504606846976"])
def test_O2_a_refused_start_leaves_no_directory_behind(tmp_path, setting, detach):
    there = tmp_path / "there"
    there.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        setting = setting.format(port=taken.getsockname()[1])
        start = detached if detach else up
        done = start(tmp_path, "service.port=0", f"run_dir={there}/new/run", setting)
    assert done.returncode == 1 and done.stderr.startswith("error ") and list(there.iterdir()) == [], done.stderr
    (there / "new").mkdir()
    assert detached(tmp_path, f"run_dir={there}/new/run", "store.capacity_bytes=1152921504606846976").returncode == 1
    assert [path.name for path in there.rglob("*")] == ["new"], "and what was there stays"


def ended_run(directory: Path) -> None:
    db = LedgerDB(directory / "ledger.sqlite")
    ledger = db.load()
    for event in (
        register(ledger, n=2),
        ready(0, 0),
        ready(0, 1),
        BatchAssembled(batch_id=0, uids=(0,), plan=b"[]", time=1.0),
        BatchApplied(batch_id=0, epoch=0, skipped=None, report=b"{}", time=2.0),
        VersionCommitted(version=1, checkpoint=f"{directory}/checkpoints/1", time=3.0),
        RunEnded(how="all batches trained"),
    ):
        db.write(ledger.apply(event))
    db.close()


def test_up_in_the_background_on_a_run_that_has_ended_says_so_with_its_result_and_how_to_go_on(tmp_path):
    directory = tmp_path / "run"
    ended_run(directory)
    settings = (f"run_dir={directory}", "service.port=0")
    done = detached(tmp_path, *settings)
    try:
        assert done.returncode == 0, done.stderr
        first, second = done.stdout.splitlines()
        assert first.startswith(
            "run sort-digits has ended (all batches trained): 1 batches, 2 trajectories trained, 0 discarded. It can not"
        )
        assert f"--set model.path={directory}/checkpoints/1/hf" in first and "--set run_id=NAME" in first
        assert second.startswith("it is only shown, at http://127.0.0.1:") and " is up " not in done.stdout
    finally:
        url = json.loads((directory / "service.json").read_text())["url"]
        assert run("down", "--url", url).exit_code == 0
    done = subprocess.run(
        [sys.executable, "-P", "-m", "driver.cli", "up", str(CONFIG), "-d", "--exit-when-done"]
        + [part for each in (*settings, f"store.directory={tmp_path}/store") for part in ("--set", each)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "run sort-digits has ended (all batches trained)" in done.stdout, done.stderr


def test_a_start_that_takes_long_is_said_to_go_on_and_not_to_have_failed(tmp_path, monkeypatch):
    started = []

    def starts(argv, **options):
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        return started[0]

    monkeypatch.setattr(cli, "ANSWER_S", 0.2)
    monkeypatch.setattr(cli, "subprocess", SimpleNamespace(Popen=starts, DEVNULL=subprocess.DEVNULL))
    try:
        done = run("up", str(CONFIG), "--detach", "--set", f"run_dir={tmp_path}/run", "--set", "service.port=0")
        assert done.exit_code == 1 and f"(process {started[0].pid}) has not answered for 0 s and goes on starting" in " ".join(
            done.output.split()
        )
        assert started[0].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()
