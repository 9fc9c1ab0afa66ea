"""Weights from the store and from disk: whole or not at all, checked by checksums, in SGLang's sequence and with its refusals."""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from store import Column, EmbeddedStore
from store.pieces import cut

from .conftest import Served, wait_for

PROMPT = [80, 81, 82, 35, 60]
NAME = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def bucket(tmp_path: Path) -> Callable[..., str]:
    """Puts tensors into a store and gives what /update_weights_from_tensor takes for them."""
    store = EmbeddedStore(tmp_path / "store", 2**26)
    count = iter(range(1000))

    def put(tensors: dict[str, Any]) -> str:
        ref = store.put(f"run/weights/0/1/{next(count)}", tensors)
        return base64.b64encode(json.dumps(ref.to_wire()).encode()).decode()

    return put


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def first_weights(engine: Served, checkpoints: Callable[..., Path]) -> Iterator[None]:
    yield
    engine.post("/continue_generation", {})
    engine.request("POST", "/resume_memory_occupation", {"tags": ["weights"]})
    engine.post(
        "/update_weights_from_disk", {"model_path": str(checkpoints("Qwen3")), "weight_version": "default", "abort_all_requests": True}
    )


def weights(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


def sums(engine: Served) -> dict[str, str]:
    return engine.post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]


def send(engine: Served, entry: str, expect: int = 200, **more: Any) -> dict[str, Any]:
    body = {"serialized_named_tensors": [entry], "load_format": "headrace_store"} | more
    return engine.post("/update_weights_from_tensor", body, expect)


def greedy(engine: Served) -> list[int]:
    return engine.generate(PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True)["output_ids"]


def test_checksums_are_sha256_of_each_tensor_under_its_hugging_face_name(engine: Served, checkpoints: Callable[..., Path]) -> None:
    report = engine.post("/weights_checker", {"action": "checksum"})
    expected = {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in weights(checkpoints("Qwen3")).items()}
    assert report["ranks"][0]["checksums"] == expected
    assert report["success"] is True and len(report["per_engine_checksum"]) == 64
    assert engine.get("/weights_checker").json() == report
    assert "does only checksum" in engine.post("/weights_checker", {"action": "snapshot"}, expect=400)["message"]


def test_a_push_in_buckets_gives_the_engine_exactly_the_new_weights(
    engine: Served, checkpoints: Callable[..., Path], bucket: Callable[..., str]
) -> None:
    new = weights(checkpoints("Qwen3", seed=1))
    names = list(new)
    before = engine.post("/weights_checker", {})["per_engine_checksum"]
    engine.post("/pause_generation", {"mode": "retract"})
    engine.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert engine.post("/begin_weight_update", {}) == {"success": True, "message": "Success"}
    assert send(engine, bucket({name: new[name] for name in names[:5]}), flush_cache=False) == {"success": True, "message": "Success"}
    assert engine.get("/model_info").json()["weight_version"] == "default"
    reply = send(engine, bucket({name: new[name] for name in names[5:]}), weight_version="run/0/1/1")
    assert reply == {"success": True, "message": "Success Weight version updated to run/0/1/1."}
    assert engine.post("/end_weight_update", {}) == {"success": True, "message": "Success"}
    assert sums(engine) == {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in new.items()}
    engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    engine.post("/continue_generation", {})
    assert engine.get("/model_info").json()["weight_version"] == "run/0/1/1"
    after = greedy(engine)
    assert engine.post("/update_weights_from_disk", {"model_path": str(checkpoints("Qwen3", seed=1))})["num_paused_requests"] == 0
    assert greedy(engine) == after
    assert engine.post("/weights_checker", {})["per_engine_checksum"] != before


