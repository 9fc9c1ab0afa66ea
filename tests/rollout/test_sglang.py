"""What SGLang is told and handed, without SGLang: the pickle that names shared memory, the command line, where it is looked for."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import pickle
import secrets
import sys
from io import BytesIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout.sglang import launch, payload, spec
from rollout.sglang.spec import SglangSpec, located

BASE = Path(__file__).parents[2] / "examples/sort_digits/base"
# All that SGLang's list of allowed names must hold for us; 0.5.23 has each.
ALLOWED = {
    ("torch", "UntypedStorage"),
    ("torch", "Tensor"),
    ("torch", "Size"),
    ("torch", "uint8"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"),
}
TENSORS = {
    "wide": ("float32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "narrow": ("bfloat16", np.array([0x3F80, 0xC000, 0x4040], np.uint16)),
    "later": ("float32", np.array([[7.5]], np.float32)),
}


class Allowing(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED
        if name == "FlattenedTensorMetadata":
            return lambda *values: SimpleNamespace(**dict(zip(("name", "shape", "dtype", "start", "end", "size"), values, strict=True)))
        return super().find_class(module, name)


@pytest.fixture
def shared():
    """A bucket's file under /dev/shm, and its payload."""
    name = f"headrace-test-{os.getpid()}-{secrets.token_hex(4)}"
    placed, length = payload.place([(key, dtype, array.shape, array.nbytes) for key, (dtype, array) in TENSORS.items()])
    path = Path("/dev/shm") / name
    with path.open("wb") as file:
        file.write(payload.header())
        for entry in placed:
            file.seek(payload.HEADER_BYTES + entry.start)
            file.write(TENSORS[entry.name][1].tobytes())

    def entries() -> list[str]:
        link = path.with_name(f"{name}@{secrets.token_hex(4)}")
        os.link(path, link)
        return payload.bucket_payload(link.name, placed, length, ranks=2)

    yield path, entries
    for left in path.parent.glob(f"{name}*"):
        left.unlink()


def _receive(entry: str, pipe: Any) -> None:
    """A process like the server's: torch maps what the pickle names."""
    import torch

    bucket = Allowing(BytesIO(base64.b64decode(entry))).load()
    whole = bucket["flattened_tensor"]
    found = {}
    for at in bucket["metadata"]:
        tensor = whole[at.start : at.end].view(at.dtype).reshape(at.shape)
        assert isinstance(at.shape, torch.Size) and at.size == at.end - at.start
        found[at.name] = (str(at.dtype), tensor.float().tolist())
    pipe.send(found)
    del whole, bucket


