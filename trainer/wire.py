"""What travels between the driver and rank 0: keys, numbers and short lists, never tensors. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from store import Ref


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class WireRef(_Message):
    """A `store.Ref` as JSON."""

    key: str
    size_bytes: int
    location: str
    inline: str | None = None
    """base64 of a small object, which rides along"""

    def ref(self) -> Ref:
        """Raises ValueError when `inline` is not base64."""
        return Ref.from_wire(self.model_dump())

    @classmethod
    def of(cls, ref: Ref) -> WireRef:
        return cls.model_validate(ref.to_wire())


class PlanRow(_Message):
    """One row of a plan: number `row` in the object `rollout`. `length` is S, its tokens, prompt included; `advantage` is the scalar of all
    its trained tokens.

    With a critic the advantage is made on the rank, from `score`. `sequence` names the trajectory where rows of one are one sequence.
    """

    row_id: str
    rollout: WireRef
    row: int = Field(0, ge=0)
    extras: WireRef | None = None
    advantage: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    score: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    sequence: str | None = None
    length: int = Field(ge=2)


class MiniBatch(_Message):
    """The rows of one optimizer step: `ranks[r][m]` are those of data-parallel rank r's m-th micro-batch. Any of the lists may be empty."""

    ranks: list[list[list[PlanRow]]]

    def rows(self) -> list[PlanRow]:
        return [row for rank in self.ranks for micro_batch in rank for row in micro_batch]


class LoadRequest(_Message):
    model_path: str | None = None


class ResumeRequest(_Message):
    path: str


class TrainRequest(_Message):
    batch_id: int = Field(ge=0)
    epoch: int = Field(ge=0)
    lr: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    critic_lr: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    mini_batches: list[MiniBatch]
    """None, when no row has an advantage: the batch is then skipped, and the next version has the same weights."""


class LogprobsRequest(_Message):
    rows: Annotated[list[PlanRow], Field(min_length=1)]


class SnapshotRequest(_Message):
    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    bucket_bytes: int = Field(ge=1)
    canary_ids: list[int] = []

    @field_validator("canary_ids")
    @classmethod
    def _no_lone_token(cls, ids: list[int]) -> list[int]:
        if len(ids) == 1:
            raise ValueError("one token has no log-prob after it: give at least two, or none")
        return ids


class SaveRequest(_Message):
    directory: str
    keep_last: int | None = Field(None, ge=1)


class StopRequest(_Message):
    pass


class Health(_Message):
    role: Literal["trainer"]
    incarnation: int
    state: Literal["empty", "busy", "idle"]
    progress: int
    """Grows with every command and every micro-batch: a busy trainer whose progress stands still is hung."""
    trained_version: int
    world_size: int


class Loaded(_Message):
    trained_version: int


class TrainReport(_Message):
    """Token means over the batch's trained tokens; None where no token was computed, or the number is not finite.

    `row_ids` are the rows of the mini-batches that were applied; the others are in `skipped_row_ids`. `skipped` says why
    when nothing was applied.
    """

    batch_id: int
    trained_version: int
    skipped: str | None
    row_ids: list[str]
    skipped_row_ids: list[str]
    rows: int
    tokens: int
    loss: float | None
    grad_norm: float | None
    clip_fraction: float | None
    entropy: float | None
    kl: float | None
    ratio_max: float | None
    logprob_gap_max: float | None
    logprob_gap_rows: int
    reference_kl: float | None = None
    """KL to the reference model, by the loss's estimator; None without one."""
    off_policy_kl: float | None = None
    """From the recorded to the recomputed log-probs, before any step of the batch (k3); None unless they are recomputed."""
    effective_sample_size: float | None = None
    """(sum w)^2 / (n sum w^2) of the correction's weights: 1 when all are equal."""
    masked_tokens: int = 0
    masked_rows: int = 0
    value_loss: float | None = None
    value_clip_fraction: float | None = None
    explained_variance: float | None = None
    """1 - E (return - value)^2 / Var(return), of the values before the batch; None without a critic."""
    critic_grad_norm: float | None = None
    replayed_rows: int | None = None
    """Of `rows`, those whose tokens went where the engine had sent them; None when routing is not replayed."""
    unreplayed_rows: int | None = None
    read_s: float
    prepare_s: float = 0.0
    """What was recomputed before the first step: old log-probs, reference, values."""
    forward_backward_s: float
    optimizer_s: float
    step_s: float
    memory_bytes: dict[str, int]
    """Phase -> the highest bytes of any rank in it (`trainer/memory.py`); load and export are the last ones before this step."""
    memory_phase: str | None
    """The phase that needs most."""


class Logprobs(_Message):
    log_probs: dict[str, list[float]]


class TensorFacts(_Message):
    shape: list[int]
    dtype: str
    sha256: str
    """Of the tensor's contiguous bytes."""


class Canary(_Message):
    """`log_probs[i]` is that of `input_ids[i + 1]` after `input_ids[:i + 1]`, at temperature 1."""

    input_ids: list[int]
    log_probs: list[float]


class Snapshot(_Message):
    buckets: list[WireRef]
    tensors: dict[str, TensorFacts]
    canary: Canary


class Saved(_Message):
    path: str
    trained_version: int


class Stopped(_Message):
    pass


REQUESTS: dict[str, type[_Message]] = {
    "load": LoadRequest,
    "resume": ResumeRequest,
    "train": TrainRequest,
    "logprobs": LogprobsRequest,
    "snapshot": SnapshotRequest,
    "save": SaveRequest,
    "stop": StopRequest,
}


def problems_in_words(errors: list[Any]) -> str:
    """Pydantic's error list as one sentence that names the fields."""
    words = {"extra_forbidden": "unknown field", "missing": "missing"}
    return "; ".join(f"{'.'.join(map(str, error['loc']))}: {words.get(error['type'], error['msg'])}" for error in errors)
