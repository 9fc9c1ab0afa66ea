"""What every store promises between real processes, some of which die: no read is torn, nothing is lost but what its holder took along."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from store import EmbeddedStore, Exists, Gone, MooncakeStore, Ref, Store
from tests.store.conftest import CAPACITY_BYTES, Backend, MooncakeHost, Spawn, said, tell, wait_for

READER = """
import sys, json
from store import Ref, open_store
ref = Ref.from_wire(json.loads(sys.argv[1]))
lease = open_store(ref.location).open(ref)
print(int(lease["a"].sum()), flush=True)
sys.stdin.readline()
print(int(lease["a"].sum()), flush=True)
sys.stdin.readline()
"""


def wire(ref: Ref) -> str:
    return json.dumps(ref.to_wire())


def attached(store: Store) -> Store:
    """Another process' view of the same store, without its memory of what was freed."""
    return EmbeddedStore(store._root) if isinstance(store, EmbeddedStore) else MooncakeStore(store.location)


def test_B3_free_while_another_process_reads_leaves_its_view_whole(backend: Backend, spawn: Spawn) -> None:
    store = backend.store
    ref = store.put("k", {"a": np.arange(1000)})
    reader = spawn(READER, wire(ref))
    assert said(reader) == "499500"
    store.free([ref])
    with pytest.raises(Gone):
        store.open(ref)
    store.put("next", {"a": np.zeros(1000)})
    tell(reader)
    assert said(reader) == "499500"


def test_a_free_is_seen_by_other_processes(backend: Backend) -> None:
    ref = backend.store.put("k", {"a": np.arange(1000)})
    backend.store.open(ref)
    backend.store.free([ref])
    other = attached(backend.store)

    def is_gone() -> bool:
        try:
            assert other.open(ref)["a"].sum() == 499500
        except Gone:
            return True
        time.sleep(1.5)  # what is looked for all the time is leased all the time
        return False

    wait_for(is_gone, "another process to see the object gone")
    other.close()


@pytest.mark.parametrize("freed_first", [True, False])
def test_B3_bytes_come_back_when_the_reader_is_killed(backend: Backend, spawn: Spawn, freed_first: bool) -> None:
    backend.empty()
    ref = backend.store.put("k", {"a": np.arange(1000)})
    reader = spawn(READER, wire(ref))
    said(reader)
    if freed_first:
        backend.store.free([ref])
    reader.kill()
    reader.wait(10)
    if not freed_first:
        backend.store.free([ref])
    backend.settled(0, 0)


# Stops for ever at the named function, before it or after it, so that it can be killed exactly there.
STOPPING = """
import importlib, sys, time
import numpy as np
from store import open_store
where, when = sys.argv[2:]
module, _, path = where.partition(":")
*owners, name = path.split(".")
owner = importlib.import_module(module)
for part in owners:
    owner = getattr(owner, part)
real = getattr(owner, name)
def stop(*facts, **more):
    if when == "after":
        real(*facts, **more)
    print("there", flush=True)
    time.sleep(600)
setattr(owner, name, stop)
store = open_store(sys.argv[1])
"""
WRITER = STOPPING + 'store.put("k", {"a": np.full(100_000, 7)})'
STOPPED_READER = STOPPING + 'store.open(store.ref("k"))'
MID_READ = {"embedded": "mmap:mmap", "mooncake": "store.mooncake_read:Found._copy"}
BEFORE_PUBLISHING = {
    "embedded": [("store.files:write_all", "before"), ("os:link", "before")],
    "mooncake": [("store.mooncake_client:Client.write", "before"), ("store.mooncake_client:Client.put_end", "before")],
}
PUBLISHED = {"embedded": ("os:link", "after"), "mooncake": ("store.mooncake_client:Client.put_end", "after")}


def test_B3_a_reader_killed_in_the_middle_of_a_read_keeps_nothing(backend: Backend, spawn: Spawn) -> None:
    backend.empty()
    ref = backend.store.put("k", {"a": np.full(100_000, 7)})
    reader = spawn(STOPPED_READER, backend.store.location, MID_READ[backend.name], "before")
    assert said(reader) == "there"
    backend.store.free([ref])
    if backend.name == "embedded":
        assert backend.store.stats().used_bytes == ref.size_bytes, "it may still go on; with Mooncake until its lease has run out"
    reader.kill()
    reader.wait(10)
    backend.settled(0, 0)


