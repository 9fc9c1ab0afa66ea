"""Process groups: weights that another process broadcasts. Rank 0 is the courier's own code, here in the test's process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from trainer.broadcast import SendingGroup

from .lab import Server, wait_for

Checkpoints = tuple[Path, Path]
JOINED = {"success": True, "message": "Succeeded to initialize custom process group."}
LEFT = {"success": True, "message": "Succeeded to destroy custom process group."}
UNKNOWN = {"success": False, "message": "The group to be destroyed does not exist."}
RECEIVED = {"success": True, "message": "Succeeded to update parameter online."}
NAME = "tests"


class Peer:
    """Rank 0 of a group with one engine, and the engine's calls."""

    def __init__(self, engine: Server) -> None:
        self.engine = engine
        self.group = self.listen()

    def listen(self) -> SendingGroup:
        return SendingGroup(NAME, 2, "gloo", "127.0.0.1", 60.0)

    def body(self, **more: Any) -> dict[str, Any]:
        about = {"master_address": "127.0.0.1", "master_port": self.group.port, "rank_offset": 1, "world_size": 2}
        return about | {"group_name": NAME, "backend": "gloo"} | more

    def join(self) -> Any:
        answer = self.engine.post("/init_weights_update_group", self.body())
        self.group.joined.result(60)
        return answer

    def leave(self, expect: int = 200) -> Any:
        return self.engine.post("/destroy_weights_update_group", {"group_name": NAME}, expect)

    def update(self, tensors: dict[str, torch.Tensor], expect: int = 200, **more: Any) -> Future[Any]:
        """Asked, not answered: the engine waits for the bytes."""
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()]
        body = {"names": list(tensors), "dtypes": dtypes, "shapes": [list(tensor.shape) for tensor in tensors.values()]}
        body |= {"group_name": NAME, "flush_cache": False}
        return self.engine.background.submit(self.engine.post, "/update_weights_from_distributed", body | more, expect)

    def send(self, tensor: torch.Tensor) -> None:
        staged: Future[torch.Tensor] = Future()
        staged.set_result(tensor)
        self.group.send(staged).result(60)


@pytest.fixture
def peer(engine: Server) -> Iterator[Peer]:
    made = Peer(engine)
    yield made
    made.group.close()
    if engine.alive():
        engine.request("POST", "/destroy_weights_update_group", {"group_name": NAME})


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])


def sums(engine: Server) -> str:
    return engine.post("/weights_checker", {})["per_engine_checksum"]