def test_e9_the_same_prompt_after_an_update_is_computed_anew(engine: Served, checkpoints: Callable[..., Path]) -> None:
    before = engine.generate(PROMPT, temperature=0, max_new_tokens=1)
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints("Qwen3", seed=1))})
    after = engine.generate(PROMPT, temperature=0, max_new_tokens=1)
    assert after["meta_info"]["cached_tokens"] == 0
    assert after["meta_info"]["output_token_logprobs"] != before["meta_info"]["output_token_logprobs"]
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints("Qwen3"))})
    again = engine.generate(PROMPT, temperature=0, max_new_tokens=1)
    assert again["meta_info"]["output_token_logprobs"] == before["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_v5_tokens_after_an_update_come_from_the_new_weights_and_say_so(
    engine: Served, checkpoints: Callable[..., Path], background: ThreadPoolExecutor, mode: str
) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    one = background.submit(engine.generate, PROMPT, temperature=0, max_new_tokens=40, ignore_eos=True)
    wait_for(lambda: engine.load("num_used_tokens") > 10, "a few tokens")
    engine.post("/pause_generation", {"mode": mode})
    update = {"model_path": str(checkpoints("Qwen3", seed=1)), "flush_cache": mode == "retract", "weight_version": "two"}
    engine.post("/update_weights_from_disk", update)
    engine.post("/continue_generation", {})
    engine.post("/slow_down", {"forward_sleep_time": None})
    reply = one.result()
    ids = reply["output_ids"]
    old, new = reply["meta_info"]["weight_versions"]
    assert (old["version"], new["version"], old["end"]) == ("default", "two", new["start"])
    if mode == "retract":
        # The prefix was computed again, so all that follows is what the new weights alone say of it.
        prefix = PROMPT + ids[: new["start"]]
        alone = engine.generate(prefix, temperature=0, max_new_tokens=40 - new["start"], ignore_eos=True)
        assert alone["output_ids"] == ids[new["start"] :]


