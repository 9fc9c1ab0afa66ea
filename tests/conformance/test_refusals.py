"""What is refused, with which status, in which envelope and, where a client can act on them, in which words."""

from typing import Any

import pytest

from .lab import PROMPT, Server, wait_for

INVALID = {"object": "error", "type": "Bad Request", "param": None, "code": 400}


def demand_envelope(reply: Any) -> None:
    """The one for a body that is not of the form: its message differs from server to server."""
    assert {key: value for key, value in reply.items() if key != "message"} == INVALID
    assert isinstance(reply["message"], str) and reply["message"]


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"max_new_tokens": 2.0}, "invalid type: floating point `2.0`, expected i64"),
        ({"max_new_tokens": "3"}, 'invalid type: string "3", expected i64'),
        ({"temperature": "hot"}, 'invalid type: string "hot", expected f64'),
        ({"temperature": True}, "invalid type: boolean `true`, expected f64"),
        ({"top_k": 5.0}, "invalid type: floating point `5.0`, expected i64"),
        ({"ignore_eos": 1}, "invalid type: integer `1`, expected a boolean"),
        ({"stop_token_ids": ["a"]}, 'invalid type: string "a", expected i64'),
        ({"stop_token_ids": 5}, "invalid type: integer `5`, expected a sequence"),
        ({"stop": 5}, "invalid type: integer `5`, expected a value or an array of values for StringOrList"),
        ({"stop": [5]}, "invalid type: integer `5`, expected a string"),
        ({"top_p": {}}, "invalid type: map, expected f64"),
    ],
)
def test_a_parameter_of_a_wrong_type_is_refused_in_the_words_of_the_contract(engine: Server, sampling: dict[str, Any], says: str) -> None:
    assert engine.generate(expect=400, **sampling) == {"error": says}


def test_an_unknown_parameter_is_refused_with_the_list_of_the_known(engine: Server) -> None:
    error = engine.generate(expect=400, seed=1)["error"]
    assert error.startswith("unknown field `seed`, expected one of `max_new_tokens`, `stop`, `stop_token_ids`, `stop_regex`, `temperature`")
    assert "`sampling_seed`" in error


def test_unknown_keys_beside_the_parameters_are_ignored(engine: Server) -> None:
    plain = engine.generate(max_new_tokens=3)["output_ids"]
    assert engine.generate(max_new_tokens=3, top={"surprise": 1, "seed": 5})["output_ids"] == plain


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"temperature": -1}, "temperature must be a non-negative finite number, got -1."),
        ({"temperature": -0.5}, "temperature must be a non-negative finite number, got -0.5."),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0."),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2."),
        ({"top_k": 0, "temperature": 1}, "top_k must be -1 (disable) or at least 1, got 0."),
        ({"top_k": -2, "temperature": 1}, "top_k must be -1 (disable) or at least 1, got -2."),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1."),
        ({"frequency_penalty": 3}, "frequency_penalty must be in [-2, 2], got 3."),
        ({"presence_penalty": -3}, "presence_penalty must be in [-2, 2], got -3."),
        ({"repetition_penalty": 0}, "repetition_penalty must be in (0, 2] (1.0 = no penalty), got 0."),
        ({"min_new_tokens": 5, "max_new_tokens": 3}, "min_new_tokens must be in [0, max_new_tokens(3)], got 5."),
        ({"stop": ["a"] * 33}, "at most 32 stop strings are allowed, got 33"),
    ],
)
def test_h3_a_parameter_out_of_its_range_is_refused(engine: Server, sampling: dict[str, Any], says: str) -> None:
    assert engine.generate(expect=400, **sampling) == {"error": {"message": says}}
    event = engine.stream({"input_ids": PROMPT, "sampling_params": {"temperature": 0} | sampling})
    assert event == [{"error": {"message": says, "type": "invalid_request_error", "code": 400, "retryable": False}}]


