"""Weights: sessions, updates from disk, versions, checksums, and the memory that is released and resumed."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from .lab import PROMPT, Server, wait_for

Checkpoints = tuple[Path, Path]
OPENED = {"success": True, "message": "Success"}
NOT_AN_ENTRY = base64.b64encode(json.dumps({}).encode()).decode()


def refusal(message: str) -> dict[str, Any]:
    return {"success": False, "message": message}


# ---- sessions --------------------------------------------------------------------------------------------------------------


def test_l3_a_session_is_opened_once_and_closed_once(engine: Server) -> None:
    assert engine.post("/begin_weight_update", {}) == OPENED
    opened = engine.post("/begin_weight_update", {"selector": "target"}, expect=400)
    assert opened == refusal("a weight-update session is already open; call end_weight_update() first")
    assert engine.post("/end_weight_update", {}) == OPENED
    closed = engine.post("/end_weight_update", {}, expect=400)
    assert closed == refusal("no weight-update session is open; call begin_weight_update() first")


def test_l3_tensors_outside_a_session_are_refused(engine: Server) -> None:
    reply = engine.post("/update_weights_from_tensor", {"serialized_named_tensors": [NOT_AN_ENTRY]}, expect=400)
    assert reply == refusal("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
    body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}
    reply = engine.post("/update_weights_from_distributed", body, expect=400)
    assert reply == refusal("update_weights_from_distributed must run between begin_weight_update() and end_weight_update()")


def test_an_update_from_a_group_that_was_never_made_is_refused(engine: Server) -> None:
    engine.post("/begin_weight_update", {})
    reply = engine.post("/update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}, expect=400)
    wanted = "Failed to receive weights: Group weight_update_group not in []. Please call `init_weights_update_group` first."
    assert reply == refusal(wanted)
    assert engine.post("/destroy_weights_update_group", {}, expect=400) == refusal("The group to be destroyed does not exist.")


def test_an_open_session_does_not_stop_generation_and_survives_a_pause(engine: Server) -> None:
    engine.post("/begin_weight_update", {})
    assert len(engine.generate(max_new_tokens=2)["output_ids"]) == 2
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/continue_generation", {})
    assert engine.post("/end_weight_update", {}) == OPENED


def test_the_calls_of_a_push_are_legal_in_their_order(engine: Server, checkpoints: Checkpoints) -> None:
    """Pause, release, begin, end, load, resume, continue: a request in flight gets the rest of its tokens under the new version."""
    (one,) = engine.start_running("pushed")
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.post("/release_memory_occupation", {"tags": ["kv_cache"]}) is None
    engine.post("/begin_weight_update", {})
    engine.post("/end_weight_update", {})
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[1]), "weight_version": "pushed"})
    assert engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]}) is None
    engine.fast()
    engine.post("/continue_generation", {})
    meta = one.result()["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "pushed"]
    assert meta["num_retractions"] == 1


# ---- from disk -------------------------------------------------------------------------------------------------------------


def test_an_update_from_disk_changes_weights_version_and_path(engine: Server, checkpoints: Checkpoints) -> None:
    before = engine.generate(max_new_tokens=8)
    body = {"model_path": str(checkpoints[1]), "weight_version": "second"}
    reply = engine.post("/update_weights_from_disk", body)
    message = "Succeeded to update model weights. Weight version updated to second."
    assert reply == {"success": True, "message": message, "num_paused_requests": 0}
    after = engine.generate(max_new_tokens=8)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_versions"] == [{"version": "second", "start": 0, "end": 8}]
    about = engine.info()
    assert (about["weight_version"], about["model_path"], about["served_model_name"]) == ("second", *[str(checkpoints[1])] * 2)
    assert about["tokenizer_path"] == str(checkpoints[0])
    assert engine.get("/server_info").json()["weight_version"] == "default"  # of the start
    reply = engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[0])})
    assert reply == {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
    assert engine.info()["weight_version"] == "second"
    assert engine.generate(max_new_tokens=8)["output_ids"] == before["output_ids"]


def test_v9_a_bad_path_is_refused_and_changes_nothing(engine: Server) -> None:
    before, sums = engine.generate(max_new_tokens=8), engine.post("/weights_checker", {})["per_engine_checksum"]
    reply = engine.post("/update_weights_from_disk", {"model_path": "/nonexistent/x", "weight_version": "bad"}, expect=400)
    assert reply["success"] is False and reply["message"].startswith("Failed to get weights iterator: ")
    assert reply["num_paused_requests"] == 0
    assert (engine.info()["weight_version"], engine.info()["model_path"]) == ("default", str(engine.model))
    assert engine.generate(max_new_tokens=8)["output_ids"] == before["output_ids"]
    assert engine.post("/weights_checker", {})["per_engine_checksum"] == sums


def test_an_update_without_a_pause_waits_for_the_running(engine: Server, checkpoints: Checkpoints) -> None:
    (one,) = engine.start_running("first", tokens=20)
    body = {"model_path": str(checkpoints[1]), "weight_version": "second"}
    engine.post("/update_weights_from_disk", body)
    assert one.result(timeout=5)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 20}]


def test_an_update_that_aborts_does_not_wait(engine: Server, checkpoints: Checkpoints) -> None:
    (one,) = engine.start_running("first", tokens=400)
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[1]), "abort_all_requests": True})
    assert one.result(timeout=5)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("flush", [True, False])
def test_v6_an_update_in_an_in_place_pause_may_not_flush(engine: Server, checkpoints: Checkpoints, flush: bool) -> None:
    """The refused flush comes after the fact: the weights are in, new tokens carry the version, /model_info does not."""
    (one,) = engine.start_running("old-cache")
    engine.post("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(checkpoints[1]), "weight_version": "second", "flush_cache": flush}
    reply = engine.post("/update_weights_from_disk", body, expect=400 if flush else 200)
    assert reply["success"] is not flush
    if flush:
        assert reply["message"].startswith("Weights were updated, but the cache was not flushed")
    assert engine.info()["weight_version"] == ("default" if flush else "second")
    engine.fast()
    engine.post("/continue_generation", {})
    meta = one.result()["meta_info"]
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "second"]
    assert meta["num_retractions"] == 0
    # Back, whatever /model_info thinks.
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[0]), "weight_version": "default"})


# ---- versions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place", None])
def test_v5_a_version_published_in_mid_request_is_a_span_of_its_own(engine: Server, mode: str | None) -> None:
    (one,) = engine.start_running("span")
    if mode is not None:
        engine.post("/pause_generation", {"mode": mode})
    reply = engine.post("/update_weight_version", {"new_version": "next", "abort_all_requests": False})
    assert reply == {"success": True, "message": "Weight version updated to next", "new_version": "next"}
    assert engine.info()["weight_version"] == "next"
    engine.fast()
    engine.post("/continue_generation", {})
    meta = one.result()["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], second["version"], meta["weight_version"]) == ("default", "next", "next")
    assert first["start"] == 0 < first["end"] == second["start"] < second["end"] == 60


def test_the_same_version_again_is_no_span(engine: Server) -> None:
    (one,) = engine.start_running("same", tokens=30)
    engine.post("/update_weight_version", {"new_version": "default", "abort_all_requests": False})
    engine.fast()
    assert one.result()["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 30}]


def test_there_and_back_is_three_spans(engine: Server) -> None:
    (one,) = engine.start_running("back")
    for version in ("next", "default"):
        made = engine.load("num_used_tokens")
        engine.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        wait_for(lambda made=made: engine.load("num_used_tokens") > made + 1, "more tokens")
    engine.fast()
    spans = one.result()["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "next", "default"]
    assert [span["start"] for span in spans[1:]] == [span["end"] for span in spans[:-1]]


def test_e2_naming_a_version_aborts_everything_unless_told_not_to(engine: Server) -> None:
    (one,) = engine.start_running("gone", tokens=400)
    engine.post("/update_weight_version", {"new_version": "default"})
    assert one.result(timeout=5)["meta_info"]["finish_reason"]["type"] == "abort"


def test_versions_are_any_string(engine: Server) -> None:
    for version in ("run/3/1/17", "", "7"):
        engine.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        assert engine.info()["weight_version"] == version
        assert engine.generate(max_new_tokens=1)["meta_info"]["weight_versions"] == [{"version": version, "start": 0, "end": 1}]


# ---- what is loaded ----------------------------------------------------------------------------------------------------------


def test_checksums_begin_with_the_sha256_of_a_tensors_bytes(engine: Server, checkpoints: Checkpoints) -> None:
    """For tensors that are not fused. SGLang gives 16 digits and its own fused names; the embedded engine all 64, and the checkpoint's."""
    reply = engine.post("/weights_checker", {"action": "checksum"})
    assert reply.keys() == {"success", "message", "ranks", "per_engine_checksum"}
    assert (reply["success"], reply["message"]) == (True, "Success.")
    (rank,) = reply["ranks"]
    assert rank.keys() == {"checksums", "per_gpu_checksum", "parallelism_info"}
    place = {"tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "rank": 0, "size": 1}
    assert rank["parallelism_info"] == [{"role": "target"} | place]
    tensors = load_file(checkpoints[0] / "model.safetensors")
    plain = [name for name in tensors if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))]
    digits = 64 if engine.embedded else 16
    for name in plain:
        assert rank["checksums"][name] == hashlib.sha256(tensors[name].contiguous().numpy().tobytes()).hexdigest()[:digits]
    fused = {"q_proj", "k_proj", "gate_proj"} if engine.embedded else {"qkv_proj", "gate_up_proj"}
    assert all(any(part in name for name in rank["checksums"]) for part in fused)


