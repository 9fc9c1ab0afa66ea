"""What only the store on Mooncake can lose: its master, a process that gives memory, a lease. And what its client must not be asked."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from store import (
    Exists,
    Gone,
    MooncakeStore,
    Ref,
    Unavailable,
    mooncake_client,
    mooncake_frees,
    mooncake_location,
    mooncake_read,
    open_store,
)
from store.base import Damaged
from store.mooncake_client import Client
from store.mooncake_frees import Frees
from store.mooncake_owner import MASTER_LOST, STALLED_S
from store.mooncake_segment import DIRECTORY, Mapped
from tests.store.conftest import Backend, MooncakeHost, Spawn, free_port, said, wait_for, why_no_mooncake

MB = 1 << 20
needs_mooncake = pytest.mark.skipif(why_no_mooncake() is not None, reason=why_no_mooncake() or "")
only_mooncake = pytest.mark.parametrize("backend", ["mooncake"], indirect=True)


@pytest.mark.parametrize(
    "wrong", ["mooncake:", "mooncake:host:1/name", "mooncake:host/name?http=2", "mooncake:host:1/a b?http=2", "elsewhere:x"]
)
def test_what_is_no_location_is_refused_with_the_form_it_should_have(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"unknown store location .* must be"):
        open_store(wrong)


def test_O2_a_store_without_mooncake_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "_version_of", lambda package: None)
    monkeypatch.setattr(mooncake_client, "is_reachable", lambda host, port: True)
    with pytest.raises(Unavailable, match="make mooncake"):
        MooncakeStore(mooncake_location("127.0.0.1", 1, "run", 2)).ref("k")


@needs_mooncake
def test_O2_a_master_that_is_not_there_is_said_at_once() -> None:
    store = MooncakeStore(mooncake_location("127.0.0.1", free_port(), "run", free_port()))
    verbs: list[Any] = [lambda: store.put("k", {}), lambda: store.ref("k"), store.stats, store.keys, store.parts]
    for verb in verbs:
        with pytest.raises(Unavailable, match=r"master.*does not answer.*is its process running"):
            verb()
    store.remove()


@only_mooncake
def test_a_closed_store_refuses_and_does_not_crash(backend: Backend) -> None:
    store = MooncakeStore(backend.store.location)
    ref = store.put("k", {"a": np.arange(3)})
    store.close()
    store.close()
    verbs: list[Any] = [lambda: store.put("x", {}), lambda: store.open(ref), lambda: store.ref("k"), store.stats, store.keys, store.parts]
    for verb in verbs:
        with pytest.raises(Unavailable, match="closed in this process"):
            verb()
    assert backend.store.open(ref)["a"].sum() == 3, "what it put stays"


@only_mooncake
def test_closing_waits_for_the_calls_of_other_threads(backend: Backend) -> None:
    store, faults = MooncakeStore(backend.store.location), []

    def work() -> None:
        try:
            for turn in range(10_000):
                store.put(f"{threading.get_ident()}/{turn}", {"a": np.zeros(1000)})
        except Unavailable as error:
            faults.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(backend.store.keys()) > 20, "some puts")
    store.close()
    for thread in threads:
        thread.join(30)
    assert len(faults) == 3 and all("closed in this process" in fault for fault in faults)


@only_mooncake
def test_a_store_opened_before_a_fork_refuses_to_work_in_the_child(backend: Backend, spawn: Spawn) -> None:
    code = """
import os, sys
import numpy as np
from store import Unavailable, open_store
store = open_store(sys.argv[1])
store.put("k", {"a": np.zeros(1)})
child = os.fork()
if child == 0:
    try:
        store.ref("k")
    except Unavailable as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(store.ref("k").key, flush=True)
