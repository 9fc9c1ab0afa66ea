"""A policy loss by its name: one of ours, or a function of the user's, `path/file.py:name` or `module:name`.

A function of the user's is tried once on a few made-up tokens before anything is trained with it. `headrace selfcheck loss` goes
further: whether it is the same for every split and layout (trainer/selfcheck.py).
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from trainer.loss import REGISTRY, Policy, Tokens, loss_sums
from trainer.loss_spec import LossSpec


def resolve(spec: LossSpec) -> Policy:
    """Raises ValueError, in a sentence, for what cannot be found or does not keep the contract of `trainer.loss.Policy`."""
    if not spec.own_policy:
        return REGISTRY[spec.policy]
    place, _, name = spec.policy.rpartition(":")
    function = getattr(_module(place), name, None)
    if not callable(function):
        raise ValueError(f"policy {spec.policy}: {place} has no function {name}")
    policy: Policy = function
    tokens = made_up_tokens(spec.kl.wanted)
    loss = _tried(spec, policy, tokens, "three made-up tokens")
    _tried(spec, policy, tokens.at(torch.zeros(0, dtype=torch.int64)), "a micro-batch without tokens, which a rank without rows runs")
    steered = _leaves(loss)
    if tokens.log_probs not in steered:
        raise ValueError(
            f"policy {spec.policy} has no gradient in tokens.log_probs: return a loss computed from them, not detached "
            "(tokens.row_means has no gradient: add one with `+ x - x.detach()`)"
        )
    if not bool(torch.isfinite(loss)):
        raise ValueError(f"policy {spec.policy} gives {float(loss.detach())} on three made-up tokens with advantages 1, 1 and -0.5")
    if tokens.entropy in steered and not spec.entropy_bonus:
        raise ValueError(
            f"policy {spec.policy} has a gradient in tokens.entropy, which without an entropy bonus is a number and would stay silent: "
            "set loss.entropy_bonus instead, or use tokens.entropy.detach()"
        )
    return policy


def _tried(spec: LossSpec, policy: Policy, tokens: Tokens, what: str) -> torch.Tensor:
    """The loss. Raises ValueError for what the user's code raises: said here, not by a rank that dies in some later step."""
    try:
        return loss_sums(spec, tokens, torch.zeros(len(tokens.row), dtype=torch.bool), policy)[0]
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        hint = "" if tokens.reference is not None or "NoneType" not in str(error) else " (tokens.reference is None: set loss.kl.reference)"
        raise ValueError(f"policy {spec.policy} failed on {what}: {type(error).__name__}: {error}{hint}") from error


def _leaves(loss: torch.Tensor) -> set[torch.Tensor]:
    """What a backward would reach. Looked up, not run: a process that has run autograd must not fork ranks."""
    found: set[torch.Tensor] = set()
    seen: set[Any] = set()
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found


def made_up_tokens(with_reference: bool = True) -> Tokens:
    """Three tokens of two rows."""
    log_probs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    behaviour = torch.tensor([-1.1, -0.4, -2.0])
    return Tokens(
        log_probs=log_probs,
        behaviour=behaviour,
        old=behaviour,
        advantage=torch.tensor([1.0, 1.0, -0.5]),
        weight=torch.ones(3),
        reference=behaviour - 0.1 if with_reference else None,
        entropy=torch.ones(3, requires_grad=True),
        counts=torch.ones(3, dtype=torch.bool),
        row=torch.tensor([0, 0, 1]),
        row_tokens=torch.tensor([2, 1]),
        sequence_tokens=torch.tensor([2, 1]),
    )


def _module(place: str) -> Any:
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        if not Path(place).is_file():
            raise ValueError(f"there is no file {place}")
        found = importlib.util.spec_from_file_location(f"headrace_own_loss_{Path(place).stem}", place)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    return module
