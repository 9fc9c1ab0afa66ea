"""Calls that a real SGLang 0.5.23 does not survive: the client sees a lost connection, and the process is gone.

The embedded engine refuses each of them, says that a real server would have died, and goes on unharmed.
"""

from typing import Any

import httpx
import pytest

from .lab import DIES_S, PROMPT, VOCAB, Server, wait_for

SAYS = "a real SGLang 0.5.23 dies of"


def demand_fatal(server: Server, path: str, body: Any, status: int) -> None:
    if server.embedded:
        message = server.post(path, body, expect=status)["error"]["message"]
        assert SAYS in message, message
        return
    with pytest.raises(httpx.TransportError):
        server.request("POST", path, body)
    wait_for(lambda: not server.alive(), "the server to die", DIES_S)


@pytest.mark.parametrize("mode", [None, "in_place"])
def test_l3_releasing_memory_under_running_requests(victim: Server, mode: str | None) -> None:
    asked = victim.start_running("a", "b", tokens=30)
    if mode is not None:
        victim.post("/pause_generation", {"mode": mode})
    demand_fatal(victim, "/release_memory_occupation", {}, 500)
    if victim.embedded:
        victim.fast()
        victim.post("/continue_generation", {})
        assert all(len(one.result()["output_ids"]) == 30 for one in asked)


def test_l3_resuming_what_was_not_released(victim: Server) -> None:
    victim.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    demand_fatal(victim, "/resume_memory_occupation", {}, 500)
    if victim.embedded:
        victim.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert len(victim.generate(max_new_tokens=3)["output_ids"]) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1, VOCAB]},
        {"input_ids": [[]]},
        {"text": ""},
        {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": -2},
    ],
    ids=["a token out of the vocabulary", "an empty prompt", "an empty text", "a negative start"],
)
def test_h3_prompts_that_kill(victim: Server, body: dict[str, Any]) -> None:
    demand_fatal(victim, "/generate", body, 400)
    if victim.embedded:
        assert len(victim.generate(max_new_tokens=3)["output_ids"]) == 3


def test_w3_a_payload_that_cannot_be_unpickled(victim: Server) -> None:
    """The embedded engine reads no pickles, so for it this is a plain refusal."""
    victim.post("/begin_weight_update", {})
    body = {"serialized_named_tensors": ["bm9uc2Vuc2U="]}
    if victim.embedded:
        reply = victim.post("/update_weights_from_tensor", body, expect=400)
        assert reply["success"] is False and "loads no pickles" in reply["message"]
    else:
        demand_fatal(victim, "/update_weights_from_tensor", body, 400)


def test_a_process_group_without_a_name(victim: Server) -> None:
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "", "backend": "gloo"}
    demand_fatal(victim, "/init_weights_update_group", body, 500)
