"""A checkpoint written and read by all ranks: weights as a Hugging Face model, optimizer and random state rank by rank.

In fp32 the Hugging Face tensors are the weights bit for bit, so a resume in the same layout continues as if nothing had happened. Rank
files are read with `weights_only=True`: they cannot run code.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from pickle import UnpicklingError

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors.torch import save_file

from trainer import checkpoints
from trainer.export import hf_tensors
from trainer.group import Group
from trainer.model import Model, build
from trainer.spec import TrainerSpec


def save(spec: TrainerSpec, group: Group, model: Model, directory: Path, trained_version: int, epoch: int, keep_last: int | None) -> Path:
    """All ranks together. Raises Refused when the directory cannot be written; older checkpoints are then untouched."""
    partial = _begin(group, directory)
    fault = None
    try:
        with (partial / rank_file(group.rank)).open("wb") as file:
            torch.save({"optimizer": model.optimizer.state_dict(), "random": _random_state()}, file)
    except OSError as error:
        fault = (507, f"cannot write {partial}: {error.strerror}")
    tensors = {}
    for name, tensor in hf_tensors(model):
        if group.rank == 0:
            tensors[name] = tensor.clone()
    group.agree(fault)
    if group.rank == 0:
        try:
            _write_hf(model, tensors, partial / "hf")
            versions = {"torch": torch.__version__, "megatron": version("megatron-core")}
            checkpoints.publish(partial, trained_version, epoch, spec.layout, versions)
            if keep_last is not None:
                checkpoints.prune(directory, keep_last)
        except OSError as error:
            fault = (507, f"cannot write {directory}: {error.strerror or error}")
    group.agree(fault)
    return directory / f"step_{trained_version:08d}"


def resume(spec: TrainerSpec, group: Group, path: Path) -> tuple[Model, checkpoints.Checkpoint]:
    """All ranks together. Raises Refused for what is no whole checkpoint, or one of another layout."""
    fault = None
    try:
        checkpoint = checkpoints.read(path)
        if checkpoint.meta.layout != spec.layout:
            fault = (
                409,
                f"{path} was saved with the layout {_in_words(checkpoint.meta.layout)}, this trainer has {_in_words(spec.layout)}: "
                f"start it with that layout, or load the weights alone from {checkpoint.hf_path} (the optimizer then begins anew)",
            )
        state = torch.load(path / rank_file(group.rank), weights_only=True) if not fault else None
    except (ValueError, OSError, RuntimeError, UnpicklingError) as error:
        fault = (409, str(error))
    group.agree(fault)
    assert state is not None
    model = build(spec, group, checkpoint.hf_path)
    model.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"]["torch"])
    get_cuda_rng_tracker().set_states(state["random"]["megatron"])
    return model, checkpoint


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def _random_state() -> dict[str, object]:
    return {"torch": torch.get_rng_state(), "megatron": dict(get_cuda_rng_tracker().get_states())}


def _begin(group: Group, directory: Path) -> Path:
    """The directory to write into, made by rank 0 and known to all."""
    name = torch.zeros(64, dtype=torch.uint8)
    fault = None
    if group.rank == 0:
        try:
            data = checkpoints.begin(directory).name.encode()
            name[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        except OSError as error:
            fault = (507, f"cannot write {directory}: {error.strerror}; give a directory this user may write to")
    group.agree(fault)
    torch.distributed.broadcast(name, 0)
    return directory / name.numpy().tobytes().rstrip(b"\0").decode()


def _write_hf(model: Model, tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.mkdir()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for name, content in model.companions.items():
        (path / name).write_bytes(content)


def _in_words(layout: dict[str, int]) -> str:
    return " ".join(f"{name} {size}" for name, size in layout.items())
