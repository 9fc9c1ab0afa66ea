"""The loop: one thread that owns the model, the KV cache and every decision about requests.

Other threads hand it functions through one queue; it runs them between steps, so whatever they do (a pause, a weight update, an abort)
happens at a step's boundary and no token is made with half of it. With nothing to do, or paused, it blocks on that queue.

A turn of the loop admits waiting requests in order (one prefill, of a bounded size), then makes one token for every running request in
one batched step. In deterministic mode each request is computed alone, and its prompt token by token: a position's numbers then come
from operations of the same shapes whether it was sent or sampled, so a continued request repeats the bits of an uninterrupted one.

KV memory is reserved when a request is admitted (prompt and all new tokens it may make), so running requests never run out of it and
retraction happens only on request.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollout.engine.model import KVCache, Model
from rollout.engine.request import (
    Request,
    finish_aborted_running,
    finish_aborted_waiting,
    finish_failed,
    finish_length,
    finish_stop,
)
from rollout.engine.sampling import Drawn, draw, record_input_logprobs
from rollout.engine.settings import Settings
from rollout.engine.text import Text

log = logging.getLogger(__name__)

T = TypeVar("T")

# Tokens, with padding, of one prefill. It bounds how long running requests and control calls wait for it.
PREFILL_TOKENS = 4096
ENDED_LATER_S = 0.5
# How often the tokens of an unstreamed answer leave the loop, as in SGLang: an abort in the queue has none that are newer.
SHOWN_EVERY = 50


class Scheduler:
    """`deliver(requests)` is called in the loop thread after each step with those that have news; `died(reason)` if the loop fails."""

    def __init__(
        self,
        model: Model,
        settings: Settings,
        context_length: int,
        text: Text | None,
        deliver: Callable[[list[Request]], None],
        died: Callable[[BaseException], None],
    ) -> None:
        self.model = model
        self.settings = settings
        self.max_total_tokens = settings.max_total_tokens or settings.max_running_requests * context_length
        # SGLang's own arithmetic, margins included: the longest sequence, and the longest prompt.
        self.max_sequence = min(context_length, self.max_total_tokens) - 1
        self.max_prompt = self.max_sequence - 5
        self.cache = KVCache(
            model.config, settings.max_running_requests, context_length, model.dtype, keep_routes=settings.enable_return_routed_experts
        )
        self.weight_version = settings.weight_version
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # index = cache row
        self.paused = False
        self.forward_sleep_s = settings.slow_step
        self.generated_tokens = 0
        self.prefilled_tokens = 0
        self.loads: dict[str, Any] = {}
        self._text = text
        self._deliver = deliver
        self._died = died
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = False
        self._generator = torch.Generator().manual_seed(settings.random_seed)
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._rate = RateMeter()

    # Called from other threads.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the loop to end; a step under way is waited for, but not longer than ENDED_LATER_S."""
        self._inbox.put(self._stop)
        self._thread.join(ENDED_LATER_S)

    def submit(self, request: Request) -> None:
        self._inbox.put(lambda: self._accept(request))

    def abort(self, rid: str | None) -> None:
        """None aborts everything. Like SGLang's, it takes every rid that starts with `rid`."""
        self._inbox.put(lambda: self._abort(rid))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` in the loop thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = action()
            except Exception as error:  # whatever it is, it belongs to the caller, and the loop goes on
                future.set_exception(error)
            else:
                future.set_result(result)

        self._inbox.put(run)
        return future

    # The loop thread.

    @property
    def is_empty(self) -> bool:
        return not self.waiting and not self.running

    def _run(self) -> None:
        # OpenMP keeps its thread count per thread: set where the work is done.
        torch.set_num_threads(self.settings.threads)
        try:
            with torch.inference_mode():
                while not self._stopping:
                    if not self.paused:
                        self._publish()
                    self._drain(block=self.paused or self.is_empty)
                    if not (self.paused or self.is_empty):
                        self._turn()
        except BaseException as error:
            log.critical("the scheduler loop failed; the engine ends", exc_info=True)
            self._died(error)

    def _drain(self, block: bool) -> None:
        """Run what was handed over. Blocks for the first item when there is nothing else to do: no deadline, `stop` is an item too."""
        try:
            if block:
                self._inbox.get()()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _turn(self) -> None:
        admitted = self._admit()
        if admitted:
            self._prefill(admitted)
        if self.running:
            self._decode()

    def _stop(self) -> None:
        self._stopping = True

    def _accept(self, request: Request) -> None:
        limit = self.settings.max_queued_requests
        if limit is not None and len(self.waiting) + 1 > limit:
            request.end(finish_failed("The request queue is full.", 503))
            self._deliver([request])
        else:
            self.waiting.append(request)

    def _abort(self, rid: str | None) -> None:
        hit = {request for request in (*self.waiting, *self.running) if rid is None or request.rid.startswith(rid)}
        ended = [request for request in self.waiting if request in hit]
        self.waiting = deque(request for request in self.waiting if request not in hit)
        for request in ended:
            request.end_unseen(finish_aborted_waiting())
        for request in self.running:
            # It ends after its next token, as in SGLang, so in a pause it does not end at all.
            request.aborting |= request in hit
        if ended:
            self._deliver(ended)

    def _admit(self) -> list[Request]:
        """Take from the head of the queue what fits: free rows, unreserved tokens, and the size of one prefill."""
        if self.cache.data is None:
            self._refuse_without_cache()
            return []
        admitted: list[Request] = []
        reserved = sum(self._reservation(request) for request in self.running)
        longest = 0
        while self.waiting and len(self.running) + len(admitted) < self.settings.max_running_requests:
            request = self.waiting[0]
            longest = max(longest, request.length)
            reserved += self._reservation(request)
            if reserved > self.max_total_tokens or (admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS):
                break
            admitted.append(self.waiting.popleft())
        return admitted

    @staticmethod
    def _reservation(request: Request) -> int:
        return len(request.input_ids) + request.sampling.max_new_tokens

    def _refuse_without_cache(self) -> None:
        ended = list(self.waiting)
        self.waiting.clear()
        log.error("%d requests came while the KV cache is released: a real engine would crash here", len(ended))
        for request in ended:
            request.end(finish_failed("the KV cache is released; call /resume_memory_occupation before generating", 500))
        self._deliver(ended)

    def _prefill(self, admitted: list[Request]) -> None:
        assert self.cache.data is not None
        first = len(self.running)
        self.running += admitted
        self.prefilled_tokens += sum(request.length for request in admitted)
        self._sleep()
        rows = range(first, len(self.running))
        if self.settings.deterministic:
            hidden = [self._prefill_alone(row) for row in rows]
        else:
            longest = max(request.length for request in admitted)
            tokens = torch.tensor([request.known_ids + [0] * (longest - request.length) for request in admitted])
            place = slice(rows.start, rows.stop)
            hidden = list(self.model.prefill(self.cache.data[:, :, place], tokens, self.cache.routes_of(place)))
        for request, states in zip(admitted, hidden, strict=True):
            if request.wants_input_logprobs:
                record_input_logprobs(request, states, self.model.logits)
        last = [states[request.length - 1] for request, states in zip(admitted, hidden, strict=True)]
        self._take(list(rows), torch.stack(last))

    def _prefill_alone(self, row: int) -> Tensor:
        """Hidden states [length, hidden] of one request, one position at a time."""
        states = [self._step([row], [token], [position]) for position, token in enumerate(self.running[row].known_ids)]
        return torch.cat(states)

    def _decode(self) -> None:
        self._sleep()
        rows = list(range(len(self.running)))
        tokens = [request.output_ids[-1] for request in self.running]
        positions = [request.length - 1 for request in self.running]
        if self.settings.deterministic:
            hidden = torch.cat([self._step([row], [tokens[row]], [positions[row]]) for row in rows])
        else:
            hidden = self._step(rows, tokens, positions)
        self._take(rows, hidden)

    def _step(self, rows: list[int], tokens: list[int], positions: list[int]) -> Tensor:
        """One token for each of these neighbouring rows → hidden [B, hidden]."""
        assert self.cache.data is not None
        place = slice(rows[0], rows[-1] + 1)
        return self.model.decode(self.cache.data[:, :, place], torch.tensor(tokens), torch.tensor(positions), self.cache.routes_of(place))

    def _take(self, rows: list[int], hidden: Tensor) -> None:
        """Draw a token for each of these rows, append it, end what ends, and tell the HTTP side."""
        requests = [self.running[row] for row in rows]
        if self.settings.deterministic:
            drawn = [draw(self.model.logits(hidden[i : i + 1]), [request], self._generator) for i, request in enumerate(requests)]
            drawn_all = Drawn(
                *([x for part in parts for x in part] for parts in zip(*((d.tokens, d.logprobs, d.tops) for d in drawn), strict=True))
            )
        else:
            drawn_all = draw(self.model.logits(hidden), requests, self._generator)
        news, ended = [], []
        for row, request, token, logprob, tops in zip(rows, requests, drawn_all.tokens, drawn_all.logprobs, drawn_all.tops, strict=True):
            finish = self._append(request, token, logprob, tops)
            if finish is not None:
                if request.routes_from is not None and self.cache.routes is not None:
                    request.routes = self.cache.routes.of(row, request.routes_from, request.length - 1)
                request.end(finish)
                ended.append(row)
                news.append(request)
            elif not request.stream:
                if len(request.output_ids) % SHOWN_EVERY == 0:
                    request.show()
            elif self._may_show(request):
                request.show()
                news.append(request)
        if ended:
            self._close_gaps(ended)
        self._deliver(news)

    def _append(self, request: Request, token: int, logprob: float, tops: Any) -> dict[str, Any] | None:
        """Add the token; returns why the request ends with it, if it does. Stop strings win over tokens, both over length."""
        sampling = request.sampling
        if sampling.max_new_tokens == 0:
            return finish_aborted_running() if request.aborting else finish_length(0)
        if not float("-inf") < logprob < float("inf"):
            self.cache.clear(self.running.index(request))
            return finish_failed("the model gave logits that are not finite; its weights are broken", 500)
        request.append(token, logprob, tops, self.weight_version)
        self.generated_tokens += 1
        if request.aborting:
            return finish_aborted_running()
        if sampling.stop and self._text is not None:
            matched = self._text.find_stop(request.output_ids, sampling.stop)
            if matched is not None:
                return finish_stop(matched)
        if not sampling.ignore_eos and (token in sampling.stop_token_ids or token in self.model.config.eos_ids or self._is_text_eos(token)):
            return finish_stop(token)
        if len(request.output_ids) >= sampling.max_new_tokens:
            return finish_length(sampling.max_new_tokens)
        return None

    def _is_text_eos(self, token: int) -> bool:
        return self._text is not None and token == self._text.eos_id

    def _may_show(self, request: Request) -> bool:
        """With enough unseen tokens (the first is shown at once), and not at what may be the start of a stop string."""
        unseen = len(request.output_ids) - request.visible
        if request.visible > 0 and unseen < request.sampling.stream_interval:
            return False
        stops = request.sampling.stop
        return not (stops and self._text is not None and self._text.may_start_stop(request.output_ids, stops))

    def _close_gaps(self, ended: list[int]) -> None:
        """Drop these rows and move the last rows into their places, so that 0 … n−1 stay without gaps."""
        left = len(self.running) - len(ended)
        gone = set(ended)
        targets = [row for row in sorted(gone) if row < left]
        sources = [row for row in range(left, len(self.running)) if row not in gone]
        if targets:
            self.cache.move(sources, targets, max(self.running[row].length for row in sources))
            for source, target in zip(sources, targets, strict=True):
                self.running[target] = self.running[source]
        del self.running[left:]

    def _sleep(self) -> None:
        if self.forward_sleep_s > 0:
            time.sleep(self.forward_sleep_s)

    def _publish(self) -> None:
        """The numbers of /v1/loads. As in SGLang they come from the turns of the loop, so in a pause they are those of before."""
        used = sum(request.length for request in self.running)
        self.loads = {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "waiting_tokens": sum(request.length for request in self.waiting),
            "used_tokens": used,
            "reserved_tokens": sum(self._reservation(request) for request in self.running),
            "prefilled_tokens": self.prefilled_tokens,
            "retracted": sum(request.num_retractions > 0 for request in self.waiting),
            "tokens_per_s": self._rate.update(self.generated_tokens),
        }


class RateMeter:
    """Tokens a second over windows of at least half a second."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._count = 0
        self._rate = 0.0

    def update(self, count: int) -> float:
        passed_s = time.monotonic() - self._since_s
        if passed_s >= 0.5:
            self._rate = (count - self._count) / passed_s
            self._since_s, self._count = time.monotonic(), count
        return self._rate
