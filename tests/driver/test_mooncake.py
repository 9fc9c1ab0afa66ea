"""Where a run's store by Mooncake is, in each of its lives, and what is said before anything of it is started."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from driver import mooncake, run_store
from driver.config import load_config
from driver.mooncake import Place, lacking, place_of, room_bytes, starts_owner
from driver.reconcile import CannotContinue
from driver.run_store import RunStore
from driver.settings import RunConfig
from driver.training import decode_plan
from store import StoreStats
from store.mooncake import Address

ROOT = Path(__file__).parents[2]
MB = 1 << 20
Make = Callable[..., RunConfig]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(mooncake, "installed", lambda: "0.3.13.post1")

    def make(*settings: str) -> RunConfig:
        return load_config(
            ROOT / "examples/sort_digits/config.yaml",
            ["store.kind=mooncake", f"store.capacity_bytes={64 * MB}", f"run_dir={tmp_path}/run", *settings],
        )

    return make


def ports(place: Place) -> list[int]:
    address = Address.of(place.location)
    return [address.port, address.http_port]


def test_W1_a_run_finds_its_store_where_it_was_and_elsewhere_if_somebody_took_its_port(config: Make) -> None:
    """References in the ledger, in plans and in other processes hold the location."""
    first = place_of(config())
    assert place_of(config()) == first and first.master and first.gives_bytes == 64 * MB
    with socket.create_server(("127.0.0.1", ports(first)[0])):
        second = place_of(config())
    assert ports(second)[0] != ports(first)[0] and ports(second)[1] == ports(first)[1]
    assert ports(place_of(config("store.mooncake.port=41234", "store.mooncake.http_port=41235"))) == [41234, 41235]


def test_its_own_owner_is_told_the_location_its_share_and_whether_the_master_is_its_too(config: Make) -> None:
    place = place_of(config("store.mooncake.segment_bytes=134217728"))
    flags = ["--location", place.location, "--port", "7", "--capacity-bytes", str(128 * MB), "--host", "127.0.0.1"]
    assert place.owner(7) == [*flags, "--master"] and starts_owner(config())
    theirs = config("store.mooncake.master=10.0.0.4:50051", "store.mooncake.segment_bytes=0")
    assert place_of(theirs).location == f"mooncake:10.0.0.4:50051/{theirs.run_id}?http=9003"
    assert "--master" not in place_of(theirs).owner(7) and not starts_owner(theirs), "all lies with others"
    assert starts_owner(config("store.mooncake.master=10.0.0.4:50051")), "this host gives its part"


def test_O2_a_port_that_is_taken_a_silent_master_and_too_little_memory_are_said_with_the_remedy(
    config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lacking(config()) == []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert lacking(config(f"store.mooncake.port={port}")) == [
            f"store.mooncake: port {port} is taken: end what uses it, or leave it out for a free one"
        ]
        assert lacking(config(f"store.mooncake.master=127.0.0.1:{port}")) == []
    (silent,) = lacking(config(f"store.mooncake.master=127.0.0.1:{port}"))
    assert "does not answer" in silent and "leave it out and the run starts its own" in silent
    monkeypatch.setattr(mooncake.os, "statvfs", lambda path: SimpleNamespace(f_bavail=70 * MB // 4096, f_frsize=4096))
    (small,) = lacking(config())
    assert room_bytes(64 * MB) == 80 * MB and "enlarge it (Docker: --shm-size)" in small
    assert lacking(config(f"store.capacity_bytes={50 * MB}")) == []


def test_O2_other_hosts_that_can_not_reach_this_one_are_said_with_the_remedy(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    (unreachable,) = lacking(config("hosts=[127.0.0.1]"))
    assert "set store.mooncake.address" in unreachable
    (foreign,) = lacking(config("store.mooncake.address=192.0.2.1"))
    assert foreign.startswith("store.mooncake.address 192.0.2.1 is none of this host's")
    (unknown,) = lacking(config("hosts=[no.such.host.invalid]"))
    assert "no.such.host.invalid is not known here" in unknown
    monkeypatch.setattr(mooncake, "installed", lambda: (_ for _ in ()).throw(mooncake.Unavailable("run `make mooncake`")))
    with pytest.raises(ValueError, match="make mooncake"):
        RunStore(config())


class Scripted:
    """A store by its sizes alone."""

    location = "mooncake:127.0.0.1:1/run?http=2"

    def __init__(self, capacity_bytes: int, claimed: bool = False) -> None:
        self.capacity_bytes, self.claimed = capacity_bytes, claimed

    def stats(self) -> StoreStats:
        return StoreStats(0, 0, self.capacity_bytes)

    def claim(self) -> None:
        if self.claimed:
            raise ValueError("another run has its store at this location")


async def _nothing() -> None: ...


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (Scripted(63 * MB), "give 66,060,288 bytes together, and store.capacity_bytes is 67,108,864: start an owner on the others"),
        (Scripted(64 * MB, claimed=True), "another run has its store"),
        (Scripted(64 * MB), None),
    ],
    ids=["smaller than asked for", "another run's", "as asked for"],
)
async def test_B2_a_run_begins_only_with_all_the_memory_that_it_counts_on_and_alone(
    config: Make, monkeypatch: pytest.MonkeyPatch, store: Any, words: str | None
) -> None:
    monkeypatch.setattr(run_store, "open_store", lambda location: store)
    ours, opened = RunStore(config()), []
    run: Any = SimpleNamespace(
        processes=SimpleNamespace(begin=_nothing),
        store_watch=SimpleNamespace(begin=_nothing),
        core=SimpleNamespace(gate=SimpleNamespace(open=lambda: opened.append(True))),
    )
    if words is None:
        await ours.open(run)
        assert opened == [True]
        return
    with pytest.raises(CannotContinue, match=words):
        await ours.open(run)
    assert not opened and ours.keep(None) is None, "what is another's is not taken away"


def test_A2_the_rows_of_a_plan_are_looked_for_where_the_store_is_now_and_those_that_ride_stay_as_they_are() -> None:
    def row(name: str, location: str, **more: Any) -> dict[str, Any]:
        return {"row_id": name, "rollout": {"key": name, "size_bytes": 8, "location": location, **more}, "length": 3, "advantage": 1.0}

    stored = row("a", "tmpfs:/dev/shm/before") | {"extras": {"key": "e", "size_bytes": 8, "location": "tmpfs:/dev/shm/before"}}
    small = row("b", "inline:", inline="AAAA")
    plan = json.dumps([{"ranks": [[[stored, small]]]}]).encode()
    (mini,) = decode_plan(plan, Scripted.location, {"b": small["rollout"]})
    first, second = mini.rows()
    assert first.rollout.location == Scripted.location and first.extras is not None and first.extras.location == Scripted.location
    assert second.rollout.location == "inline:"
