"""The settings of a run: every key of its YAML, with its default and what goes wrong without it.

Unknown keys are errors. What can be judged from the numbers alone is judged here; files and machines are `driver/config.py`'s.
"""

from __future__ import annotations

import ipaddress
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from driver.mix import check_sum
from driver.row_bytes import trajectory_bytes
from driver.section import Section
from driver.settings_data import CurriculumConfig, DataConfig, FilterConfig
from driver.settings_evaluation import EvaluationConfig
from driver.settings_roles import NAME as ROLE_NAME
from driver.settings_roles import RoleConfig, check_names
from driver.settings_store import Kind, StoreConfig
from rollout.address import bare_host, checked_url, is_loopback
from rollout.sglang.spec import SglangSpec
from trainer.layout import misplaced, nothing_to_offload, sequence_unit
from trainer.loss_spec import CriticSpec, LossSpec, check_critic

SECRETS = {"service": {"token"}, "rollout": {"engine_api_key", "engine_admin_key", "router_api_key"}}  # keys that are never shown


def _from_environment(value: str | None) -> str | None:
    """A secret as it is, or the environment's variable that ${NAME} names."""
    if value and value.startswith("${") and value.endswith("}"):
        name = value[2:-1]
        if not os.environ.get(name):
            raise ValueError(f"the environment variable {name} is not set")
        value = os.environ[name].strip()  # what is read from a file ends with a newline
    if value and not (value.isascii() and value.isprintable()):
        raise ValueError("it goes into an HTTP header, which takes printable ASCII only; look for an umlaut, a quotation mark, a newline")
    return value


class SamplingConfig(Section):
    """Sampling of training traffic. Top-p, top-k and the like are refused: the trainer could not know the support (M5)."""

    temperature: float = Field(1.0, gt=0, description="log-probs are of logits / temperature; 0 has no gradient")
    max_new_tokens: int = Field(16, ge=1)
    stop_token_ids: list[int] = Field([])


class RolloutConfig(Section):
    engine: Literal["embedded", "sglang"] = Field(
        "embedded", description="embedded: ours, small models on the CPU; sglang: the real server"
    )
    sglang: SglangSpec = SglangSpec()
    engines: int = Field(1, ge=0, le=64, description="engine processes started on this machine; 0 when all are elsewhere")
    engine_urls: list[str] = Field([], description="engines that are started elsewhere, each as http://HOST:PORT")
    router_url: str | None = Field(None, description="a router (sglang-router, smg) that requests go through; engines are its workers")
    router_api_key: str | None = Field(None, description="of the router; ${NAME} reads the environment")
    engine_api_key: str | None = Field(None, description="of the engines at engine_urls; ${NAME} reads the environment")
    engine_admin_key: str | None = Field(None, description="where they have one beside the API key; ${NAME} reads the environment")
    n: int = Field(8, ge=1, description="trajectories per sample; a group baseline needs at least 2")
    min_group: int = Field(2, ge=1, description="fewer ready trajectories than this and the sample is discarded whole")
    sampling: SamplingConfig = SamplingConfig()
    apply_chat_template: bool = False
    context_length: int = Field(256, ge=8)
    max_running_requests: int = Field(128, ge=1, description="per engine: requests it decodes at once")
    max_open_requests: int = Field(256, ge=1, description="per engine: requests sent and not answered; bounds the engine's queue")
    deterministic: bool = Field(False, description="each request computed alone and seeded: the same run, bit for bit; slow")
    stream_interval: int = Field(16, ge=1, description="tokens per streamed chunk: with an engine at most this much is lost a request")
    stall_s: float = Field(
        60.0, gt=0, description="a request without a new token for this long goes elsewhere; an engine that is silent so long is replaced"
    )
    prefix_log_every_s: float | None = Field(
        2.0,
        gt=0,
        le=60,
        description="tokens of unfinished answers go to RUN_DIR/prefixes.sqlite this often, and after a restart are gone on from; null: "
        "they are sampled from their prompts again",
    )
    prefix_log_every_tokens: int = Field(256, ge=1, description="and as soon as a trajectory has so many that are not there yet")
    part_tokens: int | None = Field(
        None,
        ge=1,
        description="answers are asked for in parts of so many tokens, each going on from the one before: bounds what is sampled again "
        "when an engine or the driver is lost after a push; null: in one, and what came after a push in its middle is lost with it",
    )
    loads_interval_s: float = Field(1.0, gt=0, le=60, description="each engine is asked this often how loaded it is, and seen to move")
    infrastructure_retries: int = Field(20, ge=0, description="a request lost to a dead engine is sent again this often")
    data_retries: int = Field(1, ge=0, description="a prompt or a score that fails by itself is tried again this often")
    lengths_trace: Path | None = Field(
        None, description="lengths of answers (CSV, output_tokens) for the what-if model, until the run has seen its own"
    )
    engine_args: list[str] = Field([], description="further flags for the engine's command line")
    threads: int = Field(1, ge=1)

    @field_validator("engine_urls")
    @classmethod
    def _addresses(cls, urls: list[str]) -> list[str]:
        return [checked_url(url) for url in urls]

    @field_validator("router_url")
    @classmethod
    def _address(cls, url: str | None) -> str | None:
        return None if url is None else checked_url(url)

    @field_validator("engine_api_key", "engine_admin_key", "router_api_key")
    @classmethod
    def _secret(cls, value: str | None) -> str | None:
        return _from_environment(value)

    @model_validator(mode="after")
    def _what_sglang_can(self) -> RolloutConfig:
        if self.engine == "sglang" and self.deterministic:
            raise ValueError("deterministic needs engine: embedded; a real SGLang computes requests together, and its sums depend on which")
        if self.engine == "sglang" and self.engine_args:
            raise ValueError("engine_args are the embedded engine's; those of SGLang go under rollout.sglang.args")
        return self


