"""All that a trainer holds: the policy, and beside it a frozen reference and a critic where the loss asks for them.

The critic is a second model on the same ranks with an optimizer of its own; the reference is never written and never changes, so it is read
from its own directory again after a loss of the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer import saving
from trainer.checkpoints import POLICY, Checkpoint
from trainer.group import Group
from trainer.loss import Policy
from trainer.model import Frozen, Model, build, in_dtype, load_module
from trainer.own_loss import resolve
from trainer.spec import TrainerSpec
from trainer.wanted import Wanted

CRITIC = "critic"


def begin(spec: TrainerSpec, group: Group, model_path: Path) -> Model:
    """From a Hugging Face checkpoint, nothing trained yet. All ranks together. Raises Refused."""
    model = build(spec, group, model_path)
    add_reference(spec, group, model)
    if spec.critic is not None:
        model.critic = _new_critic(spec, group, model, spec.critic.model_path or model_path)
    return model


def resume(spec: TrainerSpec, group: Group, path: Path) -> tuple[Model, Checkpoint]:
    """From a checkpoint of any layout. All ranks together. Raises Refused for what is no whole checkpoint.

    A critic that the checkpoint does not have, because the run was given one later, begins as it would have at first.
    """
    checkpoint = saving.open_checkpoint(group, path)
    model = build(spec, group, checkpoint.hf_path)
    saving.restore(spec, group, model, checkpoint)
    add_reference(spec, group, model)
    if spec.critic is not None:
        saved = checkpoint.directory_of(CRITIC)
        if saved.is_dir():
            model.critic = build(spec, group, saved / "hf", value_head=True)
            saving.restore(spec, group, model.critic, checkpoint, CRITIC)
        else:
            model.critic = _new_critic(spec, group, model, spec.critic.model_path or spec.model_path)
    saving.restore_random_state(spec, group, checkpoint)
    return model, checkpoint


def parts(model: Model) -> dict[str, Model]:
    """What is trained, by the name it has in a checkpoint."""
    return {POLICY: model} | ({CRITIC: model.critic} if model.critic is not None else {})


def add_reference(spec: TrainerSpec, group: Group, model: Model) -> None:
    """All ranks together. Raises Refused for a reference that cannot be loaded or speaks of other tokens."""
    if not spec.loss.kl.wanted:
        return
    path = spec.loss.kl.reference or spec.model_path
    hf_config, bridge, module = load_module(spec, group, path)
    _agree_on_vocabulary(group, model, hf_config, f"reference {path}")
    model.reference = Frozen(in_dtype(spec, bridge, module.requires_grad_(False)), Wanted(module))


def _new_critic(spec: TrainerSpec, group: Group, model: Model, path: Path) -> Model:
    critic = build(spec, group, path, value_head=True)
    _agree_on_vocabulary(group, model, critic.hf_config, f"critic {path}")
    return critic


def _agree_on_vocabulary(group: Group, model: Model, other: Any, name: str) -> None:
    """A token beyond the other's vocabulary would kill a rank, or with tensor-parallel ranks be embedded as zeros. Raises Refused."""
    ours, theirs = model.hf_config.vocab_size, other.vocab_size
    why = f"the {name} has a vocabulary of {theirs} tokens, the policy of {ours}: they must be the same"
    group.agree((400, why) if ours != theirs else None)


def policy_loss(spec: TrainerSpec, group: Group) -> Policy:
    """The policy loss of the spec. All ranks together. Raises Refused for a user's function that cannot be used."""
    policy, fault = None, None
    try:
        policy = resolve(spec.loss)
    except ValueError as error:
        fault = (400, str(error))
    group.agree(fault)
    assert policy is not None
    return policy
