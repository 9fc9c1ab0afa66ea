"""Where SGLang is, said in words before anything starts: which Python has it, which version, and what it computes on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from rollout.capabilities import OLDEST, SESSIONS_SINCE, TRIED, version_numbers

ENVIRONMENT = ".venv-sglang"
ASK_VERSION = "from importlib.metadata import version; print(version('sglang'))"
ASK_DEADLINE_S = 60.0


class SglangSpec(BaseModel):
    """How a run's SGLang servers are started. `located` fills in what is left to us."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    python: Path | None = Field(
        None, description="the Python that has sglang; default: .venv-sglang beside the project (`make sglang`), else this one"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is an NVIDIA device, else cpu")
    tp: int = Field(1, ge=1, le=64, description="tensor-parallel ranks of each engine")
    start_deadline_s: float = Field(300.0, gt=0, description="a server that does not answer by then is ended and started anew")
    args: list[str] = Field([], description="further flags for sglang.launch_server; they come last, so they win")


def located(spec: SglangSpec, base: Path) -> SglangSpec:
    """With the Python's whole path and the device decided; relative paths start at `base`. ValueError with the remedy."""
    python = find_python(base / spec.python if spec.python is not None else None)
    found = version_of(python)
    if version_numbers(found) < SESSIONS_SINCE:
        raise ValueError(f"{python} has sglang {found}; Headrace needs {OLDEST} or newer (tried: {TRIED}); `make sglang` installs it")
    if spec.device == "cuda" and not has_cuda_device():
        raise ValueError("device is cuda, and this machine has no NVIDIA device: set it to cpu, or to auto")
    device = spec.device if spec.device != "auto" else ("cuda" if has_cuda_device() else "cpu")
    return spec.model_copy(update={"python": python, "device": device})


def find_python(wanted: Path | None) -> Path:
    """The interpreter to ask for SGLang. Its links are kept: an environment's Python is a link to another one."""
    if wanted is not None:
        python = Path(os.path.abspath(wanted))
        if not os.access(python, os.X_OK):
            raise ValueError(f"there is no Python {python}; run `make sglang`, or name the Python that has sglang")
        return python
    here = [Path(sys.prefix).parent, Path(__file__).parents[2], Path.cwd()]
    for directory in here:
        python = directory / ENVIRONMENT / "bin/python"
        if os.access(python, os.X_OK):
            return python
    if importlib.util.find_spec("sglang") is not None:
        return Path(sys.executable)
    raise ValueError(f"SGLang is not installed: there is no {here[0] / ENVIRONMENT}. Run `make sglang`, or name the Python that has it")


@lru_cache
def version_of(python: Path) -> str:
    """The version of the installed sglang, asked of its metadata: importing it takes seconds. ValueError when there is none."""
    try:
        answer = subprocess.run([python, "-I", "-c", ASK_VERSION], capture_output=True, text=True, timeout=ASK_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{python} can not be run ({error}); name the Python that has sglang, or run `make sglang`") from error
    if answer.returncode != 0:
        raise ValueError(f"{python} has no sglang; run `make sglang`, or name the Python that has it")
    return answer.stdout.strip()


def has_cuda_device() -> bool:
    return Path("/dev/nvidiactl").exists()
