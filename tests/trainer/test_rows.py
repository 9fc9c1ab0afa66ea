"""A pack, without a model: every wanted token once, with its own target, temperature and numbers, wherever its row lies."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed
    from trainer import cpu

    cpu.install()
    from trainer.rows import Pack, Row, pack


def made(seed: int, sizes: list[int]) -> list[Row]:
    """Rows whose tokens are all different, so that each says where it came from. Behaviour numbers are the target's token."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, size in enumerate(sizes):
        ids = 1000 * (number + 1) + np.arange(size)
        trained = np.flatnonzero(rng.random(size - 1) < 0.7)
        tokens = {"behaviour": ids[trained + 1].astype(np.float32)}
        spans = np.array([[0, 0, 0, size - 1]])
        rows.append(Row(f"r{number}", None, ids, trained, tokens, spans, 0.5 + number, 1.0))
    return rows


def packed(rows: list[Row], cp_size: int = 1, tp_size: int = 1) -> list[Pack]:
    wanted = [row.trained for row in rows]
    return [pack(rows, wanted, ("behaviour",), cp_size=cp_size, cp_rank=rank, tp_size=tp_size) for rank in range(cp_size)]


@pytest.mark.parametrize(("cp_size", "tp_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)])
def test_M5_every_wanted_token_stands_once_behind_the_token_that_predicts_it(cp_size: int, tp_size: int) -> None:
    rows = made(1, [5, 17, 2, 9, 17])
    seen = []
    for part in packed(rows, cp_size, tp_size):
        assert torch.equal(part.tokens[0, part.at] + 1, part.target), "the logits of token i predict token i + 1"
        assert torch.equal(part.columns["behaviour"].long(), part.target), "each with its own numbers"
        for target, row, slot in zip(part.target.tolist(), part.row.tolist(), part.slot.tolist(), strict=True):
            assert target == rows[row].input_ids[rows[row].trained[slot] + 1]
            seen.append(target)
        assert part.temperature.tolist() == [rows[row].temperature for row in part.row.tolist()]
    expected = [int(row.input_ids[position + 1]) for row in rows for position in row.trained]
    assert sorted(seen) == sorted(expected), "none twice, none left out, none of the padding"


@pytest.mark.parametrize("cp_size", [1, 2])
def test_M4_tokens_that_are_not_wanted_and_the_empty_micro_batch_are_in_no_list(cp_size: int) -> None:
    rows = made(2, [6, 8])
    nothing = pack(rows, [np.zeros(0, np.int64)] * 2, ("behaviour",), cp_size=cp_size)
    empty = pack([], [], ("behaviour",), cp_size=cp_size)
    for part in (nothing, empty):
        lists = (part.at, part.target, part.temperature, part.row, part.slot, part.columns["behaviour"])
        assert all(len(column) == 0 for column in lists) and part.tokens.shape[1] > 0


def test_M3_a_row_is_where_its_own_tokens_are_whatever_it_is_packed_with() -> None:
    rows = made(3, [7, 12, 4])
    for order in ([0, 1, 2], [2, 0, 1]):
        (part,) = packed([rows[i] for i in order])
        ends = part.packing.cu_seqlens_q.tolist()
        inside = [part.tokens[0, a:b].tolist() for a, b in pairwise(ends)]
        assert sorted(inside) == sorted(row.input_ids.tolist() for row in rows)
