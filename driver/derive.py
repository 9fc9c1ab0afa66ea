"""A run made from another one: what may be changed over REST, and whether the engines of the one can serve the other.

Pure. Whoever may speak to the service may change numbers and choices of a run, but may not name code, files, hosts or keys: those are the
service's own configuration's, so that a request can not run a program or read a file that nobody declared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driver.config import ConfigError, parse_config, set_key
from driver.settings import RunConfig

CHANGEABLE = (
    "seed",
    "shuffle",
    "stop_deadline_s",
    "batch",
    "checkpoint",
    "filter",
    "curriculum.deadline_s",
    "curriculum.every_batches",
    "curriculum.params",
    "filter",
    "staleness",
    "stop",
    "trainer",
    "store.capacity_bytes",
    "push.bucket_bytes",
    "push.deadline_s",
    "push.logprob_tolerance",
    "push.transport",
    "reward.batch_wait_s",
    "reward.deadline_s",
    "reward.workers",
    "rollout.apply_chat_template",
    "rollout.context_length",
    "rollout.data_retries",
    "rollout.deterministic",
    "rollout.engines",
    "rollout.infrastructure_retries",
    "rollout.loads_interval_s",
    "rollout.max_open_requests",
    "rollout.max_running_requests",
    "rollout.min_group",
    "rollout.n",
    "rollout.sampling",
    "rollout.stall_s",
    "rollout.stream_interval",
)
# What an engine was started with. Where these are equal, a running engine needs new weights and nothing else.
_OF_ENGINES = (
    "engine",
    "sglang",
    "context_length",
    "max_running_requests",
    "stream_interval",
    "deterministic",
    "engine_args",
    "threads",
)


def derived(origin: RunConfig, run_id: str, changes: dict[str, Any]) -> RunConfig:
    """The configuration of run `run_id`: that of `origin` but for `changes` (dotted key → value), beside it on disk. ConfigError."""
    raw = origin.model_dump(mode="json")
    for key, value in changes.items():
        if not any(key == allowed or key.startswith(allowed + ".") for allowed in CHANGEABLE):
            raise ConfigError(
                f"{key} can not be changed here: only the service's own configuration names code, files, hosts and keys. To be changed are "
                + ", ".join(CHANGEABLE)
            )
        set_key(raw, f"{key}={json.dumps(value)}")
    raw["run_id"] = run_id
    raw["run_dir"] = str(origin.directory.parent / run_id)
    raw["data"] = None
    raw["store"]["directory"] = None if origin.store.directory is None else f"{origin.store.directory}-{run_id}"
    config = parse_config(raw, Path("/"))
    _check_files_unchanged(origin, config)
    return config


def _check_files_unchanged(origin: RunConfig, config: RunConfig) -> None:
    """`trainer` is open to changes as a section, but for the three keys in it that name code or directories."""
    before, after = origin.trainer, config.trainer
    named = {
        "trainer.loss.policy": (
            before.loss.policy if before.loss.own_policy else None,
            after.loss.policy if after.loss.own_policy else None,
        ),
        "trainer.loss.kl.reference": (before.loss.kl.reference, after.loss.kl.reference),
        "trainer.critic.model_path": (
            before.critic.model_path if before.critic else None,
            after.critic.model_path if after.critic else None,
        ),
    }
    for key, (had, has) in named.items():
        if has is not None and has != had:
            raise ConfigError(f"{key} names code or files, which only the service's own configuration may: leave it, or start a service")


def other_engines(origin: RunConfig, config: RunConfig) -> str | None:
    """Why the engines of `origin` can not serve `config`: the first key that differs. None when they can."""
    if origin.model.path != config.model.path:
        return "model.path"
    if origin.trainer.dtype != config.trainer.dtype:
        return "trainer.dtype"
    for key in _OF_ENGINES:
        if getattr(origin.rollout, key) != getattr(config.rollout, key):
            return f"rollout.{key}"
    return None


def same_reward(origin: RunConfig, config: RunConfig) -> bool:
    """Does the reward service of the one score for the other?"""
    return (origin.reward.scorers, origin.reward.workers) == (config.reward.scorers, config.reward.workers)
