"""/generate, streamed and not: what an answer holds, and why it ends."""

import itertools
from typing import Any

import pytest

from .lab import EOS, PROMPT, Server

META = {
    *("id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "cached_tokens_details", "reasoning_tokens"),
    *("weight_version", "weight_versions", "num_retractions", "dp_rank", "e2e_latency", "response_sent_to_client_ts"),
}
LOG_PROBS = {"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"}


def ask(engine: Server, prompt: Any = PROMPT, **top: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    return engine.post("/generate", {"input_ids": prompt, "sampling_params": sampling} | top)


def test_an_answer_has_these_fields_and_no_others(engine: Server) -> None:
    reply = ask(engine, rid="rid-a")
    meta = reply["meta_info"]
    assert reply.keys() == {"text", "output_ids", "meta_info"}
    assert meta.keys() == META
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("rid-a", 5, 3)
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["weight_version"], meta["weight_versions"]) == ("default", [{"version": "default", "start": 0, "end": 3}])
    assert (meta["num_retractions"], meta["reasoning_tokens"], meta["dp_rank"]) == (0, 0, None)


def test_log_probs_come_only_when_asked_for(engine: Server) -> None:
    assert ask(engine, return_logprob=True)["meta_info"].keys() == META | LOG_PROBS
    assert ask(engine, top_logprobs_num=2)["meta_info"].keys() == META
    meta = ask(engine, return_logprob=True, top_logprobs_num=2)["meta_info"]
    assert meta.keys() == META | LOG_PROBS | {"input_top_logprobs", "output_top_logprobs"}


def test_the_prompt_comes_back_when_asked_for(engine: Server) -> None:
    assert ask(engine, return_prompt_token_ids=True)["prompt_token_ids"] == PROMPT


def test_a_request_without_an_id_gets_one(engine: Server) -> None:
    first, second = ask(engine)["meta_info"]["id"], ask(engine)["meta_info"]["id"]
    assert first != second and len(first) == 32


def test_without_details_there_are_no_cached_tokens(engine: Server) -> None:
    """How many tokens a prefix cache saves is an engine's own affair; that nothing is saved looks the same everywhere."""
    meta = ask(engine, [301, 302, 303, 304])["meta_info"]
    assert (meta["cached_tokens"], meta["cached_tokens_details"]) == (0, None)
    again = ask(engine, [301, 302, 303, 304])["meta_info"]
    assert 0 <= again["cached_tokens"] < 4
    assert again["cached_tokens_details"] == (None if again["cached_tokens"] == 0 else {"device": again["cached_tokens"], "host": 0})


def test_put_is_as_good_as_post(engine: Server) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
    assert engine.request("PUT", "/generate", body).json()["output_ids"] == ask(engine)["output_ids"]
    assert engine.get("/generate").status_code == 405


def test_text_goes_in_and_comes_out(engine: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    reply = engine.post("/generate", {"text": "abc", "sampling_params": sampling})
    assert reply["output_ids"] == engine.generate([3 + byte for byte in b"abc"], max_new_tokens=6)["output_ids"]
    assert reply["text"] == bytes(token - 3 for token in reply["output_ids"] if 3 <= token < 259).decode(errors="replace")
    assert reply["meta_info"]["prompt_tokens"] == 3


def test_without_parameters_there_are_at_most_128_tokens_at_temperature_1(engine: Server) -> None:
    replies = [engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {"ignore_eos": True}}) for _ in range(2)]
    assert [reply["meta_info"]["finish_reason"] for reply in replies] == [{"type": "length", "length": 128}] * 2
    assert replies[0]["output_ids"] != replies[1]["output_ids"]


# ---- streams -----------------------------------------------------------------------------------------------------------


