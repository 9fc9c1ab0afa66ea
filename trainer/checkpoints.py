"""Checkpoints on disk, as far as one can see without torch.

    DIRECTORY/step_00000012/
        hf/                 config, tokenizer, the weights: loads in transformers
        optimizer/          exp_avg/, exp_avg_sq/ (Adam) or momentum_buffer/ (SGD), weights/ (the fp32 ones behind bf16): under
                            the weights' names, and as they are laid out in files; nothing in it depends on the trainer's layout
        random/             rank_00000.safetensors …: random state, for the layout that wrote it
        NAME/               hf/ and optimizer/ of each further model
        meta.json           written last: version, layout, and every other file with its size

A checkpoint is written under another name and renamed when all of it is on the disk. A directory without meta.json, or in which a file is
missing or short, is no checkpoint, whatever its name says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

META = "meta.json"
POLICY = "policy"
"""The model whose files stand at the top of a checkpoint; others have a directory of their name."""
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = re.compile(r"\.(partial|old)-.*")


class Meta(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    trained_version: int
    epoch: int
    batch_id: int | None = None
    """The last batch that was trained; None before the first."""
    layout: dict[str, int]
    """The one that wrote it; any other reads it."""
    optimizer_steps: dict[str, int] | None = None
    """Model -> Adam's step count, of the models that have taken a step; None in a checkpoint of the old format, with rank_*.pt files."""
    torch: str
    megatron: str
    files: dict[str, int]
    """path inside the checkpoint -> size in bytes"""


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    meta: Meta

    @property
    def trained_version(self) -> int:
        return self.meta.trained_version

    @property
    def hf_path(self) -> Path:
        return self.path / "hf"

    def directory_of(self, model: str) -> Path:
        """Where that model's hf/ and optimizer/ are."""
        return directory_of(self.path, model)


def directory_of(path: Path, model: str) -> Path:
    return path if model == POLICY else path / model


def read(path: Path) -> Checkpoint:
    """Raises ValueError that says what is wrong with it."""
    try:
        meta = Meta.model_validate_json((path / META).read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not a whole checkpoint: it has no {META}. Use an older one") from error
    except (OSError, ValidationError) as error:
        raise ValueError(f"{path}/{META} cannot be read: {error}. Use an older checkpoint") from error
    for name, size_bytes in meta.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            raise ValueError(f"{path} is not a whole checkpoint: {name} is missing. Use an older one") from error
        if found != size_bytes:
            raise ValueError(f"{path} is not a whole checkpoint: {name} has {found} bytes of {size_bytes}. Use an older one")
    return Checkpoint(path, meta)


def whole(directory: Path) -> list[Checkpoint]:
    """The good ones in `directory`, newest first."""
    found = []
    for path in directory.glob("step_*") if directory.is_dir() else []:
        if _STEP.fullmatch(path.name):
            try:
                found.append(read(path))
            except ValueError:
                continue  # half written or damaged: the next older one is used
    return sorted(found, key=lambda checkpoint: checkpoint.trained_version, reverse=True)


def newest(directory: Path) -> Checkpoint | None:
    return next(iter(whole(directory)), None)


def begin(directory: Path) -> Path:
    """An empty directory to write a checkpoint into. What an interrupted save left behind is removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if _PARTIAL.fullmatch(path.name):
            shutil.rmtree(path)
    partial = directory / f".partial-{uuid.uuid4().hex}"
    partial.mkdir()
    return partial


def publish(
    partial: Path,
    trained_version: int,
    epoch: int,
    layout: dict[str, int],
    versions: dict[str, str],
    optimizer_steps: dict[str, int] | None = None,
) -> Checkpoint:
    """Make it durable, then give it its name. One of the same version is replaced."""
    files = {str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()}
    meta = Meta(
        trained_version=trained_version,
        epoch=epoch,
        batch_id=trained_version - 1 if trained_version else None,
        layout=layout,
        optimizer_steps=optimizer_steps or {},
        files=files,
        **versions,
    )
    for name in files:
        sync(partial / name)
    (partial / META).write_text(json.dumps(meta.model_dump(), indent=1))
    sync(partial / META)
    for path in (*filter(Path.is_dir, partial.rglob("*")), partial):
        sync(path)
    directory = partial.parent
    path = directory / f"step_{trained_version:08d}"
    if path.exists():
        path.rename(directory / f".old-{uuid.uuid4().hex}")
    partial.rename(path)
    sync(directory)
    return Checkpoint(path, meta)


def prune(directory: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` whole checkpoints. What is not whole is left for a person to look at."""
    for checkpoint in whole(directory)[keep_last:]:
        doomed = directory / f".old-{uuid.uuid4().hex}"
        checkpoint.path.rename(doomed)
    for path in directory.iterdir():
        if path.name.startswith(".old-"):
            shutil.rmtree(path)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
