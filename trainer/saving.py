"""A checkpoint written and read by all ranks: each model's weights, and its optimizer's state under the same names.

Nothing in it depends on the layout that wrote it, so any layout resumes from it; in fp32, or with the fp32 weights behind bf16 ones, the
same layout continues bit for bit as if nothing had happened. Only the random state is of one layout: on another the seeds begin anew,
which changes nothing today, as nothing draws from them (there is no dropout). All files are safetensors and JSON: reading runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from trainer import checkpoints
from trainer.checkpoints import POLICY, Checkpoint
from trainer.export import hf_tensors
from trainer.group import Group
from trainer.model import Model
from trainer.shards import write_shards
from trainer.spec import TrainerSpec
from trainer.state import SLOTS, WEIGHTS, load_state, set_steps, state_tensors, steps_taken


def save(
    spec: TrainerSpec, group: Group, models: Mapping[str, Model], directory: Path, trained_version: int, epoch: int, keep_last: int | None
) -> Path:
    """All ranks together. Raises Refused when the directory cannot be written; older checkpoints are then untouched."""
    partial = _begin(group, directory)
    group.agree(_write_random_state(partial / "random", group.rank))
    steps = {name: _write_model(spec, group, model, checkpoints.directory_of(partial, name)) for name, model in models.items()}
    fault = None
    if group.rank == 0:
        try:
            versions = {"torch": torch.__version__, "megatron": version("megatron-core")}
            taken = {name: count for name, count in steps.items() if count is not None}
            checkpoints.publish(partial, trained_version, epoch, spec.layout, versions, taken)
            if keep_last is not None:
                checkpoints.prune(directory, keep_last)
        except OSError as error:
            fault = (507, f"cannot write {directory}: {error.strerror or error}")
    group.agree(fault)
    return directory / f"step_{trained_version:08d}"


def open_checkpoint(group: Group, path: Path) -> Checkpoint:
    """Raises Refused for what is no whole checkpoint, or one of the old format."""
    fault = None
    try:
        checkpoint = checkpoints.read(path)
        if checkpoint.meta.optimizer_steps is None:
            fault = (
                409,
                f"{path} is of an older version, whose optimizer state (rank_*.pt) is not read any more: resume it with the version "
                f"that wrote it, or load the weights alone from {checkpoint.hf_path} (the optimizer then begins anew)",
            )
    except ValueError as error:
        fault = (409, str(error))
    group.agree(fault)
    return checkpoint


def restore(spec: TrainerSpec, group: Group, model: Model, checkpoint: Checkpoint, name: str = POLICY) -> None:
    """The optimizer's state into a model just built from the checkpoint's weights. All ranks together. Raises Refused."""
    directory = checkpoint.directory_of(name)
    steps = (checkpoint.meta.optimizer_steps or {}).get(name)
    fault = None
    try:
        if spec.dtype == "bfloat16" or (directory / "optimizer" / WEIGHTS).is_dir():
            behind = directory / "optimizer" / WEIGHTS
            load_state(model, behind if behind.is_dir() else directory / "hf", WEIGHTS)
        if steps is not None:
            for slot in SLOTS[spec.optimizer.kind]:
                if not (directory / "optimizer" / slot).is_dir():
                    raise ValueError(
                        f"{checkpoint.path} has no {slot}: it was written with another kind of optimizer than {spec.optimizer.kind}. "
                        f"Start with that kind, or load the weights alone from {directory / 'hf'}"
                    )
                load_state(model, directory / "optimizer" / slot, slot)
            set_steps(model, steps)
    except (ValueError, OSError) as error:
        fault = (409, str(error))
    group.agree(fault)


def restore_random_state(spec: TrainerSpec, group: Group, checkpoint: Checkpoint) -> None:
    """Of the same layout and kind of device, for a GPU's generator has another state; else it stays as the seed made it."""
    if checkpoint.meta.layout != spec.layout:
        return
    fault = None
    try:
        states = load_file(checkpoint.path / "random" / _random_file(group.rank))
    except (OSError, SafetensorError) as error:
        fault = (409, str(error))
    group.agree(fault)
    torch_state, here = states.pop("torch"), get_cuda_rng_tracker().get_states()
    if {name: state.shape for name, state in states.items()} == {name: state.shape for name, state in here.items()}:
        torch.set_rng_state(torch_state)
        get_cuda_rng_tracker().set_states(states)


def _write_model(spec: TrainerSpec, group: Group, model: Model, directory: Path) -> int | None:
    """hf/ and optimizer/ in `directory`; the step count, as `steps_taken` has it."""
    write_shards(group, hf_tensors(model), directory / "hf", spec.shard_bytes)
    fault = None
    if group.rank == 0:
        try:
            for name, content in model.companions.items():
                (directory / "hf" / name).write_bytes(_with_dtype(content, spec.dtype) if name == "config.json" else content)
        except OSError as error:
            fault = (507, f"cannot write {directory}: {error.strerror or error}")
    group.agree(fault)
    steps = steps_taken(model)
    slots = SLOTS[spec.optimizer.kind] if steps is not None else ()
    for slot in (*slots, *([WEIGHTS] if spec.dtype == "bfloat16" else ())):
        write_shards(group, state_tensors(model, slot), directory / "optimizer" / slot, spec.shard_bytes)
    return steps


def _with_dtype(config_json: bytes, dtype: str) -> bytes:
    """A configuration that says what the files hold: the base model's may have been of another dtype."""
    config = json.loads(config_json)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return config_json if config.get(key) == dtype else json.dumps({**config, key: dtype}, indent=2).encode()


def _random_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def _write_random_state(directory: Path, rank: int) -> tuple[int, str] | None:
    """Bytes as uint8 tensors; the fault, if any."""
    states = {"torch": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
    try:
        directory.mkdir(exist_ok=True)
        save_file({name: state.contiguous() for name, state in states.items()}, directory / _random_file(rank))
    except (OSError, SafetensorError) as error:
        return 507, f"cannot write {directory}: {error}"
    return None


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