"""
    parent = spawn(code, backend.store.location)
    assert "forked" in said(parent) and said(parent) == "k"


# Reads an object of many chunks, and stops itself in the middle of the copy.
STOPPED_READER = """
import os, signal, sys
import numpy as np
from store import Gone, mooncake_read, open_store
copy, count = mooncake_read.Found._copy, []
def stop(self, into, offset):
    copy(self, into[:into.size // 2], offset)
    count.append(1)
    if len(count) == 2:
        print("there", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    copy(self, into[into.size // 2:], offset + into.size // 2)
mooncake_read.Found._copy = stop
store = open_store(sys.argv[1])
try:
    print(*np.unique(store.open(store.ref("old"))["a"]), flush=True)
except Gone:
    print("gone", flush=True)
"""


@only_mooncake
def test_B2_a_reader_that_is_stopped_while_its_bytes_are_freed_and_used_again_is_shown_no_mixture(backend: Backend, spawn: Spawn) -> None:
    """The lease runs out meanwhile, and the master rightly gives the bytes to another object."""
    backend.empty()
    old = backend.store.put("old", {"a": np.full(40 * MB, 1, np.uint8)})
    reader = spawn(STOPPED_READER, backend.store.location)
    assert said(reader) == "there"
    backend.store.free([old])
    backend.settled(0, 0)
    backend.store.put("new", {"a": np.full(40 * MB, 2, np.uint8)})
    os.kill(reader.pid, signal.SIGCONT)
    assert said(reader) == "gone"


@only_mooncake
def test_B2_bytes_that_somebody_may_be_reading_are_given_to_no_other_object(backend: Backend) -> None:
    """They were freed, and there is no room but theirs: the put waits until the lease has run out."""
    backend.empty()
    store = backend.store
    assert isinstance(store, MooncakeStore)
    old = store.put("old", {"a": np.full(40 * MB, 1, np.uint8)})
    leased_s = time.monotonic()
    assert not isinstance(store._client.find(store._name_of("old")), int)
    store.free([old])
    store.put("new", {"a": np.full(40 * MB, 2, np.uint8)})
    assert time.monotonic() - leased_s >= mooncake_read.LEASE_S


@only_mooncake
def test_a_reader_on_another_host_gets_the_same_bytes_over_the_network(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"a": np.random.default_rng(0).integers(0, 255, 20 * MB, np.uint8), "b": np.arange(10)}
    ref = backend.store.put("k", columns)
    small = backend.store.put("small", {"a": np.arange(5)})
    monkeypatch.setattr(Mapped, "bytes_of", lambda self, place: None)
    reads: list[int] = []
    read = Client.read
    monkeypatch.setattr(Client, "read", lambda self, key, data, offset: (reads.append(data.nbytes), read(self, key, data, offset))[1])
    lease = backend.store.open(ref)
    assert (lease["a"] == columns["a"]).all() and (lease["b"] == columns["b"]).all()
    assert (backend.store.open(small)["a"] == np.arange(5)).all()
    assert sum(reads) >= ref.size_bytes and max(reads) <= mooncake_client.CHUNK_BYTES
    backend.store.free([ref])
    with pytest.raises(Gone):
        backend.store.open(ref)


@only_mooncake
def test_an_address_that_is_not_the_objects_is_damage_not_data(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (backend.store.put(key, {"a": np.arange(1000)}) for key in ("first", "other"))
    find = Client.find
    monkeypatch.setattr(Client, "find", lambda self, name: find(self, name.replace("first", "other")))
    assert backend.store.open(second)["a"].sum() == 499500
    with pytest.raises(Damaged, match="'first'"):
        backend.store.open(first)


@only_mooncake
def test_a_put_that_cannot_be_written_is_taken_back_and_tried_again(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.empty()
    write, failed = Client.write, []

    def fail_twice(self: Client, key: str, data: np.ndarray, offset: int) -> int:
        if len(failed) < 2:
            failed.append(key)
            return mooncake_client.TRANSFER_FAILED
        return write(self, key, data, offset)

    monkeypatch.setattr(Client, "write", fail_twice)
    ref = backend.store.put("k", {"a": np.arange(10)})
    assert len(failed) == 2 and backend.store.open(ref)["a"].sum() == 45
    monkeypatch.setattr(Client, "write", lambda self, key, data, offset: mooncake_client.TRANSFER_FAILED)
    with pytest.raises(Unavailable, match="'x' could not be written"):
        backend.store.put("x", {"a": np.arange(10)})
    monkeypatch.undo()
    assert backend.store.stats().used_bytes == ref.size_bytes, "its bytes are free, and so is its key"
    backend.store.put("x", {"a": np.arange(10)})


def test_a_free_that_meets_a_reader_is_kept_and_tried_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    answers = {
        "free": [0],
        "read": [mooncake_client.LEASED, mooncake_client.LEASED, 0],
        "wrong": [-1],
        "never": [mooncake_client.LEASED] * 10**6,
    }
    frees = Frees(lambda names: [answers[name].pop(0) for name in names])
    frees.free(["free", "read", "wrong"])
    assert "read" in frees and "free" not in frees and len(frees) == 1
    assert "could not free wrong (code -1)" in caplog.text
    wait_for(lambda: len(frees) == 0, "the lease to end", 10.0)
    frees.free(["never"])
    with pytest.raises(Unavailable, match=r"1 objects could not be freed within 0\.1 s"):
        frees.finish(0.1)
    frees.close()
    assert "1 freed objects are still leased" in caplog.text


def test_frees_without_a_master_wait_for_it_and_no_more_than_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = False

    def remove(names: Any) -> list[int]:
        if not there:
            raise Unavailable("no master")
        return [0] * len(names)

    monkeypatch.setattr(mooncake_frees, "LIMIT", 3)
    frees = Frees(remove)
    frees.free(["a", "b"])
    frees.free(["c"])
    with pytest.raises(Unavailable, match="3 objects wait to be freed"):
        frees.free(["d"])
    assert caplog.text.count("no master") == 1
    there = True
    wait_for(lambda: len(frees) == 0, "the master", 10.0)
    frees.close()


def test_L2_a_master_that_is_lost_takes_every_object_along_and_the_next_begins_empty(mooncake_host: MooncakeHost) -> None:
    owner = mooncake_host.start(32 * MB, master=True)
    store = MooncakeStore(mooncake_host.location("run"))
    ref = store.put("k", {"a": np.arange(1000)})
    view, before = store.open(ref)["a"], store.parts()
    mooncake_host.master().kill()
    assert owner.wait(20) == MASTER_LOST, "its memory must not be given out twice"
    verbs: list[Any] = [lambda: store.open(ref), lambda: store.ref("k"), lambda: store.put("x", {}), store.stats, store.parts]
    for verb in verbs:
        with pytest.raises(Unavailable, match="master"):
            verb()
    store.free([ref])  # is not forgotten, and not an error
    mooncake_host.start(32 * MB, master=True)
    assert not before & store.parts() and len(store.parts()) == 1
    with pytest.raises(Gone):
        store.open(ref)
    assert store.keys() == []
    store._frees._pending.setdefault(store._name_of("k"), None)  # it may have been tried again by now
    again = store.put("k", {"a": np.arange(10)})
    assert store.open(again)["a"].sum() == 45 and view.sum() == 499500
    store.remove()


@pytest.mark.parametrize("when", ["behind the put", "in mid-put"])
def test_L2_a_key_whose_put_the_loss_of_the_master_cut_short_is_put_again_under_the_next(
    mooncake_host: MooncakeHost, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A trainer's key of weights is the same at the second try; it was refused for as long as the trainer lived."""
    owner = mooncake_host.start(32 * MB, master=True)
    store = MooncakeStore(mooncake_host.location("run"))
    write = Client.write

    def lose_the_master(self: Client, key: str, data: np.ndarray, offset: int) -> int:
        mooncake_host.master().kill()
        assert owner.wait(20) == MASTER_LOST
        if when == "in mid-put":
            mooncake_host.start(32 * MB, master=True)
        return write(self, key, data, offset)

    monkeypatch.setattr(Client, "write", lose_the_master)
    with pytest.raises(Unavailable):
        store.put("k", {"a": np.arange(10)})
    monkeypatch.undo()
    if when == "behind the put":
        mooncake_host.start(32 * MB, master=True)
    assert store.keys() == []
    assert store.open(store.put("k", {"a": np.arange(10)}))["a"].sum() == 45
    store.remove()


def test_L2_a_process_that_gave_memory_and_is_killed_takes_its_objects_and_no_others(mooncake_host: MooncakeHost) -> None:
    mooncake_host.start(0, master=True)
    lost, stays = mooncake_host.start(32 * MB), mooncake_host.start(32 * MB)
    store = MooncakeStore(mooncake_host.location("run"))
    refs: list[Ref] = []
    wait_for(lambda: refs.append(store.put(f"k{len(refs)}", {"a": np.full(4 * MB, len(refs), np.uint8)})) or len(refs) == 12, "puts")
    before = store.parts()
    assert len(before) == 2
    lost.kill()
    lost.wait()
    left = store.parts()
    assert len(left) == 1 and left < before
    found = []
    for index, ref in enumerate(refs):
        try:
            assert (store.open(ref)["a"] == index).all()
            assert store.ref(ref.key) == ref
            found.append(index)
        except Gone:
            with pytest.raises(Gone):
                store.ref(ref.key)
    assert 0 < len(found) < len(refs)
    assert sorted(store.keys()) == sorted(refs[index].key for index in found)
    assert store.stats().capacity_bytes == 32 * MB, "what is lost has no room"
    put = store.put("new", {"a": np.arange(10)})
    assert store.open(put)["a"].sum() == 45, "what is put now goes to who lives"
    assert stays.poll() is None
    store.close()


@pytest.mark.slow
def test_L2_an_owner_that_was_stopped_for_long_ends_and_its_memory_is_not_given_out_again(mooncake_host: MooncakeHost) -> None:
    """The master may have given it up meanwhile, and its addresses to others."""
    mooncake_host.start(0, master=True)
    owner = mooncake_host.start(32 * MB)
    store = MooncakeStore(mooncake_host.location("run"))
    before = store.parts()
    owner.send_signal(signal.SIGSTOP)
    time.sleep(STALLED_S + 1.0)
    owner.send_signal(signal.SIGCONT)
    assert owner.wait(20) == MASTER_LOST and len(before) == 1
    assert not store.parts(), "the master names it for a while yet"
    mooncake_host.start(32 * MB)
    assert len(store.parts()) == 1 and not before & store.parts()
    store.close()


def memory_of(pid: int) -> list[Path]:
    maps = Path(f"/proc/{pid}/maps").read_text()
    return [path for path in DIRECTORY.glob("*.bytes") if str(path) in maps]


def test_an_owner_that_is_asked_to_end_leaves_no_memory_behind(mooncake_host: MooncakeHost) -> None:
    owner = mooncake_host.start(32 * MB, master=True)
    ours = memory_of(owner.pid)
    assert len(ours) == 1
    owner.terminate()
    assert owner.wait(20) == 0 and not ours[0].exists()


def test_the_next_owner_takes_away_what_a_killed_one_left(mooncake_host: MooncakeHost) -> None:
    owner = mooncake_host.start(32 * MB, master=True)
    left = memory_of(owner.pid)
    owner.kill()
    owner.wait()
    assert len(left) == 1 and left[0].exists()
    mooncake_host.start(32 * MB, master=True)
    assert not left[0].exists()


def test_O2_two_masters_do_not_take_one_address(mooncake_host: MooncakeHost, spawn: Spawn) -> None:
    mooncake_host.start(32 * MB, master=True)
    code = "import runpy, sys; sys.argv[0] = 'owner'; runpy.run_module('store.mooncake_owner', run_name='__main__')"
    second = spawn(code, "--location", mooncake_host.location("x"), "--port", free_port(), "--capacity-bytes", 32 * MB, "--master")
    assert "listens at" in said(second) and second.wait(20) == 1


def test_a_lease_shorter_than_the_copy_is_tried_again_and_then_said(mooncake_host: MooncakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    mooncake_host.start(32 * MB, master=True)
    store = MooncakeStore(mooncake_host.location("run"))
    ref = store.put("k", {"a": np.arange(10)})
    monkeypatch.setattr(mooncake_read, "SAFE_S", -1.0)
    with pytest.raises(Unavailable, match="longer than its lease"):
        store.open(ref)
    monkeypatch.undo()
    assert store.open(ref)["a"].sum() == 45
    with pytest.raises(Exists):
        store.put("k", {})
    store.remove()
