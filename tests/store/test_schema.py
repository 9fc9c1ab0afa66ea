"""The schema refuses what is not a row, and lays rows out as the contract's table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from store import Column
from store.rows import packed
from store.schema import HOPS, fields_of, padded, validate


def rollout(**changes: Any) -> dict[str, Any]:
    """An object of one row, in which some columns are others."""
    names = ("length", "prompt", "version")
    return packed([row(**{name: value for name, value in changes.items() if name in names})]) | {
        name: value for name, value in changes.items() if name not in names
    }


def row(length: int = 5, prompt: int = 2, version: int = 3, **changes: Any) -> dict[str, Any]:
    positions = length - 1
    mask = (np.arange(positions) >= prompt - 1).astype(np.uint8)
    columns: dict[str, Any] = {
        "input_ids": np.arange(10, 10 + length, dtype=np.int32),
        "response_mask": mask,
        "rollout_log_probs": np.where(mask, np.float32(-0.5), np.float32(0)),
        "version_spans": np.array([[0, version, prompt - 1, positions]], np.int64),
        "temperature": np.array(1.0, np.float32),
    }
    return columns | changes


REWARD: dict[str, Any] = {"score": np.array([0.25], np.float32), "is_correct": np.array([255], np.uint8)}
PICTURES: dict[str, Any] = {
    "grid_offsets": np.array([0, 2]),
    "image_grid": np.array([[1, 2, 2], [1, 1, 3]], np.int32),
    "pixel_values": Column(np.zeros((7, 5), np.uint16), "bfloat16"),
    "position_ids": np.zeros((5, 3), np.int32),
}


def test_a_row_as_the_contract_has_it_is_accepted() -> None:
    validate("rollout", rollout())
    validate("rollout", packed([row(5), row(length=1, prompt=1, version_spans=np.zeros((0, 4), np.int64)), row(9)]))
    validate("rollout", rollout(**PICTURES))
    validate("reward", REWARD)
    validate("weights", {"model.norm.weight": Column(np.zeros(4, np.uint16), "bfloat16"), "lm_head.weight": np.zeros((2, 2), np.float32)})
    assert HOPS == ("rollout", "reward", "extras", "weights") and [field.name for field in fields_of("reward")] == ["score", "is_correct"]


ROUTES = np.zeros((4, 48, 8), np.uint8)


def test_routed_experts_are_small_integers() -> None:
    for routes in (ROUTES, ROUTES[1:].astype(np.uint16), ROUTES[:0].astype(np.int32)):
        validate("extras", {"routed_experts": routes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": np.zeros(1)}, "has the unknown extra"),
        ({"input_ids": np.zeros(5, np.int64)}, "'input_ids' of hop 'rollout' is int64; it must be int32"),
        ({"input_ids": [1, 2]}, "is list"),
        ({"response_mask": np.zeros(5, np.uint8)}, r"shape \[5\]; it must be \[U\] with U = 4"),
        ({"row_offsets": np.array([0])}, "at least one row"),
        ({"row_offsets": np.array([1, 5])}, "row_offsets is .*begins with 0"),
        ({"row_offsets": np.array([0, 4])}, "does not fit column input_ids"),
        ({"row_offsets": np.array([0, 5, 5])}, r"'span_offsets' .* must be \[N \+ 1\] with N = 2"),
        (packed([row(4), row(1, prompt=1)]) | {"row_offsets": np.array([0, 5, 5])}, "a row has at least one token"),
        ({"span_offsets": np.array([0, 2])}, "does not fit column version_spans"),
        (PICTURES | {"pixel_values": np.zeros((6, 5), np.float32)}, "does not fit column pixel_values"),
        (PICTURES | {"position_ids": np.zeros((4, 3), np.int32)}, r"\[T, 3\] with T = 5"),
        ({"version_spans": np.zeros((1, 3), np.int64)}, r"must be \[K, 4\]"),
        ({"temperature": np.ones(2, np.float32)}, r"must be \[N\] with N = 1"),
        ({"input_ids": np.array([1, 2, 3, 4, -1], np.int32)}, "negative token id"),
        ({"response_mask": np.array([0, 2, 1, 1], np.uint8)}, "holds 2"),
        ({"rollout_log_probs": np.array([0, np.nan, 0, 0], np.float32)}, "not finite at position 1"),
        ({"rollout_log_probs": np.array([-1, -1, -1, -1], np.float32)}, "not 0 where response_mask is 0"),
        ({"temperature": np.zeros(1, np.float32)}, "above 0"),
        ({"version_spans": np.array([[0, 1, 1, 5]], np.int64)}, "version_spans has"),
        ({"version_spans": np.array([[0, 1, 1, 3], [0, 2, 2, 4]], np.int64), "span_offsets": np.array([0, 2])}, "do not overlap"),
        ({"version_spans": np.array([[0, 1, 1, 3]], np.int64)}, "no version span covers the sampled position 3"),
    ],
)
def test_a_rollout_that_is_wrong_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate("rollout", rollout(**changes))


@pytest.mark.parametrize(
    ("hop", "columns", "said"),
    [
        ("reward", REWARD | {"score": np.array([np.nan], np.float32)}, "a failed reward is a failed reward"),
        ("reward", REWARD | {"is_correct": np.array([2], np.uint8)}, "may be 0, 1, or 255"),
        ("reward", {"score": REWARD["score"]}, "lacks is_correct"),
        ("reward", REWARD | {"is_correct": np.array([1, 1], np.uint8)}, r"must be \[N\] with N = 1"),
        ("rewards", REWARD, "no hop 'rewards'; the hops are rollout, reward, extras, weights"),
        ("extras", {"routed_experts": ROUTES[..., 0]}, r"must be \[Q, L, E\]"),
        ("extras", {"routed_experts": ROUTES.astype(np.int16)}, "must be uint8 or uint16 or int32"),
        ("extras", {"routed_experts": ROUTES.astype(np.int32) - 1}, "holds a negative number"),
        ("weights", {}, "at least one column"),
        ("weights", {"w": np.zeros(1, np.uint16)}, "float32 or bfloat16 or float16"),
    ],
)
def test_L4_other_hops_are_checked_too(hop: str, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(hop, columns)


SCORED: dict[str, Any] = {"score": np.float32(1), "is_correct": np.uint8(1)}


def test_padded_is_the_contracts_table_right_padded() -> None:
    first = row(5) | {"score": np.float32(0.25), "is_correct": np.uint8(1), "advantage": 2.0, "reward": 0.5, "finish_reason": "length"}
    second = row(3) | {"score": np.float32(0.75), "is_correct": np.uint8(255), "advantage": -1.0}
    table = padded([first, second])
    expected: dict[str, list[Any]] = {
        "prompts": [[10], [10]],
        "responses": [[11, 12, 13, 14], [11, 12, 0, 0]],
        "input_ids": [[10, 11, 12, 13, 14], [10, 11, 12, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "position_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 0, 0]],
        "response_mask": [[0, 1, 1, 1], [0, 1, 0, 0]],
        "rollout_log_probs": [[0, -0.5, -0.5, -0.5], [0, -0.5, 0, 0]],
        "token_level_scores": [[0, 0, 0, 0.25], [0, 0.75, 0, 0]],
        "token_level_rewards": [[0, 0, 0, 0.5], [0, 0.75, 0, 0]],
        "advantages": [[0, 2, 2, 2], [0, -1, 0, 0]],
        "returns": [[0, 0.5, 0.5, 0.5], [0, 0.75, 0, 0]],
        "is_correct": [1, 255],
        "finish_reason": ["length", "stop"],
    }
    spans = table.pop("version_spans")
    assert [array.tolist() for array in spans] == [[[0, 3, 1, 4]], [[0, 3, 1, 2]]]
    assert {name: np.asarray(array).tolist() for name, array in table.items()} == expected


def test_padded_puts_the_scalar_on_the_last_trained_position() -> None:
    tool_last = row(6) | {"response_mask": np.array([0, 1, 1, 0, 0], np.uint8)} | SCORED
    untrained = row(4) | {"response_mask": np.zeros(3, np.uint8), "score": np.float32(2), "is_correct": np.uint8(0)}
    assert padded([tool_last, untrained])["token_level_rewards"].tolist() == [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]


def test_padded_cuts_a_row_keeps_its_scalar_on_the_last_kept_token_and_says_length() -> None:
    table = padded([row(8) | SCORED, row(3) | SCORED], max_tokens=5, extras=())
    assert table["input_ids"].tolist() == [[10, 11, 12, 13, 14], [10, 11, 12, 0, 0]]
    assert table["token_level_rewards"].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert table["finish_reason"] == ["length", "stop"] and table["version_spans"][0].tolist() == [[0, 3, 1, 4]]


def test_padded_has_three_positions_a_token_where_a_row_has_pictures() -> None:
    """[B, 3, S], for mRoPE: a row of text has its one position three times."""
    seen = np.array([[0, 0, 0], [1, 1, 1], [1, 1, 2], [1, 2, 1], [3, 3, 3]], np.int32)
    table = padded([row(5) | SCORED | {"position_ids": seen}, row(3) | SCORED])
    assert table["position_ids"].shape == (2, 3, 5) and table["position_ids"].dtype == np.int32
    assert table["position_ids"][0].T.tolist() == seen.tolist()
    assert table["position_ids"][1].tolist() == [[0, 1, 2, 0, 0]] * 3


def test_padded_gives_per_token_extras_in_their_own_dtype_where_they_are_known() -> None:
    """What a row leaves out are leading tokens; a row without any has a mask of zeros."""
    routes = np.arange(1, 1 + 3 * 2 * 2).reshape(3, 2, 2)
    for dtype in (np.uint8, np.uint16, np.int32):
        some = [row(5) | SCORED | {"routed_experts": routes.astype(dtype)}, row(6) | SCORED]
        table = padded(some, extras=["routed_experts"])
        assert table["routed_experts"].dtype == dtype and table["routed_experts"].shape == (2, 5, 2, 2)
        assert table["routed_experts_mask"].tolist() == [[0, 1, 1, 1, 0], [0] * 5]
        assert np.array_equal(table["routed_experts"][0, 1:4], routes) and not table["routed_experts"][0, [0, 4]].any()
        cut = padded(some, extras=["routed_experts"], max_tokens=4)
        assert np.array_equal(cut["routed_experts"][0, 1:3], routes[:2]) and cut["routed_experts_mask"].tolist() == [[0, 1, 1], [0] * 3]
    with pytest.raises(ValueError, match="no row has a column routed_experts"):
        padded([row(5) | SCORED], extras=["routed_experts"])


def test_padded_takes_a_row_of_one_token_and_refuses_what_is_no_table() -> None:
    single = row(1, prompt=1, version_spans=np.zeros((0, 4), np.int64)) | SCORED
    assert padded([single])["responses"].shape == (1, 0)
    with pytest.raises(ValueError, match="at least one row"):
        padded([])
    with pytest.raises(ValueError, match="row 0 has no tokens"):
        padded([single | {"input_ids": np.zeros(0, np.int32)}])
    with pytest.raises(ValueError, match="row 1 has no advantage"):
        padded([single | {"advantage": 1.0}, single])
