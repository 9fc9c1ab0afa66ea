"""The three pauses, continue, abort, and what a request in flight notices of them."""

import time
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from .lab import PROMPT, Server, wait_for

PAUSED = {"message": "Generation paused successfully.", "status": "ok"}
CONTINUED = {"message": "Generation continued successfully.", "status": "ok"}
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
MODES = ("abort", "retract", "in_place")


def pause(engine: Server, mode: str) -> None:
    assert engine.post("/pause_generation", {"mode": mode}) == PAUSED


def carry_on(engine: Server) -> None:
    engine.fast()
    assert engine.post("/continue_generation", {}) == CONTINUED


def stays_open(one: "Future[Any]") -> bool:
    time.sleep(0.4)
    return not one.done()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_e2_a_pause_shows_as_nothing_but_time(engine: Server, mode: str) -> None:
    asked = engine.start_running("a", "b", "c")
    pause(engine, mode)
    assert all(stays_open(one) for one in asked)
    carry_on(engine)
    for index, one in enumerate(asked):
        reply, alone = one.result(), engine.generate([*PROMPT, 5 + index], max_new_tokens=60)
        assert reply["output_ids"] == alone["output_ids"]
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
        assert reply["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
        pairs, others = (found["meta_info"]["output_token_logprobs"] for found in (reply, alone))
        assert [pair[0] for pair in pairs] == pytest.approx([pair[0] for pair in others], abs=1e-4)


def test_e2_pause_abort_answers_everyone_with_what_they_have(engine: Server) -> None:
    asked = engine.start_running("a", "b", "c", tokens=400)
    pause(engine, "abort")
    for one in asked:
        reply = one.result(timeout=5)
        assert reply["meta_info"]["finish_reason"] == ABORTED
        assert 0 < len(reply["output_ids"]) == len(reply["meta_info"]["output_token_logprobs"]) < 400
    assert engine.request("POST", "/flush_cache").status_code == 200


@pytest.mark.parametrize("mode", MODES)
def test_e7_a_paused_engine_is_healthy_but_not_ready(engine: Server, mode: str) -> None:
    assert engine.get("/ready").status_code == engine.get("/health").status_code == 200
    pause(engine, mode)
    assert engine.get("/health").status_code == 200
    assert engine.get("/ready").status_code == 503
    assert engine.info()["weight_version"] == "default"
    assert engine.get("/server_info").status_code == engine.get("/v1/loads").status_code == 200
    assert engine.post("/weights_checker", {})["success"] is True
    carry_on(engine)
    assert engine.get("/ready").status_code == 200


@pytest.mark.parametrize("mode", MODES)
def test_e7_requests_that_come_in_a_pause_wait_and_run_under_the_new_version(engine: Server, mode: str) -> None:
    pause(engine, mode)
    held = engine.background.submit(engine.generate, max_new_tokens=2, top={"rid": f"held-{mode}"})
    assert stays_open(held)
    engine.post("/update_weight_version", {"new_version": mode, "abort_all_requests": False})
    carry_on(engine)
    meta = held.result()["meta_info"]
    assert (meta["weight_version"], meta["weight_versions"]) == (mode, [{"version": mode, "start": 0, "end": 2}])


def test_e7_an_id_is_taken_while_a_pause_holds_its_request(engine: Server) -> None:
    pause(engine, "retract")
    held = engine.background.submit(engine.generate, max_new_tokens=2, top={"rid": "held"})
    assert stays_open(held)
    assert engine.generate(expect=400, top={"rid": "held"}) == {"error": {"message": "Duplicate request ID detected: held"}}
    carry_on(engine)
    assert len(held.result()["output_ids"]) == 2


def test_e7_a_held_request_cannot_be_aborted_and_runs_after_continue(engine: Server) -> None:
    pause(engine, "retract")
    held = engine.background.submit(engine.generate, max_new_tokens=20, top={"rid": "stuck"})
    assert stays_open(held)
    engine.post("/abort_request", {"rid": "stuck"})
    engine.post("/abort_request", {"abort_all": True})
    engine.slow()
    engine.post("/continue_generation", {})
    wait_for(lambda: engine.load() == 1, "it to run")
    engine.post("/abort_request", {"rid": "stuck"})
    assert held.result()["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


@pytest.mark.parametrize("mode", MODES)
def test_pausing_twice_and_continuing_twice_is_fine(engine: Server, mode: str) -> None:
    pause(engine, mode)
    pause(engine, mode)
    carry_on(engine)
    carry_on(engine)
    assert len(engine.generate(max_new_tokens=2)["output_ids"]) == 2


def test_a_pause_without_a_mode_is_an_abort(engine: Server) -> None:
    (one,) = engine.start_running("a", tokens=400)
    assert engine.post("/pause_generation", {}) == PAUSED
    assert one.result(timeout=5)["meta_info"]["finish_reason"] == ABORTED


def test_a_retract_after_an_in_place_pause_lets_the_cache_be_flushed(engine: Server) -> None:
    (one,) = engine.start_running("a")
    pause(engine, "in_place")
    assert engine.request("POST", "/flush_cache").status_code == 400
    pause(engine, "retract")
    assert engine.request("POST", "/flush_cache").status_code == 200
    carry_on(engine)
    assert one.result()["meta_info"]["num_retractions"] == 1


def test_e1_many_requests_on_few_places_survive_a_retract_and_a_flush(engine: Server) -> None:
    engine.slow()
    asked = [engine.background.submit(engine.generate, [*PROMPT, 3 + i], max_new_tokens=40) for i in range(24)]
    wait_for(lambda: engine.load() == 8 and engine.load("num_waiting_reqs") > 8, "a full engine")
    pause(engine, "retract")
    assert engine.request("POST", "/flush_cache").status_code == 200
    carry_on(engine)
    replies = [one.result() for one in asked]
    assert sum(reply["meta_info"]["num_retractions"] for reply in replies) == 8
    for index, reply in enumerate(replies):
        assert reply["output_ids"] == engine.generate([*PROMPT, 3 + index], max_new_tokens=40)["output_ids"]


# ---- streams in a pause ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_v5_a_stream_is_silent_in_a_pause_and_ends_whole(engine: Server, mode: str) -> None:
    engine.slow()
    sampling = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    streamed = engine.background.submit(engine.stream, {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
    wait_for(lambda: engine.load() == 1 and engine.load("num_used_tokens") > 8, "some tokens")
    pause(engine, mode)
    assert stays_open(streamed)
    engine.post("/update_weight_version", {"new_version": "next", "abort_all_requests": False})
    engine.post("/continue_generation", {})
    events = streamed.result()
    last = events[-1]
    assert all(event["output_ids"] == last["output_ids"][: len(event["output_ids"])] for event in events)
    first, second = last["meta_info"]["weight_versions"]
    assert (first["version"], second["version"], second["end"]) == ("default", "next", 30)
    for event in events[:-1]:
        # A chunk names the version of the moment it was sent.
        assert event["meta_info"]["weight_version"] == ("default" if len(event["output_ids"]) <= first["end"] else "next")


# ---- aborts --------------------------------------------------------------------------------------------------------------


def test_e15_an_aborted_request_answers_200_with_what_it_has(engine: Server) -> None:
    one, two = engine.start_running("one", "two", tokens=400)
    assert engine.request("POST", "/abort_request", {"rid": "one"}).content == b""
    reply = one.result(timeout=5)
    assert reply["meta_info"]["finish_reason"] == ABORTED
    assert 0 < len(reply["output_ids"]) < 400
    assert len(reply["meta_info"]["output_token_logprobs"]) == reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])
    assert reply["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": len(reply["output_ids"])}]
    assert stays_open(two)
    engine.post("/abort_request", {"abort_all": True})
    assert two.result(timeout=5)["meta_info"]["finish_reason"] == ABORTED


def test_e15_an_aborted_stream_ends_with_its_reason(engine: Server) -> None:
    engine.slow()
    sampling = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
    streamed = engine.background.submit(engine.stream, {"input_ids": PROMPT, "sampling_params": sampling, "rid": "s"})
    wait_for(lambda: engine.load() == 1 and engine.load("num_used_tokens") > 8, "some tokens")
    engine.post("/abort_request", {"rid": "s"})
    last = streamed.result(timeout=5)[-1]
    assert last["meta_info"]["finish_reason"] == ABORTED
    assert 0 < len(last["output_ids"]) < 400


def test_an_abort_of_nobody_is_200_and_does_nothing(engine: Server) -> None:
    (one,) = engine.start_running("live-1", tokens=30)
    for body in ({}, {"rid": ""}, {"rid": None}, {"rid": "unknown"}, {"rid": "live-"}, {"rid": "live-12"}):
        engine.post("/abort_request", body)
    engine.fast()
    assert one.result()["meta_info"]["finish_reason"] == {"type": "length", "length": 30}


def test_an_abort_also_takes_ids_that_begin_with_the_one_named(engine: Server) -> None:
    """As long as the one named is live: so no id may be the beginning of another."""
    short, longer = engine.start_running("a", "ab", tokens=400)
    engine.post("/abort_request", {"rid": "a"})
    assert short.result(timeout=5)["meta_info"]["finish_reason"] == longer.result(timeout=5)["meta_info"]["finish_reason"] == ABORTED


def test_an_abort_in_the_queue_answers_without_the_facts_of_a_run(engine: Server) -> None:
    engine.start_running(*(f"running-{i}" for i in range(8)), tokens=400)
    waiting = engine.background.submit(engine.generate, max_new_tokens=5, top={"rid": "waiting"})
    wait_for(lambda: engine.load("num_waiting_reqs") == 1, "it to wait")
    engine.post("/abort_request", {"rid": "waiting"})
    reply = waiting.result(timeout=5)
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & reply["meta_info"].keys()
    assert (reply["meta_info"]["id"], reply["meta_info"]["completion_tokens"]) == ("waiting", 0)
    engine.post("/abort_request", {"abort_all": True})


@pytest.mark.parametrize("streamed", [True, False])
def test_e15_an_abort_in_a_retract_pause_answers_from_the_queue_with_what_was_sent(engine: Server, streamed: bool) -> None:
    """So a stream keeps its tokens; an answer that is not streamed leaves the scheduler 50 tokens at a time, and loses the rest."""
    engine.slow()
    sampling = {"temperature": 0, "max_new_tokens": 45, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "a"}
    asked = engine.background.submit(lambda: engine.stream(body)[-1] if streamed else engine.post("/generate", body))
    wait_for(lambda: engine.load() == 1 and engine.load("num_used_tokens") > 8, "some tokens")
    pause(engine, "retract")
    engine.post("/abort_request", {"rid": "a"})
    reply = asked.result(timeout=10)
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert len(reply["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    assert (len(reply["output_ids"]) > 0) is streamed
    assert not {"prompt_tokens", "cached_tokens", "num_retractions"} & meta.keys()
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": len(reply["output_ids"])}]


def test_e15_an_abort_in_an_in_place_pause_waits_for_continue(engine: Server) -> None:
    (one,) = engine.start_running("a", tokens=400)
    pause(engine, "in_place")
    time.sleep(0.5)  # a real scheduler that is told both between two steps ends the request with the step in progress
    engine.post("/abort_request", {"rid": "a"})
    assert stays_open(one)
    carry_on(engine)
    assert one.result(timeout=10)["meta_info"]["finish_reason"] == ABORTED


def test_a_client_that_goes_away_takes_its_request_with_it(engine: Server) -> None:
    engine.slow()
    for streamed in (True, False):
        body = {"input_ids": PROMPT, "stream": streamed, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        with pytest.raises(httpx.ReadTimeout):
            engine.request("POST", "/generate", body, timeout_s=1.5 if not streamed else 0.02)
        wait_for(lambda: engine.load() == 0, "the abandoned request to end", 15.0)
