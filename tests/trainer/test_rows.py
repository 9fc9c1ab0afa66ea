"""A pack, without a model: every wanted token once, with its own target, temperature and numbers, wherever its row lies."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from store import EmbeddedStore, Ref
from store.rows import packed as together
from trainer.wire import PlanRow, WireRef

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what is not installed
    from trainer import cpu

    cpu.install()
    from trainer.routes import Routing
    from trainer.rows import Pack, Row, Unreadable, open_row, pack

DATA = Path(__file__).parents[1] / "data"
ROUTING = Routing(8, 2, (True, True))


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


def planned(ref: Ref, length: int, **more: object) -> PlanRow:
    return PlanRow.model_validate({"row_id": "r", "rollout": WireRef.of(ref), "length": length} | more)


def test_a_row_of_schema_1_trains_as_it_would_have(store: EmbeddedStore) -> None:
    """Stored by the program before, each row an object of its own with its routes; its plan names no number."""
    ref = store.put_encoded("run/old/rollout", (DATA / "schema-1-rollout.object").read_bytes())
    row = open_row(planned(ref, 6), 20, ROUTING)
    assert row.input_ids.tolist() == [10, 11, 12, 13, 14, 15] and row.trained.tolist() == [2, 3, 4]
    assert row.tokens["behaviour"].tolist() == [-0.5, -0.25, -1.0] and row.spans.tolist() == [[1, 3, 2, 5]]
    assert row.temperature == 0.75 and row.routes is not None and row.routes.shape == (5, 2, 2)
    with pytest.raises(Unreadable, match="no row 1") as caught:
        open_row(planned(ref, 6, row=1), 20)
    assert caught.value.status == 422
    store.free([ref])


def test_a_row_is_the_one_of_its_number_with_the_routes_that_are_its_own(store: EmbeddedStore) -> None:
    def columns(first: int, length: int) -> dict[str, np.ndarray]:
        return {
            "input_ids": np.arange(first, first + length, dtype=np.int32),
            "response_mask": np.ones(length - 1, np.uint8),
            "rollout_log_probs": np.full(length - 1, -first, np.float32),
            "version_spans": np.array([[0, 0, 0, length - 1]]),
            "temperature": np.array(first, np.float32),
        }

    ref = store.put("run/t/rollout", together([columns(1, 4), columns(9, 6)]))
    routes = np.tile(np.array([300, 2], np.uint16), (5, 2, 1))
    extras = store.put("run/extras/t", {"routed_experts": routes})
    many = Routing(512, 2, (True, True))
    first, second = open_row(planned(ref, 4), 20, many), open_row(planned(ref, 6, row=1, extras=WireRef.of(extras)), 20, many)
    assert first.routes is None and first.input_ids.tolist() == [1, 2, 3, 4] and first.temperature == 1.0
    assert second.routes is not None and np.array_equal(second.routes, routes) and second.input_ids.tolist() == [9, 10, 11, 12, 13, 14]
    assert second.tokens["behaviour"].tolist() == [-9.0] * 5
    part = pack([first, second], [first.trained, second.trained])
    assert part.packing.routes[:, 0, 0].tolist() == [300] * 5 + [-1] * 5
    store.free([ref])
    with pytest.raises(Unreadable, match="not in the store") as caught:
        open_row(planned(ref, 4), 20)
    assert caught.value.status == 410
    store.free([extras])