@pytest.mark.parametrize("step", [0, 1])
def test_a_writer_killed_mid_put_leaves_no_object_and_the_key_is_free_again(backend: Backend, spawn: Spawn, step: int) -> None:
    store = backend.store
    writer = spawn(WRITER, store.location, *BEFORE_PUBLISHING[backend.name][step])
    assert said(writer) == "there"
    for _ in range(2):
        with pytest.raises(Gone):
            store.open(Ref("k", 1, store.location))
        with pytest.raises(Gone):
            store.ref("k")
        assert store.keys() == []
        writer.kill()
        writer.wait(10)
    ref = store.put("k", {"a": np.full(100_000, 9)})
    assert (store.open(ref)["a"] == 9).all() and store.keys() == ["k"]
    if backend.name == "embedded":
        backend.settled(1, ref.size_bytes)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mooncake"], indirect=True)
def test_the_bytes_of_a_writer_killed_mid_put_come_back(backend: Backend, spawn: Spawn) -> None:
    """Embedded it is at once; Mooncake's master waits, for the writer may only have been stopped."""
    backend.empty()
    writer = spawn(WRITER, backend.store.location, *BEFORE_PUBLISHING["mooncake"][1])
    assert said(writer) == "there" and backend.store.stats().used_bytes > 800_000
    writer.kill()
    writer.wait(10)
    backend.settled(0, 0)


def test_a_writer_killed_just_after_publishing_leaves_a_whole_object(backend: Backend, spawn: Spawn) -> None:
    store = backend.store
    writer = spawn(WRITER, store.location, *PUBLISHED[backend.name])
    assert said(writer) == "there"
    writer.kill()
    writer.wait(10)
    assert (store.open(store.ref("k"))["a"] == 7).all()
    with pytest.raises(Exists):
        store.put("k", {})


def test_no_read_is_torn_while_others_put_and_free_where_it_reads(backend: Backend, spawn: Spawn, tmp_path: Path) -> None:
    """Objects that come and go in a store with room for few: whatever is read is one object's bytes, whole, or an error."""
    code = """
import os, sys, time
import numpy as np
from store import Full, open_store
store, turn, refs = open_store(sys.argv[1]), 0, []
while not os.path.exists(sys.argv[3]):
    turn += 1
    time.sleep(0.02)  # so that what the reader has listed is not all gone when it opens it
    try:
        refs.append(store.put(f"{sys.argv[2]}/{turn}", {"a": np.full(300_000, turn)}))
    except Full:
        time.sleep(0.1)
    if len(refs) > 3:
        store.free([refs.pop(0)])
"""
    end = tmp_path / "end"
    writers = [spawn(code, backend.store.location, name, end) for name in "ab"]
    reader, seen = attached(backend.store), set()
    give_up = time.monotonic() + 60.0
    while len(seen) < 20 and time.monotonic() < give_up:
        for key in sorted(reader.keys()):
            try:
                with reader.open(Ref(key, 1, reader.location)) as lease:
                    values = np.unique(lease["a"])
            except Gone:
                continue
            assert values.tolist() == [int(key.partition("/")[2])], "a torn read"
            seen.add(key)
    end.touch()
    assert [writer.wait(30) for writer in writers] == [0, 0]
    assert len(seen) >= 20
    reader.close()


def test_a_race_of_processes_for_one_key_has_one_winner(backend: Backend, spawn: Spawn) -> None:
    code = """
import os, sys
import numpy as np
from store import Exists, open_store
store = open_store(sys.argv[1])
store.stats()
print("ready", flush=True)
sys.stdin.readline()
won = 0
for turn in range(50):
    try:
        store.put(f"k{turn}", {"pid": np.int64(os.getpid())})
        won += 1
    except Exists:
        pass
print(os.getpid(), won, flush=True)
"""
    racers = [spawn(code, backend.store.location) for _ in range(2)]
    for racer in racers:
        assert said(racer) == "ready"
    for racer in racers:
        tell(racer)
    won = dict(map(int, said(racer).split()) for racer in racers)
    assert sum(won.values()) == 50
    read = [int(backend.store.open(backend.store.ref(f"k{turn}"))["pid"]) for turn in range(50)]
    assert {pid: read.count(pid) for pid in won} == won, "what is read is what the winner put"


