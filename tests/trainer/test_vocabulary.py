"""One rank's vocabulary in float64; split ones are in test_parity.py and test_layouts.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer import vocabulary
from trainer.vocabulary import token_log_probs


@pytest.fixture(scope="module")
def alone_group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("steered", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("padding", [0, 3])
def test_M5_log_probs_entropies_and_gradients_are_those_of_their_definitions_in_any_piece(
    alone_group: Any, monkeypatch: pytest.MonkeyPatch, steered: bool, temperature: float, padding: int
) -> None:
    monkeypatch.setattr(vocabulary, "_PIECE", 40)  # three rows at a time
    torch.manual_seed(0)
    logits = (5.0 * torch.randn(7, 11 + padding, dtype=torch.float64)).requires_grad_()
    target = torch.tensor([0, 10, 3, 3, 7, 1, 10])
    temperatures = torch.tensor([1.0, 1.0, 1.0, temperature, 1.0, temperature, 1.0], dtype=torch.float64)
    toward, flatten = torch.randn(2, 7, dtype=torch.float64)
    every = (logits[:, :11] / temperatures[:, None]).log_softmax(-1)
    expected = every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)
    loss = expected[0] @ toward + (expected[1] @ flatten if steered else 0.0)
    (wanted,) = torch.autograd.grad(loss, logits)
    found = token_log_probs(logits * 1.0, target, temperatures, 11, alone_group, steered)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    loss = found[0] @ toward + (found[1] @ flatten if steered else 0.0)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted, rtol=1e-11, atol=1e-12)


def test_a_token_of_probability_0_has_finite_numbers_and_no_token_has_none(alone_group: Any) -> None:
    logits = torch.tensor([[0.0, -2000.0, 0.0]], requires_grad=True)
    log_probs, entropy = token_log_probs(logits * 1.0, torch.tensor([1]), torch.ones(1), 3, alone_group, True)
    assert log_probs.item() == pytest.approx(-2000.7, abs=0.01) and entropy.item() == pytest.approx(0.6931, abs=1e-4)
    (gradient,) = torch.autograd.grad(log_probs.sum() + entropy.sum(), logits)
    torch.testing.assert_close(gradient, torch.tensor([[-0.5, 1.0, -0.5]]))
    nothing = torch.zeros(0, 3, requires_grad=True)
    log_probs, entropy = token_log_probs(nothing * 1.0, torch.zeros(0, dtype=torch.int64), torch.ones(0), 3, alone_group)
    log_probs.sum().backward()
    assert len(entropy) == 0 and nothing.grad is not None and nothing.grad.shape == (0, 3)
