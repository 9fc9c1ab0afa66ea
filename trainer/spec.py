"""What a trainer is told at its start, in one JSON file. No torch here: the driver builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from trainer.layout import misplaced, nothing_to_offload, uneven_experts
from trainer.loss_spec import CriticSpec, LossSpec, Strict, check_critic
from trainer.wire import problems_in_words


class OptimizerSpec(Strict):
    """Adam with decoupled weight decay, or SGD with momentum and a decay that is part of its gradient; norms and biases are never
    decayed. `grad_clip` 0 clips nothing. `betas` and `eps` are Adam's, `momentum` is SGD's.
    """

    kind: Literal["adam", "sgd"] = "adam"
    momentum: float = Field(0.9, ge=0.0, lt=1.0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(0.0, ge=0.0)
    grad_clip: float = Field(1.0, ge=0.0)


class TrainerSpec(Strict):
    run_id: str
    run_dir: Path
    store_location: str
    model_path: Path
    """Loaded by `/v1/load` when the call names no other."""
    host: str = "127.0.0.1"
    port: int = Field(ge=0, le=65535)
    """0 takes a free port and writes it to RUN_DIR/trainer.json."""
    token: str | None = None
    incarnation: int = Field(0, ge=0)
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    cp: int = Field(1, ge=1)
    dp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    """Over how many of a stage's tp·cp·dp ranks the experts are split; these are no further ranks."""
    routing_replay: bool = False
    """Whether tokens go to the experts that their row's `routed_experts` name."""
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where torch sees a GPU for every rank, else the CPU."""
    transformer_engine: Literal["auto", "off"] = "auto"
    """auto: its modules make up the layers where it is installed, on CUDA and in bfloat16; else, and with off, our own torch modules do."""
    optimizer_offload: float = Field(0.0, ge=0.0, le=1.0)
    """Which part of the optimizer's state is kept, and stepped, in the host's memory instead of the GPU's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations. The optimizer's weights and state, and the gradients' sum, are float32 always."""
    distributed_optimizer: bool = False
    """Each data-parallel (and context-parallel) rank keeps a part of the optimizer's state, not a copy of it."""
    sequence_parallel: bool = False
    """Norms and residuals are split over the tensor-parallel ranks along the sequence; with experts they always are."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, the attention's core, or whole layers."""
    loss: LossSpec = LossSpec()
    critic: CriticSpec | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    micro_batch_tokens: int = Field(4096, ge=1)
    """How many tokens one forward pass of `/v1/logprobs` takes; training follows the plan's own micro-batches."""
    threads_per_rank: int = Field(1, ge=1)
    shard_bytes: int = Field(2 << 30, ge=1)
    """The largest file of a checkpoint, and what a rank holds beside the model while it writes; a single tensor may be larger."""
    control_timeout_s: float = Field(30.0, gt=0.0)
    """How long a rank waits for rank 0 to say anything; rank 0 says something every fifth of it."""
    work_timeout_s: float = Field(1800.0, gt=0.0)
    """How long a rank waits for the others inside a command: longer than the slowest rank's share of a step."""
    max_quick_deaths: int = Field(5, ge=1)
    quick_death_s: float = Field(10.0, gt=0.0)
    """A group that dies this soon after its fork died quickly; after `max_quick_deaths` in a row the trainer gives up."""

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> TrainerSpec:
        if self.token is None and self.host not in ("127.0.0.1", "::1", "localhost"):
            raise ValueError(f"host {self.host} can be reached from other machines: set a token, or listen on 127.0.0.1")
        return self

    @model_validator(mode="after")
    def _a_critic_that_fits(self) -> TrainerSpec:
        check_critic(self.loss, self.critic)
        return self

    @model_validator(mode="after")
    def _experts_over_whole_ranks(self) -> TrainerSpec:
        if why := uneven_experts(self.tp, self.cp, self.dp, self.ep):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _switches(self) -> TrainerSpec:
        if why := misplaced(self.tp, self.sequence_parallel, self.distributed_optimizer, self.optimizer.kind):
            raise ValueError(why)
        if why := nothing_to_offload(self.device, self.optimizer_offload):
            raise ValueError(why)
        return self

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def layout(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp, "ep": self.ep}

    @classmethod
    def read(cls, path: Path) -> TrainerSpec:
        """Raises ValueError in words a user can act on."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read the trainer's spec {path}: {error.strerror}") from error
        except ValidationError as error:
            raise ValueError(f"the trainer's spec {path} is not valid: {problems_in_words(list(error.errors()))}") from error
