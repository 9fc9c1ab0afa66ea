"""The courier by itself: what it refuses, and what it says while it waits for an engine."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from store import EmbeddedStore
from trainer.address import address_towards
from trainer.broadcast import KEPT, SendingGroup, Stage
from trainer.courier import Courier, build_app
from trainer.courier_wire import CourierSpec

OPEN = {"group": "g", "size": 2, "backend": "auto", "engine_device": "cpu", "address": None, "engine_host": "127.0.0.1", "timeout_s": 0.5}


def client_on(device: str) -> TestClient:
    return TestClient(build_app(Courier(3, torch.device(device))))


@pytest.mark.parametrize(
    ("here", "engine", "wanted", "expected"),
    [
        ("cpu", "cpu", "auto", "gloo"),
        ("cpu", "cuda", "auto", "gloo"),
        ("cuda", "cpu", "auto", "gloo"),
        ("cuda", "cuda", "auto", "nccl"),
        ("cuda", "cuda", "gloo", "gloo"),
        ("cuda", "cpu", "nccl", "the engine computes on the CPU; leave it at auto"),
        ("cpu", "cuda", "nccl", "the trainer computes on the CPU; leave it at auto"),
    ],
)
def test_nccl_is_for_gpus_at_both_ends(here, engine, wanted, expected, monkeypatch):
    joined: list[str] = []
    monkeypatch.setattr("trainer.broadcast.process_group", lambda backend, *_: joined.append(backend))
    with client_on(here) as client:
        reply = client.post("/v1/open", json=OPEN | {"engine_device": engine, "backend": wanted})
        if expected in ("gloo", "nccl"):
            assert reply.json()["backend"] == expected and reply.json()["address"] == "127.0.0.1"
            client.post("/v1/join", json={"group": "g"})
            assert joined == [expected]
        else:
            assert reply.status_code == 400 and expected in reply.json()["detail"]


def test_the_next_bucket_is_made_ready_while_one_is_sent(store, monkeypatch):
    refs = [store.put(f"r/w/{number}", {"a": np.ones(3, np.float32)}).to_wire() for number in range(2)]
    first, then = ({"number": number, "refs": [ref], "names": ["a"]} for number, ref in enumerate(refs))
    staged: list[list[tuple[str, int]]] = []
    courier = Courier(1, torch.device("cpu"))
    monkeypatch.setattr("trainer.broadcast.process_group", lambda *_: None)
    monkeypatch.setattr("trainer.broadcast.broadcast", lambda *_: staged.append(list(courier._stage._made)))
    with TestClient(build_app(courier)) as client:
        client.post("/v1/open", json=OPEN)
        assert client.post("/v1/send", json={"group": "g", "push": "p", "bucket": first, "then": then}).status_code == 200
        assert staged == [[("p", 0), ("p", 1)]] and client.get("/health").json()["progress"] == 1
        client.post("/v1/forget", json={"push": "p"})
        assert not courier._stage._made


def test_an_engine_that_does_not_come_is_said_after_the_groups_time_out_and_health_answers_meanwhile():
    with client_on("cpu") as client:
        assert client.post("/v1/open", json=OPEN).status_code == 200
        assert client.post("/v1/open", json=OPEN).status_code == 409
        assert client.get("/health").json() == {"role": "courier", "incarnation": 3, "groups": 1, "progress": 0}
        late = client.post("/v1/join", json={"group": "g"})
        assert late.status_code == 502 and late.json()["detail"].startswith("the engine did not join: ")
        assert client.get("/health").json()["groups"] == 0
        assert client.post("/v1/join", json={"group": "g"}).status_code == 404
        assert client.post("/v1/close", json={"group": "g"}).status_code == 200, "idempotent"
        assert client.post("/v1/open", json=OPEN | {"tea": 1}).json()["detail"] == "body.tea: unknown field"


def test_an_address_that_is_not_this_hosts_is_refused_with_the_key_to_set():
    with client_on("cpu") as client:
        reply = client.post("/v1/open", json=OPEN | {"address": "203.0.113.9"})
        assert reply.status_code == 400 and "set push.address to an address of this host" in reply.json()["detail"]


@pytest.mark.parametrize(("host", "expected"), [("localhost", "127.0.0.1"), ("127.0.0.5", "127.0.0.1"), ("::1", "::1")])
def test_towards_this_host_the_address_is_loopback(host, expected):
    assert address_towards(host) == expected


def pair(timeout_s: float) -> tuple[SendingGroup, Any]:
    """Rank 0 as the courier has it, and rank 1 as the engine has it."""
    from torch.distributed import TCPStore

    from trainer.broadcast import process_group

    group = SendingGroup("pair", 2, "gloo", "127.0.0.1", timeout_s)
    store = TCPStore("127.0.0.1", group.port, 2, False)
    peer = process_group("gloo", store, "pair", 1, 2, "127.0.0.1", 30.0)
    group.joined.result(30)
    return group, peer


def receive(peer: Any, size: int) -> Future[torch.Tensor]:
    from trainer.broadcast import broadcast

    received: Future[torch.Tensor] = Future()

    def run() -> None:
        tensor = torch.empty(size, dtype=torch.uint8)
        try:
            broadcast(peer, tensor)
            received.set_result(tensor)
        except RuntimeError as error:
            received.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return received


@pytest.fixture
def store(tmp_path):
    made = EmbeddedStore(tmp_path / "store", 1 << 20)
    yield made
    made.remove()


def test_B1_a_bucket_is_sent_flat_in_the_order_asked_for_and_staged_once(store):
    columns = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(3, dtype=np.uint8), "c": np.ones(2, np.float32)}
    refs = [store.put("r/w/0", {"a": columns["a"], "b": columns["b"]}), store.put("r/w/1", {"c": columns["c"]})]
    stage = Stage(torch.device("cpu"))
    staged = stage.get("push", 0, refs, ["c", "a", "b"])
    assert stage.get("push", 0, refs, ["c", "a", "b"]) is staged
    group, peer = pair(30.0)
    received = receive(peer, 8 + 24 + 3)
    group.send(staged).result(30)
    assert received.result(30).numpy().tobytes() == columns["c"].tobytes() + columns["a"].tobytes() + columns["b"].tobytes()
    group.close()


def test_E10_a_tensor_that_was_cut_over_several_buckets_is_sent_as_one(store):
    whole = np.arange(7, dtype=np.float32)
    refs = [store.put("r/w/0", {"d@0": whole[:4]}), store.put("r/w/1", {"d@4": whole[4:]})]
    staged = Stage(torch.device("cpu")).get("push", 0, refs, ["d"]).result(30)
    assert staged.numpy().tobytes() == whole.tobytes()


def test_B2_the_courier_keeps_few_buckets_and_none_of_a_push_that_is_over(store):
    ref = store.put("r/w/0", {"a": np.ones(3, np.float32)})
    stage = Stage(torch.device("cpu"))
    for number in range(KEPT + 2):
        stage.get("push", number, [ref], ["a"]).result(30)
    assert [number for _, number in stage._made] == list(range(2, KEPT + 2))
    stage.get("other", 0, [ref], ["a"])
    stage.forget("push")
    assert list(stage._made) == [("other", 0)]


def test_E4_a_bucket_that_is_gone_ends_the_group_and_so_frees_the_engine_that_waits_for_it(store):
    ref = store.put("r/w/0", {"a": np.ones(3, np.float32)})
    store.free([ref])
    group, peer = pair(30.0)
    received = receive(peer, 12)
    with pytest.raises(RuntimeError, match="r/w/0"):
        group.send(Stage(torch.device("cpu")).get("push", 0, [ref], ["a"])).result(30)
    with pytest.raises(RuntimeError, match=r"losed|reset by peer"):
        received.result(30)
    with pytest.raises(RuntimeError, match="has ended"):
        group.send(Future()).result(30)
    group.close()


def test_E6_an_engine_that_takes_nothing_holds_a_group_no_longer_than_its_time_out():
    group, peer = pair(3.0)
    staged: Future[torch.Tensor] = Future()
    staged.set_result(torch.zeros(1 << 20, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="Timed out"):
        group.send(staged).result(30)
    with pytest.raises(RuntimeError):
        receive(peer, 1 << 20).result(30)


def test_a_spec_that_is_not_one_is_refused_in_words(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"port": 0, "tea": 1}')
    with pytest.raises(ValueError, match="tea: unknown field"):
        CourierSpec.read(path)
