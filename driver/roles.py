"""Roles as declarations: what each kind of process is, what it needs, and which streams it reads and writes.

    feed ──samples──▶ rollout ──trajectories──▶ reward ──scored──▶ batcher ──batches──▶ trainer
                         ▲                                                                  │
                         └───────────────────────── weights (latest) ───────────────────────┘

Roles do not know each other; the streams' names are all that connects them. A stream has one publisher, a schema and a kind. `queue`: each
item once per subscribing role, bounded, with back-pressure. `latest`: a versioned value, and reading it never waits. A stream that is only
`offered` is made when somebody subscribes: nothing of the run depends on its being read.

`builtin` declares the run's own roles from its configuration. `feed` and `batcher` are parts of the driver and take no resources of their
own. `driver/planner.py` checks the graph and places the instances; nothing is started that it did not place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from driver.config import weights_bytes
from driver.mooncake import gives_bytes, room_bytes, starts_owner
from driver.settings import RunConfig
from driver.settings_roles import ANY, RoleConfig

Kind = Literal["queue", "latest"]
MiB = 1 << 20


@dataclass(frozen=True)
class Stream:
    """`schema` maps a field to its type, as `driver.schema` reads it."""

    name: str
    kind: Kind
    schema: Mapping[str, str] = field(default_factory=dict)
    offered: bool = False
    capacity: int = 256
    """items of a queue that its slowest subscriber has not done yet, at most"""


@dataclass(frozen=True)
class Subscription:
    stream: str
    kind: Kind
    schema: Mapping[str, str] = field(default_factory=dict)
    """what the subscriber needs of an item; the publisher's schema must have it"""


@dataclass(frozen=True)
class Resources:
    """Of one instance. A mark that is None is not known: a default is taken, and said."""

    devices: int = 0
    device_memory_bytes: int | None = None
    """of each of its devices"""
    host_memory_bytes: int | None = None
    """high-water mark"""
    cores: int = 1
    """its pool of CPU cores: shared with whoever else is there"""


@dataclass(frozen=True)
class Role:
    name: str
    logic: str
    resources: Resources = Resources()
    publishes: tuple[Stream, ...] = ()
    subscribes: tuple[Subscription, ...] = ()
    instances: int = 1
    pooled: bool = False
    """its instances are workers of one process"""
    process: str | None = None
    """what its processes are called; None: the role is a part of the driver"""
    own: bool = False
    """declared by the user"""
    start_together: bool = True
    """a run can not go on without it: one that does not start ends the run"""


# Resident memory measured at work on the demo's model (1.7 MB of weights): an engine 280 MiB, the trainer's parent 372 and each rank up to
# 401, the reward service 52 and each worker 19. What larger weights add is counted on top.
ENGINE_BYTES = 300 * MiB
TRAINER_BYTES = 400 * MiB
RANK_BYTES = 420 * MiB
REWARD_WORKER_BYTES = 75 * MiB  # with its share of the service, when it is the only one
COURIER_BYTES = 300 * MiB  # torch, as an engine
OWNER_BYTES = 150 * MiB  # with its master, beside the memory that it gives
STORE = "store"
RANK_COPIES = 6  # in float32: weights, gradients, two moments, and as much again while a snapshot or checkpoint is made
ENGINE_COPIES = 2  # the weights, and those that arrive

METRICS = Stream(
    "metrics", "queue", {"batch_id": "int", "reward_mean": "float", "trained_version": "int", "staleness_max": "int"}, offered=True
)
VERSIONS = Stream(
    "versions", "latest", {"epoch": "int", "trained_version": "int", "serving_version": "int", "committed_version": "int"}, offered=True
)
FED_BY_DRIVER = (METRICS.name, VERSIONS.name)