def test_B2_capacity_is_shared_by_all_processes(backend: Backend, spawn: Spawn) -> None:
    code = """
import sys
import numpy as np
from store import Full, open_store
store, put = open_store(sys.argv[1]), 0
try:
    while True:
        store.put(f"{sys.argv[2]}/{put}", {"a": np.full(1 << 20, put, np.uint8)})
        put += 1
except Full:
    print(put, flush=True)
"""
    backend.empty()
    store = backend.store
    writers = [spawn(code, store.location, name) for name in "ab"]
    put = {name: int(said(writer)) for name, writer in zip("ab", writers, strict=True)}
    assert 0.9 * CAPACITY_BYTES <= store.stats().used_bytes <= 1.25 * CAPACITY_BYTES
    assert sorted(store.keys()) == sorted(f"{name}/{index}" for name, count in put.items() for index in range(count))
    for name, count in put.items():
        assert all((store.open(store.ref(f"{name}/{index}"))["a"] == index).all() for index in range(0, count, 10))


def test_L2_when_the_owner_of_a_store_is_killed_its_objects_stay_and_another_takes_it(backend: Backend, spawn: Spawn) -> None:
    code = """
import sys
import numpy as np
from store import open_store
store = open_store(sys.argv[1])
store.claim()
store.put("k", {"a": np.arange(1000)})
print("put", flush=True)
sys.stdin.readline()
"""
    owner = spawn(code, backend.store.location)
    assert said(owner) == "put"
    with pytest.raises(ValueError, match="another run"):
        backend.store.claim()
    owner.kill()
    owner.wait(10)
    backend.store.claim()
    assert backend.store.open(backend.store.ref("k"))["a"].sum() == 499500


def test_O2_a_process_that_may_open_few_files_reads_whole_objects_or_says_why_not(backend: Backend, spawn: Spawn) -> None:
    code = """
import resource, sys
from store import Unavailable, open_store
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
store, leases, refused = open_store(sys.argv[1]), [], ""
for index in range(200):
    try:
        leases.append(store.open(store.ref(f"k{index}")))
    except Unavailable as error:
        refused = str(error)
        break
    assert (leases[-1]["a"] == index).all()
leases.clear()
assert (store.open(store.ref("k199"))["a"] == 199).all()
print("all" if not refused else refused, flush=True)
"""
    for index in range(200):
        backend.store.put(f"k{index}", {"a": np.full(100, index)})
    answer = said(spawn(code, backend.store.location))
    if backend.name == "mooncake":
        assert answer == "all", "its views are copies, and hold no file open"
    else:
        assert "ulimit -n" in answer


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["embedded", "mooncake"])
def test_a_million_small_objects_are_put_by_many_found_by_one_and_freed(
    kind: str, root: Path, spawn: Spawn, request: pytest.FixtureRequest
) -> None:
    code = """
import sys
import numpy as np
from store import open_store
store, name, count = open_store(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for index in range(count):
    store.put(f"{name}/{index}", {"a": np.int64(index)})
print("put", flush=True)
"""
    each = int(os.environ.get("OBJECTS", "1000000")) // 2
    host: MooncakeHost | None = None
    if kind == "embedded":
        store: Store = EmbeddedStore(root, 2 * each * 4096)
    else:
        host = request.getfixturevalue("mooncake_host")
        host.start(2 * each * 512, master=True)
        store = MooncakeStore(host.location("million"))
    began = time.monotonic()

    def done(what: str) -> None:
        nonlocal began
        took_s, began = time.monotonic() - began, time.monotonic()
        holds = f"; the master holds {host.master().memory_info().rss >> 20} MiB" if host is not None else ""
        print(f"\n{kind}: {2 * each} objects {what} in {took_s:.1f} s, {1e6 * took_s / (2 * each):.0f} us each{holds}", end="", flush=True)

    writers = [spawn(code, store.location, name, each) for name in "ab"]
    assert [said(writer) for writer in writers] == ["put", "put"]
    done("put")
    assert store.stats().objects == 2 * each
    assert sorted(store.keys()) == sorted(f"{name}/{index}" for name in "ab" for index in range(each))
    done("listed")
    assert all(store.open(store.ref(f"b/{index}"))["a"] == index for index in range(0, each, 997))
    store.free(Ref(f"{name}/{index}", 0, store.location) for name in "ab" for index in range(each))
    wait_for(lambda: store.stats().used_bytes == 0, "the last leases to run out")
    done("freed")
    assert store.stats().objects == 0 and store.keys() == []
    store.remove()
