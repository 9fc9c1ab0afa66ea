"""A run's configuration: one YAML file, read and checked whole before anything starts.

Unknown keys are errors that name the nearest right one (a misspelled key that is silently ignored costs somebody a week of
training). Paths are relative to the file that names them, except `run_dir`, which is relative to the current directory so that one
configuration can be run from many places. The keys themselves are in `driver/settings.py`.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import ValidationError

from driver.settings import ModelConfig, RunConfig, TrainerConfig
from driver.words import wrong
from rollout.sglang.spec import has_cuda_device, located
from trainer.layout import misfit


class _Once(yaml.SafeLoader):
    """YAML lets a key that is written twice win the second time: here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = (key_node.tag, key_node.value), key_node.start_mark.line + 1
            if isinstance(key_node, yaml.ScalarNode) and key in seen:
                problem = f"{key_node.value!r} is written twice, in lines {seen[key]} and {line}: leave one"
                raise yaml.constructor.ConstructorError(None, None, problem)
            if isinstance(key_node, yaml.ScalarNode):
                seen[key] = line
        return super().construct_mapping(node, deep)


class ConfigError(ValueError):
    """A sentence for the user: what is wrong, where, and what to do."""


def load_config(path: str | os.PathLike[str], overrides: list[str] | None = None) -> RunConfig:
    """Read and check a configuration. `overrides` are `dotted.key=YAML value`. Raises ConfigError with the remedy."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no configuration file {file}")
    try:
        raw = yaml.load(file.read_text(encoding="utf-8"), _Once)
    except yaml.constructor.ConstructorError as error:
        raise ConfigError(f"{file}: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold a mapping with at least run_id and model.path")
    for override in overrides or []:
        set_key(raw, override)
    return parse_config(raw, base=file.parent)


def parse_config(raw: dict[str, Any], base: Path) -> RunConfig:
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    try:
        return _check_files(config, base)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # a path with a NUL in it, or longer than the file system allows
        raise ConfigError(f"a path in the configuration cannot be looked at: {str(error)[:500]}") from error


def set_key(raw: dict[str, Any], override: str) -> None:
    """`override` is `dotted.key=YAML value`. Raises ConfigError."""
    dotted, value = read_override(override)
    node = raw
    *parents, leaf = dotted.split(".")
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {parent} is not a section")
        node = child
    node[leaf] = value


def read_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value. Raises ConfigError."""
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set {override!r}: write it as key.key=value")
    try:
        return dotted, yaml.load(text, _Once)
    except yaml.YAMLError as error:
        what = getattr(error, "problem", None) or "it can not be read"
        raise ConfigError(f"--set {override!r}: what stands behind = is not YAML: {what}; quote it") from None


def _check_files(config: RunConfig, base: Path) -> RunConfig:
    """Make paths absolute and say now, not in a child process minutes later, what is missing."""
    model_path = (base / config.model.path).resolve()
    for name in ("config.json", "tokenizer.json"):
        if not (model_path / name).is_file():
            what = f"has no {name}" if model_path.is_dir() else "does not exist"
            raise ConfigError(f"model.path {model_path} {what}; it must be a Hugging Face checkpoint directory (nothing is downloaded)")
    model = json.loads((model_path / "config.json").read_text())
    max_positions = model.get("max_position_embeddings")
    if max_positions and config.rollout.context_length > max_positions:
        raise ConfigError(
            f"rollout.context_length ({config.rollout.context_length}) exceeds the model's max_position_embeddings ({max_positions})"
        )
    trainer = config.trainer
    if why := misfit(model, trainer.tp, trainer.pp, trainer.cp, trainer.dp, trainer.ep, routing_replay=trainer.routing_replay):
        raise ConfigError(f"trainer: {why}")
    scorers = {}
    for task_type, scorer in config.reward.scorers.items():
        if scorer.function:
            function = _own_function(scorer.function, base, f"reward.scorers.{task_type}.function")
            scorer = scorer.model_copy(update={"function": function})
        scorers[task_type] = scorer
    check_store(config, model_path)
    rollout = config.rollout
    if rollout.engine == "sglang":
        try:
            rollout = rollout.model_copy(update={"sglang": located(rollout.sglang, base)})
        except ValueError as error:
            raise ConfigError(f"rollout.sglang: {error}") from None
    if rollout.lengths_trace is not None:
        trace = (base / rollout.lengths_trace).resolve()
        if not trace.is_file():
            raise ConfigError(f"rollout.lengths_trace: there is no file {trace}")
        rollout = rollout.model_copy(update={"lengths_trace": trace})
    data = [each.model_copy(update={"path": (base / each.path).resolve()}) for each in config.data]
    if missing := next((each.path for each in data if not each.path.is_file()), None):
        raise ConfigError(f"data: there is no file {missing}")
    curriculum = config.curriculum
    if curriculum is not None:
        function = _own_function(curriculum.function, base, "curriculum.function")
        curriculum = curriculum.model_copy(update={"function": function})
    evaluation = config.evaluation
    if evaluation is not None:
        held_out = (base / evaluation.data).resolve()
        if not held_out.is_file():
            raise ConfigError(f"evaluation.data: there is no file {held_out}")
        evaluation = evaluation.model_copy(update={"data": held_out})
    roots = [(base / root).resolve() for root in config.service.data_roots]
    return config.model_copy(
        update={
            "model": ModelConfig(path=model_path),
            "rollout": rollout,
            "reward": config.reward.model_copy(update={"scorers": scorers}),
            "trainer": _trainer_files(trainer, base),
            "roles": {
                name: role.model_copy(update={"logic": _own_function(role.logic, base, f"roles.{name}.logic")})
                for name, role in config.roles.items()
            },
            "data": data,
            "evaluation": evaluation,
            "curriculum": curriculum,
            "service": config.service.model_copy(update={"data_roots": roots}),
        }
    )


