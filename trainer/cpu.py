"""All that is needed to run Megatron-core 0.16.1 on a CPU over gloo, in one place.

Call `install()` before the first import of megatron, and `enter_mode()` once in the main thread of each rank. What Megatron asks of CUDA is
of four kinds, and each gets its CPU meaning here:

* where am I: `current_device` is the CPU, `.cuda()` is the tensor itself, streams and events are nothing;
* allocate there: a torch-function mode rewrites `device="cuda"` to the CPU and drops `pin_memory`;
* random numbers: the CUDA generator's state is the CPU generator's, so the tracker's forks and recomputation are real;
* what am I: `Tensor.type()` says `torch.cuda.FloatTensor`, the name Megatron's gradient buckets are keyed by.

Two gaps of its mixture of experts are filled as well.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream or an event where there are none. A class, not a function: transformers writes `torch.cuda.Stream | None`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()

    wait_event = wait_stream = synchronize = record = wait = _nothing


class _OnCPU(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs:  # nearly always, and some thousand times a step
            result = func(*args)
            if func is torch.Tensor.type and isinstance(result, str):
                return result.replace("torch.", "torch.cuda.", 1)
            return result
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def install() -> None:
    """Idempotent. GPUs are hidden from this process and its children, and must not have been used in it."""
    if installed():
        return
    assert not torch.cuda.is_initialized(), "this process has used CUDA already"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    itself = _returns_first
    patches: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": _does_nothing,
        "empty_cache": _does_nothing,
        "FloatTensor": torch.FloatTensor,
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": _Nothing,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "headrace_on_cpu": True,
    }
    for name, value in patches.items():
        setattr(torch.cuda, name, value)
    setattr(torch.Tensor, "cuda", itself)  # noqa: B010  (mypy knows these names with other types)
    setattr(torch.Tensor, "record_stream", _does_nothing)  # noqa: B010
    setattr(torch.nn.Module, "cuda", itself)  # noqa: B010
    compile_function = torch.compile
    torch.compile = _uncompiled  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401  (decorates its fusions, none of which is used here; inductor alone costs 2 s to import)
    finally:
        torch.compile = compile_function
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    fill_gap_of_the_router()
    from megatron.core.transformer.moe import token_dispatcher

    # The dispatcher's split sizes become numbers on their way from the GPU; on the CPU they would stay tensors, which all_to_all refuses.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numbers


def installed() -> bool:
    return getattr(torch.cuda, "headrace_on_cpu", False)


def fill_gap_of_the_router() -> None:
    """It asks whether a function of TransformerEngine is None; where that is not installed, on a GPU too, the name is undefined."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def enter_mode() -> None:
    """Redirect allocations of the calling thread, for good: once, in the main thread of each rank."""
    _OnCPU().__enter__()


def _uncompiled(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda decorated: decorated


def _returns_first(first: Any, *args: Any, **kwargs: Any) -> Any:
    return first


def _does_nothing(*args: Any, **kwargs: Any) -> None:
    pass
