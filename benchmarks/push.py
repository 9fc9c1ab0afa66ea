"""What a push costs: a model of 500 MB to two engines on this host, by each transport, beside a plain copy of as many bytes.

The pause is the time from an engine's gate shut to its gate open, all checks in it; what is copied before the gate is shut is apart. The
plain copy is made by as many processes at once as there are engines, between two buffers that are in memory. The model is a random Llama;
one tensor of it is larger than two buckets. Two versions of it are pushed in turn, through the driver's own Pusher. Figures are medians.

    python -m benchmarks.push [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import Aim, arguments, median, report
from driver.checkpoint_files import safetensors_head, tensor_shapes
from driver.launcher import LocalLauncher
from driver.life import ProcessSpec
from driver.push import Pusher
from driver.snapshot import Snapshot
from driver.transport import DiskTransport, SharedMemoryTransport, StoreTransport, Transports
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool, EngineSlot
from rollout.sglang import launch
from rollout.sglang.spec import SglangSpec, located
from rollout.version import Version
from store import EmbeddedStore, TensorForm
from store.pieces import cut

ROOT = Path(__file__).parents[1]
BASE = ROOT / "examples/sort_digits/base"  # its tokenizer
ENGINES = 2
BUCKET_BYTES = 64 << 20
CANARY = tuple((7 + 37 * i) % 259 for i in range(32))
COPY = "copy"
START_S = 300.0


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    vocab: int
    bucket_bytes: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """A tied Llama's, under Hugging Face's names."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            for part, rows in (("q", self.hidden), ("k", self.hidden // 2), ("v", self.hidden // 2), ("o", self.hidden)):
                yield f"{prefix}.self_attn.{part}_proj.weight", (rows, self.hidden)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{prefix}.mlp.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{prefix}.mlp.down_proj.weight", (self.hidden, self.intermediate)
        yield "model.norm.weight", (self.hidden,)

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "num_key_value_heads": self.hidden // 128,
            "head_dim": 64,
            "vocab_size": self.vocab,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        }


FULL = Shape(1024, 2816, 8, 32768, BUCKET_BYTES)  # 507 MB
QUICK = Shape(512, 1408, 3, 8192, BUCKET_BYTES // 8)  # 52 MB


class Model:
    """Two versions of a random model: a checkpoint of the first, snapshots of both in the store."""

    def __init__(self, shape: Shape, directory: Path, store: EmbeddedStore) -> None:
        self.path = directory
        self.store = store
        directory.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(BASE / name, directory)
        (directory / "config.json").write_text(json.dumps(shape.config()))
        random = np.random.default_rng(0)
        tensors = {
            name: np.ones(form, np.float32) if len(form) == 1 else random.normal(0.0, 0.02, form).astype(np.float32)
            for name, form in shape.tensors()
        }
        self.size_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.snapshots = []
        for version in (0, 1):
            self._save(tensors)
            self.snapshots.append(self._snapshot(version, tensors, shape.bucket_bytes))
            for tensor in tensors.values():
                tensor *= np.float32(1.01)

    def _save(self, tensors: Mapping[str, np.ndarray]) -> None:
        head, offsets = safetensors_head([(name, TensorForm("float32", tensor.shape), tensor.nbytes) for name, tensor in tensors.items()])
        with (self.path / "model.safetensors").open("wb") as file:
            file.write(head)
            for name, tensor in tensors.items():
                assert file.tell() == offsets[name]
                file.write(tensor.data)

    def _snapshot(self, version: int, tensors: Mapping[str, np.ndarray], bucket_bytes: int) -> Snapshot:
        """As the trainer makes one; the log-probs are transformers'."""
        buckets: list[dict[str, Any]] = [{}]
        for name, tensor in tensors.items():
            if tensor.nbytes > bucket_bytes:
                buckets += [dict([part]) for part in cut(name, tensor, bucket_bytes)] + [{}]
            else:
                if sum(part.nbytes for part in buckets[-1].values()) + tensor.nbytes > bucket_bytes:
                    buckets.append({})
                buckets[-1][name] = tensor
        refs = [self.store.put(f"push/weights/0/{version}/{i}", bucket) for i, bucket in enumerate(bucket for bucket in buckets if bucket)]
        sums = {name: hashlib.sha256(tensor.data).hexdigest() for name, tensor in tensors.items()}
        forms = {name: TensorForm("float32", tensor.shape) for name, tensor in tensors.items()}
        return Snapshot("push", 0, version, tuple(ref.to_wire() for ref in refs), sums, CANARY, self._log_probs(), forms)

    def _log_probs(self) -> tuple[float, ...]:
        import torch
        from transformers import AutoModelForCausalLM

        ids = torch.tensor([CANARY])
        with torch.no_grad():
            log_probs = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)(ids).logits[0].log_softmax(-1)
        return tuple(log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())