def _trainer_files(trainer: TrainerConfig, base: Path) -> TrainerConfig:
    if trainer.device == "cuda" and not has_cuda_device():
        raise ConfigError("trainer.device is cuda, and this machine has no NVIDIA device: set it to cpu, or to auto")
    loss, critic = trainer.loss, trainer.critic
    if loss.own_policy:
        loss = loss.model_copy(update={"policy": _own_function(loss.policy, base, "trainer.loss.policy")})
    if loss.kl.reference is not None:
        path = _model_directory(base / loss.kl.reference, "trainer.loss.kl.reference")
        loss = loss.model_copy(update={"kl": loss.kl.model_copy(update={"reference": path})})
    if critic is not None and critic.model_path is not None:
        critic = critic.model_copy(update={"model_path": _model_directory(base / critic.model_path, "trainer.critic.model_path")})
    return trainer.model_copy(update={"loss": loss, "critic": critic})


def _model_directory(path: Path, where: str) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{where} {path.resolve()} is no Hugging Face checkpoint directory: it has no config.json")
    return path.resolve()


def _own_function(target: str, base: Path, where: str) -> str:
    """The user's function with its file's whole path. Nothing of the user's is run here."""
    if ":" not in target:
        raise ConfigError(f"{where} {target!r}: write it as path/file.py:name or module:name")
    file, _, attribute = target.rpartition(":")
    if not file.endswith(".py"):
        return target
    resolved = (base / file).resolve()
    if not resolved.is_file():
        raise ConfigError(f"{where}: there is no file {resolved}")
    _check_name(resolved, attribute, where)
    return f"{resolved}:{attribute}"


def _check_name(file: Path, name: str, where: str) -> None:
    """A misspelled function is said now and not by a process later. Nothing of the user's is run: the file is only parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{where}: {file} is not Python: {error}") from None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    if name.partition(".")[0] not in names and "*" not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        raise ConfigError(f"{where}: {file} has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def check_store(config: RunConfig, model_path: Path) -> None:
    """The worst case must fit (B2): every row there can be between two checkpoints at full length, and three copies of the weights."""
    batches = config.checkpoint.every + config.staleness.bound + 1
    rows_bytes = config.batch.samples * config.sample_bytes * batches
    needed = rows_bytes + 3 * weights_bytes(model_path, config.trainer.dtype)
    if needed > config.store.capacity_bytes:
        raise ConfigError(
            f"store.capacity_bytes ({config.store.capacity_bytes:,}) is too small: {batches} batches of rows at full length and three "
            f"copies of the weights may need {needed:,}. Raise it, or lower checkpoint.every, rollout.context_length or batch.samples"
        )


def weights_bytes(model_path: Path, dtype: str) -> int:
    """The size of a snapshot in the trainer's dtype, from the files of the checkpoint."""
    stored = json.loads((model_path / "config.json").read_text())
    half = (stored.get("dtype") or stored.get("torch_dtype")) in ("bfloat16", "float16")
    return sum(file.stat().st_size for file in model_path.glob("*.safetensors")) * (2 if half else 1) // (2 if dtype == "bfloat16" else 1)


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "the configuration"
        if item["type"] == "extra_forbidden":
            names = _names_at(item["loc"][:-1])
            near = difflib.get_close_matches(str(item["loc"][-1]), names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(sorted(names))}"
            lines.append(f"unknown key {where!r}: {hint}")
        else:
            lines.append(wrong(item, where))
    return "; ".join(lines)


def _names_at(location: tuple[Any, ...]) -> list[str]:
    """The field names of the section at a location; through mappings (scorers, roles) by their value type."""
    section: Any = RunConfig
    for part in location:
        if isinstance(section, dict):  # any name; what stands under it is of one kind
            section = section[...]
            continue
        field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        if field is None:
            continue  # also a number, which is a place in a list
        kinds = (field.annotation, *get_args(field.annotation))  # a section may be optional, or there may be a list of it
        found = next((kind for kind in kinds if hasattr(kind, "model_fields")), section)
        section = {...: found} if get_origin(field.annotation) is dict else found
    return list(getattr(section, "model_fields", {}))
