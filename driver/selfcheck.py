"""`headrace selfcheck loss`, the driver's side: which loss is meant. The check itself needs torch and is a process of the trainer's."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from driver.config import ConfigError, load_config, set_key
from driver.words import wrong
from trainer.loss_spec import LossSpec


def command(target: str | None, config: Path | None, overrides: list[str], rows: int, seed: int, layouts: bool) -> list[str]:
    """The command line of the check. Raises ConfigError."""
    spec = loss_spec(target, config, overrides)
    flags = ["--loss", spec.model_dump_json(), "--rows", str(rows), "--seed", str(seed), "--layouts" if layouts else "--no-layouts"]
    return [sys.executable, "-P", "-m", "trainer.selfcheck", "loss", *flags]


def loss_spec(target: str | None, config: Path | None, overrides: list[str]) -> LossSpec:
    """The configuration's loss, or the defaults, with `target` as its policy and `overrides` (`dotted.key=value`). Raises ConfigError."""
    if target is None and config is None:
        raise ConfigError("say which loss: headrace selfcheck loss path/file.py:name, or --config run.yaml")
    # What is not set stays so: another policy may ask for it.
    raw: dict[str, Any] = load_config(config).trainer.loss.model_dump(exclude_unset=True, exclude={"advantage"}) if config else {}
    if target is not None:
        raw["policy"] = target
    for override in overrides:
        set_key(raw, override.removeprefix("trainer.loss."))
    try:
        return LossSpec.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("; ".join(map(_problem, error.errors()))) from None


def _problem(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), LossSpec.model_fields, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near and len(error["loc"]) == 1 else f"your own function's is written params.{where}"
        return f"unknown key {where!r} of the loss: {hint}"
    return wrong(error, where) if where else str(error["msg"]).removeprefix("Value error, ")