class TimedPool(EnginePool):
    """Notes when a gate is shut and when it is open again."""

    def __init__(self) -> None:
        super().__init__()
        self.shut_at: dict[str, float] = {}
        self.pauses: list[float] = []

    def shut(self, slot: EngineSlot, reason: str) -> None:
        self.shut_at[slot.engine_id] = time.monotonic()
        super().shut(slot, reason)

    def open(self, slot: EngineSlot, version: Version) -> None:
        super().open(slot, version)
        self.pauses.append(time.monotonic() - self.shut_at[slot.engine_id])


class TimedClient(EngineClient):
    """Notes how long its calls take."""

    def __init__(self, url: str, http: Any) -> None:
        super().__init__(url, http)
        self.seconds: dict[str, float] = defaultdict(float)

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float) -> Any:
        began = time.monotonic()
        try:
            return await super()._call(method, path, body, deadline_s)
        finally:
            self.seconds[path] += time.monotonic() - began


@dataclass
class Seen:
    """Of every push: seconds paused and before the first gate was shut, seconds by call, bytes by system calls over bytes sent."""

    pause: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    written: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)


class Engines:
    """Two engines on the model, and pushes to both at once."""

    def __init__(self, model: Model, pids: list[int], clients: list[TimedClient], push_directory: Path) -> None:
        self._model = model
        self._pids = pids
        self._clients = clients
        self._pushes = 0
        shapes = tensor_shapes(model.path)
        self._transports = {
            "store": StoreTransport(shapes),
            "tensor": SharedMemoryTransport(push_directory, shapes),
            "disk": DiskTransport(push_directory, model.path, shapes),
        }

    async def push(self, transport: str, seen: Seen) -> None:
        """The other version than the one they hold. The slots are new, so every attempt begins as a first one does."""
        self._pushes += 1
        pool = TimedPool()
        for number, client in enumerate(self._clients):
            client.seconds.clear()
            pool.register(f"engine-{number}", client, self._pushes, 4, await client.capabilities())

        async def replace(slot: EngineSlot, reason: str) -> None:
            raise RuntimeError(f"{slot.engine_id}: {reason}")

        makers: dict[str, Callable[[], Any]] = {name: partial(lambda made: made, made) for name, made in self._transports.items()}
        transports = Transports("disk" if transport == "disk" else "auto", makers)  # type: ignore[arg-type]
        pusher = Pusher(pool, deadline_s=120.0, logprob_tolerance=1e-3, replace=replace, transports=transports)
        for client in self._clients:
            client.seconds.clear()
        began, written, read = time.monotonic(), _written([os.getpid()]), _read(self._pids)
        outcomes = await pusher.push_all(self._model.snapshots[self._pushes % 2])
        assert all(outcome.verified for outcome in outcomes), outcomes
        sent = len(self._clients) * self._model.size_bytes
        seen.pause += pool.pauses
        seen.before.append(min(pool.shut_at.values()) - began)
        seen.written.append((_written([os.getpid()]) - written) / sent)
        seen.read.append((_read(self._pids) - read) / sent)
        for client in self._clients:
            for path, seconds in client.seconds.items():
                seen.calls[path].append(seconds)


def _written(pids: list[int]) -> int:
    return sum(psutil.Process(pid).io_counters().write_chars for pid in pids)


def _read(pids: list[int]) -> int:
    """Of the processes and what they started."""
    family = [process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]
    return sum(process.io_counters().read_chars for process in family)


