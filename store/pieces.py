"""Weights as they lie in buckets: whole tensors, and parts of one that is larger than a bucket.

A whole tensor is a column under its own name. A part is a column `NAME@START`, one-dimensional: the tensor's elements from START on, in C
order. Parts of one tensor follow each other without gaps; its shape is told beside the buckets. Whoever cuts a tensor, or puts one
together again, does it here.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from store.base import Column, Damaged, Lease, Ref
from store.opening import open_store

_MARK = "@"  # in no name of Hugging Face's


@dataclass(frozen=True, slots=True)
class TensorForm:
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor, or (`start` is a number) its elements from there on, flat. bfloat16 is seen as uint16."""

    name: str
    dtype: str
    start: int | None
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Bundle:
    """As many buckets in a row as it takes to have no tensor half: one, or those of a tensor that was cut.

    `tensors` are (name, form, size in bytes), in the order in which they lie there.
    """

    refs: tuple[Ref, ...]
    tensors: tuple[tuple[str, TensorForm, int], ...]


def cut(name: str, value: np.ndarray | Column, most_bytes: int) -> Iterator[tuple[str, np.ndarray | Column]]:
    """A tensor's parts as columns of at most `most_bytes` each, but of one element at least. Views: nothing is copied."""
    flat = (value.data if isinstance(value, Column) else value).reshape(-1)
    step = max(1, most_bytes // flat.itemsize)
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        yield f"{name}{_MARK}{start}", Column(part, value.dtype) if isinstance(value, Column) else part


def pieces(lease: Lease) -> Iterator[Piece]:
    """What one bucket holds. Raises Damaged for a part that cannot be one."""
    for column, data in lease.items():
        name, mark, start = column.rpartition(_MARK)
        if not mark:
            yield Piece(column, lease.dtypes[column], None, data)
        elif name and start.isdecimal() and data.ndim == 1:
            yield Piece(name, lease.dtypes[column], int(start), data)
        else:
            raise Damaged(f"column {column!r} of {lease.ref.key!r} is no part of a tensor: NAME{_MARK}START and one dimension are")


def bundles(refs: Iterable[Ref], forms: Mapping[str, TensorForm]) -> list[Bundle]:
    """The buckets of a snapshot, in order; only their tables are read. `forms` has the shape of every tensor that was cut.

    Raises Gone and Unavailable, and Damaged when parts are missing, overlap or are not of the form that was told.
    """
    made: list[Bundle] = []
    held: list[Ref] = []
    tensors: list[tuple[str, TensorForm, int]] = []
    half: tuple[str, int] | None = None  # the tensor whose parts are coming, and the element that its next part begins with
    for ref in refs:
        held.append(ref)
        with open_store(ref.location).open(ref) as lease:
            for piece in pieces(lease):
                if half != (None if not piece.start else (piece.name, piece.start)):
                    found = f"{piece.name!r} at element {piece.start or 0}"
                    raise Damaged(f"{ref.key!r} goes on with {found}, where {_wanted(half)} was expected")
                if piece.start is None:
                    tensors.append((piece.name, TensorForm(piece.dtype, piece.data.shape), piece.data.nbytes))
                    continue
                form = forms.get(piece.name)
                end = piece.start + piece.data.size
                if form is None or form.dtype != piece.dtype or end > form.elements:
                    raise Damaged(f"{ref.key!r} holds {piece.dtype} elements up to {end} of {piece.name!r}, which is {form or 'unknown'}")
                if not piece.start:
                    tensors.append((piece.name, form, form.elements * piece.data.itemsize))
                half = None if end == form.elements else (piece.name, end)
        if half is None:
            made.append(Bundle(tuple(held), tuple(tensors)))
            held, tensors = [], []
    if half is not None:
        raise Damaged(f"the buckets end before {_wanted(half)}")
    return made


def whole_tensors(bundle: Bundle) -> Iterator[tuple[str, TensorForm, np.ndarray]]:
    """Each tensor in its shape: a view of the store, or (one that was cut) an array of its own, one at a time. Raises Gone, Unavailable."""
    forms = {name: form for name, form, _ in bundle.tensors}
    joined = np.empty(0)
    for ref in bundle.refs:
        with open_store(ref.location).open(ref) as lease:
            for piece in pieces(lease):
                form = forms[piece.name]
                if piece.start is None:
                    yield piece.name, form, piece.data
                    continue
                if not piece.start:
                    joined = np.empty(form.elements, piece.data.dtype)
                end = piece.start + piece.data.size
                joined[piece.start : end] = piece.data
                if end == form.elements:
                    yield piece.name, form, joined.reshape(form.shape)


def digests(bundle: Bundle) -> dict[str, str]:
    """Name → sha256 of the tensor's bytes, as they lie in the store. Raises Gone, Unavailable."""
    sums = {name: hashlib.sha256() for name, _, _ in bundle.tensors}
    for ref in bundle.refs:
        with open_store(ref.location).open(ref) as lease:
            for piece in pieces(lease):
                sums[piece.name].update(piece.data.reshape(-1).view(np.uint8).data)
    return {name: digest.hexdigest() for name, digest in sums.items()}


def write_whole(bundle: Bundle, handle: int, offsets: Mapping[str, int]) -> None:
    """Copy each tensor to its offset in an open file, piece by piece, from the store by the kernel. Raises OSError, Gone, Unavailable."""
    for ref in bundle.refs:
        with open_store(ref.location).open(ref) as lease:
            for piece in pieces(lease):
                offset = offsets[piece.name] + (piece.start or 0) * piece.data.itemsize
                data = piece.data.reshape(-1).view(np.uint8).data
                while data:
                    written = os.pwrite(handle, data, offset)
                    data, offset = data[written:], offset + written


def _wanted(half: tuple[str, int] | None) -> str:
    return "a tensor's beginning" if half is None else f"element {half[1]} of {half[0]!r}"
