"""Objects on disk while nothing runs: a tmpfs does not survive the machine, and a store should not stay in memory after its owner ended.

One archive (a tar of the encoded objects) is written, synced and renamed into place before any object leaves the store; going back, objects
are put before the archive is removed. Killed at any point, either side is found in one of those states, and doing it again completes it.
"""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from pathlib import Path

from store.base import Damaged, Exists, Store

ARCHIVE = "parked.tar"


def park(store: Store, directory: Path) -> int:
    """Move every object into `directory`; an archive that an interrupted `unpark` left is taken in first."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    unpark(store, directory)
    refs = [store.ref(key) for key in sorted(store.keys())]
    partial = directory / (ARCHIVE + ".partial")
    try:
        with open(partial, "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
                for ref in refs:
                    encoded = store.encoded(ref)
                    member = tarfile.TarInfo(ref.key)
                    member.size = len(encoded)
                    archive.addfile(member, io.BytesIO(encoded))
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)  # on a full disk its half would keep the disk full
        raise
    partial.rename(directory / ARCHIVE)
    _sync(directory)
    store.free(refs)
    return len(refs)


def unpark(store: Store, directory: Path) -> int:
    """Put every parked object back that is not in the store, then remove the archive. Raises Full with the archive kept."""
    path = directory / ARCHIVE
    (directory / (ARCHIVE + ".partial")).unlink(missing_ok=True)
    if not path.exists():
        return 0
    put_back = 0
    try:
        with tarfile.open(path, mode="r:") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is None:
                    raise Damaged(f"{path} holds {member.name!r}, which is not an object")
                with contextlib.suppress(Exists):  # parked, and killed before it was freed
                    store.put_encoded(member.name, file.read())
                    put_back += 1
    except tarfile.TarError as error:
        raise Damaged(f"the parked objects in {path} cannot be read: {error}") from error
    path.unlink()
    return put_back


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