def test_a_greedy_request_may_say_any_top_k(engine: Server) -> None:
    plain = engine.generate(max_new_tokens=3)["output_ids"]
    assert all(engine.generate(max_new_tokens=3, top_k=top_k)["output_ids"] == plain for top_k in (0, -2, -1, 7))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "Either text, input_ids or input_embeds should be provided."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": [5] * 600}, "The input (600 tokens) is longer than the model's context length (512 tokens)."),
        ({"input_ids": [5] * 512}, "The input (512 tokens) is longer than the model's context length (512 tokens)."),
        (
            {"input_ids": [5] * 506, "sampling_params": {"max_new_tokens": 0}},
            "Input length (506 tokens) exceeds the maximum allowed length (506 tokens). "
            "Use a shorter input or enable --allow-auto-truncate.",
        ),
        (
            {"input_ids": [5] * 400, "sampling_params": {"max_new_tokens": 200}},
            "Requested token count exceeds the model's maximum context length of 512 tokens. You requested a total of 600 tokens: "
            "400 tokens from the input messages and 200 tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit.",
        ),
        (
            {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 6},
            "req.logprob_start_len=6 is higher than the number of input tokens len(req.origin_input_ids)=5. "
            "Please use a smaller logprob_start_len.",
        ),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["a", "a"]}, "Duplicate request IDs detected within the request: ['a']"),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["a"]}, "The specified rids length mismatch with the batch_size for batch processing."),
        (
            {"input_ids": [PROMPT, PROMPT], "sampling_params": [{"n": 2}, {"n": 3}]},
            "The parallel_sample_num should be the same for all samples in sample params.",
        ),
    ],
)
def test_h3_a_prompt_that_cannot_be_served_is_refused(engine: Server, body: dict[str, Any], says: str) -> None:
    assert engine.post("/generate", body, expect=400) == {"error": {"message": says}}
    (event,) = engine.stream(body)
    if "Input length" in says or "logprob_start_len" in says:  # found by the scheduler, not before it
        assert event["meta_info"]["finish_reason"] == {"type": "abort", "message": says, "status_code": 400, "err_type": "BadRequestError"}
    else:
        assert event == {"error": {"message": says, "type": "invalid_request_error", "code": 400, "retryable": False}}


def test_h3_the_longest_prompt_and_the_longest_answer_are_served(engine: Server) -> None:
    assert engine.generate([5] * 505, max_new_tokens=0)["meta_info"]["prompt_tokens"] == 505
    assert engine.generate([5] * 500, max_new_tokens=12)["meta_info"]["finish_reason"] == {"type": "length", "length": 10}


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1.5]},
        {"input_ids": "abc"},
        {"input_ids": [1, [2]]},
        {"input_ids": [1, "a"]},
        {"input_ids": PROMPT, "stream": None},
        {"input_ids": PROMPT, "rid": 5},
        {"input_ids": PROMPT, "return_logprob": {}},
        {"input_ids": PROMPT, "sampling_params": "x"},
        {"text": 5},
        [1],
        b"{",
        b"",
    ],
)
def test_a_body_of_another_form_is_refused(engine: Server, body: Any) -> None:
    demand_envelope(engine.post("/generate", body, expect=400))


def test_s2_a_live_id_is_refused_and_a_finished_one_free_again(engine: Server) -> None:
    (first,) = engine.start_running("twice", tokens=40)
    assert engine.generate(expect=400, top={"rid": "twice"}) == {"error": {"message": "Duplicate request ID detected: twice"}}
    engine.fast()
    assert first.result()["meta_info"]["completion_tokens"] == 40
    assert engine.generate(max_new_tokens=1, top={"rid": "twice"})["meta_info"]["id"] == "twice"


def test_a_refused_request_leaves_its_id_free(engine: Server) -> None:
    engine.generate(expect=400, temperature=-1, top={"rid": "again"})
    engine.generate([5] * 600, expect=400, top={"rid": "again"})
    engine.generate(max_new_tokens=1, top={"rid": "again"})


