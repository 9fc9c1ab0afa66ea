"""Checks the whole graph of roles and streams, and places every instance on a host, before anything starts. Pure.

Refused, each in a sentence that names what is wrong: a circle of `queue` streams (each waits for the next, and all for ever), a queue that
nobody reads (it fills, and its publisher stops), a subscriber without a publisher, two publishers of one stream, a kind or a field that
the other side does not have, more devices, memory or cores than the hosts have. What is only doubtful is a warning: a role without a
memory mark (a default is taken), cores that are shared.

Placement: devices first, then memory marks, largest first, each instance where most memory is left, so that roles with large marks are
spread over hosts. A GPU is one instance's, unless there are too few: then instances share one whose marks fit it together, and
the trainer and an engine may do so without marks (SGLang's own --mem-fraction-static divides it), with a warning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from driver.roles import MiB, Role, Stream
from driver.schema import lacking

# Of an instance without a mark, as measured: the process of a role that imports nothing has 42 MiB, a real SGLang on a CPU with the demo's
# model 1.8 GiB in its three processes.
DEFAULT_BYTES = 64 * MiB
DEFAULT_SGLANG_BYTES = 2048 * MiB


class PlanError(ValueError):
    """A sentence for the user: what in the graph or on the hosts does not fit, and what to do."""


@dataclass(frozen=True)
class Host:
    """One machine of the mesh. `memory_bytes` is what all roles together may take at most."""

    name: str
    cores: int
    memory_bytes: int
    devices: tuple[int, ...] = ()
    """the memory of each, in bytes; 0: not known"""


@dataclass(frozen=True)
class Placement:
    """One process: an instance of a role, or the process that has all instances of a pooled one as its workers."""

    role: Role
    index: int
    count: int
    host: str
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.role.process}-{self.index}"


@dataclass(frozen=True)
class Route:
    """A stream with who writes and who reads it. `way`: in the driver, through shared memory, or over the network."""

    stream: Stream
    publisher: str
    subscribers: tuple[str, ...]
    way: str


@dataclass(frozen=True)
class Plan:
    roles: tuple[Role, ...]
    placements: tuple[Placement, ...]
    routes: tuple[Route, ...]
    warnings: tuple[str, ...]

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    @property
    def processes(self) -> dict[str, Placement]:
        """By the name of the process."""
        return {placement.name: placement for placement in self.placements}


def make_plan(
    roles: Sequence[Role],
    hosts: Sequence[Host],
    standing: Mapping[str, Placement] | None = None,
    others: Mapping[str, Plan] | None = None,
) -> Plan:
    """PlanError with the first thing that does not fit. `standing` are processes that run already: they stay where they are. `others` are
    the plans of the runs beside this one, by run_id: what their processes are marked with is taken."""
    routes = _connected(roles)
    _no_circle(roles)
    warnings: list[str] = []
    placements = _Placing(hosts, warnings, standing or {}, others or {}).all(roles)
    where = {role.name: {p.host for p in placements if p.role.name == role.name} for role in roles}
    used = [
        Route(stream, publisher, subscribers, _way(stream, [where[name] for name in (publisher, *subscribers)]))
        for stream, publisher, subscribers in routes
        if subscribers or not stream.offered
    ]
    return Plan(tuple(roles), tuple(placements), tuple(used), tuple(warnings))


# ---- the graph -------------------------------------------------------------------------------------------------------------


def _connected(roles: Sequence[Role]) -> list[tuple[Stream, str, tuple[str, ...]]]:
    publishers: dict[str, tuple[Stream, str]] = {}
    for role in roles:
        for stream in role.publishes:
            if stream.name in publishers:
                other = publishers[stream.name][1]
                raise PlanError(f"stream {stream.name} is published by {other} and by {role.name}: give one of them another name")
            publishers[stream.name] = (stream, role.name)
    subscribers: dict[str, list[str]] = {name: [] for name in publishers}
    for role in roles:
        for wanted in role.subscribes:
            if wanted.stream not in publishers:
                known = ", ".join(publishers)
                raise PlanError(f"{role.name} subscribes {wanted.stream}, which no role publishes; there are {known}")
            stream, publisher = publishers[wanted.stream]
            if wanted.kind != stream.kind:
                raise PlanError(f"{role.name} subscribes {stream.name} as {wanted.kind}, and {publisher} publishes it as {stream.kind}")
            if why := lacking(wanted.schema, stream.schema):
                raise PlanError(f"{role.name} wants of {stream.name} {why}")
            subscribers[stream.name].append(role.name)
    for stream, publisher in publishers.values():
        if stream.kind == "queue" and not subscribers[stream.name] and not stream.offered:
            raise PlanError(
                f"nobody reads the queue {stream.name}: it fills, and {publisher} stops. Subscribe a role to it, or make it latest"
            )
    return [(stream, publisher, tuple(subscribers[stream.name])) for stream, publisher in publishers.values()]


def _no_circle(roles: Sequence[Role]) -> None:
    """From each queue to what is made of it. Nothing follows a `latest` stream: reading it never waits."""
    follows: dict[str, list[str]] = {}
    for role in roles:
        made = [stream.name for stream in role.publishes]
        for read in (wanted.stream for wanted in role.subscribes if wanted.kind == "queue"):
            follows.setdefault(read, []).extend(made)
    done: set[str] = set()
    for start in follows:
        if (circle := _circle_from(start, follows, done)) is not None:
            raise PlanError(
                f"circular dependency: {' → '.join(circle)}. Each of these queues waits for the one before; make one of them latest, or "
                "leave it out"
            )


def _circle_from(start: str, follows: dict[str, list[str]], done: set[str]) -> list[str] | None:
    """Depth first, without recursion: graphs come from users."""
    path: list[str] = []
    todo: list[tuple[str, Iterator[str]]] = []

    def enter(name: str) -> None:
        path.append(name)
        todo.append((name, iter(follows.get(name, ()))))

    if start not in done:
        enter(start)
    while todo:
        name, rest = todo[-1]
        following = next(rest, None)
        if following is None:
            todo.pop()
            path.pop()
            done.add(name)
        elif following in path:
            return [*path[path.index(following) :], following]
        elif following not in done:
            enter(following)
    return None


def _way(stream: Stream, places: list[set[str]]) -> str:
    hosts = set().union(*places)
    if len(hosts) > 1:
        return "network"
    return "shared memory" if stream.name in ("trajectories", "batches", "weights") else "direct"


# ---- the hosts -------------------------------------------------------------------------------------------------------------


@dataclass
class _Device:
    memory_bytes: int
    holders: list[Role] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """of the holders, for the user: those of another run say so"""

    def hold(self, role: Role, label: str) -> None:
        self.holders.append(role)
        self.labels.append(label)

    def takes(self, role: Role) -> bool:
        """Beside those who are there already."""
        marks = [holder.resources.device_memory_bytes for holder in (*self.holders, role)]
        if self.memory_bytes and all(mark is not None for mark in marks):
            return sum(mark or 0 for mark in marks) <= self.memory_bytes
        # Without marks: one of each, and none of the user's own, who can not know what the others take.
        names = [holder.name for holder in (*self.holders, role)]
        return len(set(names)) == len(names) and not any(holder.own for holder in (*self.holders, role))


@dataclass
class _Room:
    host: Host
    free_bytes: int
    devices: list[_Device]

    def choice(self, role: Role) -> tuple[int, ...] | None:
        """A free device before a shared one; None when there are too few."""
        wanted = role.resources.devices
        fits = [i for i, device in enumerate(self.devices) if not device.holders or device.takes(role)]
        fits.sort(key=lambda i: (len(self.devices[i].holders), i))
        return tuple(sorted(fits[:wanted])) if len(fits) >= wanted else None


class _Placing:
    def __init__(self, hosts: Sequence[Host], warnings: list[str], standing: Mapping[str, Placement], others: Mapping[str, Plan]) -> None:
        self._standing = standing
        self._rooms = [_Room(host, host.memory_bytes, [_Device(memory) for memory in host.devices]) for host in hosts]
        self._warnings = warnings
        self._taken: Counter[str] = Counter()
        for run_id, plan in others.items():
            for placement in plan.placements:
                self._held_elsewhere(run_id, placement)

    def _held_elsewhere(self, run_id: str, placement: Placement) -> None:
        label, needed = f"{placement.role.name} of run {run_id}", _needed(placement.role)
        for room in self._rooms:
            if room.host.name == placement.host:
                room.free_bytes -= needed
                self._taken[label] += needed
                for device in placement.devices:
                    room.devices[device].hold(placement.role, label)

    def all(self, roles: Sequence[Role]) -> list[Placement]:
        """In the order of the roles, whatever the order in which they were placed."""
        placed: dict[tuple[str, int], Placement] = {}
        process_roles = [role for role in roles if role.process is not None]
        for role in process_roles:
            self._check_cores(role)
            if role.resources.host_memory_bytes is None and role.instances:
                self._warnings.append(
                    f"{role.name} has no memory mark; {mark(role) // MiB} MiB are taken for each of its instances. "
                    + (f"Measure it and set roles.{role.name}.resources.host_memory_bytes" if role.own else "Watch its memory")
                )
        # The trainer's ranks are devices 0 to n-1 of their host, so it comes first; then large marks before small ones.
        order = sorted(process_roles, key=lambda role: (role.name != "trainer", -role.resources.devices, -mark(role)))
        instances = [(role, index) for role in order for index in range(1 if role.pooled else role.instances)]
        for role, index in sorted(instances, key=lambda each: f"{each[0].process}-{each[1]}" not in self._standing):
            placed[role.name, index] = self._place(role, index)
        self._share_cores(process_roles)
        return [placed[key] for role in process_roles for key in sorted(k for k in placed if k[0] == role.name)]

    def _place(self, role: Role, index: int) -> Placement:
        needed = _needed(role)
        there = self._standing.get(f"{role.process}-{index}")
        if there is not None:
            fitting = [(room, there.devices) for room in self._rooms if room.host.name == there.host]
        else:
            fitting = [(room, devices) for room in self._rooms if (devices := room.choice(role)) is not None]
        if not fitting:
            raise PlanError(self._no_devices(role, index))
        room, devices = max(fitting, key=lambda each: each[0].free_bytes)
        if room.free_bytes < needed:
            raise PlanError(self._no_memory(role, index, needed))
        room.free_bytes -= needed
        self._taken[role.name] += needed
        for device in devices:
            shared = room.devices[device]
            if shared.holders and role.resources.device_memory_bytes is None:
                names = " and ".join(sorted({*shared.labels, role.name}))
                self._warnings.append(f"{names} share GPU {device} of {room.host.name} and say not how much of it each takes")
            shared.hold(role, role.name)
        return Placement(role, index, role.instances, room.host.name, devices)

    def _no_devices(self, role: Role, index: int) -> str:
        there = ", ".join(f"{len(room.devices)} on {room.host.name}" for room in self._rooms)
        holders = Counter(label for room in self._rooms for device in room.devices for label in device.labels)
        held = ", ".join(f"{name} {count}" for name, count in holders.items()) or "none is taken"
        each = f"{role.resources.devices} GPU{'s' if role.resources.devices > 1 else ''}"
        return (
            f"over-committed: {role.name} {index} wants {each}, and there is no room: {there}; taken: {held}. "
            f"Lower the number of {role.name}, or give each a device_memory_bytes with which they fit"
        )

    def _no_memory(self, role: Role, index: int, needed: int) -> str:
        taken = ", ".join(f"{name} {size // MiB}" for name, size in self._taken.items()) or "nothing"
        most = max(room.free_bytes for room in self._rooms)
        return (
            f"over-committed: {role.name} {index} is marked with {needed // MiB} MiB of memory, and no host has more than {most // MiB} "
            f"left (taken, in MiB: {taken}). Lower a number of instances or a mark, or take a larger host"
        )

    def _check_cores(self, role: Role) -> None:
        most = max(room.host.cores for room in self._rooms)
        if role.own and role.resources.cores > most:
            raise PlanError(f"over-committed: {role.name} wants {role.resources.cores} cores for an instance; the largest host has {most}")

    def _share_cores(self, roles: Sequence[Role]) -> None:
        wanted = sum(role.instances * role.resources.cores for role in roles)
        there = sum(room.host.cores for room in self._rooms)
        if wanted > there:
            self._warnings.append(f"{there} cores are shared by roles that could keep {wanted} busy")


def _needed(role: Role) -> int:
    """Of one process: an instance, or all of a pooled role."""
    return mark(role) * (role.instances if role.pooled else 1)


def mark(role: Role) -> int:
    """The memory counted for one instance."""
    known = role.resources.host_memory_bytes
    if known is not None:
        return known
    return DEFAULT_SGLANG_BYTES if role.name == "rollout" else DEFAULT_BYTES