class BatchConfig(Section):
    samples: int = Field(16, ge=1, description="P: samples per global batch")
    mini_batches: int = Field(1, ge=1, description="optimizer steps per global batch")
    micro_batch_tokens: int = Field(4096, ge=16, description="token budget of one forward and backward pass, all its rows together")
    long_rows: Literal["refuse", "alone"] = Field(
        "refuse",
        description="rows above that budget: refuse: a context_length that allows them is an error; alone: each is a micro-batch by "
        "itself, which takes the memory that it takes",
    )

    @model_validator(mode="after")
    def _mini_batches_fit(self) -> BatchConfig:
        if self.mini_batches > self.samples:
            raise ValueError(f"mini_batches ({self.mini_batches}) exceeds samples ({self.samples}); a mini-batch is cut by sample")
        return self


class StalenessConfig(Section):
    """The bound, and who gives way when a straggler holds a batch. Keys of another preset are refused: they would have no effect."""

    bound: int = Field(2, ge=0, description="S: no trained sample is more than this many batches old; 0 is synchronous")
    preset: Literal["strict", "deadline", "partial"] = Field(
        "strict",
        description="strict: a held batch waits, nothing is discarded for age or length; deadline: it waits hold_s, then the stragglers "
        "are discarded; partial: a sample is trained with partial_k of its n. Both lose long answers: watch `headrace bias`",
    )
    alarm_s: float = Field(600.0, gt=0, description="a batch held this long raises an alarm, in every preset; nothing is discarded by it")
    hold_s: float | None = Field(
        None,
        gt=0,
        description="deadline only: a batch is held this long, then its stragglers go; too short costs the long answers; null: 60",
    )
    partial_k: int | None = Field(
        None,
        ge=2,
        description="partial only: ready trajectories with which a sample may be trained; few lose more work; null: rollout.n - 1",
    )
    partial_after_s: float | None = Field(
        None, ge=0, description="partial only: only when so many have been ready for this long; 0 loses the most work; null: 0"
    )
    bias_window_versions: int = Field(10, ge=1, description="shares sampled and trained are compared over so many versions at a time")
    bias_tolerance: float = Field(
        0.02, gt=0, lt=1, description="an alarm when a share trained is this far from the share sampled, and chance does not explain it"
    )

    @model_validator(mode="after")
    def _keys_of_the_preset(self) -> StalenessConfig:
        for key, preset in (("hold_s", "deadline"), ("partial_k", "partial"), ("partial_after_s", "partial")):
            if getattr(self, key) is not None and self.preset != preset:
                raise ValueError(f"{key} is a key of preset {preset}, and preset is {self.preset}: remove it, or set preset: {preset}")
        return self