def test_the_checksum_of_an_engine_is_made_of_those_of_its_tensors(engine: Server) -> None:
    reply = engine.post("/weights_checker", {})
    (rank,) = reply["ranks"]
    pairs = "".join(name + value for name, value in sorted(rank["checksums"].items()))
    assert rank["per_gpu_checksum"] == hashlib.sha256(pairs.encode()).hexdigest()
    assert reply["per_engine_checksum"] == hashlib.sha256(rank["per_gpu_checksum"].encode()).hexdigest()


def test_checksums_follow_the_weights(engine: Server, checkpoints: Checkpoints) -> None:
    def overall() -> str:
        return engine.request("GET", "/weights_checker").json()["per_engine_checksum"]

    first = overall()
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[1])})
    second = overall()
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[0])})
    assert first != second and overall() == first


def test_checksums_may_leave_tensors_out_and_know_their_actions(engine: Server) -> None:
    names = engine.post("/weights_checker", {"skip_tensor_list": ["norm", "lm_head"]})["ranks"][0]["checksums"]
    assert names and not any("norm" in name or "lm_head" in name for name in names)
    assert engine.post("/weights_checker", {"action": "tea"}, expect=400) == refusal("Unsupported action='tea'")


def test_a_weight_can_be_read_by_its_name(engine: Server, checkpoints: Checkpoints) -> None:
    tensors = load_file(checkpoints[0] / "model.safetensors")
    for name in ("model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        assert engine.post("/get_weights_by_name", {"name": name, "truncate_size": 3}) == tensors[name][:3].tolist()
    assert len(engine.request("GET", "/get_weights_by_name", {"name": "lm_head.weight"}).json()) == 100
    assert engine.post("/get_weights_by_name", {"name": "nothing"}, expect=400) == {"error": {"message": "Get parameter by name failed"}}


# ---- memory ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tags", [["kv_cache"], ["weights"], ["weights", "kv_cache"], ["kv_cache", "cuda_graph"], None, []])
def test_what_was_released_can_be_resumed(engine: Server, tags: list[str] | None) -> None:
    before = engine.generate(max_new_tokens=4)["output_ids"]
    assert engine.post("/release_memory_occupation", {"tags": tags}) is None
    assert engine.post("/release_memory_occupation", {"tags": tags}) is None  # twice is fine
    assert engine.post("/resume_memory_occupation", {"tags": tags}) is None
    assert engine.generate(max_new_tokens=4)["output_ids"] == before


def test_memory_comes_back_part_by_part(engine: Server, checkpoints: Checkpoints) -> None:
    """The order of a push: everything goes, the weights come, are loaded, and then the cache comes."""
    (one,) = engine.start_running("kept")
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/release_memory_occupation", {})
    engine.post("/resume_memory_occupation", {"tags": ["weights"]})
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[0])})
    engine.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    engine.fast()
    engine.post("/continue_generation", {})
    assert one.result()["output_ids"] == engine.generate([*PROMPT, 5], max_new_tokens=60)["output_ids"]


def test_unknown_tags_are_accepted(engine: Server) -> None:
    assert engine.post("/release_memory_occupation", {"tags": ["tea"]}) is None
