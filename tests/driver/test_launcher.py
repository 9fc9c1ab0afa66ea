"""The launcher with real children: killed, stopped, hung, broken at the start, and orphaned."""

import asyncio
import os
import signal
import socket
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from driver import launcher as launcher_module
from driver import life as life_module
from driver.launcher import ChildHung, Died, Hung, LocalLauncher, Process, Quarantined, Ready, Restarts, Started, StartFailed
from driver.life import ProcessSpec

CHILD = textwrap.dedent(
    """
    import json, os, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    incarnation, port, mode = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print("child says hello, incarnation", incarnation, flush=True)
    if mode == "broken":
        print("no such model: /models/x", file=sys.stderr)
        sys.exit(3)
    if mode == "silent":
        time.sleep(60)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "parent":
        kid = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print("kid", kid.pid, flush=True)
    if mode == "foreman":
        kids = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
        print("kids", *(kid.pid for kid in kids), flush=True)

    class Handler(BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self):
            Handler.asked += 1
            ok = not (mode == "sick" and Handler.asked > 2)
            progress = Handler.asked
            if mode in ("idle", "standing"):
                progress = 7
            if mode == "foreman":  # its work moves while each of its children lives or has been replaced
                still = [kid for kid in kids if kid.poll() is None]
                progress = 7 if len(still) == 2 else Handler.asked
            busy = mode in ("standing", "foreman")
            body = json.dumps({"progress": progress, "busy": busy, "incarnation": incarnation}).encode()
            self.send_response(200 if ok else 503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class Owner:
    """Holds the launcher and what it said."""

    def __init__(self, tmp_path: Path, restarts: Restarts) -> None:
        self.events: list[object] = []
        self.arrived = asyncio.Event()
        self.launcher = LocalLauncher(self.hear, restarts)
        self.tmp_path = tmp_path
        self.script = tmp_path / "child.py"
        self.script.write_text(CHILD)

    def hear(self, event: object) -> None:
        self.events.append(event)
        self.arrived.set()

    def spec(self, mode: str = "well", **changes) -> ProcessSpec:
        def build(incarnation: int, port: int) -> list[str]:
            return [sys.executable, "-I", "-S", str(self.script), str(incarnation), str(port), mode]

        usual = {"role": "engine", "index": 0, "build": build, "log_path": self.tmp_path / "logs" / "engine-0.log", "heartbeat_s": 0.25}
        return ProcessSpec(**(usual | changes))

    async def start(self, mode: str = "well", **changes) -> Process:
        process = await self.launcher.start(self.spec(mode, **changes))
        await process.wait_ready(10)
        return process

    async def until(self, kind: type, count: int = 1, within_s: float = 15.0):
        """The count-th event of this kind."""
        async with asyncio.timeout(within_s):
            while len(found := [event for event in self.events if isinstance(event, kind)]) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return found[count - 1]

    def log(self) -> str:
        return (self.tmp_path / "logs" / "engine-0.log").read_text()


@pytest.fixture
async def owner(tmp_path):
    owner = Owner(tmp_path, Restarts(first_s=0.05, longest_s=0.2, healthy_s=60.0, deaths=3, within_s=60.0))
    yield owner
    await owner.launcher.stop(1.0)
    pids = [event.pid for event in owner.events if isinstance(event, Started)]
    assert not [pid for pid in pids if is_alive(pid)], "a child is left"


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def gone(*pids: int, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while any(is_alive(pid) for pid in pids):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_process_starts_becomes_ready_and_tells_its_progress(owner):
    process = await owner.start()
    started, ready = owner.events
    assert started == Started("engine", 0, 1, process.url, process.pid)
    assert ready == Ready("engine", 0, 1, process.url)
    assert process.state == "ready"
    assert process.health["incarnation"] == 1
    before = process.progress
    async with asyncio.timeout(5):
        while process.progress == before:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert "child says hello, incarnation 1" in owner.log()


async def test_L2_a_killed_process_is_named_and_comes_back_as_the_next_incarnation(owner):
    process = await owner.start()
    first_pid = process.pid
    killed_at = time.monotonic()
    os.kill(first_pid, signal.SIGKILL)
    died = await owner.until(Died)
    assert time.monotonic() - killed_at < 1.0, "an exit is noticed at once, not at a heartbeat"
    assert died.incarnation == 1
    assert "engine-0 (incarnation 1) was killed by SIGKILL" in died.reason
    ready = await owner.until(Ready, 2)
    assert ready.incarnation == process.incarnation == 2
    assert process.pid != first_pid
    assert process.state == "ready"
    assert process.health["incarnation"] == 2
    assert not [event for event in owner.events if isinstance(event, Hung)]


async def test_L2_a_stopped_process_is_found_as_hung_and_replaced(owner):
    process = await owner.start()
    first_pid = process.pid
    stopped_at = time.monotonic()
    os.kill(first_pid, signal.SIGSTOP)
    hung = await owner.until(Hung)
    assert time.monotonic() - stopped_at < 3 * 2 * 0.25 + 1.0
    assert "3 heartbeats of 0.25 s" in hung.reason
    assert (await owner.until(Died)).reason.startswith("engine-0 (incarnation 1) was killed: it hangs")
    assert (await owner.until(Ready, 2)).incarnation == 2
    assert not is_alive(first_pid)


async def test_E14_L2_a_process_that_answers_and_whose_work_stands_still_is_replaced(owner):
    await owner.start("standing", stall_s=0.6)
    hung = await owner.until(Hung)
    assert hung.incarnation == 1 and "it answers and is busy, and its work has stood still for" in hung.reason
    assert (await owner.until(Ready, 2)).incarnation == 2


async def test_a_process_that_has_nothing_to_do_may_stand_still(owner):
    process = await owner.start("idle", stall_s=0.1)
    asked = len(owner.events)
    await asyncio.sleep(1.0)  # ten times its limit
    assert process.state == "ready" and len(owner.events) == asked


async def test_H9_L2_a_child_that_was_stopped_is_named_and_ended_and_its_parent_is_left_alone(owner):
    process = await owner.start("foreman", stall_s=0.6, children="rank")
    kids = [int(pid) for pid in owner.log().split("kids ")[1].splitlines()[0].split()]
    os.kill(kids[1], signal.SIGSTOP)
    hung = await owner.until(ChildHung)
    assert f"rank 1 (process {kids[1]}) was stopped from outside and is replaced" in hung.reason
    await gone(kids[1])
    assert is_alive(kids[0]) and process.state == "ready" and process.incarnation == 1
    assert not [event for event in owner.events if isinstance(event, Hung | Died)]


async def test_one_process_is_ended_by_name_and_its_name_is_free_again(owner):
    process = await owner.start()
    await owner.launcher.end("engine-0", 5.0)
    assert not is_alive(process.pid) and not owner.launcher.processes
    assert not [event for event in owner.events if isinstance(event, Died)], "it was asked to"
    assert (await owner.start(first_incarnation=2)).incarnation == 2


async def test_a_process_that_says_503_hangs_too(owner):
    await owner.start("sick")
    assert (await owner.until(Hung)).incarnation == 1


async def test_O2_a_process_that_dies_at_its_start_says_why(owner):
    process = await owner.launcher.start(owner.spec("broken"))
    with pytest.raises(StartFailed, match="ended with exit code 3") as caught:
        await process.wait_ready(10)
    text = str(caught.value)
    assert "before it was ready" in text
    assert "no such model: /models/x" in text
    assert "engine-0.log" in text


async def test_too_many_deaths_are_a_quarantine_and_the_last_words_are_kept(owner):
    process = await owner.launcher.start(owner.spec("broken"))
    quarantined = await owner.until(Quarantined)
    assert "died 3 times within 60 s" in quarantined.reason
    assert "no such model" in quarantined.reason
    assert quarantined.incarnation == 3
    assert [event.incarnation for event in owner.events if isinstance(event, Started)] == [1, 2, 3]
    await asyncio.wait_for(process.task, 5)
    assert process.state == "quarantined"
    with pytest.raises(StartFailed, match="left alone"):
        await process.wait_ready(1)
    again = await owner.launcher.start(owner.spec("well", first_incarnation=4))
    await again.wait_ready(10)
    assert again.incarnation == 4


async def test_a_log_tail_speaks_of_this_life_only(owner):
    owner.spec().log_path.parent.mkdir()
    owner.spec().log_path.write_text("old trouble\n")
    process = await owner.launcher.start(owner.spec("broken", restart=False))
    with pytest.raises(StartFailed) as caught:
        await process.wait_ready(10)
    assert "old trouble" not in str(caught.value)
    assert owner.log().startswith("old trouble"), "logs are appended to"


async def test_a_log_that_is_too_long_is_put_aside_at_the_next_start(owner, monkeypatch):
    monkeypatch.setattr(life_module, "LOG_LIMIT_BYTES", 10)
    path = owner.spec().log_path
    path.parent.mkdir()
    path.write_text("a long old log\n")
    await owner.start()
    assert path.with_name("engine-0.log.1").read_text() == "a long old log\n"
    assert "long old" not in owner.log()


async def test_a_process_that_is_never_ready_is_killed_at_its_start_deadline(owner):
    process = await owner.launcher.start(owner.spec("silent", start_deadline_s=0.3, restart=False))
    with pytest.raises(StartFailed, match=r"was not ready within 0.3 s"):
        await process.wait_ready(10)
    await owner.until(Died)
    assert not is_alive(process.pid)


async def test_waiting_for_a_start_has_a_deadline_of_its_own(owner):
    process = await owner.launcher.start(owner.spec("silent"))
    with pytest.raises(StartFailed, match=r"engine-0 was not ready within 0.1 s"):
        await process.wait_ready(0.1)


async def test_a_program_that_does_not_exist_is_named(owner):
    spec = owner.spec(build=lambda incarnation, port: ["/no/such/program"], restart=False)
    process = await owner.launcher.start(spec)
    with pytest.raises(StartFailed, match="cannot run /no/such/program"):
        await process.wait_ready(10)


async def test_a_process_that_must_not_restart_dies_once(owner):
    process = await owner.start(restart=False)
    os.kill(process.pid, signal.SIGKILL)
    await owner.until(Died)
    await asyncio.wait_for(process.task, 5)
    assert process.state == "ended"
    assert len([event for event in owner.events if isinstance(event, Started)]) == 1


async def test_the_owner_can_end_a_life_with_a_reason_of_its_own(owner):
    process = await owner.start()
    process.kill("its checksums differ")
    assert "was killed: its checksums differ" in (await owner.until(Died)).reason
    assert (await owner.until(Ready, 2)).incarnation == 2


@pytest.mark.parametrize("mode", ["well", "stubborn", "parent"])
async def test_H6_stop_ends_within_its_deadline_and_leaves_nothing(owner, mode):
    process = await owner.start(mode)
    pids = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    assert len(pids) == (2 if mode == "parent" else 1)
    began = time.monotonic()
    await process.stop(0.3)
    assert (time.monotonic() - began >= 0.3) is (mode == "stubborn"), "asked first, killed only after the deadline"
    assert time.monotonic() - began < 3.0
    await gone(*pids)
    assert process.state == "ended"
    assert not [event for event in owner.events if isinstance(event, Died)], "what was asked for is no death"


async def test_H6_a_process_with_nothing_to_save_is_not_asked(owner):
    process = await owner.start("stubborn", stop_signal=signal.SIGKILL)
    began = time.monotonic()
    await process.stop(20.0)
    assert time.monotonic() - began < 10.0
    await gone(process.pid)


async def test_H6_stop_is_quick_in_every_state(owner):
    starting = await owner.launcher.start(owner.spec("silent"))
    await owner.until(Started)
    pausing = await owner.launcher.start(owner.spec("broken", index=1))
    await owner.until(Died)
    hung = await owner.start(index=2)
    os.kill(hung.pid, signal.SIGSTOP)
    began = time.monotonic()
    await owner.launcher.stop(0.3)
    assert time.monotonic() - began < 3.0
    assert {process.state for process in (starting, pausing, hung)} <= {"ended", "quarantined"}
    await owner.launcher.watch()


async def test_L2_what_a_dead_process_had_started_dies_too(owner):
    process = await owner.start("parent")
    (kid,) = psutil.Process(process.pid).children()
    os.kill(process.pid, signal.SIGKILL)
    await owner.until(Died)
    await gone(kid.pid)


async def test_L2_processes_live_and_die_alone(owner):
    one, two = await owner.start(), await owner.start(index=1)
    pid = two.pid
    os.kill(one.pid, signal.SIGKILL)
    await owner.until(Ready, 3)
    assert (two.pid, two.incarnation, two.state) == (pid, 1, "ready")
    assert one.url != two.url
    with pytest.raises(ValueError, match="engine-1 runs already"):
        await owner.launcher.start(owner.spec(index=1))


async def test_O2_a_port_taken_between_choice_and_use_is_tried_again_and_counts_as_no_death(owner, monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    ports = iter([taken.getsockname()[1]])
    choose = life_module.free_port
    monkeypatch.setattr(life_module, "free_port", lambda: next(ports, None) or choose())
    process = await owner.start()
    assert process.incarnation == 1
    assert not [event for event in owner.events if isinstance(event, Died)]
    assert "Address already in use" in owner.log()
    taken.close()


async def test_H8_an_exception_in_a_supervisor_ends_the_watch_with_its_traceback(owner, caplog):
    def build(incarnation: int, port: int) -> list[str]:
        raise RuntimeError("the recipe is broken")

    process = await owner.launcher.start(owner.spec(build=build))
    with pytest.raises(RuntimeError, match="recipe is broken"):
        await asyncio.wait_for(owner.launcher.watch(), 1)
    assert "supervisor of engine-0 failed" in caplog.text
    with pytest.raises(StartFailed, match="supervisor failed"):
        await process.wait_ready(1)


async def test_H8_an_owner_that_raises_in_its_callback_hears_of_it_and_no_child_is_left(tmp_path):
    def hear(event: object) -> None:
        if isinstance(event, Ready):
            raise RuntimeError("the ledger is full")

    owner = Owner(tmp_path, Restarts())
    launcher = LocalLauncher(hear)
    process = await launcher.start(owner.spec())
    with pytest.raises(RuntimeError, match="ledger is full"):
        await asyncio.wait_for(launcher.watch(), 5)
    assert not is_alive(process.pid)
    with pytest.raises(RuntimeError, match="ledger is full"):
        await launcher.watch()
    await launcher.stop(1.0)
    await owner.launcher.stop(1.0)


@pytest.mark.parametrize(("healthy_s", "expected"), [(60.0, [0.3, 0.6, 0.6]), (0.0, [0.3, 0.3, 0.3])])
async def test_pauses_double_up_to_their_limit_and_a_healthy_life_forgives(tmp_path, monkeypatch, healthy_s, expected):
    pauses = []
    finishes = launcher_module.finishes

    async def short(waiting, pause_s):
        pauses.append(pause_s)
        return await finishes(waiting, 0.01)

    monkeypatch.setattr(launcher_module, "finishes", short)
    owner = Owner(tmp_path, Restarts(first_s=0.3, longest_s=0.6, healthy_s=healthy_s, deaths=9))
    process = await owner.start()
    for incarnation in range(1, 4):
        os.kill(process.pid, signal.SIGKILL)
        await owner.until(Ready, incarnation + 1)
    assert pauses == expected
    await owner.launcher.stop(1.0)


async def test_W1_nothing_outlives_a_driver_that_was_killed(tmp_path):
    """A real driver in a process of its own, killed with SIGKILL while its child runs."""
    (tmp_path / "child.py").write_text(CHILD)
    driver = tmp_path / "small_driver.py"
    driver.write_text(
        textwrap.dedent(
            f"""
            import asyncio, os, sys
            from pathlib import Path
            from driver.launcher import LocalLauncher
            from driver.life import ProcessSpec

            async def main():
                launcher = LocalLauncher(lambda event: None)
                build = lambda incarnation, port: [sys.executable, {str(tmp_path / "child.py")!r}, str(incarnation), str(port), "well"]
                process = await launcher.start(ProcessSpec("engine", 0, build, Path({str(tmp_path / "engine.log")!r})))
                await process.wait_ready(20)
                environment = Path(f"/proc/{{process.pid}}/environ").read_bytes().decode().split(chr(0))
                assert f"HEADRACE_PARENT_PID={{os.getpid()}}" in environment
                print(process.pid, flush=True)
                await launcher.watch()

            asyncio.run(main())
            """
        )
    )
    repository = Path(launcher_module.__file__).parent.parent
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, str(driver)), env=os.environ | {"PYTHONPATH": str(repository)}, stdout=asyncio.subprocess.PIPE
    )
    assert running.stdout is not None
    pid = int(await asyncio.wait_for(running.stdout.readline(), 30))
    assert is_alive(pid)
    running.kill()
    await running.wait()
    await gone(pid)