class ScorerConfig(Section):
    rule: Literal["exact", "numeric", "partial"] | None = None
    function: str | None = Field(None, description="module:attribute or path/file.py:attribute")
    params: dict[str, Any] = Field({})
    time_limit_s: float = Field(10.0, gt=0, description="a scorer that runs longer is killed and its leaf fails")

    @model_validator(mode="after")
    def _one_of(self) -> ScorerConfig:
        if (self.rule is None) == (self.function is None):
            raise ValueError("a scorer needs either `rule` (exact, numeric, partial) or `function` (module:attribute)")
        return self


class RewardConfig(Section):
    scorers: dict[str, ScorerConfig] = Field({"*": ScorerConfig(rule="exact")}, description="by task type; '*' is the default")
    workers: int = Field(1, ge=1)
    batch_wait_s: float = Field(0.01, ge=0, description="jobs are gathered this long before they are sent")
    deadline_s: float = Field(120.0, gt=0, description="a score that has not come by then counts as lost and is asked for again")


class LossConfig(LossSpec):
    """The trainer's loss, and the advantage that goes into it."""

    advantage: Literal["group_mean", "dr_grpo", "grpo", "rloo", "reinforce_pp", "length_aware"] = Field(
        "group_mean",
        description="group_mean, dr_grpo: reward - the group's mean; grpo: also over the group's std; rloo: reward - the others' mean; "
        "reinforce_pp: reward - the group's mean, over the whole batch's std; length_aware: reward - the mean weighted by length",
    )

    @property
    def spec(self) -> LossSpec:
        """What the trainer is told: all but the advantage, which the plan carries as numbers."""
        return LossSpec.model_validate(self.model_dump(exclude={"advantage"}))


class CriticConfig(CriticSpec):
    """PPO's critic. With one, advantages are made per token from the leaf's score, and `loss.advantage` is not used."""

    learning_rate: float = Field(1e-3, gt=0, description="follows the schedule of trainer.learning_rate")

    @property
    def spec(self) -> CriticSpec:
        return CriticSpec.model_validate(self.model_dump(exclude={"learning_rate"}))


