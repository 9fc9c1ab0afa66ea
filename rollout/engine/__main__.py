"""`python -P -m rollout.engine`: check what can be wrong (flags, port, checkpoint) before anything slow is imported, then serve.

A user's mistake ends it with one sentence and exit code 2. It dies with its parent when HEADRACE_PARENT_PID names it: the kernel is asked
to kill this process when the thread that started it ends, so start engines from a thread that lives as long as the engines should.
SIGTERM and SIGINT end it within two seconds, whatever runs.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from rollout.engine.config import ModelConfig, read_config
from rollout.engine.settings import Settings, parse_flags

if TYPE_CHECKING:
    from rollout.engine.faults import AnyFault
    from rollout.engine.server import Handler, Server

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "HEADRACE_PARENT_PID"
BACKLOG = 2048
CLOSE_S = 1.0
# The loop thread gives up the GIL in every torch call. At Python's 5 ms it could wait that long each time while replies are written.
SWITCH_S = 0.0002

log = logging.getLogger("rollout.engine")


def main() -> None:
    settings = parse_flags(sys.argv[1:])
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    die_with_parent()
    try:
        config = read_config(settings.model_path)
        if settings.enable_return_routed_experts and config.experts is None:
            raise ValueError(f"{settings.model_path} has no experts: leave out --enable-return-routed-experts")
        script = read_script(settings)
        listener = listen(settings.host, settings.port)
    except ValueError as error:
        fail(str(error))
    # Before torch is imported: OpenMP reads it once.
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    sys.setswitchinterval(SWITCH_S)
    code = run(settings, config, listener, script)
    logging.shutdown()
    # Not sys.exit: the loop thread may be inside a long step, and there is nothing left to tidy.
    os._exit(code)


def fail(message: str) -> None:
    print(f"rollout.engine: {message}", file=sys.stderr)
    sys.exit(2)


def die_with_parent() -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # It died before the kernel was asked.
        fail(f"the parent process {parent} named by {PARENT_VARIABLE} is gone; start the engine from a live one, or unset the variable")


def listen(host: str, port: int) -> socket.socket:
    """ValueError when the address cannot be had. Listening starts at once, so two engines never believe they own one port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); "
            "choose another --port, or end what holds this one (ss -ltnp shows it)"
        ) from None
    return listener


def read_script(settings: Settings) -> list[AnyFault] | None:
    """None for an engine that fails on no command, which is every one outside of tests."""
    if settings.faults is None and not settings.allow_faults:
        return None
    from rollout.engine.faults import read_script_file

    return [] if settings.faults is None else read_script_file(settings.faults)


def run(settings: Settings, config: ModelConfig, listener: socket.socket, script: list[AnyFault] | None) -> int:
    import uvloop

    return uvloop.run(serve(settings, config, listener, script))


async def serve(settings: Settings, config: ModelConfig, listener: socket.socket, script: list[AnyFault] | None) -> int:
    """Until a signal (0) or until the loop thread fails (1)."""
    from aiohttp import web

    from rollout.engine.engine import Engine
    from rollout.engine.server import Server

    try:
        engine = Engine(settings, config)
        server = Server(engine)
        handle = server.handle if script is None else with_faults(server, script, settings)
        engine.start()
    except ValueError as error:
        fail(str(error))
    asked_to_end = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked_to_end.set)
    # A handler is cancelled when its client goes away: that is what aborts the request.
    front = web.Server(handle, request_factory=server.make_request, access_log=None, handler_cancellation=True)
    runner = web.ServerRunner(front, shutdown_timeout=0.1)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    host, port = listener.getsockname()[:2]
    log.info("serving %s (%s, %s) on http://%s:%d", settings.model_path, config.architecture, settings.dtype, host, port)

    waits = [asyncio.create_task(event.wait()) for event in (asked_to_end, engine.ended)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    log.info("ending: %s", "asked to" if asked_to_end.is_set() else "the scheduler loop failed")
    await asyncio.wait([asyncio.ensure_future(runner.cleanup())], timeout=CLOSE_S)
    engine.scheduler.stop()
    return 1 if engine.ended.is_set() else 0


def with_faults(server: Server, script: list[AnyFault], settings: Settings) -> Handler:
    from rollout.engine.faults import Faults

    return Faults(server, script, by_http=settings.allow_faults).handle


if __name__ == "__main__":
    main()