@pytest.fixture
def second(engine: Server, checkpoints: Checkpoints) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the second checkpoint; the engine has the first again afterwards."""
    yield load_file(checkpoints[1] / "model.safetensors")
    if engine.alive():
        engine.request("POST", "/end_weight_update", {})
        engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[0])})


@pytest.mark.parametrize("load_format", [None, "flattened_bucket", "tea"])
def test_L3_weights_that_are_broadcast_are_those_of_the_checkpoint(
    engine: Server, peer: Peer, second: dict[str, torch.Tensor], checkpoints: Checkpoints, load_format: str | None
) -> None:
    """One broadcast a tensor, in order, or one of all bytes. Any other load format means one a tensor."""
    assert peer.join() == JOINED
    engine.post("/begin_weight_update", {})
    answer = peer.update(second, load_format=load_format, weight_version="broadcast")
    if load_format == "flattened_bucket":
        peer.send(flat(second))
    else:
        for tensor in second.values():
            peer.send(tensor)
    assert answer.result(60) == RECEIVED | {"message": RECEIVED["message"] + " Weight version updated to broadcast."}
    engine.post("/end_weight_update", {})
    assert engine.info()["weight_version"] == "broadcast"
    received = sums(engine)
    engine.post("/update_weights_from_disk", {"model_path": str(checkpoints[1]), "weight_version": "default"})
    assert sums(engine) == received
    assert (peer.leave(), peer.leave(400)) == (LEFT, UNKNOWN)


def test_L3_a_broadcast_outside_a_session_is_refused_before_it_is_waited_for(
    engine: Server, peer: Peer, second: dict[str, torch.Tensor]
) -> None:
    peer.join()
    refused = peer.update(second, 400).result(60)
    words = "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
    assert refused == {"success": False, "message": words}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"group_name": "other"}, "Group other not in ['tests']. Please call `init_weights_update_group` first."),
        ({"dtypes": ["torch.float32"]}, "module 'torch' has no attribute 'torch.float32'"),
        ({"names": [], "dtypes": [], "shapes": []}, "Cannot create empty tensor bucket"),
        (
            {"names": ["a", "b"], "dtypes": ["bfloat16", "float32"], "shapes": [[1], [1]]},
            "Unaligned received tensor b: byte offset 2, dtype torch.float32",
        ),
        ({"shapes": [[-1]]}, "Negative dimension in received tensor a: torch.Size([-1])"),
        ({"shapes": []}, "zip() argument 3 is shorter than arguments 1-2"),
    ],
)
def test_what_cannot_be_received_is_refused_and_the_group_is_still_good(
    engine: Server, peer: Peer, second: dict[str, torch.Tensor], body: dict[str, Any], words: str
) -> None:
    peer.join()
    engine.post("/begin_weight_update", {})
    whole = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": NAME, "load_format": "flattened_bucket"}
    reply = engine.post("/update_weights_from_distributed", whole | body, expect=400)
    assert reply == {"success": False, "message": f"Failed to receive weights: {words}"}
    answer = peer.update({"lm_head.weight": second["lm_head.weight"]})
    peer.send(second["lm_head.weight"])
    assert answer.result(60) == RECEIVED


def test_E10_a_shape_that_does_not_fit_is_refused_and_a_name_that_is_unknown_is_not(
    engine: Server, peer: Peer, second: dict[str, torch.Tensor]
) -> None:
    """Unlike tensors by /update_weights_from_tensor, of which a real server dies."""
    peer.join()
    engine.post("/begin_weight_update", {})
    answer = peer.update({"lm_head.weight": torch.zeros(4)}, 400)
    peer.send(torch.zeros(4))
    assert answer.result(60)["message"].startswith("Failed to update parameter online: ")
    answer = peer.update({"tea": torch.zeros(4)})
    peer.send(torch.zeros(4))
    assert answer.result(60) == RECEIVED


def test_E4_a_peer_that_disappears_in_mid_broadcast_is_a_refusal_and_the_engine_lives(
    engine: Server, peer: Peer, second: dict[str, torch.Tensor]
) -> None:
    peer.join()
    engine.post("/begin_weight_update", {})
    answer = peer.update(second, 400)  # some milliseconds before the end of the group, or after it: the same
    peer.group.close()
    assert answer.result(60)["message"].startswith("Failed to receive weights: ")
    again = peer.update(second, 400).result(60)
    assert again["message"].startswith("Failed to receive weights: "), "the group is of no use any more"
    assert (peer.leave(), peer.leave(400)) == (LEFT, UNKNOWN)
    engine.post("/end_weight_update", {})
    assert len(engine.generate(max_new_tokens=2)["output_ids"]) == 2
    peer.group = peer.listen()
    assert peer.join() == JOINED, "the name is free again"


def test_E4_a_peer_that_listens_and_goes_away_before_the_group_is_made_is_a_refusal(engine: Server) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    held = [TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False, master_listen_fd=listener.detach())]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": NAME, "backend": "gloo"}
    answer = engine.background.submit(engine.post, "/init_weights_update_group", body, 400)
    wait_for(lambda: held[0].num_keys() > 1, "the engine to write where it listens")
    held.clear()
    assert answer.result(60)["message"].startswith("Failed to initialize custom process group: ")
    assert engine.post("/destroy_weights_update_group", {"group_name": NAME}, 400) == UNKNOWN
    assert len(engine.generate(max_new_tokens=2)["output_ids"]) == 2


def test_groups_that_cannot_be_joined_are_refused(engine: Server, peer: Peer) -> None:
    failed = "Failed to initialize custom process group: "
    nccl = engine.post("/init_weights_update_group", peer.body(backend="nccl"), 400)
    assert nccl == {"success": False, "message": failed + "Distributed package doesn't have NCCL built in."}
    tea = engine.post("/init_weights_update_group", peer.body(backend="tea"), 400)
    assert tea == {"success": False, "message": failed + "Unknown backend type tea."}
    assert peer.join() == JOINED
    twice = engine.post("/init_weights_update_group", peer.body(), 400)
    words = "The specified group name has already been created, please use a different group name."
    assert twice == {"success": False, "message": failed + words}