class TrainerConfig(Section):
    tp: int = Field(1, ge=1, le=64, description="tensor-parallel ranks: each layer's heads and widths are split over them")
    pp: int = Field(1, ge=1, le=64, description="pipeline stages: the layers are split over them")
    cp: int = Field(1, ge=1, le=64, description="context-parallel ranks: each sequence is split over them")
    dp: int = Field(1, ge=1, le=64, description="data-parallel ranks; the trainer has tp x pp x cp x dp ranks in all")
    ep: int = Field(1, ge=1, le=64, description="the experts of a mixture are split over so many of a stage's tp x cp x dp ranks")
    routing_replay: bool = Field(
        False, description="tokens go to the experts their row's `routed_experts` name; rows without it are routed by the live router"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where torch sees a GPU for every rank, else cpu; cpu keeps the trainer off the GPUs"
    )
    transformer_engine: Literal["auto", "off"] = Field(
        "auto", description="auto: its kernels where it is installed, on cuda and in bfloat16; off: our own torch modules"
    )
    optimizer_offload: float = Field(
        0.0, ge=0, le=1, description="cuda only: which part of the optimizer's state is kept and stepped in the host's memory"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="of weights, activations and pushes, and of the engines; the optimizer's weights stay float32"
    )
    sequence_parallel: bool = Field(
        False, description="with tp above 1: norms and residuals are split along the sequence, not repeated; always, with experts"
    )
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="memory for time: attention's core, or whole layers, are computed again in the backward pass"
    )
    distributed_optimizer: bool = Field(False, description="the optimizer's state is spread over data- and context-parallel ranks")
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd only; betas and eps are adam's")
    learning_rate: float = Field(3e-4, gt=0)
    warmup_batches: int = Field(0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="decay to zero at stop.batches")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    loss: LossConfig = LossConfig()
    critic: CriticConfig | None = Field(None, description="a value model beside the policy; {} takes the defaults")
    threads_per_rank: int = Field(1, ge=1)
    stall_s: float = Field(
        300.0, gt=0, description="busy, and for this long no micro-batch and no command done: its group is restarted; longer than a save"
    )
    step_deadline_s: float = Field(600.0, gt=0, description="a training call without an answer for this long: the group is restarted")

    @field_validator("transformer_engine", mode="before")
    @classmethod
    def _unquoted_off(cls, value: object) -> object:
        """YAML reads a bare `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _a_critic_that_fits(self) -> TrainerConfig:
        check_critic(self.loss, self.critic)
        return self

    @model_validator(mode="after")
    def _switches(self) -> TrainerConfig:
        if why := misplaced(self.tp, self.sequence_parallel, self.distributed_optimizer, self.optimizer):
            raise ValueError(why)
        if why := nothing_to_offload(self.device, self.optimizer_offload):
            raise ValueError(why)
        return self

    def learning_rate_at(self, batch_id: int, last_batch: int | None) -> float:
        """The rate of a batch, from its id alone, so that a restart or a replay gets the same one."""
        if batch_id < self.warmup_batches:
            return self.learning_rate * (batch_id + 1) / (self.warmup_batches + 1)
        if self.schedule == "constant" or not last_batch:
            return self.learning_rate
        span = max(1, last_batch - self.warmup_batches)
        done = min(1.0, (batch_id - self.warmup_batches) / span)
        if self.schedule == "linear":
            return self.learning_rate * (1.0 - done)

        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


class CheckpointConfig(Section):
    every: int = Field(10, ge=1, description="batches between checkpoints; bounds what is replayed after a loss")
    keep_last: int = Field(2, ge=1)


class PushConfig(Section):
    transport: Literal["auto", "store", "tensor", "disk", "distributed"] = Field(
        "auto",
        description="store: the embedded engine reads the store; tensor: SGLang maps shared memory; distributed: broadcasts over the "
        "network; disk: a checkpoint directory",
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="of distributed: auto is nccl where the trainer and the engine are on GPUs, else gloo"
    )
    address: str | None = Field(
        None, description="of distributed: the trainer's host as engines reach it; null: 127.0.0.1 for those here, else as routes say"
    )
    bucket_bytes: int = Field(64 << 20, ge=1 << 10, description="most bytes of weights in one object of the store; larger tensors are cut")
    deadline_s: float = Field(60.0, gt=0, description="one engine's whole push; later it is quarantined")
    logprob_tolerance: float | None = Field(
        None,
        gt=0,
        description="largest difference of the fixed sequence's log-probs, engine to trainer; null: 1e-3, with trainer.dtype bfloat16 0.1",
    )


class StopConfig(Section):
    batches: int | None = Field(None, ge=1)
    epochs: int | None = Field(1, ge=1, description="passes over the datasets; null: for ever")
    reward: float | None = Field(None, description="stop when the mean reward over the last `reward_window` batches reaches this")
    reward_window: int = Field(5, ge=1)


class ServiceConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(8700, ge=0, le=65535, description="0: any free port, written to RUN_DIR/service.json")
    token: str | None = Field(
        None,
        description="bearer token; needed as soon as host is not loopback, then for /metrics too; clients send it as Authorization: Bearer "
        "TOKEN, the command line from HEADRACE_TOKEN; ${NAME} reads the environment",
    )
    data_roots: list[Path] = Field([], description="folders from which datasets may be read by path over REST")
    engine_hosts: list[str] = Field([], description="where engines may be added over REST: HOST, HOST:PORT, or *.DOMAIN")

    @property
    def loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @field_validator("engine_hosts")
    @classmethod
    def _hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if "/" in host:
                raise ValueError(
                    f"{host!r} is an address of one engine, not a host; write HOST, HOST:PORT or *.DOMAIN, like {bare_host(host)}"
                )
        return hosts

    @field_validator("token")
    @classmethod
    def _secret(cls, value: str | None) -> str | None:
        return _from_environment(value)

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> ServiceConfig:
        if not self.loopback and not self.token:
            raise ValueError(
                f"host {self.host} is reachable from outside: set service.token (the command line sends what HEADRACE_TOKEN holds), or "
                "host: 127.0.0.1"
            )
        return self


class ModelConfig(Section):
    path: Path = Field(description="a Hugging Face checkpoint directory (config.json, safetensors, tokenizer.json)")


class RunConfig(Section):
    run_id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    run_dir: Path | None = Field(None, description="default runs/RUN_ID")
    seed: int = 0
    model: ModelConfig
    rollout: RolloutConfig = RolloutConfig()
    batch: BatchConfig = BatchConfig()
    staleness: StalenessConfig = StalenessConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    push: PushConfig = PushConfig()
    stop: StopConfig = StopConfig()
    store: StoreConfig = StoreConfig()
    hosts: list[str] = Field([], description="machines beside this one that read or write the run's rows, by name or address")
    service: ServiceConfig = ServiceConfig()
    roles: dict[Annotated[str, Field(pattern=ROLE_NAME)], RoleConfig] = Field({}, description="your own processes; see examples/own_role")
    evaluation: EvaluationConfig | None = Field(None, description="a held-out set, scored at chosen versions; null: none")
    stop_deadline_s: float = Field(60.0, gt=0, description="SIGTERM waits this long for the step in flight and a last checkpoint")
    shuffle: bool = Field(True, description="dataset rows in a seeded order, another one each epoch; false: as they came")
    data: list[DataConfig] = Field([], description="a file, or a list of {path, name, weight, priority, epochs, mapping}")
    filter: FilterConfig = FilterConfig()
    curriculum: CurriculumConfig | None = Field(None, description="who sets the datasets' weights; null: only you do")

    @field_validator("data", mode="before")
    @classmethod
    def _one_file(cls, value: object) -> object:
        """One file may be written as it is, and one dataset without a list."""
        if value is None:
            return []
        if isinstance(value, str | Path):
            return [{"path": value}]
        return [value] if isinstance(value, dict) else value

    @field_validator("data")
    @classmethod
    def _told_apart(cls, value: list[DataConfig]) -> list[DataConfig]:
        names = [data.called for data in value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two datasets are called {twice!r}: give them a `name` each")
        if value:
            check_sum(data.weight for data in value)
        return value

    @property
    def directory(self) -> Path:
        return (self.run_dir or Path("runs") / self.run_id).absolute()

    @property
    def store_directory(self) -> Path:
        return self.store.directory or Path(f"/dev/shm/headrace-{os.getuid()}-{self.run_id}")

    @property
    def store_kind(self) -> Kind:
        """On several hosts it is Mooncake unless the configuration says otherwise."""
        return self.store.kind or ("mooncake" if self.hosts else "embedded")

    @property
    def transport(self) -> str:
        """How weights get into this run's engines: store, tensor, disk or distributed."""
        if self.push.transport != "auto":
            return self.push.transport
        return "store" if self.rollout.engine == "embedded" else "tensor"

    @property
    def needs_courier(self) -> bool:
        """Some engine may get its weights by broadcasts, which a process of their own sends."""
        if self.push.transport != "auto":
            return self.push.transport == "distributed"
        elsewhere = [urlsplit(url).hostname or "" for url in self.rollout.engine_urls] + self.service.engine_hosts
        return not all(is_loopback(host) for host in elsewhere)

    @property
    def logprob_tolerance(self) -> float:
        """Two programs that compute in bf16 are some hundredths apart, and a wrong tensor several units."""
        return self.push.logprob_tolerance or (0.1 if self.trainer.dtype == "bfloat16" else 1e-3)

    @property
    def partial_k(self) -> int:
        """Of preset partial: with how many ready trajectories a sample may be trained."""
        return self.rollout.n - 1 if self.staleness.partial_k is None else self.staleness.partial_k

    @property
    def row_tokens(self) -> int:
        """The longest row there can be."""
        return self.rollout.context_length

    @property
    def sample_bytes(self) -> int:
        """Worst case of one sample in the store: every trajectory at full length, with its routing where that is replayed."""
        return self.rollout.n * trajectory_bytes(self.row_tokens, self.model.path if self.trainer.routing_replay else None)

    @field_validator("roles")
    @classmethod
    def _role_names(cls, roles: dict[str, RoleConfig]) -> dict[str, RoleConfig]:
        check_names(roles)
        return roles

    @model_validator(mode="after")
    def _whole(self) -> RunConfig:
        if not (self.rollout.engines or self.rollout.engine_urls or self.service.engine_hosts):
            raise ValueError("rollout.engines is 0 and there is no other engine: give rollout.engine_urls, or service.engine_hosts")
        if why := self.store.misfit(self.store_kind, alone=not self.hosts):
            raise ValueError(why)
        if self.rollout.min_group > self.rollout.n:
            raise ValueError(f"rollout.min_group ({self.rollout.min_group}) exceeds rollout.n ({self.rollout.n}): lower it to that")
        if self.staleness.preset == "partial" and not self.rollout.min_group <= self.partial_k < self.rollout.n:
            raise ValueError(
                f"staleness.preset partial would train {self.partial_k} of rollout.n ({self.rollout.n}) trajectories: staleness.partial_k "
                f"must be below n and at least rollout.min_group ({self.rollout.min_group}); or take preset strict or deadline"
            )
        if self.rollout.n == 1 and self.trainer.critic is None:
            raise ValueError(
                "rollout.n is 1: alone in its group, every trajectory has advantage 0 and nothing is trained; raise it, or set "
                "trainer.critic"
            )
        if self.rollout.sampling.max_new_tokens >= self.rollout.context_length:
            raise ValueError("rollout.sampling.max_new_tokens must be smaller than rollout.context_length, or no prompt fits")
        unit = sequence_unit(self.trainer.tp, self.trainer.cp)
        longest = -(-self.row_tokens // unit) * unit
        if self.batch.micro_batch_tokens < longest and self.batch.long_rows == "refuse":
            padded = f", which the layout pads to {longest}" if longest > self.row_tokens else ""
            raise ValueError(
                f"batch.micro_batch_tokens ({self.batch.micro_batch_tokens}) is below rollout.context_length ({self.row_tokens}{padded}): "
                "the longest row would not fit; raise the one or lower the other, or set batch.long_rows: alone"
            )
        if self.transport == {"embedded": "tensor", "sglang": "store"}[self.rollout.engine]:
            raise ValueError(
                f"push.transport {self.transport} is not for engine {self.rollout.engine}: store is for embedded, tensor for sglang; "
                "leave it at auto, or take disk or distributed"
            )
        if self.push.backend == "nccl" and self.trainer.device == "cpu":
            raise ValueError("push.backend nccl sends from the trainer's GPU, and trainer.device is cpu: leave it at auto")
        if self.trainer.schedule != "constant" and self.stop.batches is None:
            raise ValueError(f"trainer.schedule {self.trainer.schedule} decays towards stop.batches, which is not set")
        return self
