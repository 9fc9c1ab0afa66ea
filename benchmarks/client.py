"""The driver's client against raw aiohttp: the same single-turn workflow, streamed, on engines that compute nothing (`--paced`).

Ours is what the dispatch loop calls: EnginePool.acquire, EngineClient.generate with its checks, clock and on_tokens, httpx over aiohttp.
Raw is aiohttp, a split at line ends and orjson, and believes what it is told. The client has core 0 and the engine core 1. For each number
of open requests there is an engine of its own, whose pace would let OFFERED trajectories a second end: more than a client can take.

    python -m benchmarks.client [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import psutil
import uvloop

from benchmarks.common import Aim, arguments, median, report
from driver import collector
from rollout.answer import Generation
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool
from rollout.version import Version
from rollout.workflow import Task, single_turn

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples/sort_digits/base"  # only its vocabulary counts
VOCABULARY = 259
VERSION = Version("bench", 0, 0, 1)
CONCURRENCIES = (64, 256, 1024, 4096)
PROMPT_TOKENS, TOKENS, INTERVAL = 32, 64, 16  # an answer comes in 4 chunks
OFFERED = 4000.0  # trajectories a second that an engine's pace allows
CLIENT_CORE, ENGINE_CORE = 0, 1
START_S = 60.0

Trajectory = Callable[[int], Awaitable[None]]


@dataclass(frozen=True)
class Engine:
    url: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


@dataclass(frozen=True)
class Measured:
    per_s: float
    client_us: float
    engine_busy: float


@contextmanager
def engines() -> Iterator[dict[int, Engine]]:
    """By the number of open requests."""
    with tempfile.TemporaryDirectory() as directory:
        processes, found = {}, {}
        try:
            for open_requests in CONCURRENCIES:
                processes[open_requests] = start(open_requests, Path(directory) / f"{open_requests}.log")
            for open_requests, process in processes.items():
                found[open_requests] = Engine(url_of(Path(directory) / f"{open_requests}.log", process), psutil.Process(process.pid))
            yield found
        finally:
            for process in processes.values():
                process.terminate()
            for process in processes.values():
                process.wait(10)


def start(open_requests: int, log_path: Path) -> subprocess.Popen[bytes]:
    pace = OFFERED / open_requests * TOKENS
    flags = ["--paced", pace, "--stream-interval", INTERVAL, "--max-running-requests", open_requests, "--weight-version", VERSION]
    argv = [sys.executable, "-P", "-m", "rollout.engine", "--model-path", MODEL, "--port", 0, "--skip-tokenizer-init", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HEADRACE_PARENT_PID": str(os.getpid())}
    with log_path.open("wb") as log:
        process = subprocess.Popen([str(part) for part in argv], stdout=log, stderr=log, env=environment)
    os.sched_setaffinity(process.pid, {ENGINE_CORE})
    return process


def url_of(log_path: Path, process: subprocess.Popen[bytes]) -> str:
    until_s = time.monotonic() + START_S
    while " on http://" not in (text := log_path.read_text()):
        assert process.poll() is None and time.monotonic() < until_s, text
        time.sleep(0.05)
    return text.split(" on ")[1].split()[0]


# ---- the two clients -------------------------------------------------------------------------------------------------------------


def sampling() -> dict[str, object]:
    return {"temperature": 1.0, "max_new_tokens": TOKENS, "stream_interval": INTERVAL}


def rid(number: int) -> str:
    return f"bench.0.{number:012d}.0000.000000.000000"


@asynccontextmanager
async def ours(url: str, open_requests: int, task: Task) -> AsyncIterator[Trajectory]:
    progress: dict[int, int] = {}
    async with make_http() as http:
        pool = EnginePool()
        pool.open(pool.register("engine-0", EngineClient(url, http, vocab_size=VOCABULARY), 1, open_requests), VERSION)

        async def trajectory(number: int) -> None:
            progress[number] = 0

            def on_tokens(ids: list[int], log_probs: list[float], version: str) -> None:
                progress[number] += len(ids)

            async def generate(input_ids: Sequence[int]) -> Generation:
                async with pool.acquire(600.0, f"trajectory {number}") as lease:
                    return await lease.client.generate(
                        input_ids,
                        sampling(),
                        rid(number),
                        stall_s=120.0,
                        clock=lease.slot.clock,
                        version=str(lease.slot.verified),
                        on_tokens=on_tokens,
                    )

            tree = await single_turn(task, generate)
            assert len(tree.turns[-1].token_ids) == progress.pop(number) == TOKENS

        yield trajectory


@asynccontextmanager
async def raw(url: str, open_requests: int, task: Task) -> AsyncIterator[Trajectory]:
    headers = {"content-type": "application/json"}
    connector, timeout = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def trajectory(number: int) -> None:
            async def generate(input_ids: Sequence[int]) -> Generation:
                body = {"input_ids": input_ids, "sampling_params": sampling(), "rid": rid(number), "return_logprob": True, "stream": True}
                rest = b""
                async with session.post(f"{url}/generate", data=orjson.dumps(body), headers=headers) as response:
                    async for data in response.content.iter_any():
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            if line.startswith(b"data: {"):
                                chunk = orjson.loads(line[6:])
                meta = chunk["meta_info"]
                log_probs = [pair[0] for pair in meta["output_token_logprobs"]]
                spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
                return Generation(chunk["output_ids"], log_probs, spans, meta["finish_reason"]["type"])

            tree = await single_turn(task, generate)
            assert len(tree.turns[-1].token_ids) == TOKENS

        yield trajectory


CLIENTS = {"ours": ours, "raw": raw}


# ---- measuring -------------------------------------------------------------------------------------------------------------------


async def measure(client: str, engine: Engine, open_requests: int, count: int) -> Measured:
    """Over `count` trajectories, while `open_requests` are open all the time.

    Requests that were opened together end together, so `count` is a multiple of `open_requests`: part of a wave is part of its work.
    """
    chosen = random.Random(0)
    task = Task(tuple(chosen.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)), {})
    marks: list[tuple[float, float, float]] = []
    ended = 0
    warm = open_requests * max(1, count // 4 // open_requests)

    async with CLIENTS[client](engine.url, open_requests, task) as trajectory:

        async def worker(number: int) -> None:
            nonlocal ended
            while len(marks) < 2:
                await trajectory(number)
                number += open_requests
                ended += 1
                if ended in (warm, warm + count):
                    marks.append((time.monotonic(), time.process_time(), engine.cpu_s()))

        workers = [asyncio.create_task(worker(number)) for number in range(open_requests)]
        workers.append(asyncio.create_task(collector.collect()))
        # The first to come back has set the second mark, or has failed.
        await asyncio.gather(*(await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED))[0])
        for one in workers:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    (wall, cpu, engine_cpu), ends = marks
    wall_s = ends[0] - wall
    return Measured(count / wall_s, (ends[1] - cpu) / count * 1e6, (ends[2] - engine_cpu) / wall_s)


def main() -> int:
    options = arguments(__doc__)
    rounds, least = (1, 1024) if options.quick else (5, 8192)
    os.sched_setaffinity(0, {CLIENT_CORE})
    collector.settle()  # as the driver does; for both
    seen: dict[tuple[str, int], list[Measured]] = {(client, n): [] for client in CLIENTS for n in CONCURRENCIES}
    with engines() as running:
        for _ in range(rounds):  # alternating, so that the machine's moods fall on both
            for open_requests, engine in running.items():
                for client in CLIENTS:
                    count = open_requests * max(1, round(least / open_requests))
                    seen[client, open_requests].append(uvloop.run(measure(client, engine, open_requests, count)))
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {}
    for n in CONCURRENCIES:
        for client in CLIENTS:
            runs = seen[client, n]
            figures[f"{client}_{n}_per_s"] = median([run.per_s for run in runs])
            figures[f"{client}_{n}_cpu_us"] = median([run.client_us for run in runs])
            figures[f"{client}_{n}_engine_busy"] = median([run.engine_busy for run in runs])
        both = list(zip(seen["ours", n], seen["raw", n], strict=True))
        figures[f"ours_over_raw_{n}"] = median([a.per_s / b.per_s for a, b in both])
        aims |= {f"ours_over_raw_{n}": (">=", 0.8), f"ours_{n}_cpu_us": ("<=", 700.0)}
    what = f"{TOKENS} tokens in {TOKENS // INTERVAL} chunks"
    return report(f"client: a trajectory of {what}", figures, aims, options, ["httpx", "httpx-aiohttp", "aiohttp", "orjson", "uvloop"])


if __name__ == "__main__":
    sys.exit(main())
