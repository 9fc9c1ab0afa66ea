"""What a server can do, from what servers of several versions say of themselves, and from a real process."""

from dataclasses import asdict

import pytest

from rollout.answer import EngineError
from rollout.capabilities import capabilities_of, version_numbers

SERVER = {"version": "0.5.23", "tp_size": 2, "dp_size": 1, "ep_size": 1, "enable_memory_saver": True, "speculative_algorithm": None}
MODEL = {"is_generation": True, "disaggregation_mode": "null", "weight_version": "default"}


def test_a_current_server_can_serve_a_run():
    found = capabilities_of(SERVER, MODEL)
    assert found.lacks == []
    assert (found.version, found.spans, found.sessions, found.flush_under_retract) == ("0.5.23", True, True, True)
    assert found.pause_modes == ("abort", "retract", "in_place")
    assert (found.tensor_parallel, found.memory_saver, found.speculative, found.embedded) == (2, True, None, False)
    found.demand_usable("http://engine")


def test_flags_are_told_as_they_are():
    flags = {"speculative_algorithm": "EAGLE", "ep_size": 4, "enable_return_routed_experts": True, "enable_memory_saver": False}
    found = capabilities_of(SERVER | flags, MODEL)
    assert (found.speculative, found.expert_parallel, found.routed_experts, found.memory_saver) == ("EAGLE", 4, True, False)
    assert found.lacks == []


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("0.5.21", []),
        ("0.5.24.dev3+gabcdef", []),
        ("1.0.0", []),
        ("0.5.20", ["has no /begin_weight_update"]),
        ("0.5.19.post2", ["does not say which weights made which token", "has no /begin_weight_update"]),
        ("0.4.6", ["is older than anything tried here", "does not say which weights", "has no /begin_weight_update"]),
    ],
)
def test_an_older_server_gets_a_clear_answer(version, lacks):
    found = capabilities_of(SERVER | {"version": version}, MODEL)
    assert len(found.lacks) == len(lacks)
    for sentence, part in zip(found.lacks, lacks, strict=True):
        assert part in sentence and version in sentence and "install 0.5.21 or newer" in sentence


@pytest.mark.parametrize(
    ("server", "model", "says"),
    [
        ({"dp_size": 2}, {}, "start one server a replica"),
        ({}, {"is_generation": False}, "does not generate"),
        ({}, {"disaggregation_mode": "prefill"}, "does not generate"),
    ],
)
def test_a_server_that_cannot_take_part_says_why(server, model, says):
    with pytest.raises(EngineError, match=says) as caught:
        capabilities_of(SERVER | server, MODEL | model).demand_usable("http://engine")
    assert caught.value.kind == "configuration" and "http://engine" in str(caught.value)


@pytest.mark.parametrize("version", [None, 5, "", "unknown"])
def test_no_version_is_no_server(version):
    with pytest.raises(EngineError, match="check that the URL"):
        version_numbers(version)


async def test_the_client_asks_both_pages_and_refuses_what_cannot_serve(server, client):
    server.replies["/server_info"] = [(200, SERVER), (200, SERVER | {"version": "0.5.20"})]
    server.replies["/model_info"] = [(200, MODEL)]
    found = await client.capabilities()
    assert asdict(found)["version"] == "0.5.23"
    assert [path for path, _ in server.calls] == ["/server_info", "/model_info"]
    with pytest.raises(EngineError, match=r"SGLang 0\.5\.20 has no /begin_weight_update"):
        await client.capabilities()
