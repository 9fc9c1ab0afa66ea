"""How much memory each phase of a batch needs at its highest, and which phase binds.

On a CPU it is the resident set of a rank's process: the kernel keeps its high-water mark (VmHWM), which is set back at the beginning
of a phase by writing 5 to /proc/self/clear_refs. It counts pages that ranks share, such as the libraries of the warm parent and rows
read from the store, once in each. Where the kernel does not let it be set back, the mark is that of the process's life so far, and a phase
shows the highest of all before it too. On CUDA it is what torch has allocated, and without such sharing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

PHASES = ("load", "log_probs", "forward_backward", "optimizer", "export")
BETWEEN_STEPS = ("load", "export")
"""These belong to other commands: a step reports the last ones before it."""

_PROCESS = Path("/proc/self")


class Peaks:
    """The highest bytes of each phase on this rank since the last report."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._remembered: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Not inside another: its beginning forgets what the outer one has seen."""
        assert name in PHASES
        _reset()
        try:
            yield
        finally:
            self._bytes[name] = max(self._bytes.get(name, 0), _peak_bytes())

    def report(self) -> dict[str, int]:
        """Phase -> highest bytes over all ranks, of the phases that ran. All ranks together; begins anew."""
        mine = self._remembered | self._bytes
        self._remembered = {name: size for name, size in mine.items() if name in BETWEEN_STEPS}
        self._bytes = {}
        highest = torch.tensor([mine.get(name, 0) for name in PHASES])
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return {name: size for name, size in zip(PHASES, highest.tolist(), strict=True) if size}


def binding(memory_bytes: dict[str, int]) -> str | None:
    """The phase that needs most, the first of several; None when none ran."""
    return max(memory_bytes, key=memory_bytes.__getitem__, default=None)


def _reset() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # a kernel or sandbox without it: see above
        (_PROCESS / "clear_refs").write_text("5")


def _peak_bytes() -> int:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    assert found, "every Linux says VmHWM"
    return int(found[1]) * 1024
