"""The service process: its runs, their REST server, its signals.

What can be known to be wrong is said before anything starts or is written: a taken port, a store that does not fit, more than the machine
has; and before anything starts a ledger in use. SIGTERM and
SIGINT end it in order (a second one at once, after a last word to engines of somebody else's). RUN_DIR/service.json says where it
listens while it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from driver import collector
from driver.config import ConfigError
from driver.datasets import DatasetError
from driver.ledger_db import LedgerError
from driver.machine import left_behind, needed, on_disk
from driver.planned import plan_of
from driver.planner import PlanError
from driver.run import Run
from driver.runs import Runs
from driver.service import create_app
from driver.settings import RunConfig
from driver.submits import submit_own

log = logging.getLogger("headrace.up")


class CannotStart(RuntimeError):
    """A sentence for the user: why the service did not start, and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """Bind now, so that a taken port is said before engines are started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise CannotStart(
            f"cannot listen on {host}:{port} ({error.strerror}); end what uses it, or choose another service.port (0 takes any free one)"
        ) from error
    sock.listen(512)
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def announced(config: RunConfig, sock: socket.socket) -> Iterator[str]:
    """RUN_DIR/service.json, readable by its owner only, while the service lives."""
    host, port = sock.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
    path = config.directory / "service.json"
    facts: dict[str, Any] = {"url": url, "pid": os.getpid(), "run_id": config.run_id, "token": config.service.token}
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts))
    partial.chmod(0o600)
    partial.rename(path)
    try:
        yield url
    finally:
        path.unlink(missing_ok=True)


def log_to(path: Path, *, also_terminal: bool) -> None:
    """The driver's own log; nothing else configures logging in this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    if also_terminal:
        handlers.append(logging.StreamHandler())
    form = logging.Formatter("%(asctime)s %(levelname).1s %(name)s: %(message)s")
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(form)
        root.addHandler(handler)
    logging.getLogger("httpx").setLevel(logging.WARNING)


async def serve(config: RunConfig, *, exit_when_done: bool, quiet: bool) -> int:
    """Run the service until it is told to end (or, with `exit_when_done`, until the run has ended). Returns the exit status."""
    sock = listen(config.service.host, config.service.port)
    lacking = [f"{finding.what}: {finding.words}" for finding in needed(config) if finding.state == "missing"]
    try:
        plan_of(config)
    except PlanError as error:
        lacking.append(str(error))
    if lacking:
        sock.close()
        raise CannotStart("; ".join(lacking))
    log_to(config.directory / "logs" / "driver.log", also_terminal=not quiet)  # the first that makes a directory
    for finding in on_disk(config):
        log.warning("%s", finding.words)
    for finding in left_behind(config):
        log.warning("left behind: %s", finding.words)
    collector.settle()
    try:
        run = Run(config)
    except (LedgerError, ValueError, OSError) as error:
        sock.close()
        raise CannotStart(str(error)) from error
    runs = Runs(run)
    ended = asyncio.Event()
    at_once: asyncio.Task[None] | None = None
    loop = asyncio.get_running_loop()

    def shutdown() -> None:
        nonlocal at_once
        if at_once is not None:
            os._exit(130)
        if ended.is_set():
            log.warning("told to end a second time: ending at once; engines of somebody else's that a push has paused are let go first")
            at_once = asyncio.create_task(end_at_once(runs.runs.values()), name="ending at once")
            return
        ended.set()
        log.info("ending in order: the step in flight, a checkpoint, the ready rows; once more (Ctrl-C) ends at once")
        runs.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown)
    loop.add_signal_handler(signal.SIGUSR1, log_tasks)
    app = create_app(runs, token=config.service.token, loopback=config.service.loopback, shutdown=shutdown)
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5))
    with announced(config, sock) as url:
        log.info("run %s listens on %s", config.run_id, url)
        collecting = asyncio.create_task(collector.collect(), name="collector")
        serving = asyncio.create_task(server.serve(sockets=[sock]), name="rest")
        try:
            if run.core.ledger.ended is None:
                await submit_own(run)
            await runs.run(ended, exit_when_done=exit_when_done)
        finally:
            collecting.cancel()
            server.should_exit = True
            await serving
            runs.close()
    return 1 if runs.failed else 0


async def end_at_once(runs: Iterable[Run]) -> None:
    """Nothing is saved that is not on disk. Engines that outlive this process get some seconds of a last effort."""
    try:
        for paused in await asyncio.gather(*(run.processes.outside.leave_at_once() for run in runs)):
            if paused:
                log.warning(
                    "may be left paused: %s; the run frees them when it starts again, README says how to do it by hand", ", ".join(paused)
                )
    finally:
        logging.shutdown()
        os._exit(130)


def log_tasks() -> None:
    """SIGUSR1: where every task stands, for a service that seems to hang."""
    for task in asyncio.all_tasks():
        frames = []
        at: Any = task.get_coro()
        while (frame := getattr(at, "cr_frame", None)) is not None:
            frames.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
            at = at.cr_await
        log.info("task %s waits at %s", task.get_name(), " > ".join(frames))


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn must not replace the handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(config: RunConfig, *, exit_when_done: bool, quiet: bool) -> int:
    try:
        import uvloop

        return uvloop.run(serve(config, exit_when_done=exit_when_done, quiet=quiet))
    except (ConfigError, DatasetError, LedgerError) as error:
        raise CannotStart(str(error)) from error
