"""The paced mode: an engine's HTTP side at a given rate, without a model. It is for benchmarks of clients and computes nothing.

Every running request gets `stream_interval` tokens a step, from a table of made-up tokens and log-probs, and so many steps a second that
the rate is what was asked for; an answer ends by its length alone. Requests, streams, spans, pauses and aborts are the engine's own.

There is no loop thread. Steps run in the server's event loop, each after the chunks of the one before are written, so an engine that is
behind is slower and its chunks stay as long as they were: what a client has to do does not depend on the load.

What would need numbers is refused, in words: weights, checksums, log-probs of a prompt. A push of a run fails at its first bucket. With
`--paced-pushes` it passes, for benchmarks of a whole run: weights are copied and compared as by any engine, nothing computes with them,
and the log-probs of a prompt are a constant that the benchmark's trainer knows. With `--paced-lengths` answers have the lengths of a trace,
drawn anew for each request: one that goes on elsewhere after a failure draws again.

All requests' chunks come in the same step, which a server that decodes token by token never does: its requests began in different ones.
With `--paced-apart` there is a step for each token, in which those requests have a chunk that took a slot a whole number of chunks ago, and
as many take one as would fill all in the time of a chunk.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar

from rollout.engine.control import Control
from rollout.engine.request import LogProb, Request, finish_aborted_running, finish_failed, finish_length, finish_stop
from rollout.engine.scheduler import Scheduler
from rollout.engine.settings import PACED_LOG_PROB

log = logging.getLogger(__name__)

T = TypeVar("T")

COMPUTES_NOTHING = "this engine runs with --paced and computes nothing, its tokens are made up: for benchmarks only, start it without"
TABLE_TOKENS = 4096
PUBLISH_S = 0.1
# The loop's rounds from a step to the last of its chunks: one wakes the requests, in the next they write.
ROUNDS_TO_WRITE = 2


class PacedScheduler(Scheduler):
    """All methods are called in the event loop."""

    def start(self) -> None:
        settings, config = self.settings, self.model.config
        assert settings.paced is not None
        log.warning("%g tokens a second and request; %s", settings.paced, COMPUTES_NOTHING)
        self._chunk = min(settings.stream_interval, TABLE_TOKENS)
        self._phases = self._chunk if settings.paced_apart else 1  # steps in which a request has one with a chunk
        self._step_s = self._chunk / self._phases / settings.paced
        self._phase = 0
        made = random.Random(settings.random_seed)
        possible = [token for token in range(config.vocab_size) if token not in config.eos_ids]
        tokens = made.choices(possible, k=TABLE_TOKENS)
        # Twice, so that a slice that starts inside never has to wrap around.
        self._tokens = tokens * 2
        self._lengths = _draws(settings.paced_lengths, settings.random_seed)
        self._drawn: set[str] = set()  # requests that end by a drawn length
        self._pairs: list[LogProb] = [[-made.expovariate(1.0), token, None] for token in tokens] * 2
        self._work = asyncio.Event()
        self._published_s = self._paused_at_s = 0.0
        self._due_s = asyncio.get_running_loop().time()  # of the next step
        self._task = asyncio.get_running_loop().create_task(self._steps(), name="paced")
        self._task.add_done_callback(self._ended)

    def stop(self) -> None:
        self._task.cancel()

    def submit(self, request: Request) -> None:
        if request.wants_input_logprobs:
            if self.settings.paced_pushes:
                known = request.input_ids[request.logprob_start_len :]
                request.input_logprobs = [[PACED_LOG_PROB if at else None, token, None] for at, token in enumerate(known)]
                request.end(finish_length(0))
            else:
                request.end(finish_failed(COMPUTES_NOTHING, 400))
            self._deliver([request])
            return
        if self._lengths is not None:
            drawn = next(self._lengths)
            if drawn < request.sampling.max_new_tokens:
                request.sampling = replace(request.sampling, max_new_tokens=drawn)
                self._drawn.add(request.rid)
        self._accept(request)
        self._work.set()

    def abort(self, rid: str | None) -> None:
        self._abort(rid)

    def call(self, action: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        was_paused, now_s = self.paused, asyncio.get_running_loop().time()
        try:
            future.set_result(action())
        except Exception as error:  # it belongs to the caller
            future.set_exception(error)
        if self.paused and not was_paused:
            self._paused_at_s = now_s
        elif was_paused and not self.paused:
            self._due_s += now_s - self._paused_at_s  # a step that was under way has all of its time left
        self._work.set()
        return future

    async def _steps(self) -> None:
        """Consumes requests; waits for the next step's time, or for a request while there is none or in a pause."""
        loop = asyncio.get_running_loop()
        while True:
            if self.paused or self.is_empty:
                self._publish()
                self._work.clear()
                await self._work.wait()
                if not self.paused:
                    self._due_s = max(self._due_s, loop.time())
                continue
            if self._due_s > loop.time():
                await asyncio.sleep(self._due_s - loop.time())
                continue  # a pause may have begun meanwhile
            self._turn()
            for _ in range(ROUNDS_TO_WRITE):
                await asyncio.sleep(0)
            self._due_s = max(self._due_s + self._step_s + self.forward_sleep_s, loop.time())

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            assert error is not None
            log.critical("the paced loop failed; the engine ends", exc_info=error)
            self._died(error)

    def _turn(self) -> None:
        if self.cache.data is None:
            self._refuse_without_cache()
        news, going = [], []
        if self._phases == 1:
            self._take_in()
        self._phase = (self._phase + 1) % self._phases
        for request in self.running:
            if request.phase != self._phase and not request.aborting:
                going.append(request)
                continue
            finish = self._grow(request)
            if finish is not None:
                request.end(finish)
                news.append(request)
                continue
            going.append(request)
            if request.stream and self._may_show(request):
                request.show()
                news.append(request)
        self.running = going
        if self._phases > 1:
            self._take_in()  # whoever comes now has its first chunk when it has all of its tokens
        self._deliver(news)
        now_s = asyncio.get_running_loop().time()
        if now_s - self._published_s >= PUBLISH_S:
            self._published_s = now_s
            self._publish()

    def _take_in(self) -> None:
        most = self.settings.max_running_requests
        new = -(-most // self._phases)  # a step
        while self.waiting and len(self.running) < most and (new or self.waiting[0].phase is not None):
            request = self.waiting.popleft()
            self.prefilled_tokens += request.length
            self.running.append(request)
            if request.phase is None:  # else a pause sent it back to the queue
                request.phase = self._phase
                new -= 1

    def _grow(self, request: Request) -> dict[str, Any] | None:
        """One step's tokens; why the request ends with them, if it does."""
        had = len(request.output_ids)
        most = request.sampling.max_new_tokens
        count = 1 if request.aborting else self._chunk
        count = min(count, most - had)
        if count:
            at = (zlib.crc32(request.rid.encode()) + had) % TABLE_TOKENS
            if not request.spans or request.spans[-1][0] != self.weight_version:
                request.spans.append((self.weight_version, had))
            request.output_ids += self._tokens[at : at + count]
            if request.return_logprob:
                request.output_logprobs += self._pairs[at : at + count]
            self.generated_tokens += count
        if request.aborting:
            return finish_aborted_running()
        if had + count < most:
            return None
        if request.rid not in self._drawn:
            return finish_length(most)
        self._drawn.discard(request.rid)
        return self._ends_by_itself(request)

    def _ends_by_itself(self, request: Request) -> dict[str, Any]:
        """It ends by itself, with a token that says so."""
        eos = min(self.model.config.eos_ids, default=None)
        if eos is None:
            return finish_length(len(request.output_ids))
        request.output_ids[-1] = eos
        if request.return_logprob:
            request.output_logprobs[-1] = [request.output_logprobs[-1][0], eos, None]
        return finish_stop(eos)


def _draws(path: Path | None, seed: int) -> Iterator[int] | None:
    """Lengths of answers for ever. ValueError, in words, for a file that has none."""
    if path is None:
        return None
    try:
        lengths = [int(line) for line in path.read_text().split()]
    except (OSError, ValueError) as error:
        raise ValueError(f"--paced-lengths {path}: {error}; it holds one whole number a line") from None
    if not lengths or min(lengths) < 1:
        raise ValueError(f"--paced-lengths {path}: it needs at least one line, and each must be 1 or more")
    made = random.Random(seed)
    return chain.from_iterable(made.choices(lengths, k=1024) for _ in repeat(None))


class PacedControl(Control):
    """Refuses what a verification would ask."""

    def _refuse_released_weights(self) -> None:
        raise ValueError(COMPUTES_NOTHING)

    def checksums(self, skipped: list[str]) -> dict[str, str]:
        raise ValueError(COMPUTES_NOTHING)

    def equal_to_stored(self, entries: list[str]) -> list[str]:
        raise ValueError(COMPUTES_NOTHING)

    def weight(self, name: str, rows: int) -> list[Any]:
        raise ValueError(COMPUTES_NOTHING)
