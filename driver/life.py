"""One life of a supervised process: the child, its group, its port, its stretch of the log, and how it ended.

Nothing outlives the driver: the kernel kills a child when the thread that started it dies, so children are started from the main thread.
What a child itself starts can watch HEADRACE_PARENT_PID, and whatever is left of the group is killed when the child is gone.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOG_LIMIT_BYTES = 50 * 2**20
KILL_WAIT_S = 10.0  # how long the kernel may take to end a killed process

# The child asks the kernel to be killed with its parent (PR_SET_PDEATHSIG is 1), sees that the parent is still there, and becomes the
# program. Done in a process of its own, because code between fork and exec of a process with threads may deadlock.
CHILD = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error}")
"""


@dataclass(frozen=True)
class ProcessSpec:
    """What to run and how to watch it. `build(incarnation, port)` gives the command; `env` is added to the driver's own.

    `misses` health calls in a row without an answer mean that the process hangs; each may take as long as a heartbeat. So does an answer
    that says it is busy and, for `stall_s`, no further than before. With `children` it replaces its own children, which are called so: one
    that somebody has stopped is ended, and the process itself is left alone.
    """

    role: str
    index: int
    build: Callable[[int, int], list[str]]
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"
    heartbeat_s: float = 1.0
    misses: int = 3
    start_deadline_s: float = 120.0
    restart: bool = True
    first_incarnation: int = 1
    stop_signal: signal.Signals = signal.SIGTERM
    stall_s: float | None = None
    children: str | None = None
    host: str | None = None
    """where the plan put it, for a launcher that has several"""
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class Life:
    """One incarnation: a child process, its group, its port and its stretch of the log."""

    def __init__(self, spec: ProcessSpec, incarnation: int) -> None:
        self.spec = spec
        self.title = f"{spec.name} (incarnation {incarnation})"
        self.incarnation = incarnation
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.was_ready = False
        self.pid = 0

    async def start(self) -> None:
        argv = self.spec.build(self.incarnation, self.port)
        log_path = self.spec.log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > LOG_LIMIT_BYTES:
            log_path.replace(log_path.with_name(log_path.name + ".1"))
        with log_path.open("ab") as output:
            self._log_start = output.seek(0, os.SEEK_END)
            self._started_s = time.monotonic()
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), *argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "HEADRACE_PARENT_PID": str(os.getpid()), **self.spec.env},
                start_new_session=True,
            )
        self.pid = self._child.pid
        self.exited = asyncio.create_task(self._child.wait())

    def lived_s(self) -> float:
        return time.monotonic() - self._started_s

    async def terminate(self, deadline_s: float) -> None:
        self._signal(self.spec.stop_signal)
        await asyncio.wait({self.exited}, timeout=deadline_s)

    async def destroy(self) -> None:
        """Kill what is left of the group, and reap the child."""
        self._signal(signal.SIGKILL)
        done, _ = await asyncio.wait({self.exited}, timeout=KILL_WAIT_S)
        if not done:
            raise RuntimeError(f"{self.title}, process {self.pid}, survived SIGKILL for {KILL_WAIT_S:g} s: a device or disk holds it")

    def end_stopped_children(self) -> list[str]:
        """Kill those that somebody has stopped (SIGSTOP); who they were, in the order in which they were started."""
        found = []
        with contextlib.suppress(psutil.Error):
            children = sorted(psutil.Process(self.pid).children(), key=lambda child: (child.create_time(), child.pid))
            for number, child in enumerate(children):
                if child.status() == psutil.STATUS_STOPPED:
                    child.kill()
                    found.append(f"{self.spec.children} {number} (process {child.pid})")
        return found

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return  # nobody is left

    def obituary(self) -> str:
        code = self.exited.result()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        when = f"after {self.lived_s():.1f} s" + ("" if self.was_ready else ", before it was ready")
        return f"{self.title} {how} {when}{self.last_words()}"

    def last_words(self, lines: int = 12) -> str:
        """What this life wrote last, ready to be put after a sentence."""
        with self.spec.log_path.open("rb") as written:
            end = written.seek(0, os.SEEK_END)
            written.seek(max(self._log_start, end - 4096))
            said = written.read().decode(errors="replace").strip().splitlines()[-lines:]
        where = f"; its log is {self.spec.log_path}"
        return where + (", which ends with:\n" + "\n".join(f"    {line}" for line in said) if said else ", where it wrote nothing")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
