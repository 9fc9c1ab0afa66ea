"""The embedded store between real processes, some of which die."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from store import EmbeddedStore, Gone, Ref, Unavailable
from store.account import Account

Child = subprocess.Popen[str]
Spawn = Callable[..., Child]

# Stops for ever at the named step of a put, so that it can be killed exactly there.
WRITER = """
import os, sys, time
from pathlib import Path
import numpy as np
import store.files
from store.account import Account
from store import EmbeddedStore
def stop(*_):
    print("there", flush=True)
    time.sleep(600)
step = sys.argv[2]
if step == "write":
    store.files.write_all = stop
elif step == "link":
    os.link = stop
elif step == "unlink":
    link = os.link
    os.link = lambda *names: (link(*names), stop())
elif step == "account":
    write, calls = Account._write, []
    Account._write = staticmethod(lambda *facts, **more: stop() if calls else (calls.append(1), write(*facts, **more)))
EmbeddedStore(Path(sys.argv[1])).put("k", {"a": np.ones(100_000)})
"""


def say_line(child: Child) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("step", ["account", "write", "link"])
def test_a_writer_killed_before_publishing_leaves_neither_object_nor_bytes(
    store: EmbeddedStore, root: Path, spawn: Spawn, step: str
) -> None:
    other = store.put("other", {"a": np.ones(200_000)})
    writer = spawn(WRITER, root, step)
    assert say_line(writer) == "there"
    if step != "account":
        assert store.stats().used_bytes > other.size_bytes + 800_000
        with pytest.raises(Gone):
            store.open(Ref("k", 1, store.location))
    writer.kill()
    writer.wait(10)
    assert (store.stats().objects, store.stats().used_bytes) == (1, other.size_bytes)
    assert not list((root / "temp").iterdir())
    store.put("k", {"a": np.ones(1)})


def test_a_writer_killed_just_after_publishing_leaves_a_whole_object_counted_once(store: EmbeddedStore, root: Path, spawn: Spawn) -> None:
    writer = spawn(WRITER, root, "unlink")
    assert say_line(writer) == "there"
    ref = store.ref("k")
    assert store.open(ref)["a"].sum() == 100_000
    assert EmbeddedStore(root, 8 << 20).stats().used_bytes == ref.size_bytes
    writer.kill()
    writer.wait(10)
    assert (store.stats().objects, store.stats().used_bytes) == (1, ref.size_bytes)
    assert EmbeddedStore(root, 8 << 20).stats().used_bytes == ref.size_bytes
    store.free([ref])
    assert (store.stats().objects, store.stats().used_bytes) == (0, 0)


def test_B2_capacity_is_shared_by_all_processes(root: Path, spawn: Spawn) -> None:
    code = """
import sys
from pathlib import Path
import numpy as np
from store import EmbeddedStore, Full
store = EmbeddedStore(Path(sys.argv[1]))
put = 0
try:
    while True:
        store.put(f"{sys.argv[2]}/{put}", {"a": np.zeros(100)})
        put += 1
except Full:
    print(put, flush=True)
"""
    store = EmbeddedStore(root, 60 * 4096)
    writers = [spawn(code, root, name) for name in "ab"]
    assert sum(int(say_line(writer)) for writer in writers) == 60
    assert store.stats().used_bytes == 60 * 4096
    store.remove()


def test_an_owner_that_attaches_again_repairs_the_account(store: EmbeddedStore, root: Path) -> None:
    ref = store.put("k", {"a": np.zeros(100)})
    (root / "account").write_bytes(b"")
    assert EmbeddedStore(root, 1 << 20).stats().used_bytes == ref.size_bytes
    (root / "temp" / "left").write_bytes(b"x" * 5000)
    assert EmbeddedStore(root, 2 << 20).stats() == store.stats()
    assert store.stats().used_bytes == ref.size_bytes and store.stats().capacity_bytes == 2 << 20


def test_L1_a_stopped_process_that_holds_the_account_is_waited_for_only_so_long(store: EmbeddedStore, root: Path, spawn: Spawn) -> None:
    writer = spawn(WRITER, root, "account")
    say_line(writer)
    os.kill(writer.pid, signal.SIGSTOP)
    with (
        pytest.raises(Unavailable, match=r"held the lock of .* for 0.05 s"),
        Account(root / "account", lambda: 0, deadline_s=0.05).locked(),
    ):
        pass


def test_a_reader_forked_from_another_holds_its_lease_alone(store: EmbeddedStore) -> None:
    """Ranks are forked from a warm parent that may hold views."""
    ref = store.put("k", {"a": np.arange(10)})
    lease = store.open(ref)
    hold, told = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(told[1], b"x")
        os.read(hold[0], 1)
        os._exit(0 if lease["a"].sum() == 45 else 1)
    os.read(told[0], 1)
    lease.close()
    store.free([ref])
    assert store.stats().used_bytes == ref.size_bytes
    os.write(hold[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.stats().used_bytes == 0
    for handle in (*hold, *told):
        os.close(handle)


# Stops itself with the account's lock held.
STOPPED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from store.account import Account
from store import EmbeddedStore
read = Account._read
def stop(*facts):
    print("there", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return read(*facts)
store = EmbeddedStore(Path(sys.argv[1]))
Account._read = stop
store.put("k", {"a": np.ones(1000)})
print("put", flush=True)
"""


def test_L2_a_child_that_is_stopped_with_the_lock_held_is_ended_by_the_owner_and_nothing_is_lost(
    store: EmbeddedStore, spawn: Spawn
) -> None:
    store.claim()
    ref = store.put("before", {"a": np.ones(1000)})
    child = spawn(STOPPED, str(store.location.removeprefix("tmpfs:")))
    assert say_line(child) == "there"
    assert store.stats().used_bytes == ref.size_bytes, "the lock is had, and what was being put is not there"
    assert child.wait(10) == -signal.SIGKILL


def test_L2_who_is_not_the_owner_ends_nobody_and_says_what_holds_it_up(store: EmbeddedStore, spawn: Spawn) -> None:
    child = spawn(STOPPED, str(store.location.removeprefix("tmpfs:")))
    assert say_line(child) == "there"
    store._account._deadline_s = 2.5
    with pytest.raises(Unavailable, match="is one of them stopped"):
        store.stats()
    os.kill(child.pid, signal.SIGCONT)
    assert say_line(child) == "put" and store.stats().objects == 1


# The parent stops itself with the lock held; its child, who wants it, waits for as long as that lasts.
STOPPED_PARENT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from store.account import Account
from store import EmbeddedStore
store = EmbeddedStore(Path(sys.argv[1]))
store.claim()
ready, go = os.pipe()
pid = os.fork()
if pid == 0:
    other = EmbeddedStore(Path(sys.argv[1]))
    other._account._deadline_s = 1.5
    os.read(ready, 1)
    other.put("k", {"a": np.ones(1000)})
    os._exit(0)
read = Account._read
def stop(*facts):
    Account._read = read
    os.write(go, b"!")
    print("there", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return read(*facts)
Account._read = stop
store.stats()
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_L2_everybody_waits_for_an_owner_that_is_stopped(store: EmbeddedStore, spawn: Spawn) -> None:
    owner = spawn(STOPPED_PARENT, str(store.location.removeprefix("tmpfs:")))
    assert say_line(owner) == "there"
    time.sleep(3.5)  # longer than the child's own deadline
    os.kill(owner.pid, signal.SIGCONT)
    assert say_line(owner) == "0", "the child put its object once the owner went on"
    assert store.stats().objects == 1
