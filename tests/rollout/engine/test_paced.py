"""The paced mode: an engine's HTTP side without a model, and no doubt about that."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from rollout.answer import EngineError
from rollout.client import EngineClient, make_http

from .conftest import SOURCES, Served, wait_for

BASE = SOURCES / "examples" / "sort_digits" / "base"
PROMPT = [80, 81, 82, 35, 60]
VERSION = "run/0/0/1"


@pytest.fixture(scope="module")
def paced(start: Callable[..., Served]) -> Iterator[Served]:
    flags = ("--paced", "1000000", "--stream-interval", "16", "--max-running-requests", "512", "--weight-version", VERSION)
    yield start(BASE, *flags, "--skip-tokenizer-init")  # a pace that it can never keep: always behind


@pytest.fixture
async def client(paced: Served) -> AsyncIterator[EngineClient]:
    async with make_http() as http:
        yield EngineClient(paced.url, http, vocab_size=259)
    paced.post("/slow_down", {"forward_sleep_time": None})
    paced.post("/continue_generation", {})
    paced.post("/update_weight_version", {"new_version": VERSION, "abort_all_requests": True})


def sampling(tokens: int) -> dict[str, float]:
    return {"temperature": 1.0, "max_new_tokens": tokens}


async def test_hundreds_of_streams_get_their_tokens_in_chunks_of_one_size(client: EngineClient) -> None:
    chunks: dict[str, list[int]] = {}

    async def one(rid: str) -> None:
        chunks[rid] = []
        answer = await client.generate(
            PROMPT, sampling(70), rid, stall_s=60.0, version=VERSION, on_tokens=lambda ids, *_: chunks[rid].append(len(ids))
        )
        assert (len(answer.output_ids), answer.finish_reason, answer.spans) == (70, "length", [(VERSION, 0, 70)])
        assert len(set(answer.log_probs)) > 30 and -5.0 < sum(answer.log_probs) / 70 < -0.2
        assert len(set(answer.output_ids)) > 30

    await asyncio.gather(*(one(f"many-{n:03d}") for n in range(300)))
    assert set(map(tuple, chunks.values())) == {(16, 16, 16, 16, 6)}


async def test_V5_a_pause_and_a_new_version_are_those_of_any_engine(client: EngineClient, paced: Served) -> None:
    paced.post("/slow_down", {"forward_sleep_time": 0.05})
    some = asyncio.Event()
    request = asyncio.create_task(client.generate(PROMPT, sampling(160), "paused", stall_s=60.0, on_tokens=lambda *_: some.set()))
    await some.wait()
    await client.pause("retract")
    assert await client.flush() and not request.done()
    held = paced.load("num_running_reqs")
    await client.set_version("run/0/1/1")
    await client.continue_generation()
    answer = await request
    assert held in (0, 1)
    assert [version for version, _, _ in answer.spans] == [VERSION, "run/0/1/1"]
    assert len(answer.output_ids) == 160 and answer.meta["num_retractions"] == 1


async def test_E15_an_abort_ends_a_request_with_what_it_has(client: EngineClient, paced: Served) -> None:
    paced.post("/slow_down", {"forward_sleep_time": 0.05})
    some = asyncio.Event()
    request = asyncio.create_task(client.generate(PROMPT, sampling(200), "cut", stall_s=60.0, on_tokens=lambda *_: some.set()))
    await some.wait()
    await client.abort("cut")
    answer = await request
    assert answer.finish_reason == "abort" and 16 <= len(answer.output_ids) < 200
    wait_for(lambda: paced.load("num_running_reqs") == 0, "the engine to be idle")


async def test_A5_it_says_that_it_computes_nothing_and_refuses_whatever_would_need_numbers(client: EngineClient, paced: Served) -> None:
    info = paced.get("/server_info").json()
    assert (info["computes_nothing"], info["paced"]) == (True, 1e6)
    assert "runs with --paced and computes nothing" in paced.log()
    await client.begin_update()
    for call in (
        client.score_sequence(PROMPT),
        client.checksums(),
        client.equal_to_stored([{"key": "run/weights/0/1/0"}]),
        client.update_from_disk(str(BASE)),
        client.update_from_tensor(["e30="]),
    ):
        with pytest.raises(EngineError, match="computes nothing"):
            await call
    await client.end_update()
    assert (await client.model_info())["weight_version"] == VERSION


def test_an_engine_with_a_model_says_so(shared: Served) -> None:
    info = shared.get("/server_info").json()
    assert (info["computes_nothing"], info["paced"]) == (False, None)
