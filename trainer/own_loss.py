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
    try:
        loss, _ = loss_sums(spec, made_up_tokens(), torch.zeros(3, dtype=torch.bool), policy)
    except ValueError:
        raise
    except Exception as error:  # the user's code may raise anything; said here, not by a rank that dies in its first step
        raise ValueError(f"policy {spec.policy} failed on three tokens: {type(error).__name__}: {error}") from error
    if not loss.requires_grad:
        raise ValueError(f"policy {spec.policy} has no gradient in tokens.log_probs: return a loss computed from them, not detached")
    return policy


def made_up_tokens() -> Tokens:
    """Three tokens of two rows."""
    log_probs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    behaviour = torch.tensor([-1.1, -0.4, -2.0])
    return Tokens(
        log_probs=log_probs,
        behaviour=behaviour,
        old=behaviour,
        advantage=torch.tensor([1.0, 1.0, -0.5]),
        weight=torch.ones(3),
        reference=behaviour,
        entropy=torch.ones(3),
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
    except Exception as error:  # importing runs the user's code
        raise ValueError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    return module