def test_chunks_are_cumulative_and_only_the_last_has_spans(engine: Server) -> None:
    engine.slow()
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    events = engine.stream({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "s"})
    last = events[-1]
    assert len(events) == 6
    for size, event in enumerate(events, 1):
        meta = event["meta_info"]
        assert event["output_ids"] == last["output_ids"][:size]
        assert meta["output_token_logprobs"] == last["meta_info"]["output_token_logprobs"][:size]
        assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (size, size)
        assert (meta["id"], meta["weight_version"], meta["prompt_tokens"]) == ("s", "default", 5)
    for event in events[:-1]:
        assert event["meta_info"]["finish_reason"] is None
        assert not {"weight_versions", "e2e_latency"} & event["meta_info"].keys()
    assert last["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 6}


def test_a_stream_and_a_whole_answer_say_the_same(engine: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    last = engine.stream({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})[-1]
    whole = engine.generate(max_new_tokens=12)
    assert (last["output_ids"], last["text"]) == (whole["output_ids"], whole["text"])
    assert last.keys() == whole.keys()
    assert last["meta_info"].keys() == whole["meta_info"].keys() - {"response_sent_to_client_ts"}
    pairs, other = (reply["meta_info"]["output_token_logprobs"] for reply in (last, whole))
    assert [pair[0] for pair in pairs] == pytest.approx([pair[0] for pair in other], abs=1e-4)


def test_stream_interval_sends_the_first_token_at_once_and_then_several(engine: Server) -> None:
    engine.slow()
    sampling = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True, "stream_interval": 4}
    sizes = [len(event["output_ids"]) for event in engine.stream({"input_ids": PROMPT, "sampling_params": sampling})]
    assert sizes == [1, 5, 9, 10]


def test_a_batch_is_streamed_with_an_index(engine: Server) -> None:
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in (2, 3)]
    events = engine.stream({"input_ids": [PROMPT, [7, 8]], "sampling_params": sampling})
    whole = engine.post("/generate", {"input_ids": [PROMPT, [7, 8]], "sampling_params": sampling})
    assert {event["index"] for event in events} == {0, 1}
    assert {event["index"]: event["output_ids"] for event in events} == {i: reply["output_ids"] for i, reply in enumerate(whole)}


# ---- batches and samples -------------------------------------------------------------------------------------------------


def test_a_batch_answers_with_a_list_in_order_and_numbers_its_ids(engine: Server) -> None:
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in (2, 3)]
    replies = engine.post("/generate", {"input_ids": [PROMPT, [7, 8]], "rid": "b", "sampling_params": sampling})
    assert [reply["meta_info"]["id"] for reply in replies] == ["b_0", "b_1"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [5, 2]
    assert replies[0]["output_ids"] == engine.generate(PROMPT, max_new_tokens=2)["output_ids"]
    assert replies[1]["output_ids"] == engine.generate([7, 8], max_new_tokens=3)["output_ids"]


def test_a_batch_of_one_is_a_list_and_may_name_its_ids(engine: Server) -> None:
    (reply,) = ask(engine, [PROMPT], rid=["only"])
    assert reply["meta_info"]["id"] == "only"
    replies = engine.post("/generate", {"text": ["abc", "d"], "rid": ["x", "y"], "sampling_params": {"max_new_tokens": 1}})
    assert [reply["meta_info"]["id"] for reply in replies] == ["x", "y"]


def test_n_samples_come_as_a_list_with_ids_of_their_own(engine: Server) -> None:
    sampling = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True, "n": 3}
    replies = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": sampling, "rid": "mine", "return_logprob": True})
    assert [len(reply["output_ids"]) for reply in replies] == [8] * 3
    assert len({tuple(reply["output_ids"]) for reply in replies}) == 3
    ids = [reply["meta_info"]["id"] for reply in replies]
    assert len({*ids, "mine", "mine_0"}) == 5
    assert all(len(reply["meta_info"]["output_token_logprobs"]) == 8 for reply in replies)


def test_n_samples_of_a_batch_stand_together(engine: Server) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True, "n": 2}
    replies = engine.post("/generate", {"input_ids": [PROMPT, [7, 8]], "sampling_params": sampling})
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [5, 5, 2, 2]
    events = engine.stream({"input_ids": PROMPT, "sampling_params": sampling})
    assert {event["index"] for event in events} == {0, 1}


