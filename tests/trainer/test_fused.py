"""Hand-written backwards against autograd's own, in float64; angles against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.fused import rms_norm, rotated, rotation, zigzag


def test_the_norm_and_its_gradients_are_those_of_its_definition() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1, 7, requires_grad=True), torch.randn(7, requires_grad=True)
    gradient = torch.randn(5, 1, 7)
    found = torch.autograd.grad(rms_norm(x, weight, 1e-2), (x, weight), gradient)
    expected = torch.autograd.grad(x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight, (x, weight), gradient)
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), torch.nn.functional.rms_norm(x, (7,), weight, 1e-2))
    torch.testing.assert_close(found, expected)


def test_the_norm_of_bfloat16_is_the_one_of_float32_rounded_once() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight.float(), 1e-6).bfloat16())


@pytest.mark.parametrize("cp_size", [1, 2])
def test_M3_each_sequence_is_turned_by_its_own_positions_and_the_gradient_turned_back(cp_size: int) -> None:
    lengths = (8, 4, 4)
    for rank in range(cp_size):
        cos, sin = rotation(lengths, cp_size, rank, 6, 100.0, torch.device("cpu"))
        positions = torch.from_numpy(np.concatenate([zigzag(length, cp_size, rank) for length in lengths]))
        x = torch.randn(len(positions), 2, 6, dtype=torch.float64, requires_grad=True)
        angle = positions[:, None, None] / 100.0 ** (torch.arange(3) / 3.0)
        a, b = x.chunk(2, -1)
        turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
        torch.testing.assert_close(rotated(x, cos, sin), turned, rtol=1e-6, atol=1e-6)
        gradient = torch.randn_like(x)
        (expected,) = torch.autograd.grad(turned, x, gradient)
        torch.testing.assert_close(torch.autograd.grad(rotated(x, cos, sin), x, gradient)[0], expected, rtol=1e-6, atol=1e-6)