def test_an_in_place_update_that_asks_for_a_flush_updates_and_is_refused(
    engine: Served, checkpoints: Callable[..., Path], background: ThreadPoolExecutor
) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    one = background.submit(engine.generate, PROMPT, temperature=0, max_new_tokens=30, ignore_eos=True)
    wait_for(lambda: engine.load("num_used_tokens") > 10, "a few tokens")
    engine.post("/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(checkpoints("Qwen3", seed=1)), "weight_version": "two"}
    assert "Weights were updated, but the cache was not flushed" in engine.post("/update_weights_from_disk", update, expect=400)["message"]
    assert engine.get("/model_info").json()["weight_version"] == "default"
    engine.post("/continue_generation", {})
    engine.post("/slow_down", {"forward_sleep_time": None})
    assert [span["version"] for span in one.result()["meta_info"]["weight_versions"]] == ["default", "two"]


def test_an_unpaused_update_waits_for_the_running_and_keeps_new_ones_out(
    engine: Served, checkpoints: Callable[..., Path], background: ThreadPoolExecutor
) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    one = background.submit(engine.generate, PROMPT, max_new_tokens=25, ignore_eos=True)
    wait_for(lambda: engine.load("num_running_reqs") == 1, "it to run")
    update = background.submit(
        engine.post, "/update_weights_from_disk", {"model_path": str(checkpoints("Qwen3", seed=1)), "weight_version": "two"}
    )
    late = background.submit(engine.generate, PROMPT, max_new_tokens=2, ignore_eos=True)
    assert update.result()["success"] is True
    assert one.done() or one.result(timeout=1)
    assert [span["version"] for span in one.result()["meta_info"]["weight_versions"]] == ["default"]
    assert late.result()["meta_info"]["completion_tokens"] == 2


def test_an_update_is_finished_although_its_client_gave_up(
    engine: Served, checkpoints: Callable[..., Path], background: ThreadPoolExecutor
) -> None:
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    one = background.submit(engine.generate, PROMPT, max_new_tokens=25, ignore_eos=True)
    wait_for(lambda: engine.load("num_running_reqs") == 1, "it to run")
    update = {"model_path": str(checkpoints("Qwen3", seed=1)), "weight_version": "two"}
    with pytest.raises(httpx.ReadTimeout):
        engine.request("POST", "/update_weights_from_disk", update, timeout_s=0.1)
    assert one.result()["meta_info"]["weight_version"] == "default"
    wait_for(lambda: engine.get("/model_info").json()["weight_version"] == "two", "the update to be in")
    assert engine.generate(PROMPT, max_new_tokens=1)["meta_info"]["weight_version"] == "two"


def test_the_session_is_opened_and_closed_once(engine: Served, checkpoints: Callable[..., Path], bucket: Callable[..., str]) -> None:
    entry = bucket({NAME: weights(checkpoints("Qwen3", seed=1))[NAME]})
    outside = send(engine, entry, expect=400)
    assert outside["message"] == "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
    assert engine.post("/end_weight_update", {}, expect=400)["success"] is False
    engine.post("/begin_weight_update", {})
    assert "already open" in engine.post("/begin_weight_update", {}, expect=400)["message"]
    engine.post("/end_weight_update", {})
    send(engine, entry, expect=400)


def test_e10_what_does_not_fit_changes_nothing_and_an_unknown_name_is_passed_over(
    engine: Served, checkpoints: Callable[..., Path], bucket: Callable[..., str]
) -> None:
    new = weights(checkpoints("Qwen3", seed=1))
    before = sums(engine)
    engine.post("/begin_weight_update", {})
    good = {"model.norm.weight": new["model.norm.weight"]}
    wrong = (
        ({NAME: new[NAME][:-1]}, "arrived as float32[31, 64], the engine holds float32[32, 64]; nothing was copied"),
        ({NAME: new[NAME].astype(np.float64)}, "float64"),
        ({NAME: Column(np.zeros((32, 64), np.uint16), "bfloat16")}, "arrived as bfloat16"),
    )
    for tensors, says in wrong:
        assert says in send(engine, bucket(good | tensors), expect=400)["message"]
        engine.wait_log(says)
    assert sums(engine) == before
    assert send(engine, bucket(good | {"model.layers.9.unknown.weight": new[NAME]}))["success"] is True
    engine.wait_log("no parameter 'model.layers.9.unknown.weight'")
    changed = sums(engine)
    assert {name for name in changed if changed[name] != before[name]} == {"model.norm.weight"}


def test_e10_parts_are_copied_into_their_place_and_one_that_reaches_past_the_end_changes_nothing(
    engine: Served, checkpoints: Callable[..., Path], bucket: Callable[..., str]
) -> None:
    """The weight is a view of a fused one, whose next part would take what is too much."""
    new = weights(checkpoints("Qwen3", seed=1))
    before = sums(engine)
    engine.post("/begin_weight_update", {})
    parts = dict(cut(NAME, new[NAME], 3000))
    assert len(parts) == 3
    late = {f"{NAME}@1500": new[NAME].reshape(-1)[:600]}
    good = {"model.norm.weight": new["model.norm.weight"]}
    for wrong, says in (
        (late, "arrived as elements 1500 to 2100 of a float32, the engine holds float32[32, 64]; nothing was copied"),
        ({f"{NAME}@0": new[NAME].reshape(-1).astype(np.float64)}, "of a float64"),
        ({f"{NAME}@0": new[NAME]}, "no part of a tensor"),
    ):
        assert says in send(engine, bucket(good | wrong), expect=400)["message"]
    assert sums(engine) == before
    for part in parts.items():
        send(engine, bucket(dict([part])))
    changed = sums(engine)
    assert {name for name in changed if changed[name] != before[name]} == {NAME}
    assert changed[NAME] == hashlib.sha256(new[NAME].tobytes()).hexdigest()


def test_E3_a_weight_is_the_stores_only_if_every_byte_is(
    engine: Served, checkpoints: Callable[..., Path], bucket: Callable[..., str]
) -> None:
    new = weights(checkpoints("Qwen3", seed=1))
    parts = [bucket(dict([part])) for part in cut(NAME, new[NAME], 3000)]
    rest = bucket({name: tensor for name, tensor in new.items() if name != NAME})

    def equal(*entries: str) -> set[str]:
        reply = engine.post("/weights_checker", {"action": "headrace_store", "serialized_buckets": list(entries)})
        assert reply["success"] is True
        return set(reply["equal"])

    norms = {name for name in equal(*parts, rest)}
    engine.post("/begin_weight_update", {})
    for entry in (rest, *parts[:2]):
        send(engine, entry)
    assert equal(rest, *parts) == new.keys() - {NAME} and norms < new.keys(), "its last part is not in yet"
    send(engine, parts[2])
    assert equal(rest, *parts) == new.keys()
    assert equal(rest, *parts[:2]) == new.keys() - {NAME} == equal(rest, *parts[1:]), "not looked at to its end, or from its beginning"
    wrong = new["model.norm.weight"].copy()
    wrong.view(np.uint8)[-1] ^= 1
    send(engine, bucket({"model.norm.weight": wrong}))
    assert equal(rest, *parts) == new.keys() - {"model.norm.weight"}
    assert equal(bucket({"unknown": wrong})) == set()
    says = engine.post("/weights_checker", {"action": "headrace_store", "serialized_buckets": ["%"]}, expect=400)
    assert "not base64" in says["error"]["message"]


def test_b1_no_pickle_is_loaded_and_a_reference_must_be_one(engine: Served, bucket: Callable[..., str]) -> None:
    engine.post("/begin_weight_update", {})
    for load_format in (None, "direct", "flattened_bucket"):
        message = send(engine, "gASVBAAAAAAAAAB9Lg==", expect=400, load_format=load_format)["message"]
        assert "the embedded engine loads no pickles" in message and "headrace_store" in message
    assert "not base64" in send(engine, "%%%", expect=400)["message"]
    assert "needs key, size_bytes and location" in send(engine, base64.b64encode(b"{}").decode(), expect=400)["message"]
    gone = {"key": "run/never", "size_bytes": 1, "location": json.loads(base64.b64decode(bucket({"x": np.zeros(1)})))["location"]}
    assert "Gone" in send(engine, base64.b64encode(json.dumps(gone).encode()).decode(), expect=400)["message"]
    two = {"serialized_named_tensors": ["a", "b"], "load_format": "headrace_store"}
    assert "2 entries" in engine.post("/update_weights_from_tensor", two, expect=400)["message"]


def test_weights_whose_memory_is_released_take_no_update(engine: Served, checkpoints: Callable[..., Path]) -> None:
    engine.post("/release_memory_occupation", {"tags": ["weights"]})
    update = {"model_path": str(checkpoints("Qwen3", seed=1))}
    assert "resume_memory_occupation" in engine.post("/update_weights_from_disk", update, expect=400)["message"]


def test_a_path_that_holds_no_model_is_a_400(engine: Served, tmp_path: Path) -> None:
    before = sums(engine)
    for path in (tmp_path / "nowhere", tmp_path):
        reply = engine.post("/update_weights_from_disk", {"model_path": str(path)}, expect=400)
        assert reply["success"] is False and str(path) in reply["message"]
    assert sums(engine) == before
    assert str(tmp_path) not in engine.get("/model_info").json()["model_path"]


def test_broken_weights_fail_the_request_and_leave_no_trace_for_the_next(
    engine: Served, checkpoints: Callable[..., Path], bucket: Callable[..., str], background: ThreadPoolExecutor
) -> None:
    good = greedy(engine)
    name = "model.layers.0.self_attn.v_proj.weight"
    value = weights(checkpoints("Qwen3"))[name]
    engine.post("/begin_weight_update", {})
    send(engine, bucket({name: np.full_like(value, np.nan)}))
    assert "not finite" in engine.generate([*PROMPT, *range(20)], expect=500)["message"]
    send(engine, bucket({name: value}))
    # A longer neighbour makes attention reach over what the failed request left behind this one's tokens.
    engine.post("/slow_down", {"forward_sleep_time": 0.02})
    short = background.submit(greedy, engine)
    wait_for(lambda: engine.load("num_running_reqs") == 1, "the short one to have the first row")
    engine.generate([7] * 30, max_new_tokens=4, ignore_eos=True)
    assert short.result() == good
