"""/generate on a real engine process: what it answers, what it refuses, and in which words."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

from .conftest import EOS, VOCAB, Served, wait_for

PROMPT = [80, 81, 82, 35, 60]


@pytest.fixture(scope="module")
def reference(checkpoints: Callable[..., Path]) -> Callable[[list[int], float], torch.Tensor]:
    """transformers' log-probs [len, vocab] at a temperature; row i is of the token after position i."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints("Qwen3"), dtype=torch.float32)

    def log_probs(ids: list[int], temperature: float) -> torch.Tensor:
        with torch.no_grad():
            return (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)

    return log_probs


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def stream(engine: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a streamed call; the last line must be [DONE]."""
    response = engine.request("POST", "/generate", body | {"stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_m5_output_log_probs_are_those_of_transformers_at_the_temperature(engine: Served, reference: Any, temperature: float) -> None:
    reply = engine.generate(PROMPT, temperature=temperature, max_new_tokens=12, ignore_eos=True)
    ids, pairs = reply["output_ids"], reply["meta_info"]["output_token_logprobs"]
    expected = reference(PROMPT + ids, temperature)
    assert [pair[1] for pair in pairs] == ids
    assert [pair[0] for pair in pairs] == pytest.approx(
        [expected[len(PROMPT) - 1 + i, token].item() for i, token in enumerate(ids)], abs=1e-5
    )


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_prompt_log_probs_are_of_the_plain_distribution_and_the_first_is_null(engine: Served, reference: Any, temperature: float) -> None:
    for start in (0, 2, len(PROMPT)):
        top = {"logprob_start_len": start, "top_logprobs_num": 2}
        meta = engine.generate(PROMPT, temperature=temperature, max_new_tokens=0, top=top)["meta_info"]
        expected = reference(PROMPT, 1.0)
        assert [pair[1] for pair in meta["input_token_logprobs"]] == PROMPT[start:]
        assert [pair[0] for pair in meta["input_token_logprobs"]][:1] == [None][: len(PROMPT) - start]
        wanted = [expected[i - 1, PROMPT[i]].item() for i in range(start + 1, len(PROMPT))]
        assert [pair[0] for pair in meta["input_token_logprobs"]][1:] == pytest.approx(wanted, abs=1e-5)
        if start < len(PROMPT):
            assert meta["input_top_logprobs"][0] is None
            best = expected[start].topk(2)
            assert [pair[1] for pair in meta["input_top_logprobs"][1]] == best.indices.tolist()
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]


def test_m3_a_crowd_and_a_lonely_request_get_the_same_greedy_tokens_and_log_probs(engine: Served, background: ThreadPoolExecutor) -> None:
    prompts = [PROMPT[: 1 + i % 5] + list(range(3, 3 + i)) for i in range(24)]
    alone = [engine.generate(prompt, temperature=0, max_new_tokens=10) for prompt in prompts]
    crowd = list(background.map(lambda prompt: engine.generate(prompt, temperature=0, max_new_tokens=10), prompts))
    for one, other in zip(alone, crowd, strict=True):
        assert one["output_ids"] == other["output_ids"]
        first, second = (reply["meta_info"]["output_token_logprobs"] for reply in (one, other))
        assert [pair[0] for pair in first] == pytest.approx([pair[0] for pair in second], abs=1e-5)


def test_the_answer_has_what_sglang_answers(engine: Served) -> None:
    reply = engine.generate(PROMPT, temperature=0, max_new_tokens=3, ignore_eos=True, top={"rid": "rid-a", "return_prompt_token_ids": True})
    meta = reply["meta_info"]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("rid-a", 5, 3, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert (meta["num_retractions"], meta["input_token_logprobs"], meta["output_token_logprobs_length"]) == (0, [], 3)
    assert meta["e2e_latency"] > 0
    assert reply["prompt_token_ids"] == PROMPT
    assert isinstance(reply["text"], str)


def test_chunks_are_cumulative_and_only_the_last_has_spans(engine: Served) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    events = stream(engine, {"input_ids": PROMPT, "return_logprob": True, "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}})
    final = events[-1]
    assert len(events) > 3
    for event in events[:-1]:
        size = len(event["output_ids"])
        assert event["output_ids"] == final["output_ids"][:size]
        assert event["meta_info"]["output_token_logprobs"] == final["meta_info"]["output_token_logprobs"][:size]
        assert event["meta_info"]["completion_tokens"] == size
        assert event["meta_info"]["finish_reason"] is None
        assert "weight_versions" not in event["meta_info"]
    assert len(final["output_ids"]) == 6
    assert final["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]


def test_stream_interval_sends_the_first_token_at_once_and_then_several(engine: Served) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    events = stream(engine, {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 10, "ignore_eos": True, "stream_interval": 4}})
    assert [len(event["output_ids"]) for event in events] == [1, 5, 9, 10]


def test_a_batch_answers_with_a_list_in_order_and_numbers_its_ids(engine: Served) -> None:
    sampling = [{"temperature": 0, "max_new_tokens": 2}, {"temperature": 0, "max_new_tokens": 3}]
    replies = engine.post("/generate", {"input_ids": [PROMPT, [7, 8]], "rid": "b", "sampling_params": sampling})
    assert [reply["meta_info"]["id"] for reply in replies] == ["b_0", "b_1"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [5, 2]
    assert replies[0]["output_ids"] == engine.generate(PROMPT, temperature=0, max_new_tokens=2)["output_ids"]
    events = stream(engine, {"input_ids": [PROMPT, [7, 8]], "sampling_params": sampling})
    assert {event["index"] for event in events} == {0, 1}
    assert {event["index"]: event["output_ids"] for event in events} == {i: reply["output_ids"] for i, reply in enumerate(replies)}


def test_text_goes_in_and_out(engine: Served) -> None:
    reply = engine.post("/generate", {"text": "abc", "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}})
    ids = [3 + byte for byte in b"abc"]
    assert reply["output_ids"] == engine.generate(ids, temperature=0, max_new_tokens=4, ignore_eos=True)["output_ids"]
    assert reply["text"] == bytes(max(token - 3, 0) for token in reply["output_ids"]).decode(errors="replace")


def test_every_way_to_stop_is_named_and_leaves_its_tokens(engine: Served) -> None:
    greedy = engine.generate(PROMPT, temperature=0, max_new_tokens=8, ignore_eos=True)["output_ids"]
    third = greedy[2]
    size = greedy.index(third) + 1
    stopped = engine.generate(PROMPT, temperature=0, max_new_tokens=8, stop_token_ids=[third])
    assert (stopped["output_ids"], stopped["meta_info"]["finish_reason"]) == (greedy[:size], {"type": "stop", "matched": third})
    kept = engine.generate(PROMPT, temperature=0, max_new_tokens=8, stop_token_ids=[third], ignore_eos=True)
    assert kept["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    both = engine.generate(PROMPT, temperature=0, max_new_tokens=size, stop_token_ids=[third])
    assert both["meta_info"]["finish_reason"] == {"type": "stop", "matched": third}


def test_eos_of_the_checkpoint_ends_a_text(engine: Served) -> None:
    for seed in range(60):
        reply = engine.generate(PROMPT, temperature=5.0, max_new_tokens=100, sampling_seed=seed)
        if reply["meta_info"]["finish_reason"]["type"] == "stop":
            break
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert reply["output_ids"].index(EOS) == len(reply["output_ids"]) - 1


def test_a_stop_string_is_found_trimmed_and_never_streamed_in_part(engine: Served) -> None:
    # Seeded and hot, so that plain letters come; the stop string is two of them.
    for seed in range(200):
        free = engine.generate(PROMPT, temperature=5.0, max_new_tokens=30, sampling_seed=seed, ignore_eos=True)
        letters = [chr(token - 3) if 32 < token - 3 < 127 else "\0" for token in free["output_ids"]]
        place = next((i for i in range(2, 28) if letters[i] != "\0" and letters[i + 1] != "\0"), None)
        if place is not None:
            break
    assert place is not None
    stop = letters[place] + letters[place + 1]
    sampling: dict[str, Any] = {"temperature": 5.0, "max_new_tokens": 30, "sampling_seed": seed, "ignore_eos": True, "stop": stop}
    reply = engine.generate(PROMPT, **sampling)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert reply["output_ids"] == free["output_ids"][: place + 2]
    assert stop not in reply["text"] and free["text"].startswith(reply["text"])
    assert engine.generate(PROMPT, **sampling, no_stop_trim=True)["text"] == reply["text"] + stop
    engine.post("/slow_down", {"forward_sleep_time": 0.01})
    events = stream(engine, {"input_ids": PROMPT, "sampling_params": sampling})
    assert len(events) > 1 and all(reply["text"].startswith(event["text"]) for event in events)


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others(engine: Served) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    first = engine.generate(PROMPT, **sampling, sampling_seed=5)["output_ids"]
    assert engine.generate(PROMPT, **sampling, sampling_seed=5)["output_ids"] == first
    assert engine.generate(PROMPT, **sampling, sampling_seed=6)["output_ids"] != first
    assert len({tuple(engine.generate(PROMPT, **sampling)["output_ids"]) for _ in range(4)}) == 4


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input_ids": PROMPT, "sampling_params": {"seed": 1}}, "unknown field `seed`, expected one of `max_new_tokens`"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2.0}}, "floating point `2.0`, expected i64"),
        ({"input_ids": [1.5]}, "got `float`"),
        ({"input_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature must be a non-negative finite number"),
        ({"input_ids": PROMPT, "sampling_params": {"top_p": 0}}, "top_p must be in (0, 1]"),
        ({"input_ids": PROMPT, "sampling_params": {"top_k": 0}}, "top_k must be -1"),
        ({"input_ids": PROMPT, "sampling_params": {"frequency_penalty": 0.5}}, "does not do frequency_penalty"),
        ({"input_ids": PROMPT, "token_ids_logprob": [1]}, "does not do token_ids_logprob"),
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [[]]}, "the prompt is empty"),
        ({"input_ids": [1] * 200}, "The input (200 tokens) is longer than the model's context length (200 tokens)."),
        (
            {"input_ids": [1] * 150, "sampling_params": {"max_new_tokens": 51}},
            "Requested token count exceeds the model's maximum context length",
        ),
        ({"input_ids": [1] * 195, "sampling_params": {"max_new_tokens": 1}}, "exceeds the maximum allowed length (194 tokens)"),
        ({"input_ids": [1, VOCAB]}, f"{VOCAB}, which is no token id of this model"),
        ({"input_ids": [1, -1]}, "-1, which is no token id"),
        ({"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 6}, "logprob_start_len=6 is higher"),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["a", "a"]}, "Duplicate request IDs detected within the request"),
        ({"input_ids": [PROMPT, PROMPT], "return_logprob": [True]}, "1 entries for a batch of 2"),
    ],
)
def test_h3_a_request_that_cannot_be_served_is_a_400_that_says_why(engine: Served, body: dict[str, Any], says: str) -> None:
    reply = engine.post("/generate", body, expect=400)
    if "object" in reply:  # the envelope of a body of another form
        assert says in reply["message"]
        return
    error = reply["error"]
    assert says in (error if isinstance(error, str) else error["message"])
    # Streamed, checks of values come as an event.
    if not isinstance(error, str):
        (event,) = stream(engine, body)
        if "error" not in event:  # found by the loop, as in SGLang
            finish = event["meta_info"]["finish_reason"]
            assert (finish["type"], finish["status_code"]) == ("abort", 400) and says in finish["message"]
            return
        assert event["error"]["code"] == 400 and says in event["error"]["message"]


def test_unknown_top_level_keys_are_ignored_and_broken_json_is_a_400(engine: Served) -> None:
    engine.post("/generate", {"input_ids": PROMPT, "surprise": 1, "sampling_params": {"max_new_tokens": 1}})
    reply = httpx.post(engine.url + "/generate", content=b"{", trust_env=False)
    assert reply.status_code == 400 and reply.json()["object"] == "error"
    assert "400000 tokens" in engine.generate([10] * 400_000, expect=400)["error"]["message"]  # 1.2 MB, more than aiohttp's own limit
    assert engine.get("/nothing").status_code == 404
    assert engine.get("/generate").status_code == 405


def test_new_tokens_are_clipped_to_the_context_as_sglang_clips_them(engine: Served) -> None:
    reply = engine.generate([5] * 190, temperature=0, max_new_tokens=10, ignore_eos=True)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert engine.generate([5] * 150, temperature=0, ignore_eos=True, max_new_tokens=None)["meta_info"]["completion_tokens"] == 48


def test_a_live_request_id_is_refused_and_a_finished_one_free_again(engine: Served, background: ThreadPoolExecutor) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    first = background.submit(engine.generate, PROMPT, max_new_tokens=40, ignore_eos=True, top={"rid": "twice"})
    wait_for(lambda: engine.load("num_running_reqs") == 1, "the first to run")
    assert engine.generate(PROMPT, expect=400, top={"rid": "twice"})["error"]["message"] == "Duplicate request ID detected: twice"
    engine.post("/slow_down", {"forward_sleep_time": None})
    assert first.result()["meta_info"]["completion_tokens"] == 40
    engine.generate(PROMPT, max_new_tokens=1, top={"rid": "twice"})


def test_e15_an_aborted_request_answers_200_with_what_it_has(engine: Served, background: ThreadPoolExecutor) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    one = background.submit(engine.generate, PROMPT, max_new_tokens=100, ignore_eos=True, top={"rid": "one"})
    two = background.submit(engine.generate, PROMPT, max_new_tokens=100, ignore_eos=True, top={"rid": "two"})
    wait_for(lambda: engine.load("num_running_reqs") == 2, "both to run")
    engine.post("/abort_request", {"rid": "unknown"})
    engine.post("/abort_request", {"rid": ""})
    engine.post("/abort_request", {"rid": "one"})
    reply = one.result()
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    assert 0 < len(reply["output_ids"]) < 100
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
    assert not two.done()
    engine.post("/abort_request", {"abort_all": True})
    assert two.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_a_client_that_goes_away_takes_its_request_with_it(engine: Served) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    for streamed in (True, False):
        body = {"input_ids": PROMPT, "stream": streamed, "sampling_params": {"max_new_tokens": 190, "ignore_eos": True}}
        with pytest.raises(httpx.ReadTimeout):
            engine.request("POST", "/generate", body, timeout_s=0.3 if not streamed else 0.01)
        wait_for(lambda: engine.load("num_running_reqs") == 0, "the abandoned request to end", 2.0)


def test_probes_and_info(engine: Served) -> None:
    assert engine.get("/ready").status_code == 200
    assert engine.get("/health_generate").status_code == 200
    about = engine.get("/server_info").json()
    assert (about["context_length"], about["max_req_input_len"], about["version"]) == (200, 194, "0.5.23")
    assert about["api_key"] is False and "sampling_seed" in about["seeded_sampling"]
    load = engine.get("/v1/loads").json()["loads"][0]
    assert load["max_total_num_tokens"] == 8 * 200 and load["memory"]["kv_cache_gb"] > 0
    assert engine.get("/v1/loads?include=core,queues").status_code == 200
    assert engine.get("/v1/loads?include=tea").status_code == 500
    assert engine.get("/model_info").json()["architectures"] == ["Qwen3ForCausalLM"]