def test_one_sample_or_none_is_no_list(engine: Server) -> None:
    for n in (0, 1):
        assert len(engine.generate(max_new_tokens=2, n=n)["output_ids"]) == 2, n


# ---- why an answer ends --------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_an_answer_and_is_part_of_it(engine: Server) -> None:
    greedy = engine.generate(max_new_tokens=8)["output_ids"]
    size = greedy.index(greedy[3]) + 1
    reply = engine.generate(max_new_tokens=8, stop_token_ids=[greedy[3]], ignore_eos=False)
    assert reply["output_ids"] == greedy[:size]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": greedy[3]}
    at_the_end = engine.generate(max_new_tokens=size, stop_token_ids=[greedy[3]], ignore_eos=False)
    assert at_the_end["meta_info"]["finish_reason"] == {"type": "stop", "matched": greedy[3]}


def test_ignore_eos_disables_stop_tokens_too(engine: Server) -> None:
    greedy = engine.generate(max_new_tokens=8)["output_ids"]
    reply = engine.generate(max_new_tokens=8, stop_token_ids=[greedy[3]], ignore_eos=True)
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == (greedy, {"type": "length", "length": 8})


def test_the_end_of_text_is_a_stop_token(engine: Server) -> None:
    for _ in range(60):
        reply = engine.generate(temperature=5.0, max_new_tokens=200, ignore_eos=False)
        if reply["meta_info"]["finish_reason"]["type"] == "stop":
            break
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert reply["output_ids"].index(EOS) == len(reply["output_ids"]) - 1


def readable_pair(ids: list[int]) -> str:
    """Two neighbouring letters of this output, the second not its first token."""
    letters = [chr(token - 3) if 32 < token - 3 < 127 else "\0" for token in ids]
    return next(first + second for first, second in itertools.pairwise(letters[1:]) if "\0" not in (first, second))


@pytest.fixture
def letters(engine: Server) -> tuple[list[int], list[int], str]:
    """A prompt, its greedy answer, and two letters that the answer holds."""
    for first in range(3, 250):
        ids = engine.generate([first, 60], max_new_tokens=40)["output_ids"]
        try:
            return [first, 60], ids, readable_pair(ids)
        except StopIteration:
            continue
    raise AssertionError("no greedy answer of this model holds two letters")


def test_a_stop_string_is_cut_from_the_text_but_not_from_the_tokens(engine: Server, letters: Any) -> None:
    prompt, ids, stop = letters
    reply = engine.generate(prompt, max_new_tokens=40, stop=[stop, "never"])
    size = next(i for i in range(2, 41) if bytes(token - 3 for token in ids[i - 2 : i]) == stop.encode())
    assert reply["output_ids"] == ids[:size]
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert stop not in reply["text"]
    kept = engine.generate(prompt, max_new_tokens=40, stop=stop, no_stop_trim=True)
    assert kept["text"] == reply["text"] + stop


def test_a_stop_string_is_never_streamed_in_part(engine: Server, letters: Any) -> None:
    prompt, _, stop = letters
    events = engine.stream(
        {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, "stop": stop}}
    )
    final = events[-1]["text"]
    assert all(final.startswith(event["text"]) for event in events)


def test_an_empty_stop_string_stops_at_once(engine: Server) -> None:
    reply = engine.generate(max_new_tokens=5, stop=[""])
    assert (reply["text"], len(reply["output_ids"])) == ("", 1)
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": ""}


def test_no_new_tokens_is_a_prefill(engine: Server) -> None:
    reply = engine.generate(max_new_tokens=0, top={"logprob_start_len": 0})
    meta = reply["meta_info"]
    assert (reply["output_ids"], reply["text"], meta["completion_tokens"]) == ([], "", 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 0}]
    assert (meta["output_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 0)
    assert [pair[1] for pair in meta["input_token_logprobs"]] == PROMPT


def test_a_null_limit_fills_the_context(engine: Server) -> None:
    reply = engine.generate([5] * 500, max_new_tokens=None)
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
