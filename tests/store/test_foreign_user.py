"""Another user of the machine can neither see nor touch an object, nor stand in the way of a store without being named."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from store import EmbeddedStore, Gone, Ref, Unavailable, open_store

NOBODY = 65534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def as_nobody(work: Callable[[], None]) -> None:
    """`work` in a child process that has given up root for good; what it raises fails the test."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_foreign_user_can_not_list_read_link_replace_or_remove_an_object(store: EmbeddedStore, root: Path, tmp_path: Path) -> None:
    ref = store.put("k", {"a": np.arange(1000)})
    store.claim()
    file = root / "objects" / "k"
    own = Path(f"/dev/shm/foreign-{os.getpid()}")

    def attempts() -> None:
        own.write_text("mine")
        tries: list[Callable[[], object]] = [
            lambda: os.listdir(root),
            lambda: os.stat(file),
            lambda: file.read_bytes(),
            lambda: os.open(file, os.O_WRONLY),
            lambda: os.open(root / "account", os.O_RDONLY),
            lambda: os.open(root / "owner", os.O_RDONLY),
            lambda: os.link(file, own.with_suffix(".link")),
            lambda: os.symlink(own, root / "objects" / "planted"),
            lambda: os.rename(own, file),
            lambda: os.unlink(file),
            lambda: os.rename(root, own.with_suffix(".moved")),
            lambda: os.rmdir(root),
            lambda: os.chmod(root, 0o777),
        ]
        for number, attempt in enumerate(tries):
            try:
                attempt()
            except PermissionError:
                continue
            raise AssertionError(f"attempt {number} was allowed")
        for refused in (lambda: open_store.__wrapped__(ref.location), lambda: EmbeddedStore(root, 1 << 20)):
            try:
                refused()
            except ValueError as error:
                assert "belongs to user 0" in str(error)
            else:
                raise AssertionError("a foreign store was attached to")

    try:
        as_nobody(attempts)
    finally:
        own.unlink(missing_ok=True)
    assert store.keys() == ["k"] and (store.open(ref)["a"] == np.arange(1000)).all()


@pytest.mark.parametrize("planted", ["a directory", "an open directory", "a symbolic link", "a link to a store of ours", "a file"])
def test_a_place_that_a_foreign_user_took_first_is_refused_and_nothing_is_written_there(root: Path, planted: str) -> None:
    elsewhere = root.with_name(root.name + "-elsewhere")
    ours = EmbeddedStore(elsewhere, 1 << 20) if planted == "a link to a store of ours" else None

    def plant() -> None:
        if planted == "a directory":
            root.mkdir(mode=0o700)
        elif planted == "an open directory":
            root.mkdir()
            root.chmod(0o777)
        elif planted == "a file":
            root.touch()
        else:
            if ours is None:
                elsewhere.mkdir()
                elsewhere.chmod(0o777)
            root.symlink_to(elsewhere)

    as_nobody(plant)
    try:
        with pytest.raises(ValueError, match=r"belongs to user 65534|is not a directory"):
            EmbeddedStore(root, 1 << 20)
        with pytest.raises((ValueError, Unavailable)):
            open_store(f"tmpfs:{root}")
        if ours is None:
            for place in (root, elsewhere):
                assert not place.is_dir() or not list(place.iterdir())
    finally:
        if ours is not None:
            ours.remove()
        root.rmdir() if root.is_dir() and not root.is_symlink() else root.unlink()
        if elsewhere.exists():
            elsewhere.rmdir()


def test_a_place_where_everybody_may_rename_is_refused_with_the_remedy(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ValueError, match=r"chmod \+t"):
        EmbeddedStore(open_to_all / "store", 1 << 20)
    open_to_all.chmod(0o1777)
    EmbeddedStore(open_to_all / "store", 1 << 20).remove()


def test_a_reference_can_not_lead_out_of_the_store(store: EmbeddedStore, root: Path) -> None:
    for key in ("../account", "..", "/etc/passwd", "a/../../account"):
        with pytest.raises(Gone):
            store.open(Ref(key, 1, store.location))