def test_B1_torch_maps_a_bucket_that_was_named_without_torch_and_leaves_the_file_alone(shared):
    path, make_entries = shared
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    for _ in range(2):  # a second engine, or a retry
        entries = make_entries()
        assert len(entries) == 2 and entries[0] == entries[1], "one entry a rank"
        process = multiprocessing.get_context("spawn").Process(target=_receive, args=(entries[0], theirs))
        process.start()
        assert ours.poll(60)
        assert ours.recv() == {
            "wide": ("torch.float32", [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
            "narrow": ("torch.bfloat16", [1.0, -2.0, 3.0]),
            "later": ("torch.float32", [[7.5]]),
        }
        process.join(30)
        assert process.exitcode == 0
    assert path.exists() and path.read_bytes()[payload.HEADER_BYTES :][:24] == TENSORS["wide"][1].tobytes()


def test_a_tensor_starts_where_its_dtype_may_be_read():
    placed, length = payload.place([("a", "bfloat16", (3,), 6), ("b", "float32", (1,), 4)])
    assert [entry.start for entry in placed] == [0, 64] and length == 68


SERVER = launch.Server(BASE, 1234, 2, 64, 128, 16, 7, "float32")


def flags_of(argv: list[str]) -> dict[str, str | None]:
    rest = argv[4:]
    return {
        flag: value if not value.startswith("--") else None for flag, value in zip(rest, [*rest[1:], "--"], strict=True) if flag[:2] == "--"
    }


def test_a_server_on_a_cpu_gets_the_shims_and_the_plain_implementations():
    chosen = SglangSpec(python=Path("/v/bin/python"), device="cpu", tp=2, args=["--max-total-tokens", "99"])
    argv = launch.command(chosen, SERVER)
    assert argv[:4] == ["/v/bin/python", "-P", "-m", "sglang.launch_server"]
    flags = flags_of(argv)
    told = {
        "--port": "1234",
        "--dtype": "float32",
        "--context-length": "64",
        "--random-seed": "7",
        "--stream-interval": "16",
        "--tp-size": "2",
    }
    assert told.items() <= flags.items() and flags["--attention-backend"] == "torch_native" and "--sleep-on-idle" in flags
    assert argv[-2:] == ["--max-total-tokens", "99"], "the user's flags come last, so they win"
    environment = launch.environment(chosen, 1)
    assert environment["PYTHONPATH"] == str(launch.SHIMS) and environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_a_server_on_a_gpu_is_stock_with_the_memory_saver_and_its_own_devices():
    chosen = SglangSpec(python=Path("/v/bin/python"), device="cuda", tp=2)
    flags = flags_of(launch.command(chosen, SERVER))
    assert flags["--base-gpu-id"] == "2" and "--enable-memory-saver" in flags and "--attention-backend" not in flags
    assert launch.environment(chosen, 1)["PYTHONPATH"] == "", "no shims, and none of our packages"


def test_the_kv_cache_on_a_cpu_is_bounded_in_bytes(tmp_path):
    model = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 1024, "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(model))
    big = launch.Server(tmp_path, 1, 0, 4096, 128, 16, 0, "float32")
    chosen = SglangSpec(python=Path("/v/bin/python"), device="cpu")
    tokens = int(flags_of(launch.command(chosen, big))["--max-total-tokens"] or 0)
    assert tokens == max(4096, launch.CPU_KV_BYTES // (2 * 32 * 1024 * 4))


def _python(directory: Path, says: str, status: int = 0) -> Path:
    """An executable that answers as a Python with, or without, sglang does."""
    path = directory / f"python-{secrets.token_hex(4)}"
    path.write_text(f"#!/bin/sh\necho {says}\nexit {status}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("says", "status", "words"),
    [
        (None, 0, ["there is no Python", "make sglang"]),
        ("0.5.20", 0, ["has sglang 0.5.20", "0.5.21 or newer", "make sglang"]),
        ("", 1, ["has no sglang", "make sglang"]),
    ],
)
def test_O1_a_missing_or_old_sglang_is_said_with_the_remedy(tmp_path, says, status, words):
    python = tmp_path / "none" if says is None else _python(tmp_path, says, status)
    with pytest.raises(ValueError, match=".*".join(words)):
        located(SglangSpec(python=python), tmp_path)


def test_a_relative_python_is_beside_the_file_that_names_it_and_its_links_are_kept(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(_python(tmp_path, "0.5.23.post1"))
    monkeypatch.setattr(spec, "has_cuda_device", lambda: False)
    with pytest.raises(ValueError, match="device is cuda, and this machine has no NVIDIA device"):
        spec.located(spec.SglangSpec(python=tmp_path / "link", device="cuda"), tmp_path)
    monkeypatch.setattr(spec, "has_cuda_device", lambda: True)
    found = located(SglangSpec(python=Path("link")), tmp_path)
    assert found.python == tmp_path / "link" and found.device == "cuda"


def test_without_an_environment_the_remedy_names_where_it_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(spec, "__file__", str(tmp_path / "a/b/c.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\.venv-sglang.*make sglang"):
        spec.find_python(None)
    (tmp_path / ".venv-sglang/bin").mkdir(parents=True)
    _python(tmp_path, "0.5.23").rename(tmp_path / ".venv-sglang/bin/python")
    assert spec.find_python(None) == tmp_path / ".venv-sglang/bin/python"


def test_a_kernel_that_is_called_on_a_cpu_says_what_is_missing(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "cudart", torch.cuda.cudart)
    module = ModuleType("sgl_kernel")
    exec(compile((launch.SHIMS / "sgl_kernel/__init__.py").read_text(), "sgl_kernel", "exec"), module.__dict__)
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.copy_all.* on a CPU"):
        module.copy_all(1)
