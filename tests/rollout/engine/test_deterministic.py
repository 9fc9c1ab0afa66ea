"""Deterministic mode (A3), on a second engine that also has keys, a short queue, no tokenizer and streams that send what is new."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import Served, wait_for

PROMPT = [80, 81, 82, 35, 60]
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def strict(start: Callable[..., Served], checkpoints: Callable[..., Path]) -> Served:
    flags = "--deterministic --incremental-streaming-output --skip-tokenizer-init --api-key key --admin-api-key boss"
    served = start(checkpoints("Llama"), *flags.split(), "--max-running-requests", "6", "--max-queued-requests", "6")
    served.headers = {"authorization": "Bearer key"}
    return served


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def operate(engine: Served, path: str, body: Any) -> Any:
    response = engine.client.post(engine.url + path, content=json.dumps(body), headers={"authorization": "Bearer boss"})
    assert response.status_code == 200
    return response


def seeded(engine: Served, seed: int, prompt: list[int], **changes: Any) -> Any:
    reply = engine.generate(prompt, **(SAMPLING | {"sampling_seed": seed} | changes))
    return reply["output_ids"], [pair[0] for pair in reply["meta_info"]["output_token_logprobs"]]


def test_a3_a_request_gives_the_same_bits_alone_and_in_a_crowd(strict: Served, background: ThreadPoolExecutor) -> None:
    alone = [seeded(strict, seed, PROMPT[: 1 + seed % 5]) for seed in range(6)]
    crowd = list(background.map(lambda seed: seeded(strict, seed, PROMPT[: 1 + seed % 5]), range(6)))
    assert crowd == alone
    assert len({tuple(ids) for ids, _ in alone}) == 6


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0}])
def test_a3_a_request_continued_from_its_prefix_repeats_every_bit(strict: Served, sampling: dict[str, float]) -> None:
    ids, log_probs = seeded(strict, 3, PROMPT, **sampling)
    for cut in (1, 7, 23):
        rest = seeded(strict, 3, PROMPT + ids[:cut], **(sampling | {"max_new_tokens": 24 - cut}))
        assert rest == (ids[cut:], log_probs[cut:])


def test_a3_a_retracted_request_repeats_every_bit(strict: Served, background: ThreadPoolExecutor) -> None:
    expected = [seeded(strict, seed, PROMPT) for seed in range(4)]
    operate(strict, "/slow_down", {"forward_sleep_time": 0.02})
    asked = [background.submit(seeded, strict, seed, PROMPT) for seed in range(4)]
    wait_for(lambda: strict.load("num_used_tokens") > 40, "them to run")
    operate(strict, "/pause_generation", {"mode": "retract"})
    operate(strict, "/continue_generation", {})
    operate(strict, "/slow_down", {"forward_sleep_time": None})
    assert [one.result() for one in asked] == expected


def test_prompt_log_probs_equal_the_output_log_probs_of_the_same_tokens(strict: Served) -> None:
    ids, log_probs = seeded(strict, 8, PROMPT)
    top = {"logprob_start_len": len(PROMPT) - 1}
    meta = strict.generate(PROMPT + ids, temperature=1.0, max_new_tokens=0, top=top)["meta_info"]
    assert [pair[0] for pair in meta["input_token_logprobs"][1:]] == pytest.approx(log_probs, abs=1e-6)


def test_without_a_seed_there_is_one_all_the_same(strict: Served) -> None:
    first, second = (strict.generate(PROMPT, **SAMPLING)["output_ids"] for _ in range(2))
    assert first == second == seeded(strict, 42, PROMPT)[0]


def test_an_incremental_stream_sends_what_is_new_and_counts_from_the_start(strict: Served) -> None:
    operate(strict, "/slow_down", {"forward_sleep_time": 0.005})
    body = {"input_ids": PROMPT, "stream": True, "return_logprob": True, "sampling_params": SAMPLING | {"sampling_seed": 1}}
    lines = strict.request("POST", "/generate", body).text.split("\n\n")
    operate(strict, "/slow_down", {"forward_sleep_time": None})
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    ids, log_probs = seeded(strict, 1, PROMPT)
    assert len(events) > 3
    assert [token for event in events for token in event["output_ids"]] == ids
    assert [pair[0] for event in events for pair in event["meta_info"]["output_token_logprobs"]] == log_probs
    assert events[-1]["meta_info"]["completion_tokens"] == events[-1]["meta_info"]["output_token_logprobs_length"] == 24
    assert "text" not in events[-1]


def test_a_full_queue_is_a_503_and_a_stream_says_it_in_a_chunk(strict: Served, background: ThreadPoolExecutor) -> None:
    operate(strict, "/slow_down", {"forward_sleep_time": 0.02})
    asked = [background.submit(seeded, strict, seed, PROMPT, max_new_tokens=40) for seed in range(6)]
    wait_for(lambda: strict.load("num_running_reqs") == 6, "every row to be taken")
    asked += [background.submit(seeded, strict, seed, PROMPT) for seed in range(6)]
    wait_for(lambda: strict.load("num_waiting_reqs") == 6, "the queue to be full")
    refused = strict.generate(PROMPT, expect=503)
    assert refused == {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}
    lines = strict.request("POST", "/generate", {"input_ids": PROMPT, "stream": True}).text.split("\n\n")
    finish = json.loads(lines[0].removeprefix("data: "))["meta_info"]["finish_reason"]
    assert (finish["type"], finish["status_code"]) == ("abort", 503)
    operate(strict, "/slow_down", {"forward_sleep_time": None})
    assert all(len(one.result()[0]) in (24, 40) for one in asked)


def test_an_engine_without_a_tokenizer_speaks_ids_only(strict: Served) -> None:
    assert "text needs a tokenizer" in strict.post("/generate", {"text": "abc"}, expect=400)["error"]["message"]
    assert "stop strings need a tokenizer" in strict.generate(PROMPT, expect=400, stop="x")["error"]["message"]


@pytest.mark.parametrize(
    ("key", "opens", "refused"),
    [
        (None, ("/health", "/ready"), ("/generate", "/model_info", "/pause_generation")),
        ("key", ("/model_info", "/v1/loads"), ("/flush_cache", "/abort_request")),
        ("boss", ("/flush_cache", "/weights_checker"), ("/model_info", "/generate")),
        ("kex", (), ("/model_info", "/flush_cache")),
    ],
)
def test_keys_open_what_sglang_says_they_open(strict: Served, key: str | None, opens: tuple[str, ...], refused: tuple[str, ...]) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    for path in opens:
        assert strict.client.get(strict.url + path, headers=headers).status_code == 200, path
    for path in refused:
        reply = strict.client.post(strict.url + path, content=b"{}", headers=headers)
        assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"}), path
    assert b"key" not in strict.client.get(strict.url + "/server_info", headers={"authorization": "Bearer key"}).content.replace(
        b"api_key", b""
    )
