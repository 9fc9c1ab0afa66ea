"""What `evaluation:` in the configuration says: a held-out set, scored at chosen versions beside the training."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from driver.section import Section


class EvaluationConfig(Section):
    data: Path = Field(description="the held-out rows, JSONL or Parquet, as a dataset's; their task types need a scorer")
    mapping: dict[str, str] = Field({}, description="field mapping, as at a submit: {prompt: question, answer: label}")
    every: int = Field(10, ge=1, description="versions between evaluations; version 0 and the last one are evaluated too")
    samples: int | None = Field(None, ge=1, description="only the first so many rows; null: all")
    n: int = Field(1, ge=1, le=1024, description="answers a row")
    temperature: float | None = Field(None, ge=0, description="null: as in training; 0: the likeliest token each time")
    max_new_tokens: int | None = Field(None, ge=1, description="null: as in training")
    engines: int = Field(
        0,
        ge=0,
        le=64,
        description="engines of its own, which hold the version that is evaluated and no other; 0: those of the run, beside its "
        "training, and an answer that lives through a push is of several versions, which the result says",
    )
    max_open: int = Field(64, ge=1, description="requests at once, so that training is not crowded out")
    deadline_s: float = Field(600.0, gt=0, description="an evaluation that takes longer is given up with what it lacks, and is an alarm")
    stop_reward: float | None = Field(None, description="the run ends when an evaluation's mean reward reaches this")
    patience: int | None = Field(None, ge=1, description="the run ends when so many evaluations in a row brought no new best")
