"""The three pauses, continue, flush and memory: nothing is lost, nothing is served half, and illegal calls are answers."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import Served, wait_for

PROMPT = [80, 81, 82, 35, 60]
PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(80) as pool:
        yield pool


def cpu_s(engine: Served) -> float:
    fields = Path(f"/proc/{engine.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def start_running(engine: Served, background: ThreadPoolExecutor, count: int = 3, tokens: int = 60, **top: Any) -> list[Future[Any]]:
    """`count` greedy requests, seen running."""
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    asked = [
        background.submit(engine.generate, [*PROMPT, 5 + i], temperature=0, max_new_tokens=tokens, ignore_eos=True, timeout_s=60.0, top=top)
        for i in range(count)
    ]
    wait_for(lambda: engine.load("num_running_reqs") == count and engine.load("num_used_tokens") > count * 10, "the requests to run")
    return asked


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_shows_as_nothing_but_time(engine: Served, background: ThreadPoolExecutor, mode: str) -> None:
    asked = start_running(engine, background)
    assert engine.post("/pause_generation", {"mode": mode}) == PAUSED
    assert engine.get("/ready").status_code == 503
    assert engine.get("/health").status_code == 200
    time.sleep(0.1)
    assert not any(one.done() for one in asked)
    assert engine.post("/continue_generation", {}) == CONTINUED
    engine.post("/slow_down", {"forward_sleep_time": None})
    for index, one in enumerate(asked):
        reply = one.result()
        alone = engine.generate([*PROMPT, 5 + index], temperature=0, max_new_tokens=60, ignore_eos=True)
        assert reply["output_ids"] == alone["output_ids"]
        first, second = (r["meta_info"]["output_token_logprobs"] for r in (reply, alone))
        assert [pair[0] for pair in first] == pytest.approx([pair[0] for pair in second], abs=2e-5)
        assert reply["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


def test_a_paused_or_idle_engine_costs_no_cpu(engine: Served, background: ThreadPoolExecutor) -> None:
    asked = start_running(engine, background)
    engine.post("/pause_generation", {"mode": "retract"})
    before_s = cpu_s(engine)
    time.sleep(0.5)
    assert cpu_s(engine) - before_s <= 0.03
    engine.post("/continue_generation", {})
    engine.post("/slow_down", {"forward_sleep_time": None})
    assert all(len(one.result()["output_ids"]) == 60 for one in asked)
    before_s = cpu_s(engine)
    time.sleep(0.5)
    assert cpu_s(engine) - before_s <= 0.03


def test_pause_abort_answers_everyone_with_what_they_have(engine: Served, background: ThreadPoolExecutor) -> None:
    asked = start_running(engine, background)
    assert engine.post("/pause_generation", {"mode": "abort"}) == PAUSED
    for one in asked:
        reply = one.result(timeout=2)
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(reply["output_ids"]) < 60
    assert engine.request("POST", "/flush_cache").status_code == 200


def test_e7_requests_that_come_in_a_pause_wait_and_then_run_under_the_new_version(engine: Served, background: ThreadPoolExecutor) -> None:
    for mode in ("abort", "retract", "in_place"):
        engine.post("/pause_generation", {"mode": mode})
        held = background.submit(engine.generate, PROMPT, max_new_tokens=2, ignore_eos=True, top={"rid": "held"})
        time.sleep(0.1)
        assert not held.done()
        assert engine.generate(PROMPT, expect=400, top={"rid": "held"})["error"]["message"] == "Duplicate request ID detected: held"
        engine.post("/update_weight_version", {"new_version": mode, "abort_all_requests": False})
        engine.post("/continue_generation", {})
        assert held.result()["meta_info"]["weight_versions"] == [{"version": mode, "start": 0, "end": 2}]


def test_a_held_request_cannot_be_aborted_and_runs_after_continue(engine: Served, background: ThreadPoolExecutor) -> None:
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    held = background.submit(engine.generate, PROMPT, max_new_tokens=20, ignore_eos=True, top={"rid": "stuck"})
    time.sleep(0.1)
    engine.post("/abort_request", {"rid": "stuck"})
    engine.post("/abort_request", {"abort_all": True})
    engine.post("/continue_generation", {})
    wait_for(lambda: engine.load("num_running_reqs") == 1, "it to run")
    engine.post("/abort_request", {"rid": "stuck"})
    assert held.result()["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


def test_e1_sixty_four_requests_on_eight_rows_survive_retract_flush_and_a_flushing_update(
    engine: Served, checkpoints: Callable[..., Path], background: ThreadPoolExecutor
) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.005})
    prompts = [[*PROMPT, 3 + i] for i in range(64)]

    def ask(prompt: list[int]) -> Any:
        return engine.generate(prompt, temperature=0, max_new_tokens=12, ignore_eos=True, timeout_s=60.0)

    asked = [background.submit(ask, prompt) for prompt in prompts]
    wait_for(lambda: engine.load("num_running_reqs") == 8 and engine.load("num_waiting_reqs") > 20, "a full engine")
    refused = engine.request("POST", "/flush_cache")
    assert refused.status_code == 400 and refused.text == "Flush cache failed.\n"
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.request("POST", "/flush_cache").status_code == 200
    update = {"model_path": str(checkpoints("Qwen3")), "flush_cache": True, "weight_version": "same weights"}
    assert engine.post("/update_weights_from_disk", update)["success"] is True
    engine.post("/continue_generation", {})
    replies = [one.result() for one in asked]
    assert 1 <= sum(reply["meta_info"]["num_retractions"] for reply in replies) <= 8
    engine.post("/slow_down", {"forward_sleep_time": None})
    assert all(reply["output_ids"] == ask(prompt)["output_ids"] for reply, prompt in zip(replies, prompts, strict=True))


def test_v5_a_version_set_in_mid_request_is_a_span_of_its_own(engine: Served, background: ThreadPoolExecutor) -> None:
    for mode in ("retract", "in_place", None):
        (one,) = start_running(engine, background, count=1, rid=f"span-{mode}")
        if mode:
            engine.post("/pause_generation", {"mode": mode})
        reply = engine.post("/update_weight_version", {"new_version": "next", "abort_all_requests": False})
        assert reply == {"success": True, "message": "Weight version updated to next", "new_version": "next"}
        if mode:
            engine.post("/continue_generation", {})
        engine.post("/slow_down", {"forward_sleep_time": None})
        meta = one.result()["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"]) == ("default", "next")
        assert first["start"] == 0 and 0 < first["end"] == second["start"] < second["end"] == 60
        assert meta["weight_version"] == "next"
        engine.post("/update_weight_version", {"new_version": "default"})


def test_e2_a_version_aborts_everything_by_default_and_nothing_when_told_so(engine: Served, background: ThreadPoolExecutor) -> None:
    (one,) = start_running(engine, background, count=1)
    engine.post("/update_weight_version", {"new_version": "default"})
    assert one.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_an_abort_in_a_retract_pause_answers_from_the_queue_with_the_tokens_that_left_the_loop(
    engine: Served, background: ThreadPoolExecutor
) -> None:
    (one,) = start_running(engine, background, count=1, tokens=100)
    wait_for(lambda: engine.load("num_used_tokens") > 58, "fifty tokens, which is when an unstreamed answer leaves the loop")
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/abort_request", {"abort_all": True})
    reply = one.result(timeout=2)
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert len(reply["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 50
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & meta.keys()


def test_an_in_place_pause_refuses_a_flush_and_release_and_loses_nothing(engine: Served, background: ThreadPoolExecutor) -> None:
    asked = start_running(engine, background)
    engine.post("/pause_generation", {"mode": "in_place"})
    assert engine.request("POST", "/flush_cache").status_code == 400
    error = engine.post("/release_memory_occupation", {}, expect=500)["error"]["message"]
    assert "a real SGLang 0.5.23 dies of this call" in error and "pause with mode abort or retract first" in error
    engine.wait_log("/release_memory_occupation while 3 requests run")
    engine.post("/continue_generation", {})
    engine.post("/slow_down", {"forward_sleep_time": None})
    assert all(len(one.result()["output_ids"]) == 60 for one in asked)


def test_released_kv_memory_is_really_given_back_and_comes_again(engine: Served, background: ThreadPoolExecutor) -> None:
    asked = start_running(engine, background)
    engine.post("/pause_generation", {"mode": "retract"})
    held = engine.get("/v1/loads").json()["loads"][0]["memory"]["kv_cache_gb"]
    assert held > 0
    assert engine.post("/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert engine.post("/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert engine.get("/v1/loads").json()["loads"][0]["memory"]["kv_cache_gb"] == 0
    error = engine.post("/resume_memory_occupation", {}, expect=500)["error"]["message"]
    assert "weights, cuda_graph, which is not released" in error
    assert engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) is None
    assert "not released" in engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]}, expect=500)["error"]["message"]
    assert engine.get("/v1/loads").json()["loads"][0]["memory"]["kv_cache_gb"] == held
    engine.post("/continue_generation", {})
    engine.post("/slow_down", {"forward_sleep_time": None})
    assert all(len(one.result()["output_ids"]) == 60 for one in asked)


def test_generating_without_kv_memory_is_an_error_and_not_a_hang(engine: Served) -> None:
    engine.post("/release_memory_occupation", {})
    reply = engine.generate(PROMPT, expect=500)
    assert reply["message"] == "the KV cache is released; call /resume_memory_occupation before generating"
    engine.post("/resume_memory_occupation", {})
    engine.generate(PROMPT, max_new_tokens=1)


def test_control_calls_want_a_body_and_know_their_words(engine: Served) -> None:
    for path in ("/pause_generation", "/continue_generation", "/abort_request", "/release_memory_occupation", "/begin_weight_update"):
        assert engine.request("POST", path).status_code == 400, path
    assert engine.request("POST", "/pause_generation", {"mode": "nap"}).status_code == 400
    assert engine.get("/ready").status_code == 200
    assert engine.post("/continue_generation", {}) == CONTINUED


def test_a_flush_with_a_timeout_waits_for_the_running_to_end(engine: Served, background: ThreadPoolExecutor) -> None:
    asked = start_running(engine, background, count=1, tokens=30)
    assert engine.request("POST", "/flush_cache?timeout=10").status_code == 200
    assert asked[0].done() or asked[0].result(timeout=1)