class Copiers:
    """As many processes as there are engines, each of which copies as many bytes when told to, all at once."""

    def __init__(self, size_bytes: int) -> None:
        argv = [sys.executable, "-P", "-m", "benchmarks.push", COPY, str(size_bytes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._processes = [
            subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(ENGINES)
        ]
        for process in self._processes:
            self._line(process)

    def copy(self) -> list[float]:
        for process in self._processes:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
        return [float(self._line(process)) for process in self._processes]

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout
        return process.stdout.readline()

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def copier(size_bytes: int) -> None:
    source, target = np.ones(size_bytes, np.uint8), np.zeros(size_bytes, np.uint8)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        np.copyto(target, source)
        print(time.monotonic() - began, flush=True)


def embedded_spec(model: Model, index: int, log: Path) -> ProcessSpec:
    def build(_incarnation: int, port: int) -> list[str]:
        flags = ["--model-path", str(model.path), "--port", str(port), "--context-length", "128", "--max-running-requests", "4"]
        return [sys.executable, "-P", "-m", "rollout.engine", *flags, "--threads", "1"]

    return ProcessSpec("embedded", index, build, log, env={"PYTHONPATH": str(ROOT)}, heartbeat_s=30.0, start_deadline_s=START_S)


def sglang_spec(spec: SglangSpec, model: Model, index: int, log: Path) -> ProcessSpec:
    def build(_incarnation: int, port: int) -> list[str]:
        return launch.command(spec, launch.Server(model.path, port, index, 128, 4, 4, 0, "float32"))

    return ProcessSpec("sglang", index, build, log, env=launch.environment(spec, 1), heartbeat_s=30.0, start_deadline_s=START_S)


async def measured(model: Model, specs: list[ProcessSpec], transport: str, rounds: int, copies: list[float], directory: Path) -> list[Seen]:
    """Pushes by `transport` and by disk, and plain copies, in turn, so that the machine's moods fall on all three."""
    launcher = LocalLauncher(lambda _event: None)
    copiers = Copiers(model.size_bytes)
    seen, disk, warm_up = Seen(), Seen(), Seen()
    try:
        processes = [await launcher.start(spec) for spec in specs]
        for process in processes:
            await process.wait_ready(START_S)
        async with make_http() as http:
            clients = [TimedClient(process.url, http) for process in processes]
            engines = Engines(model, [process.pid for process in processes], clients, directory / "push")
            if specs[0].role == "sglang":
                for client in clients:
                    await client.freeze_gc()
            for kind in (transport, "disk"):
                await engines.push(kind, warm_up)
            copiers.copy()
            for _ in range(rounds):
                copies += copiers.copy()
                await engines.push(transport, seen)
                await engines.push("disk", disk)
    finally:
        copiers.close()
        await launcher.stop(10.0)
    return [seen, disk]


def figures_of(kind: str, seen: Seen, disk: Seen, copy_s: float) -> dict[str, float]:
    pause = median(seen.pause)
    calls = {path: median(seconds) for path, seconds in seen.calls.items()}
    named = {"/update_weights_from_tensor": "load", "/weights_checker": "checksums", "/generate": "fixed_sequence"}
    parts = {f"{kind}_pause_{name}_s": calls.get(path, 0.0) for path, name in named.items()}
    return {
        f"{kind}_pause_s": pause,
        f"{kind}_pause_over_copy": pause / copy_s,
        f"{kind}_pause_over_disk": pause / median(disk.pause),
        f"{kind}_before_gate_s": median(seen.before),
        f"{kind}_disk_before_gate_s": median(disk.before),
        **parts,
        f"{kind}_pause_rest_s": pause - sum(parts.values()),
        f"{kind}_written_by_driver_per_byte_sent": median(seen.written),
        f"{kind}_read_by_engines_per_byte_sent": median(seen.read),
    }


@contextmanager
def a_store(capacity_bytes: int) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(Path(f"/dev/shm/headrace-bench-{time.time_ns():x}"), capacity_bytes)
    try:
        yield store
    finally:
        store.remove()


def main() -> int:
    if sys.argv[1:2] == [COPY]:
        copier(int(sys.argv[2]))
        return 0
    options = arguments(__doc__)
    logging.disable(logging.WARNING)  # that a release frees nothing on a CPU, with each new pool
    rounds = 3 if options.quick else 7
    figures: dict[str, float] = {}
    aims: dict[str, Aim] = {"embedded_pause_over_copy": ("<=", 1.5)}
    with tempfile.TemporaryDirectory() as name, a_store(3 << 30 if not options.quick else 1 << 28) as store:
        directory = Path(name)
        model = Model(QUICK if options.quick else FULL, directory / "model", store)
        kinds: dict[str, tuple[str, list[ProcessSpec]]] = {
            "embedded": ("store", [embedded_spec(model, i, directory / f"embedded-{i}.log") for i in range(ENGINES)])
        }
        try:
            spec = located(SglangSpec(), Path.cwd())
            kinds["sglang"] = ("tensor", [sglang_spec(spec, model, i, directory / f"sglang-{i}.log") for i in range(ENGINES)])
            aims["sglang_pause_over_copy"] = ("<=", 2.5)
        except ValueError as error:
            print(f"Left out: two real servers. {error}")
        figures["model_mb"] = model.size_bytes / 1e6
        for kind, (transport, specs) in kinds.items():
            copies: list[float] = []
            seen, disk = asyncio.run(measured(model, specs, transport, rounds, copies, directory))
            figures[f"{kind}_copy_s"] = median(copies)
            figures |= figures_of(kind, seen, disk, median(copies))
    return report("push: a model to two engines on this host", figures, aims, options, ["torch", "aiohttp", "httpx", "numpy"])


if __name__ == "__main__":
    sys.exit(main())
