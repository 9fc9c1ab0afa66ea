"""Norms and rotary embedding, each as one function with its own backward.

Left to autograd, a norm is some passes over the hidden states and many back, and keeps much of what it computed on the way. Here a
backward is written out, and what it needs is worked out again from the input.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich 2019, eq. 4). Computed in float32."""
    normed: torch.Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


class _RMSNorm(torch.autograd.Function):
    """With u = x / rms(x) and v = gradient * weight: to x goes (v - u mean(v u)) / rms(x), to the weight the sum of gradient * u."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps))[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        unit, gradient = x.float() * scale, gradients[0].float()
        to_weight = (gradient * unit).flatten(0, -2).sum(0)
        gradient = gradient * weight
        mean = torch.linalg.vecdot(gradient, unit).div_(x.shape[-1])[..., None]
        to_x = gradient.sub_(unit.mul_(mean)).mul_(scale)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [t, heads, d] with its halves (a, b) turned to (a cos - b sin, b cos + a sin) (Su et al. 2021, eq. 34).

    cos [t, 1, d], the same for both halves; sin [t, 1, d / 2].
    """
    turned: torch.Tensor = _Rotated.apply(x, cos.to(x.dtype), sin.to(x.dtype))
    return turned


class _Rotated(torch.autograd.Function):
    """The gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1.0), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    out = x * cos
    to_a, to_b = out.chunk(2, -1)
    to_a.addcmul_(b, sin, value=-sign)
    to_b.addcmul_(a, sin, value=sign)
    return out


@lru_cache(maxsize=4)
def rotation(
    lengths: tuple[int, ...], cp_size: int, cp_rank: int, dimension: int, base: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos [t, 1, d] and sin [t, 1, d / 2] of the angles position / base^(2 i / d) in a rank's share of a pack, for all layers at once."""
    positions = np.concatenate([zigzag(length, cp_size, cp_rank) for length in lengths])
    frequencies = base ** -(torch.arange(0, dimension, 2, dtype=torch.float32, device=device) / dimension)
    angles = torch.outer(torch.from_numpy(positions).to(device, torch.float32), frequencies)[:, None]
    return torch.cat([angles, angles], -1).cos(), angles.sin()


def zigzag(length: int, cp_size: int, cp_rank: int) -> np.ndarray:
    """The positions of a sequence that a context-parallel rank holds: one slice from the front, its mirror from the back, so that causal
    attention costs every rank the same. `length` is a multiple of 2·cp_size. [length / cp_size]"""
    if cp_size == 1:
        return np.arange(length)
    slice_length = length // (2 * cp_size)
    front = np.arange(cp_rank * slice_length, (cp_rank + 1) * slice_length)
    back = np.arange((2 * cp_size - 1 - cp_rank) * slice_length, (2 * cp_size - cp_rank) * slice_length)
    return np.concatenate([front, back])
