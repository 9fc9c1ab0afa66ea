"""The schema refuses what is not a row, and lays rows out as the contract's table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from store import Column
from store.schema import HOPS, fields_of, padded, validate


def rollout(length: int = 5, prompt: int = 2, version: int = 3, **changes: Any) -> dict[str, Any]:
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


REWARD: dict[str, Any] = {"score": np.array(0.25, np.float32), "is_correct": np.array(255, np.uint8)}


def test_a_row_as_the_contract_has_it_is_accepted() -> None:
    validate("rollout", rollout())
    validate("rollout", rollout(length=1, prompt=1, version_spans=np.zeros((0, 4), np.int64)))
    validate("reward", REWARD)
    validate("weights", {"model.norm.weight": Column(np.zeros(4, np.uint16), "bfloat16"), "lm_head.weight": np.zeros((2, 2), np.float32)})
    assert HOPS == ("rollout", "reward", "weights") and [field.name for field in fields_of("reward")] == ["score", "is_correct"]


ROUTES = np.zeros((4, 48, 8), np.uint8)


def test_routed_experts_are_optional_and_may_leave_out_leading_tokens() -> None:
    for routes in (ROUTES, ROUTES[1:].astype(np.int32), ROUTES[:0].astype(np.int16)):
        validate("rollout", rollout(routed_experts=routes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"routed_experts": np.zeros((5, 48, 8), np.uint8)}, r"speaks of 5 tokens; .* at most R = 4"),
        ({"routed_experts": ROUTES[..., 0]}, r"must be \[Q, L, E\]"),
        ({"routed_experts": ROUTES.astype(np.float32)}, "must be uint8 or int16 or int32"),
        ({"routed_experts": ROUTES.astype(np.int32) - 1}, "holds a negative number"),
        ({"extra": np.zeros(1)}, "has the unknown extra"),
        ({"input_ids": np.zeros(5, np.int64)}, "'input_ids' of hop 'rollout' is int64; it must be int32"),
        ({"input_ids": [1, 2]}, "is list"),
        ({"response_mask": np.zeros(5, np.uint8)}, r"shape \[5\]; it must be \[R\] with R = 4"),
        ({"version_spans": np.zeros((1, 3), np.int64)}, r"must be \[K, 4\]"),
        ({"temperature": np.ones(1, np.float32)}, r"must be \[\]"),
        ({"input_ids": np.array([1, 2, 3, 4, -1], np.int32)}, "negative token id"),
        ({"response_mask": np.array([0, 2, 1, 1], np.uint8)}, "holds 2"),
        ({"rollout_log_probs": np.array([0, np.nan, 0, 0], np.float32)}, "not finite at position 1"),
        ({"rollout_log_probs": np.array([-1, -1, -1, -1], np.float32)}, "not 0 where response_mask is 0"),
        ({"temperature": np.array(0, np.float32)}, "above 0"),
        ({"version_spans": np.array([[0, 1, 1, 5]], np.int64)}, "version_spans has"),
        ({"version_spans": np.array([[0, 1, 1, 3], [0, 2, 2, 4]], np.int64)}, "do not overlap"),
        ({"version_spans": np.array([[0, 1, 1, 3]], np.int64)}, "no version span covers the sampled position 3"),
    ],
)
def test_a_rollout_that_is_wrong_is_refused_with_the_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate("rollout", rollout(**changes))


@pytest.mark.parametrize(
    ("hop", "columns", "said"),
    [
        ("reward", REWARD | {"score": np.array(np.nan, np.float32)}, "a failed reward is a failed reward"),
        ("reward", REWARD | {"is_correct": np.array(2, np.uint8)}, "may be 0, 1, or 255"),
        ("reward", {"score": REWARD["score"]}, "lacks is_correct"),
        ("rewards", REWARD, "no hop 'rewards'; the hops are rollout, reward, weights"),
        ("weights", {}, "at least one column"),
        ("weights", {"w": np.zeros(1, np.uint16)}, "float32 or bfloat16 or float16"),
    ],
)
def test_L4_other_hops_are_checked_too(hop: str, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(hop, columns)


def test_padded_is_the_contracts_table_right_padded() -> None:
    first = rollout(5) | {"score": np.float32(0.25), "is_correct": np.uint8(1)}
    second = rollout(3) | {"score": np.float32(0.75), "is_correct": np.uint8(255)}
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
        "token_level_rewards": [[0, 0, 0, 0.25], [0, 0.75, 0, 0]],
        "is_correct": [1, 255],
    }
    spans = table.pop("version_spans")
    assert [array.tolist() for array in spans] == [[[0, 3, 1, 4]], [[0, 3, 1, 2]]]
    assert {name: np.asarray(array).tolist() for name, array in table.items()} == expected
    assert table["token_level_scores"] is not table["token_level_rewards"]


def test_padded_puts_the_scalar_on_the_last_trained_position() -> None:
    tool_last = rollout(6) | {"response_mask": np.array([0, 1, 1, 0, 0], np.uint8), "score": np.float32(1), "is_correct": np.uint8(1)}
    untrained = rollout(4) | {"response_mask": np.zeros(3, np.uint8), "score": np.float32(2), "is_correct": np.uint8(0)}
    assert np.asarray(padded([tool_last, untrained])["token_level_rewards"]).tolist() == [[0, 0, 1, 0, 0], [0, 0, 2, 0, 0]]


def test_padded_takes_a_row_of_one_token_and_refuses_none_at_all() -> None:
    single = rollout(1, prompt=1, version_spans=np.zeros((0, 4), np.int64)) | {"score": np.float32(1), "is_correct": np.uint8(1)}
    assert np.asarray(padded([single])["responses"]).shape == (1, 0)
    with pytest.raises(ValueError, match="at least one row"):
        padded([])
    with pytest.raises(ValueError, match="row 0 has no tokens"):
        padded([single | {"input_ids": np.zeros(0, np.int32)}])
