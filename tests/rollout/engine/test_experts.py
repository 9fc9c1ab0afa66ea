"""Where the tokens of a mixture of experts went: as the model routed them, in the answer or in the store, and only when asked for."""

from __future__ import annotations

import base64
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
import transformers

from rollout.extras import smallest
from store import EmbeddedStore, Ref, default_root
from store.schema import validate
from tests.rollout.engine.conftest import Served, wait_for

LAYERS, EXPERTS, CHOSEN = 2, 8, 2
SHAPE: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
ASKED = {"return_routed_experts": True}


@pytest.fixture(scope="module")
def model(checkpoints: Callable[..., Path]) -> Path:
    return checkpoints("Qwen3Moe", **SHAPE)


@pytest.fixture(scope="module")
def routed(start: Callable[..., Served], model: Path) -> Served:
    return start(model, "--enable-return-routed-experts", "--max-running-requests", "4", "--context-length", "128")


@pytest.fixture(scope="module")
def expected(model: Path) -> Callable[[list[int]], np.ndarray]:
    return routed_by(model)


def routed_by(model: Path) -> Callable[[list[int]], np.ndarray]:
    """ids → the experts that transformers sends them to, sorted [len(ids) − 1, layers, k]."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def of(ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = reference(torch.tensor([ids]), output_router_logits=True).router_logits
        return np.sort(np.stack([layer.topk(CHOSEN).indices.numpy() for layer in logits], axis=1)[:-1], axis=-1)

    return of


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(default_root(f"test-{uuid.uuid4().hex[:12]}"), 1 << 20)
    yield made
    made.remove()


def place(store: EmbeddedStore, key: str) -> dict[str, Any]:
    return ASKED | {"headrace_extras": {"location": store.location, "key": key}}


def decoded(answer: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4").reshape(-1, LAYERS, CHOSEN)


@pytest.mark.parametrize("flags", [(), ("--deterministic",)], ids=["batched", "deterministic"])
def test_an_answer_says_where_each_token_but_the_last_went_as_sglang_says_it(
    start: Callable[..., Served], model: Path, expected: Any, flags: tuple[str, ...]
) -> None:
    """Many at once, of different lengths: what a request leaves in the cache is not taken for its neighbour's."""
    engine = start(model, "--enable-return-routed-experts", "--max-running-requests", "3", "--context-length", "128", *flags)
    answers: dict[int, Any] = {}

    def ask(number: int) -> None:
        sampling = {"max_new_tokens": 4 + 3 * (number % 4), "ignore_eos": True}
        answers[number] = engine.generate([3 + number, 9, *range(20, 20 + number)], top=ASKED, **sampling)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for number in range(9):
        ids = [3 + number, 9, *range(20, 20 + number), *answers[number]["output_ids"]]
        assert np.array_equal(np.sort(decoded(answers[number]), axis=-1), expected(ids)), number
    from_third = engine.generate([5, 6, 7], top=ASKED | {"routed_experts_start_len": 2}, max_new_tokens=4, ignore_eos=True)
    assert decoded(from_third).shape == (3 + 4 - 1 - 2, LAYERS, CHOSEN)
    refused = engine.generate([5, 6, 7], 400, top=ASKED | {"routed_experts_start_len": 4}, max_new_tokens=4)
    assert "routed_experts_start_len is 4" in refused["error"]["message"]


def test_asked_for_by_key_they_are_in_the_store_and_the_answer_has_their_reference(
    routed: Served, store: EmbeddedStore, expected: Any
) -> None:
    answer = routed.generate([5, 6, 7], top=place(store, "run/extras/a"), max_new_tokens=8, ignore_eos=True)
    found = answer["meta_info"]["routed_experts"]
    assert found["shape"] == [10, LAYERS, CHOSEN] and len(orjson.dumps(found)) < 300
    with store.open(Ref.from_wire(found)) as lease:
        validate("extras", lease)
        routes = lease["routed_experts"]
        assert routes.dtype == np.uint8
        assert np.array_equal(np.sort(routes, axis=-1), expected([5, 6, 7, *answer["output_ids"]]))
    twice = routed.generate([5, 6, 7], top=place(store, "run/extras/a"), max_new_tokens=8)["meta_info"]["routed_experts"]
    assert "in the store already" in twice["error"]
    nowhere = routed.generate([5], top=ASKED | {"headrace_extras": {"location": "tmpfs:/dev/shm/nowhere", "key": "k"}}, max_new_tokens=8)
    assert "there is no store" in nowhere["meta_info"]["routed_experts"]["error"] and len(nowhere["output_ids"]) > 0
    full = EmbeddedStore(default_root(f"test-{uuid.uuid4().hex[:12]}"), 4096)
    full.put("taken", {})
    assert "capacity" in routed.generate([5], top=place(full, "k"), max_new_tokens=8)["meta_info"]["routed_experts"]["error"]
    full.remove()
    batch = routed.generate([[5], [6]], 400, top=place(store, "k"), max_new_tokens=4)
    assert "one key, for one prompt" in batch["error"]["message"]


def test_in_a_stream_only_the_last_chunk_has_them_and_an_aborted_request_leaves_nothing(routed: Served, store: EmbeddedStore) -> None:
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": sampling, "stream": True} | place(store, "run/extras/s")
    with routed.client.stream("POST", routed.url + "/generate", content=orjson.dumps(body), timeout=20) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert [("routed_experts" in event["meta_info"]) for event in events] == [False] * (len(events) - 1) + [True]
    store.free([Ref.from_wire(events[-1]["meta_info"]["routed_experts"])])
    routed.post("/slow_down", {"forward_sleep_time": 0.02})
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}, "stream": True}
    content = orjson.dumps(body | place(store, "run/extras/x"))
    with routed.client.stream("POST", routed.url + "/generate", content=content, timeout=20) as response:
        next(response.iter_lines())
    routed.post("/slow_down", {"forward_sleep_time": 0.0})
    wait_for(lambda: routed.load("num_running_reqs") == 0, "the request to end")
    assert store.keys() == []


def test_an_engine_that_was_not_told_to_keep_them_leaves_them_out_and_a_dense_model_has_none(
    start: Callable[..., Served], model: Path, routed: Served, store: EmbeddedStore
) -> None:
    said = routed.get("/server_info").json()
    assert said["enable_return_routed_experts"] is True and said["headrace_extras"] is True
    plain = start(model)
    assert plain.get("/server_info").json()["headrace_extras"] is False
    for asked in (ASKED, place(store, "k")):
        assert "routed_experts" not in plain.generate([5, 6], top=asked, max_new_tokens=4)["meta_info"]
    assert store.keys() == []


def test_the_smallest_dtype_that_holds_the_numbers_is_taken() -> None:
    for most, dtype in ((0, np.uint8), (255, np.uint8), (256, np.uint16), (65535, np.uint16), (65536, np.int32)):
        given = np.full((2, 1, 1), most, np.int32)
        assert smallest(given).dtype == dtype and np.array_equal(smallest(given), given)
    assert smallest(np.full((1, 1, 1), -1, np.int32)).dtype == np.int32 and smallest(np.zeros((0, 2, 2), np.int32)).dtype == np.uint8
