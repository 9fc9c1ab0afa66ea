"""The loop by itself, in this process: admission keeps its bounds, and what it calls back."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine.config import read_config
from rollout.engine.model import Model
from rollout.engine.request import Request, Sampling
from rollout.engine.scheduler import Scheduler
from rollout.engine.settings import Settings
from rollout.engine.weights import load_checkpoint


class Driven:
    """A scheduler whose deliveries are recorded; `finished` is set when `expected` requests have ended."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        model = Model(read_config(directory), torch.float32, 64)
        load_checkpoint(model, directory)
        self.ended: list[Request] = []
        self.most_reserved = 0
        self.most_running = 0
        self.expected = 0
        self.finished = threading.Event()
        self.failure: BaseException | None = None
        self.scheduler = Scheduler(model, Settings(directory, **settings), 64, None, self.deliver, self.died)

    def deliver(self, requests: list[Request]) -> None:
        self.most_running = max(self.most_running, len(self.scheduler.running))
        self.most_reserved = max(self.most_reserved, sum(len(r.input_ids) + r.sampling.max_new_tokens for r in self.scheduler.running))
        self.ended += [request for request in requests if request.finish is not None]
        if len(self.ended) >= self.expected:
            self.finished.set()

    def died(self, error: BaseException) -> None:
        self.failure = error
        self.finished.set()

    def run(self, requests: list[Request]) -> None:
        self.expected = len(requests)
        self.scheduler.call(lambda: self.scheduler.waiting.extend(requests))
        self.scheduler.start()
        assert self.finished.wait(20)
        assert self.failure is None


@pytest.fixture
def driven(checkpoints: Callable[..., Path]) -> Iterator[Callable[..., Driven]]:
    made: list[Driven] = []

    def make(**settings: Any) -> Driven:
        made.append(Driven(checkpoints("Qwen3"), **settings))
        return made[-1]

    yield make
    for one in made:
        one.scheduler.stop()


def greedy(index: int, prompt: int = 10, tokens: int = 10) -> Request:
    sampling = Sampling(max_new_tokens=tokens, top_k=1, ignore_eos=True)
    return Request(f"r{index}.", [5 + index] * prompt, sampling, stream=True, return_logprob=True)


def test_running_requests_never_reserve_more_tokens_than_there_are(driven: Callable[..., Driven]) -> None:
    one = driven(max_running_requests=8, max_total_tokens=64)
    one.run([greedy(index) for index in range(10)])
    assert one.most_reserved == 60 and one.most_running == 3
    assert one.scheduler.max_sequence == 63


def test_rows_bound_the_running_and_the_oldest_goes_first(driven: Callable[..., Driven]) -> None:
    one = driven(max_running_requests=2)
    one.run([greedy(index, prompt=3, tokens=4) for index in range(7)])
    assert one.most_running == 2
    assert [request.rid for request in one.ended] == [f"r{index}." for index in range(7)]


def test_an_action_that_raises_belongs_to_its_caller_and_a_cancelled_one_does_not_run(driven: Callable[..., Driven]) -> None:
    one = driven()
    ran: list[str] = []
    failing = one.scheduler.call(lambda: 1 // 0)
    cancelled = one.scheduler.call(lambda: ran.append("cancelled"))
    assert cancelled.cancel()
    after = one.scheduler.call(lambda: "after")
    one.scheduler.start()
    with pytest.raises(ZeroDivisionError):
        failing.result(5)
    assert after.result(5) == "after"
    assert ran == [] and one.failure is None


def test_an_abort_takes_every_id_that_starts_with_it_as_sglang_does(driven: Callable[..., Driven]) -> None:
    one = driven()
    requests = [greedy(1), greedy(11), greedy(2)]
    requests[1].rid = "r1.child"
    one.scheduler.call(lambda: one.scheduler.waiting.extend(requests[:2]))
    one.scheduler.abort("r1.")
    one.run(requests[2:])
    assert [request.rid for request in one.ended if request.finish and request.finish["type"] == "abort"] == ["r1.", "r1.child"]
