"""Mappings of the large files that this process writes, kept for the next objects in the same files.

To write through a mapping whose pages have been touched is a plain copy; a system call for each few pages, or a fault for each, costs more
than the bytes do. A mapping is seen by `write` alone, which is called for a file that is its caller's, before it is published. It holds no
lock, so it is no lease; and whoever gives a spare file up truncates it, so it keeps no memory either.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from store.files import write_pieces

_PIECE_BYTES = 4 << 20
_ALONE_BYTES = 16 << 20  # below this a second thread costs more than it brings
_THREADS = min(4, len(os.sched_getaffinity(0)))
_MOST = 256  # each is an open file and a range of addresses


@dataclass
class _Mapped:
    handle: int  # an open file of its own, so that no lock of another handle lives as long as the mapping
    mapping: mmap.mmap

    @classmethod
    def of(cls, path: Path, length_bytes: int) -> _Mapped | None:
        """None where the process may have no more open files or mappings; the object is written all the same."""
        handle = None
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            return cls(handle, mmap.mmap(handle, length_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
        except OSError:
            if handle is not None:
                os.close(handle)
            return None

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a copy that failed is still on its way out: it goes with that error
            self.mapping.close()
        os.close(self.handle)


class Kept:
    """Of one process; several threads may write, each into a file of its own."""

    def __init__(self) -> None:
        self._mapped: dict[int, _Mapped] = {}

    def write(self, handle: int, path: Path, pieces: Sequence[tuple[int, memoryview]], length_bytes: int) -> None:
        """Each piece at its offset into a file of that length that is this writer's, and whose pages are there. Raises OSError."""
        inode = os.fstat(handle).st_ino
        mapped = self._mapped.pop(inode, None)
        self._prune()
        if mapped is not None and len(mapped.mapping) < length_bytes:
            mapped.close()
            mapped = None
        if mapped is not None:
            try:
                _copy_pieces(mapped.mapping, pieces)
            except BaseException:
                mapped.close()
                raise
        else:
            write_pieces(handle, pieces)  # a fault in a page that was never written would fill it with zeros first
            mapped = _Mapped.of(path, length_bytes)
        if mapped is not None:
            self._keep(inode, mapped)

    def close(self) -> None:
        while self._mapped:
            self._mapped.popitem()[1].close()

    def _prune(self) -> None:
        """Those of files that are gone, and the oldest of too many."""
        surplus = len(self._mapped) - _MOST
        for inode in list(self._mapped):
            mapped = self._mapped.pop(inode, None)  # so that no other thread closes it meanwhile
            if mapped is None:
                continue
            if surplus > 0 or os.fstat(mapped.handle).st_nlink == 0:
                mapped.close()
                surplus -= 1
            else:
                self._keep(inode, mapped)

    def _keep(self, inode: int, mapped: _Mapped) -> None:
        if self._mapped.setdefault(inode, mapped) is not mapped:  # another thread has mapped the file since
            mapped.close()


def _copy_pieces(mapping: mmap.mmap, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """A large object by several threads, for numpy copies without Python's lock."""
    target = np.frombuffer(mapping, np.uint8)
    if sum(len(piece) for _, piece in pieces) < _ALONE_BYTES:
        for offset, piece in pieces:
            _copy(target, offset, piece)
        return
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(lambda part: _copy(target, *part), _cut(pieces)):
            pass


def _cut(pieces: Sequence[tuple[int, memoryview]]) -> Iterator[tuple[int, memoryview]]:
    for offset, piece in pieces:
        for start in range(0, len(piece), _PIECE_BYTES):
            yield offset + start, piece[start : start + _PIECE_BYTES]


def _copy(target: np.ndarray, offset: int, piece: memoryview) -> None:
    np.copyto(target[offset : offset + len(piece)], np.frombuffer(piece, np.uint8))