@pytest.mark.parametrize(
    "path",
    [
        *("/pause_generation", "/continue_generation", "/abort_request", "/release_memory_occupation", "/resume_memory_occupation"),
        *("/begin_weight_update", "/end_weight_update", "/update_weights_from_disk", "/update_weights_from_tensor"),
        *("/update_weights_from_distributed", "/update_weight_version", "/slow_down", "/get_weights_by_name"),
    ],
)
def test_a_control_call_wants_a_body(engine: Server, path: str) -> None:
    demand_envelope(engine.post(path, None, expect=400))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause_generation", {"mode": "nap"}),
        ("/pause_generation", {"mode": 1}),
        ("/abort_request", {"rid": 5}),
        ("/continue_generation", {"torch_empty_cache": "x"}),
        ("/begin_weight_update", {"selector": "tea"}),
        ("/begin_weight_update", {"selector": 5}),
        ("/update_weights_from_tensor", {}),
        ("/update_weights_from_tensor", {"serialized_named_tensors": 5}),
        ("/update_weights_from_disk", {"model_path": 5}),
        ("/update_weights_from_distributed", {}),
        ("/init_weights_update_group", {}),
        ("/update_weight_version", {}),
        ("/update_weight_version", {"new_version": 5}),
        ("/slow_down", {}),
        ("/slow_down", {"forward_sleep_time": "x"}),
        ("/release_memory_occupation", {"tags": "kv_cache"}),
        ("/get_weights_by_name", {}),
        ("/flush_cache?timeout=x", {}),
    ],
)
def test_a_control_call_of_a_wrong_form_is_refused_and_does_nothing(engine: Server, path: str, body: Any) -> None:
    demand_envelope(engine.post(path, body, expect=400))
    assert engine.get("/ready").status_code == 200


def test_unknown_keys_of_a_control_call_are_ignored(engine: Server) -> None:
    engine.post("/pause_generation", {"mode": "retract", "surprise": 1})
    engine.post("/continue_generation", {"surprise": 1})


def test_paths_and_methods_that_do_not_exist(engine: Server) -> None:
    assert engine.get("/nothing").json() == {"detail": "Not Found"}
    for gone in ("/get_load", "/weight_version", "/get_weight_version", "/metrics"):
        assert engine.get(gone).status_code == 404, gone
    for path in ("/generate", "/pause_generation", "/continue_generation", "/abort_request", "/begin_weight_update"):
        reply = engine.get(path)
        assert (reply.status_code, reply.json()) == (405, {"detail": "Method Not Allowed"}), path


def test_what_the_embedded_engine_cannot_do_it_refuses_by_name(engine: Server) -> None:
    """The list of docs/choices.md. The real server does all of it."""
    sampling: list[dict[str, Any]] = [
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.2},
        {"min_new_tokens": 2},
        {"logit_bias": {"7": 5.0}},
        {"stop_regex": "a"},
    ]
    top: list[dict[str, Any]] = [{"token_ids_logprob": [1, 2]}, {"return_text_in_logprobs": True}]
    for wanted, reply in [(one, engine.request("POST", "/generate", body_of(one, {}))) for one in sampling] + [
        (one, engine.request("POST", "/generate", body_of({}, one))) for one in top
    ]:
        (name,) = wanted
        if engine.embedded:
            assert reply.status_code == 400 and f"the embedded engine does not do {name}" in reply.json()["error"]["message"]
        else:
            assert reply.status_code == 200, (wanted, reply.text)


def body_of(sampling: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 3} | sampling, "return_logprob": True} | top


def test_refusals_leave_nothing_running(engine: Server) -> None:
    for _ in range(3):
        engine.generate(expect=400, temperature=-1)
    wait_for(lambda: engine.load() == 0 and engine.load("num_waiting_reqs") == 0, "an idle engine")
