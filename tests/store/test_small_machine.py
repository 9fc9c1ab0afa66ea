"""A machine as containers have it by default: 64 MB of shared memory, 1,024 open files. The mounts are real."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from store import EmbeddedStore, Unavailable, left_over
from store.places import LeftOver

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/sort_digits/config.yaml"
MAY_MOUNT = os.getuid() == 0 and shutil.which("unshare") is not None and subprocess.run(["unshare", "-m", "true"]).returncode == 0
needs_mounts = pytest.mark.skipif(not MAY_MOUNT, reason="only root may mount a file system")
Spawn = Callable[..., subprocess.Popen[str]]


def with_small_shm(*argv: str) -> subprocess.CompletedProcess[str]:
    """Runs where /dev/shm has 64 MB; nobody else sees that."""
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)


FILL = """
import os
from pathlib import Path
import numpy as np
from store import EmbeddedStore, Full, default_root
root = default_root("small")
try:
    EmbeddedStore(root, 1 << 30)
except ValueError as error:
    print(error)
store = EmbeddedStore(root, 60 << 20)
refs = [store.put(f"k{number}", {"a": np.full(8 << 20, number, np.uint8)}) for number in range(7)]
other = Path("/dev/shm/somebody-elses")
other.write_bytes(bytes(5 << 20))
for length in (4 << 20, 3 << 20):
    try:
        store.put("more", {"a": np.zeros(length, np.uint8)})
    except Full as error:
        print(error)
store.free(refs[:1])
assert store.stats().spare_bytes > 0
small = [store.put(f"small{number}", {"a": np.zeros(1 << 19, np.uint8)}) for number in range(7)]
assert store.stats().used_bytes == sum(ref.size_bytes for ref in refs[1:] + small)
assert all((store.open(ref)["a"] == number).all() for number, ref in enumerate(refs) if number)
store.remove()
print("left", os.listdir("/dev/shm"))
"""


@needs_mounts
def test_O2_B2_in_64_MB_of_shared_memory_a_store_is_refused_or_full_and_loses_nothing() -> None:
    done = with_small_shm(sys.executable, "-c", FILL)
    refused, full, file_system_full, left = done.stdout.splitlines()
    assert "1,073,741,824 bytes" in refused and "has room for 67,108,864" in refused
    for remedy in ("--shm-size", "store.directory", "store.capacity_bytes"):
        assert remedy in refused
    assert "are in use; free objects or raise the capacity" in full
    assert "is full" in file_system_full and "--shm-size" in file_system_full
    assert left == "left ['somebody-elses']", done.stderr


@needs_mounts
@pytest.mark.parametrize("command", ["up", "doctor"])
def test_O2_a_run_that_64_MB_of_shared_memory_can_not_hold_is_refused_before_anything_starts(tmp_path: Path, command: str) -> None:
    settings = ["--set", f"run_dir={tmp_path}/run", "--set", "service.port=0"]
    done = with_small_shm(sys.executable, "-P", "-m", "driver.cli", command, str(CONFIG), *settings)
    said = " ".join((done.stderr + done.stdout).split())
    assert done.returncode == 1 and "Traceback" not in said
    assert "0.06 GiB free in /dev/shm, 1.00 needed" in said
    for remedy in ("--shm-size", "store.directory", "store.capacity_bytes"):
        assert remedy in said
    assert not (tmp_path / "run" / "ledger.sqlite").exists(), "nothing was started"


@needs_mounts
def test_O5_doctor_says_whether_large_objects_get_huge_pages() -> None:
    code = "from driver.machine import huge_pages; print([(f.state, f.words) for f in huge_pages(None)])"
    without = with_small_shm(sys.executable, "-c", code)
    assert "('absent'" in without.stdout and "mount -o remount,huge=within_size /dev/shm" in without.stdout
    mount = "mount -o remount,huge=within_size /dev/shm && exec " + sys.executable + ' -c "$1"'
    assert "('ok'" in with_small_shm("sh", "-c", mount, "sh", code).stdout


OPENER = """
import resource, sys
from pathlib import Path
soft, hard = map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from store import EmbeddedStore, Ref, Unavailable
store = EmbeddedStore(Path(sys.argv[1]))
held, keys = [], store.keys()
try:
    for turn in range(1500):
        held.append(store.open(store.ref(keys[turn % len(keys)])))
    print("all", sum(int(lease["a"]) for lease in held))
except Unavailable as error:
    print(error)
    del held
    print(int(store.open(store.ref(keys[0]))["a"]))
"""


def test_O2_a_soft_limit_of_1024_files_is_raised_and_1500_objects_are_read_at_once(store: EmbeddedStore, root: Path, spawn: Spawn) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096:
        pytest.skip("the hard limit here is below 4,096")
    for number in range(3):
        store.put(f"k{number}", {"a": np.int64(1)})
    child = spawn(OPENER, root, 1024, 4096)
    assert child.communicate(timeout=60)[0] == "all 1500\n"


def test_O2_a_hard_limit_of_1024_files_is_an_error_with_its_remedy_and_letting_go_helps(
    store: EmbeddedStore, root: Path, spawn: Spawn
) -> None:
    store.put("k", {"a": np.int64(1)})
    said, after = spawn(OPENER, root, 1024, 1024).communicate(timeout=60)[0].splitlines()
    assert "ulimit -n" in said and "Too many open files" in said
    assert after == "1", "nothing is lost"


@pytest.fixture
def dead(root: Path, spawn: Spawn) -> Iterator[Path]:
    """A store whose owner was killed."""
    code = """
import sys, time
from pathlib import Path
import numpy as np
from store import EmbeddedStore
store = EmbeddedStore(Path(sys.argv[1]), 4 << 20)
store.claim()
store.put("row", {"a": np.zeros(300_000, np.uint8)})
print("there", flush=True)
time.sleep(600)
"""
    owner = spawn(code, root)
    assert owner.stdout is not None and owner.stdout.readline() == "there\n"
    assert root not in [left.root for left in left_over()], "its owner lives"
    owner.kill()
    owner.wait(10)
    yield root
    if root.exists():
        shutil.rmtree(root)


def test_a_store_of_a_run_that_was_killed_is_named_with_its_size_and_goes_on_when_the_run_does(dead: Path) -> None:
    (left,) = (left for left in left_over() if left.root == dead)
    assert 300_000 < left.size_bytes < 400_000
    assert str(dead) in left.words and "rm -r" in left.words
    again = EmbeddedStore(dead, 4 << 20)
    again.claim()
    assert again.keys() == ["row"] and dead not in [left.root for left in left_over()]
    again.remove()


def test_no_room_names_the_stores_of_dead_runs_too(dead: Path, root: Path) -> None:
    with pytest.raises(ValueError, match=f"{dead.name}.* is of a run that ended"):
        EmbeddedStore(root.with_name(root.name + "-next"), 1 << 60)
    assert not root.with_name(root.name + "-next").exists()


def test_looking_for_dead_runs_does_not_keep_a_new_owner_out(store: EmbeddedStore, root: Path) -> None:
    store.claim()
    with pytest.raises(ValueError, match="another run"):
        EmbeddedStore(root).claim()
    assert not [left for left in left_over() if left.root == root]


def test_what_is_no_store_is_not_named(root: Path) -> None:
    root.mkdir(mode=0o700)
    assert LeftOver(root, 0) not in left_over()
    root.rmdir()
    with pytest.raises(Unavailable):
        EmbeddedStore(root)
