"""What this machine has, for the planner: cores, memory, GPUs. Asked once; nothing is started and torch is not imported."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

from driver.planner import Host
from rollout.sglang.spec import has_cuda_device

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
ASK_S = 10.0
MiB = 1 << 20


@lru_cache
def this_host() -> Host:
    return Host("this host", len(os.sched_getaffinity(0)), memory_bytes(), devices())


def memory_bytes() -> int:
    """Of the machine, or of the container when that is less."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in CGROUP_LIMITS:
        try:
            most = min(most, int(path.read_text()))
        except (OSError, ValueError):  # "max", or no such file
            continue
    return most


def visible(chosen: tuple[int, ...]) -> str:
    """CUDA_VISIBLE_DEVICES for a process that was placed on these."""
    ours = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return ",".join(ours[one] if ours else str(one) for one in chosen)


def devices() -> tuple[int, ...]:
    """The memory of each GPU that processes of ours will see; none when the driver's own tool does not say."""
    if not has_cuda_device():
        return ()
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=ASK_S, check=True).stdout.split()
        found = [int(line) * MiB for line in answer]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(found) if visible is None else tuple(found[: len([one for one in visible.split(",") if one.strip()])])
