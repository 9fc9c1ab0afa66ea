"""A real SGLang server for tests, on the demo's model, and an oracle that computes what it should say."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from driver.life import CHILD, free_port
from driver.snapshot import Snapshot
from rollout.sglang import launch
from rollout.sglang.spec import SglangSpec, located
from store import EmbeddedStore, TensorForm
from store.pieces import cut

BASE = Path(__file__).parents[1] / "examples/sort_digits/base"
CONTEXT = 256
START_S = 300.0  # a quarter of a minute of computing, on a machine that may be busy


def sglang_here() -> SglangSpec:
    """Skips the test where there is no SGLang."""
    try:
        return located(SglangSpec(device="cpu"), Path.cwd())
    except ValueError as error:
        pytest.skip(str(error))


class Server:
    """One server, started as the driver starts it. Ends with this process."""

    def __init__(self, spec: SglangSpec, directory: Path) -> None:
        port = free_port()
        told = launch.Server(BASE, port, 0, CONTEXT, 16, 4, 0, "float32")
        self.url = f"http://127.0.0.1:{port}"
        self.log_path = directory / f"sglang-{port}.log"
        argv = [sys.executable, "-I", "-S", "-c", CHILD, str(os.getpid()), *launch.command(spec, told)]
        with self.log_path.open("wb") as log:
            environment = os.environ | launch.environment(spec, 1)
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait(self) -> None:
        until = time.monotonic() + START_S
        while True:
            try:
                if httpx.get(self.url + "/health", trust_env=False, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None and time.monotonic() < until, self.log_path.read_text()[-3000:]
            time.sleep(0.2)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


class Weights:
    """Version `version` of the demo's model: the base, a little of it changed."""

    def __init__(self, version: int, size: float = 0.02) -> None:
        random = np.random.default_rng(version)
        self.version = version
        self.tensors = {
            name: (tensor * (1 + size * version * random.normal(size=tensor.shape))).astype(tensor.dtype)
            for name, tensor in load_file(BASE / "model.safetensors").items()
        }

    def log_probs(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Of the tokens 1.. of `ids`, each given those before, by transformers."""
        model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        model.load_state_dict({name: torch.from_numpy(tensor) for name, tensor in self.tensors.items()}, strict=False)
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)])).logits[0] / temperature
        return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(list(ids))[1:, None])[:, 0].tolist()

    def snapshot(self, store: EmbeddedStore, buckets: int = 3, cut_bytes: int | None = None) -> Snapshot:
        """As the trainer makes one. With `cut_bytes` every tensor has buckets of its own, each of at most so many bytes."""
        names = list(self.tensors)
        refs = []
        if cut_bytes is not None:
            parts = [part for name in names for part in cut(name, self.tensors[name], cut_bytes)]
            refs = [store.put(f"t/weights/0/{self.version}/{i}", dict([part])).to_wire() for i, part in enumerate(parts)]
            buckets = 0
        for number in range(buckets):
            columns = {name: self.tensors[name] for name in names[number::buckets]}
            refs.append(store.put(f"t/weights/0/{self.version}/{number}", columns).to_wire())
        sums = {name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in self.tensors.items()}
        canary = tuple((7 + 37 * i) % 259 for i in range(32))
        forms = {name: TensorForm(tensor.dtype.name, tensor.shape) for name, tensor in self.tensors.items()}
        return Snapshot("t", 0, self.version, tuple(refs), sums, canary, tuple(self.log_probs(canary)), forms)
