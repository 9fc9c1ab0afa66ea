"""The graph of roles and streams, checked whole; and instances on hosts, by devices and memory marks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driver.config import load_config
from driver.planned import plan_of
from driver.planner import Host, Placement, PlanError, make_plan
from driver.roles import METRICS, MiB, Resources, Role, Stream, Subscription, builtin, configured

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"
HOST = Host("a", cores=8, memory_bytes=10_000 * MiB)
MARKED = Resources(host_memory_bytes=10 * MiB)


def role(name: str, reads: str = "", writes: str = "", resources: Resources = MARKED, instances: int = 1, kind: str = "queue") -> Role:
    return Role(
        name,
        "a.py:A",
        resources,
        publishes=tuple(Stream(stream, kind) for stream in writes.split()),  # type: ignore[arg-type]
        subscribes=tuple(Subscription(stream, "queue") for stream in reads.split()),
        instances=instances,
        process=name,
        own=True,
        start_together=False,
    )


def refused(*roles: Role, hosts: list[Host] | None = None) -> str:
    with pytest.raises(PlanError) as error:
        make_plan(roles, hosts or [HOST])
    return str(error.value)


def test_a_circle_of_queues_is_refused_with_the_circle_spelled_out() -> None:
    chain = [
        role("rollout", "samples", "trajectories"),
        role("batcher", "trajectories", "batches"),
        role("trainer", "batches", "grades"),
        role("teacher", "grades", "trajectories2 samples"),
        role("sink", "trajectories2"),
    ]
    text = refused(*chain)
    assert "circular dependency: " in text
    circle = text.split("circular dependency: ")[1].split(".")[0].split(" → ")
    assert circle[0] == circle[-1] and set(circle) == {"samples", "trajectories", "batches", "grades"}
    assert "circular dependency: own → own" in refused(role("narcissus", "own", "own"))


def test_a_latest_stream_breaks_a_circle_for_reading_it_never_waits() -> None:
    weights = Role("trainer", "t", MARKED, (Stream("weights", "latest"),), (Subscription("batches", "queue"),), process="trainer")
    rollout = Role("rollout", "r", MARKED, (Stream("batches", "queue"),), (Subscription("weights", "latest"),), process="engine")
    assert [route.stream.name for route in make_plan([weights, rollout], [HOST]).routes] == ["weights", "batches"]


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=14), st.integers(0, 7))
def test_whatever_the_graph_a_circle_is_found_exactly_when_there_is_one(edges: list[tuple[int, int]], start: int) -> None:
    """Each edge is a role that makes one queue of another."""
    made = {f"q{i}" for i in range(8)}
    sources = [role(f"source{i}", writes=f"s{i}") for i in range(8)]
    roles = [*sources, role("sink", " ".join(sorted(made | {f"s{i}" for i in range(8)})))]
    follows: dict[int, set[int]] = {i: set() for i in range(8)}
    writes: dict[int, list[int]] = {i: [] for i in range(8)}
    for reads, written in edges:
        if reads not in writes[written]:
            writes[written].append(reads)
            follows[reads].add(written)
    roles += [role(f"r{i}", f"s{i} " + " ".join(f"q{reads}" for reads in writes[i]), f"q{i}") for i in range(8)]

    def reachable(one: int) -> set[int]:
        seen: set[int] = set()
        todo = list(follows[one])
        while todo:
            if (at := todo.pop()) not in seen:
                seen.add(at)
                todo += follows[at]
        return seen

    circular = any(i in reachable(i) for i in range(8))
    if not circular:
        make_plan(roles, [HOST])
        return
    circle = refused(*roles).split("circular dependency: ")[1].split(".")[0].split(" → ")
    assert circle[0] == circle[-1] and len(circle) > 1
    for before, after in pairwise(circle):
        assert int(after[1:]) in follows[int(before[1:])], "each step of it is one of the graph's"


def test_what_is_connected_to_nothing_is_refused_by_name() -> None:
    assert "nobody reads the queue x" in refused(role("a", writes="x"))
    assert "a subscribes y, which no role publishes; there are x" in refused(role("a", "y"), role("b", writes="x"), role("c", "x"))
    twice = refused(role("a", writes="x"), role("b", writes="x"), role("c", "x"))
    assert "stream x is published by a and by b" in twice
    assert "c subscribes x as queue, and a publishes it as latest" in refused(role("a", writes="x", kind="latest"), role("c", "x"))
    make_plan([role("a", writes="x", kind="latest")], [HOST])  # a value that nobody reads fills nothing


def test_a_field_that_the_publisher_does_not_promise_is_refused() -> None:
    publisher = Role("a", "a", MARKED, publishes=(Stream("x", "queue", {"n": "int", "note": "str?"}),), process="a")
    for wanted, words in (({"m": "int"}, "a field 'm'"), ({"n": "str"}, "'n' as str"), ({"note": "str"}, "'note' always")):
        reader = Role("b", "b", MARKED, subscribes=(Subscription("x", "queue", wanted),), process="b")
        assert words in refused(publisher, reader)
    make_plan([publisher, Role("b", "b", MARKED, subscribes=(Subscription("x", "queue", {"n": "float"}),), process="b")], [HOST])


def test_more_devices_memory_or_cores_than_there_are_is_refused_with_who_has_them() -> None:
    gpus = Host("a", 8, 10_000 * MiB, devices=(80 * MiB,) * 4)
    text = refused(role("big", resources=Resources(3, None, MiB)), role("more", resources=Resources(2, None, MiB)), hosts=[gpus])
    assert "over-committed: more 0 wants 2 GPUs" in text and "4 on a" in text and "big 3" in text
    text = refused(role("hungry", resources=Resources(host_memory_bytes=6_000 * MiB), instances=2))
    assert "over-committed: hungry 1 is marked with 6000 MiB" in text and "4000 left" in text and "hungry 6000" in text
    assert "wants 9 cores" in refused(role("busy", resources=Resources(host_memory_bytes=MiB, cores=9)))


def test_what_another_run_of_the_service_holds_is_taken_and_it_is_named() -> None:
    large = role("large", resources=Resources(host_memory_bytes=6_000 * MiB))
    with pytest.raises(PlanError, match=r"4000 left \(taken, in MiB: large of run other 6000\)"):
        make_plan([large], [HOST], others={"other": make_plan([large], [HOST])})
    gpus = Host("a", 8, 10_000 * MiB, devices=(80 * MiB,) * 2)
    one = role("one", resources=Resources(1, None, MiB))
    other = make_plan([one], [gpus])
    assert make_plan([one], [gpus], others={"other": other}).processes["one-0"].devices == (1,)
    with pytest.raises(PlanError, match=r"one 1 wants 1 GPU, and there is no room: 2 on a; taken: one of run other 1, one 1\."):
        make_plan([replace(one, instances=2)], [gpus], others={"other": other})


def test_a_gpu_is_shared_by_those_whose_marks_fit_it_and_by_no_others() -> None:
    gpu = Host("a", 8, 10_000 * MiB, devices=(80 * MiB,))
    small, large = Resources(1, 30 * MiB, MiB), Resources(1, 60 * MiB, MiB)
    assert [p.devices for p in make_plan([role("a", resources=small, instances=2)], [gpu]).placements] == [(0,), (0,)]
    assert "over-committed" in refused(role("a", resources=small), role("b", resources=large), hosts=[gpu])
    engine = Role("rollout", "sglang", Resources(1, None, MiB), instances=1, process="engine")
    trainer = Role("trainer", "t", Resources(1, None, MiB), process="trainer")
    plan = make_plan([engine, trainer], [gpu])
    assert {p.devices for p in plan.placements} == {(0,)} and any("share GPU 0" in warning for warning in plan.warnings)
    more = Role("rollout", "sglang", Resources(1, None, MiB), instances=2, process="engine")
    assert "over-committed: rollout 1" in refused(more, trainer, hosts=[gpu])


def test_the_trainer_has_the_first_gpus_and_engines_get_those_after_them_while_there_are_any() -> None:
    host = Host("a", 8, 10_000 * MiB, devices=(0,) * 4)
    engine = Role("rollout", "sglang", Resources(1, None, MiB), instances=2, process="engine")
    trainer = Role("trainer", "t", Resources(2, None, MiB), process="trainer")
    placed = make_plan([engine, trainer], [host]).processes
    assert [placed[name].devices for name in ("trainer-0", "engine-0", "engine-1")] == [(0, 1), (2,), (3,)]


def test_what_runs_already_stays_where_it_is_when_the_graph_is_planned_again() -> None:
    host = Host("a", 8, 10_000 * MiB, devices=(0,) * 4)
    first = role("first", resources=Resources(1, None, MiB))
    placed = make_plan([first], [host]).processes
    assert placed["first-0"].devices == (0,)
    larger = role("larger", resources=Resources(2, None, MiB))
    assert make_plan([first, larger], [host]).processes["first-0"].devices == (2,), "from scratch the larger one goes first"
    again = make_plan([first, larger], [host], standing=placed).processes
    assert again["first-0"].devices == (0,) and again["larger-0"].devices == (1, 2)


def test_roles_with_large_marks_are_spread_over_hosts() -> None:
    hosts = [Host("a", 8, 1000 * MiB), Host("b", 8, 1000 * MiB)]
    heavy = role("heavy", resources=Resources(host_memory_bytes=400 * MiB), instances=2)
    light = role("light", resources=Resources(host_memory_bytes=10 * MiB), instances=1)
    placed = make_plan([light, heavy], hosts)
    assert {p.host for p in placed.placements if p.role.name == "heavy"} == {"a", "b"}
    assert [p.role.name for p in placed.placements] == ["light", "heavy", "heavy"], "told in the order in which they were declared"


def test_a_role_without_a_mark_gets_a_default_and_a_warning() -> None:
    plan = make_plan([role("unknown", resources=Resources())], [HOST])
    assert any("unknown has no memory mark; 64 MiB are taken" in w and "roles.unknown.resources" in w for w in plan.warnings)
    assert not make_plan([role("known")], [HOST]).warnings
    assert any("8 cores are shared" in w for w in make_plan([role("many", instances=9)], [HOST]).warnings)


def test_the_runs_own_roles_are_planned_from_the_configuration() -> None:
    config = load_config(CONFIG, ["rollout.engines=2", "reward.workers=3"])
    plan = plan_of(config)
    assert list(plan.processes) == ["engine-0", "engine-1", "reward-0", "trainer-0"]
    assert plan.processes["reward-0"].count == 3
    ways = {route.stream.name: (route.publisher, route.subscribers, route.way) for route in plan.routes}
    assert ways["weights"] == ("trainer", ("rollout",), "shared memory")
    assert METRICS.name not in ways, "what is only offered is made when somebody subscribes"
    assert configured(config) == {"rollout": 2, "reward": 3}
    assert not [w for w in plan.warnings if "mark" in w], "the built-in roles know what they need"


def test_couriers_and_own_roles_are_part_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A: ...\n")
    own = f"{{mine: {{logic: '{tmp_path}/a.py:A', instances: 2, subscribes: {{metrics: queue}}}}}}"
    config = load_config(CONFIG, [f"roles={own}", "push.transport=distributed"])
    plan = plan_of(config, {"mine": 3})
    assert list(plan.processes) == ["engine-0", "reward-0", "trainer-0", "courier-0", "mine-0", "mine-1", "mine-2"]
    assert {route.stream.name: route.subscribers for route in plan.routes}["metrics"] == ("mine",)
    assert isinstance(plan.processes["mine-0"], Placement) and not plan.role("mine").start_together
    assert len(builtin(config, {"rollout": 1, "reward": 1}, 0)) == 6
