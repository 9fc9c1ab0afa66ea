"""The settings of what a run is fed: its datasets, the filter, the curriculum. Part of `driver/settings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, StrictInt, model_validator

from driver.mix import Change, check_one
from driver.section import Section


class FilterConfig(Section):
    """Which samples are discarded, and replaced by others, before they can be trained. Without any of these, none."""

    max_pass_rate: float | None = Field(
        None, gt=0, le=1, description="a sample of which this share or more is right is discarded: 1 drops prompts that were always right"
    )
    min_pass_rate: float | None = Field(
        None, ge=0, lt=1, description="a sample of which this share or less is right is discarded: 0 drops prompts that were always wrong"
    )
    equal_rewards: bool = Field(False, description="a sample whose trajectories all have the same reward is discarded: it has no gradient")
    right_from: float = Field(1.0, description="a reward of this or more is right, where the scorer says nothing of is_correct")
    skip_solved: bool = Field(False, description="a row whose every trajectory was right is left out of its dataset's next pass")
    alarm_batches: int = Field(5, ge=1, description="so many batches' worth of samples filtered one after another raise an alarm")
    pause_batches: int | None = Field(50, ge=1, description="and so many pause the run: nothing can be trained; null: never")
    window: int = Field(256, ge=1, le=10_000, description="pass rates are taken over the last so many samples of each dataset")

    @model_validator(mode="after")
    def _lets_something_through(self) -> FilterConfig:
        if self.min_pass_rate is not None and self.max_pass_rate is not None and self.min_pass_rate >= self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate:g}) is not below max_pass_rate ({self.max_pass_rate:g}): kept is what lies between"
            )
        return self


class CurriculumConfig(Section):
    """A function of yours that sets the weights of the datasets while the run goes on."""

    function: str = Field(description="module:attribute or path/file.py:attribute; it is given pass rates and returns weights")
    every_batches: int = Field(5, ge=1, description="it is asked again after so many batches")
    deadline_s: float = Field(30.0, gt=0, description="its process is killed then; a failure is an alarm and changes nothing")
    params: dict[str, Any] = Field({}, description="handed to it as they are")


class DataConfig(Section):
    """A dataset that is submitted, and closed, at the first start. A later start takes over shares that were changed here."""

    path: Path
    name: str | None = Field(None, description="default: the file's name; it tells the datasets of the configuration apart")
    weight: float = Field(1.0, allow_inf_nan=False, description="its share of the samples, against the other datasets' weights; 0: none")
    priority: StrictInt = Field(0, description="while a dataset of higher priority has rows, it gives all samples")
    epochs: int | None = Field(None, ge=1, description="passes over it; null: for ever; left out: stop.epochs")
    mapping: dict[str, str | None] | None = Field(None, description="target: field, as in {prompt: question, answer: label}")

    @property
    def called(self) -> str:
        return self.name or self.path.name

    @property
    def share(self) -> Change:
        return Change(self.weight, self.priority, self.epochs, "epochs" in self.model_fields_set)

    @model_validator(mode="after")
    def _a_share(self) -> DataConfig:
        check_one(self.share)
        return self
