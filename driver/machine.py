"""What this machine must have room for before a run starts: bytes of shared memory, open files. Said with the remedy."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from driver.config import weights_bytes
from driver.mooncake import gives_bytes, room_bytes
from driver.settings import RunConfig
from store import left_over
from store.places import SHARED_MEMORY, occupied

OWN_FILES = 512  # logs, sockets, libraries of one process
ROW_FILES = 2  # a row's objects, mapped
MEMORY_KINDS = ("tmpfs", "ramfs", "hugetlbfs")


@dataclass(frozen=True)
class Finding:
    """`missing` is what a run needs and does not find; `absent` is what only some runs need."""

    what: str
    state: Literal["ok", "absent", "missing"]
    words: str


def room(config: RunConfig | None) -> list[Finding]:
    """`missing` is what the configuration needs and this machine lacks; without one, what there is."""
    return [_shared_memory(config), _open_files(config)]


def needed(config: RunConfig) -> list[Finding]:
    """What must be there before a start. A Mooncake store that outlived its run has its memory already, and says itself what it lacks."""
    return [_open_files(config)] if config.store_kind == "mooncake" else room(config)


def left_behind(config: RunConfig | None) -> Iterator[Finding]:
    """Stores of runs that were killed, which keep their memory. The configuration's own is not one: its run takes it up again."""
    for left in left_over():
        if config is None or left.root != config.store_directory:
            yield Finding("left behind", "absent", left.words)


def huge_pages(config: RunConfig | None) -> Iterator[Finding]:
    """Whether large objects get pages of 2 MB: then a put is as fast as a copy in memory, and a read as a read."""
    place = SHARED_MEMORY if config is None or config.store_kind == "mooncake" else _there(config.store_directory)
    mounted, kind, opts = _mounted(place)
    options = opts.split(",") if kind == "tmpfs" else []
    if options and {"huge=always", "huge=within_size"} & set(options):
        yield Finding("huge pages", "ok", f"{mounted} gives large objects pages of 2 MB")
    elif options:
        remedy = f"as root, on the host: mount -o remount,huge=within_size {mounted}"
        yield Finding("huge pages", "absent", f"{mounted} has pages of 4 KB, which make large objects two to three times as slow; {remedy}")


def on_disk(config: RunConfig | None) -> Iterator[Finding]:
    """A store that lies on no memory file system: it works, with the disk's speed."""
    if config is None or config.store_kind == "mooncake":
        return
    mounted, kind, _ = _mounted(_there(config.store_directory))
    if kind not in MEMORY_KINDS:
        words = (
            f"store.directory {config.store_directory} lies on {kind} (mounted at {mounted}), not in memory: rows and weights go through a "
            f"disk, which is slow and wears it out; leave store.directory out for {SHARED_MEMORY}, or name one on a tmpfs"
        )
        yield Finding("store", "absent", words)


def _mounted(place: Path) -> tuple[Path, str, str]:
    """What is mounted there last: where, of which kind, with which options."""
    mounted = next(path for path in (place.resolve(), *place.resolve().parents) if path.is_mount())
    mounts = [mount for mount in psutil.disk_partitions(all=True) if mount.mountpoint == str(mounted)]
    return (mounted, mounts[-1].fstype, mounts[-1].opts) if mounts else (mounted, "an unknown file system", "")


def _there(root: Path) -> Path:
    """The directory, or the nearest one above it that is there."""
    return next(path for path in (root, *root.parents) if path.is_dir())


def _shared_memory(config: RunConfig | None) -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding("shared memory", "missing", f"there is no {SHARED_MEMORY}; Linux has it, a container must mount it")
    if config is None:
        return Finding("shared memory", "ok", f"{_free(SHARED_MEMORY) / 2**30:.2f} GiB free in {SHARED_MEMORY}")
    embedded = config.store_kind == "embedded"
    root = config.store_directory
    place = _there(root) if embedded else SHARED_MEMORY
    needed = config.store.capacity_bytes if embedded else room_bytes(gives_bytes(config))
    # A push's copy in torch's form is made in /dev/shm, wherever the store lies.
    copied = weights_bytes(config.model.path, config.trainer.dtype) if config.transport == "tensor" else 0
    together = os.stat(place).st_dev == os.stat(SHARED_MEMORY).st_dev
    free = _free(place) + occupied(root)
    lacking = []
    if free < needed + copied * together:
        lacking.append((place, free, needed + copied * together, "take a roomier store.directory, or lower store.capacity_bytes"))
    if copied and not together and _free(SHARED_MEMORY) < copied:
        lacking.append((SHARED_MEMORY, _free(SHARED_MEMORY), copied, "or set push.transport: disk"))
    if lacking:
        words = "; ".join(
            f"{free / 2**30:.2f} GiB free in {at}, {wanted / 2**30:.2f} needed: enlarge it (Docker: --shm-size), {else_}"
            for at, free, wanted, else_ in lacking
        )
        return Finding("shared memory", "missing", words)
    return Finding("shared memory", "ok", f"{free / 2**30:.2f} GiB free in {place}, {(needed + copied * together) / 2**30:.2f} needed")


def _free(place: Path) -> int:
    facts = os.statvfs(place)
    return facts.f_bavail * facts.f_frsize


def _open_files(config: RunConfig | None) -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    shown = "no limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    if config is None:
        return Finding("open files", "ok", f"{shown} a process")
    requests = (config.rollout.engines + len(config.rollout.engine_urls)) * config.rollout.max_open_requests
    needed = OWN_FILES + requests + ROW_FILES * config.batch.samples * config.rollout.n
    if hard != resource.RLIM_INFINITY and hard < needed:
        remedy = "raise the hard limit (ulimit -Hn; Docker: --ulimit nofile=65536), or lower rollout.max_open_requests"
        return Finding("open files", "missing", f"{shown} a process, {needed:,} needed; {remedy}")
    return Finding("open files", "ok", f"{shown} a process, {needed:,} needed")
