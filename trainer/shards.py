"""Tensors on disk as Hugging Face lays them out: `model.safetensors`, or numbered files of bounded size and their index.

All ranks drain the same tensors in the same order and cut them into the same files; rank r keeps and writes file i when i mod ranks is r. A
file is written in a thread while the ranks go on with the next one, so the ranks write side by side, and none holds more than one
file's tensors, and the one at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from trainer.checkpoints import sync
from trainer.group import Group

INDEX = "model.safetensors.index.json"


def write_shards(group: Group, tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, shard_bytes: int) -> None:
    """All ranks together. Files of at most `shard_bytes` of tensors, unless one tensor alone is larger.

    Raises Refused on all ranks, after the last tensor, when any rank could not write.
    """
    shards = _Shards(directory, group.rank, group.size)
    used = 0
    for name, tensor in tensors:
        if used and used + tensor.nbytes > shard_bytes:
            shards.end_file()
            used = 0
        used += tensor.nbytes
        shards.add(name, tensor)
    shards.end_file()
    group.agree(shards.close())
    fault = None
    if group.rank == 0:
        try:
            shards.give_names()
        except OSError as error:
            fault = (507, f"cannot write {directory}: {error}")
    group.agree(fault)


class _Shards:
    """A fault is kept, not raised: the tensors must be drained on every rank before all can refuse together."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self._directory, self._rank, self._size = directory, rank, size
        self._names: list[list[str]] = [[]]
        """Of each file so far, the last one open; the same on every rank."""
        self._total_bytes = 0
        self._mine: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None
        self._fault: tuple[int, str] | None = None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._names[-1].append(name)
        self._total_bytes += tensor.nbytes
        if self._is_mine():
            self._mine[name] = tensor.detach().to("cpu", copy=True)

    def end_file(self) -> None:
        if self._is_mine():
            self._writing = self._thread.submit(self._write, len(self._names) - 1, self._mine)
            self._mine = {}
        self._names.append([])
        if self._is_mine():
            self._await_writing()  # before the next file's tensors gather

    def close(self) -> tuple[int, str] | None:
        self._await_writing()
        self._thread.shutdown()
        return self._fault

    def give_names(self) -> None:
        """Rank 0, when all files are there: how many there are was not known before."""
        files = self._names[:-1]
        names = (
            ["model.safetensors"] if len(files) == 1 else [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        )
        for number, name in enumerate(names):
            self._path(number).rename(self._directory / name)
        if len(files) > 1:
            weight_map = {tensor: name for name, tensors in zip(names, files, strict=True) for tensor in tensors}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=1))

    def _is_mine(self) -> bool:
        return (len(self._names) - 1) % self._size == self._rank and self._fault is None

    def _path(self, number: int) -> Path:
        return self._directory / f"file_{number:05d}"

    def _write(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, self._path(number), metadata={"format": "pt"})
        sync(self._path(number))

    def _await_writing(self) -> None:
        if self._writing is None:
            return
        try:
            self._writing.result()
        except (OSError, SafetensorError) as error:
            self._fault, self._mine = (507, f"cannot write {self._directory}: {error}"), {}
        self._writing = None
