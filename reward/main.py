"""The reward service: `python -P -m reward.main --spec FILE`.

Starts the workers, loads every scorer in each, then listens. A mistake of the user's (spec, scorer, port) is one sentence and exit code 2.
It holds no state: the driver may kill it at any time and start the next incarnation.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
import uvloop

from reward.lifeline import die_with
from reward.pool import WorkerLost, WorkerPool
from reward.service import create_app
from reward.spec import RewardSpec, load_spec

PARENT_VARIABLE = "HEADRACE_PARENT_PID"
SHUTDOWN_S = 1


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # The original raises the signal again at the end; here SIGTERM is an ordinary way to end, with exit code 0.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self.handle_exit, number, None)
        yield


async def serve(spec: RewardSpec) -> None:
    """Until SIGTERM or SIGINT. Raises ValueError for what a person must mend, WorkerLost, and whatever ends a worker's loop."""
    with _listening(spec) as listener:
        pool = WorkerPool(spec)
        try:
            await pool.start()
            config = uvicorn.Config(
                create_app(spec, pool), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_S
            )
            server, workers = asyncio.create_task(_Server(config).serve([listener])), asyncio.create_task(pool.run())
            await asyncio.wait({server, workers}, return_when=asyncio.FIRST_COMPLETED)
            for task in (workers, server):
                if task.done():
                    task.result()
                task.cancel()
            await asyncio.gather(server, workers, return_exceptions=True)
        finally:
            await pool.stop()


def _listening(spec: RewardSpec) -> socket.socket:
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((spec.host, spec.port))
        return listener
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {spec.host}:{spec.port}: {error.strerror}; choose a free port, or stop what uses it") from error


def main() -> int:
    parser = argparse.ArgumentParser(prog="reward.main", description=__doc__)
    parser.add_argument("--spec", type=Path, required=True, help="a JSON file, see reward/spec.py")
    arguments = parser.parse_args()
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with(int(parent))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(serve(load_spec(arguments.spec)))
    except (ValueError, WorkerLost) as error:
        print(f"headrace reward: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
