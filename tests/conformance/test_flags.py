"""Engines started with other flags: keys, queue limits, streams of what is new, no tokenizer, a first version."""

import pytest

from .conftest import Start
from .lab import PROMPT, Server, wait_for

GENERATE = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
UNAUTHORIZED = {"error": "Unauthorized"}
PROBES = ("/health", "/ready")
READS = ("/model_info", "/server_info", "/v1/loads")
CONTROL = ("/pause_generation", "/continue_generation", "/abort_request", "/begin_weight_update", "/end_weight_update")


def status(server: Server, path: str, key: str | None) -> int:
    method, body = ("GET", None) if path in READS + PROBES else ("POST", GENERATE if path == "/generate" else {})
    reply = server.request(method, path, body, key=key)
    if reply.status_code == 401:
        assert reply.json() == UNAUTHORIZED
    return reply.status_code


def demand(server: Server, paths: tuple[str, ...], key: str | None, expect: int) -> None:
    assert {path: status(server, path, key) for path in paths} == dict.fromkeys(paths, expect)


def test_an_api_key_opens_everything(start_briefly: Start) -> None:
    server = start_briefly("--api-key", "ka")
    demand(server, PROBES, None, 200)
    demand(server, (*READS, "/generate", *CONTROL), "no", 401)
    demand(server, (*READS, "/generate", *CONTROL), "ka", 200)
    bare = server.client.get(server.url + "/model_info", headers={"authorization": "ka"})
    assert bare.status_code == 401


def test_an_admin_key_alone_closes_only_control(start_briefly: Start) -> None:
    server = start_briefly("--admin-api-key", "kb")
    demand(server, (*PROBES, *READS, "/generate"), None, 200)
    demand(server, CONTROL, "no", 401)
    demand(server, CONTROL, "kb", 200)


def test_with_both_keys_each_opens_its_own_and_nothing_else(start_briefly: Start) -> None:
    server = start_briefly("--api-key", "ka", "--admin-api-key", "kb")
    demand(server, PROBES, None, 200)
    demand(server, (*READS, "/generate"), "ka", 200)
    demand(server, (*READS, "/generate"), "kb", 401)
    demand(server, CONTROL, "ka", 401)
    demand(server, CONTROL, "kb", 200)


@pytest.fixture(scope="module")
def other(start: Start) -> Server:
    """One engine for several flags at once."""
    return start("--incremental-streaming-output", "--max-queued-requests", "2", "--skip-tokenizer-init", "--weight-version", "first")


def test_the_first_version_may_be_named(other: Server) -> None:
    assert other.info()["weight_version"] == "first"
    assert other.generate(max_new_tokens=2)["meta_info"]["weight_versions"] == [{"version": "first", "start": 0, "end": 2}]


def test_a_stream_may_carry_only_what_is_new(other: Server) -> None:
    other.slow()
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    events = other.stream({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    other.fast()
    whole = other.generate(max_new_tokens=6)
    assert [len(event["output_ids"]) for event in events] == [1] * 6
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    pairs = [pair for event in events for pair in event["meta_info"]["output_token_logprobs"]]
    assert [pair[1] for pair in pairs] == whole["output_ids"]
    for size, event in enumerate(events, 1):
        assert event["meta_info"]["completion_tokens"] == event["meta_info"]["output_token_logprobs_length"] == size
    assert events[-1]["meta_info"]["weight_versions"] == [{"version": "first", "start": 0, "end": 6}]


def test_without_a_tokenizer_there_is_no_text(other: Server) -> None:
    assert other.generate(max_new_tokens=2).keys() == {"output_ids", "meta_info"}
    assert "error" in other.post("/generate", {"text": "abc"}, expect=400)


def test_a_full_queue_is_a_503(other: Server) -> None:
    other.slow()
    asked = []
    for running in range(1, 9):
        asked.append(other.background.submit(other.generate, max_new_tokens=400))
        wait_for(lambda running=running: other.load() == running, "all places to be taken")
    more = [other.background.submit(other.generate, max_new_tokens=2) for _ in range(2)]
    wait_for(lambda: other.load("num_waiting_reqs") == 2, "a full queue")
    refused = other.generate(expect=503, max_new_tokens=2)
    assert refused == {"object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503}
    streamed = other.stream({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    finish = streamed[-1]["meta_info"]["finish_reason"]
    assert (finish["type"], finish["message"], finish["status_code"]) == ("abort", "The request queue is full.", 503)
    other.post("/abort_request", {"abort_all": True})
    for one in (*asked, *more):
        one.result(timeout=10)
    other.fast()