def builtin(config: RunConfig, counts: Mapping[str, int], gpus: int) -> list[Role]:
    """The run's own roles, with `counts` instances of those that are scaled, for hosts with so many GPUs."""
    rollout, trainer = config.rollout, config.trainer
    weights = weights_bytes(config.model.path, "float32")
    ranks = trainer.tp * trainer.pp * trainer.cp * trainer.dp
    embedded = rollout.engine == "embedded"
    engine = Resources(
        devices=rollout.sglang.tp if not embedded and rollout.sglang.device == "cuda" else 0,
        host_memory_bytes=ENGINE_BYTES + ENGINE_COPIES * weights if embedded else None,
        cores=rollout.threads,
    )
    critics = 1 if trainer.critic is None else 2
    trains = Resources(
        devices=ranks if trainer.device == "cuda" or (trainer.device == "auto" and gpus >= ranks) else 0,
        host_memory_bytes=TRAINER_BYTES + ranks * RANK_BYTES + RANK_COPIES * critics * weights * trainer.dp,
        cores=ranks * trainer.threads_per_rank,
    )
    scores = Resources(host_memory_bytes=REWARD_WORKER_BYTES)
    roles = [
        Role("feed", "driver.feed:Feed", publishes=(Stream("samples", "queue", {"prompt": ANY}),)),
        Role(
            "rollout",
            "rollout.engine" if embedded else "sglang.launch_server",
            engine,
            publishes=(Stream("trajectories", "queue", {"traj_uid": "str"}),),
            subscribes=(Subscription("samples", "queue"), Subscription("weights", "latest")),
            instances=counts["rollout"],
            process="engine",
        ),
        Role(
            "reward",
            "reward.main",
            scores,
            publishes=(Stream("scored", "queue", {"traj_uid": "str", "reward": "float"}),),
            subscribes=(Subscription("trajectories", "queue"),),
            instances=counts["reward"],
            pooled=True,
            process="reward",
        ),
        Role(
            "batcher",
            "driver.batcher:choose",
            publishes=(Stream("batches", "queue", {"batch_id": "int"}),),
            subscribes=(Subscription("scored", "queue"),),
        ),
        Role(
            "trainer",
            "trainer.main",
            trains,
            publishes=(Stream("weights", "latest", {"epoch": "int", "version": "int"}), METRICS, VERSIONS),
            subscribes=(Subscription("batches", "queue"),),
            process="trainer",
        ),
    ]
    if counts.get("evaluator"):
        logic = "rollout.engine" if embedded else "sglang.launch_server"
        held_out = Subscription("weights", "latest")
        roles.append(
            Role(
                "evaluator",
                logic,
                engine,
                subscribes=(held_out,),
                instances=counts["evaluator"],
                process="evaluator",
                start_together=False,
            )
        )
    if config.store_kind == "mooncake" and starts_owner(config):
        owns = Resources(host_memory_bytes=OWNER_BYTES + room_bytes(gives_bytes(config)))
        roles.append(Role(STORE, "store.mooncake_owner", owns, process=STORE, start_together=False))
    if config.needs_courier:
        courier = Resources(host_memory_bytes=COURIER_BYTES + weights)
        roles.append(Role("courier", "trainer.courier", courier, subscribes=(Subscription("weights", "latest"),), process="courier"))
    return roles


def own(config: RunConfig, counts: Mapping[str, int]) -> list[Role]:
    """The user's roles, as the configuration declares them."""
    return [declared(name, role, counts[name]) for name, role in config.roles.items()]


def declared(name: str, role: RoleConfig, instances: int) -> Role:
    wants = role.resources
    return Role(
        name,
        role.logic,
        Resources(wants.devices, wants.device_memory_bytes, wants.host_memory_bytes, wants.cores),
        publishes=tuple(Stream(stream, each.kind, each.schema_, capacity=each.capacity) for stream, each in role.publishes.items()),
        subscribes=tuple(Subscription(stream, each.kind, each.schema_) for stream, each in role.subscribes.items()),
        instances=instances,
        process=name,
        own=True,
        start_together=False,
    )


def configured(config: RunConfig) -> dict[str, int]:
    """How many instances the configuration says each role that can be scaled begins with."""
    return {
        "rollout": config.rollout.engines,
        "reward": config.reward.workers,
        **({"evaluator": config.evaluation.engines} if config.evaluation is not None and config.evaluation.engines else {}),
        **{name: role.instances for name, role in config.roles.items()},
    }
