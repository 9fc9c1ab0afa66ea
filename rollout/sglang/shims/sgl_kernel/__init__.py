"""Stands in for SGLang's compiled kernels on a CPU, so that a stock SGLang can be imported there.

SGLang 0.5.23 asks this package for names wherever it runs on a CPU, and no wheel for CPUs carries them. The forward pass of Llama, Qwen2,
Qwen3 and Qwen3-MoE with `--attention-backend torch_native` calls none of them (they copy caches and serve speculative decoding), so each
name is given as a function that says what is missing if it is ever called. Only a server that Headrace starts on a CPU sees this directory.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10"  # the version that SGLang 0.5.23 asks for


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):  # Python's own questions about a module
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is compiled code for GPUs; on a CPU choose a feature or a model that does without it")

    return missing


class _HostMemory:
    """What `--enable-return-routed-experts` asks of CUDA's runtime: to pin host memory, which without a device is nothing to do."""

    def cudaHostRegister(self, *_: Any) -> int:
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        return 0

    def cudaGetErrorString(self, *_: Any) -> str:
        return "no error"


if not torch.cuda.is_available():
    torch.cuda.cudart = _HostMemory
