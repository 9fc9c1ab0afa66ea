"""The paced mode: an engine's HTTP side without a model, and no doubt about that."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from rollout.answer import EngineError
from rollout.client import EngineClient, make_http
from rollout.engine.paced import _draws
from rollout.engine.settings import PACED_LOG_PROB, parse_flags

from .conftest import EOS, SOURCES, Served, wait_for

BASE = SOURCES / "examples" / "sort_digits" / "base"
PROMPT = [80, 81, 82, 35, 60]
VERSION = "run/0/0/1"
PACED_APART = ("--paced", "16", "--paced-apart", "--stream-interval", "16", "--max-running-requests", "32")  # a chunk a second


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


async def test_a_pause_gives_no_step_for_nothing(client: EngineClient, paced: Served) -> None:
    """Else an engine that is paused for less than a step would lose no time by it, and a benchmark's pushes cost nothing."""
    paced.post("/slow_down", {"forward_sleep_time": 2.0})
    chunks: list[int] = []
    request = asyncio.create_task(
        client.generate(PROMPT, sampling(160), "stepping", stall_s=60.0, on_tokens=lambda ids, *_: chunks.append(len(ids)))
    )
    while not chunks:  # noqa: ASYNC110 - a list that the callback fills
        await asyncio.sleep(0.005)
    await client.pause("retract")
    await client.continue_generation()
    await asyncio.sleep(0.1)
    assert chunks == [16], "the next step is due in two seconds"
    await client.abort("stepping")
    paced.post("/slow_down", {"forward_sleep_time": None})
    assert (await request).finish_reason == "abort"


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


async def test_answers_have_the_lengths_of_a_file_and_pushes_pass_where_a_benchmark_of_a_whole_run_wants_it(start, tmp_path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("8\n24\n40\n1000\n")
    flags = ("--paced", "100000", "--stream-interval", "8", "--paced-lengths", str(lengths), "--paced-pushes", "--random-seed", "5")
    served = start(BASE, *flags, "--weight-version", VERSION, "--skip-tokenizer-init")
    drawn = random.Random(5).choices([8, 24, 40, 1000], k=1024)
    async with make_http() as http:
        client = EngineClient(served.url, http, vocab_size=259)
        for number, length in enumerate(drawn[:12]):
            answer = await client.generate(PROMPT, sampling(64), f"drawn-{number:03d}", stall_s=60.0, version=VERSION)
            ends = "stop" if length < 64 else "length"
            assert (len(answer.output_ids), answer.finish_reason) == (min(length, 64), ends)
            assert (answer.output_ids[-1] == EOS) == (ends == "stop")
        assert await client.score_sequence(PROMPT) == [PACED_LOG_PROB] * (len(PROMPT) - 1)
        assert set((await client.checksums())["ranks"][0]["checksums"]) > {"model.norm.weight"}, "of the weights it holds"
        await client.begin_update()
        await client.end_update()


@pytest.mark.parametrize(
    ("text", "words"), [("", "it needs at least one line"), ("3\nmany\n", "one whole number a line"), ("0\n", "must be 1 or more")]
)
def test_lengths_that_cannot_be_drawn_from_are_refused_in_a_sentence(tmp_path, text, words) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ValueError, match=words):
        _draws(tmp_path / "lengths.txt", 0)


@pytest.mark.parametrize("flags", [["--paced-lengths", "lengths.txt"], ["--paced-pushes"], ["--paced-apart"]])
def test_the_flags_of_the_paced_mode_are_refused_without_it(flags, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--model-path", "base", *flags])
    assert ended.value.code == 2 and "for an engine that runs with --paced" in capsys.readouterr().err


async def test_chunks_come_apart_and_as_fast_as_ever_where_each_request_has_steps_of_its_own(start) -> None:
    """A real server decodes token by token: what began in different steps has its chunks in different ones."""
    served = start(BASE, *PACED_APART, "--weight-version", VERSION, "--skip-tokenizer-init")
    came: dict[str, list[float]] = {}
    async with make_http() as http:
        client = EngineClient(served.url, http, vocab_size=259)

        async def one(rid: str) -> None:
            came[rid] = []
            answer = await client.generate(
                PROMPT, sampling(32), rid, stall_s=60.0, version=VERSION, on_tokens=lambda ids, *_: came[rid].append(len(ids))
            )
            assert (len(answer.output_ids), answer.spans) == (32, [(VERSION, 0, 32)])

        many = asyncio.gather(*(one(f"apart-{n:02d}") for n in range(32)))
        sizes: set[int] = set()
        while not many.done():  # between two steps of a chunk, seen from outside: some have had theirs, others not
            sizes.add(len({len(chunks) for chunks in came.values()}))
            await asyncio.sleep(0.005)
        await many
        assert set(map(tuple, came.values())) == {(16, 16)} and max(sizes) > 1
        some = asyncio.Event()
        request = asyncio.create_task(client.generate(PROMPT, sampling(32), "paused", stall_s=60.0, on_tokens=lambda *_: some.set()))
        await some.wait()
        served.post("/pause_generation", {"mode": "retract"})
        served.post("/continue_generation", {})
        assert len((await request).output_ids) == 32, "it goes on in its steps"
