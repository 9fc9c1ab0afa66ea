"""The work of a row, held against the multiplications of the layers themselves."""

import json
from pathlib import Path

import pytest

from driver.balance import PlanRow, Terms
from driver.config import load_config
from driver.row_cost import TOKENS, RowCost

ROOT = Path(__file__).parents[2]
QWEN3_06B = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}


def test_a_dense_model_costs_its_matrices_for_each_token_and_half_of_all_pairs():
    projections = 1024 * 16 * 128 * 2 + 1024 * 8 * 128 * 2  # q and o, k and v
    layers, head = 28 * (projections + 3 * 1024 * 3072), 1024 * 151936
    cost = RowCost.of_model(QWEN3_06B)
    assert cost.work(1000, 600) * (layers + head) == pytest.approx(layers * 1000 + head * 600 + 28 * 2 * (16 * 128) * 1000 * 1000 / 2)
    assert cost.work(1, 1) == pytest.approx(1.0, abs=1e-3), "in tokens"


def test_of_a_mixture_only_the_experts_that_a_token_goes_to_count_and_the_router():
    projections = 2048 * 32 * 128 * 2 + 2048 * 4 * 128 * 2
    layers, head = 48 * (projections + 8 * 3 * 2048 * 768 + 2048 * 128), 2048 * 151936
    cost = RowCost.of_model(QWEN3_30B_A3B)
    assert cost.head == pytest.approx(head / (layers + head))
    assert cost.attention == pytest.approx(48 * 32 * 128 / (layers + head))
    dense = RowCost.of_model({**QWEN3_30B_A3B, "mlp_only_layers": list(range(48))})
    assert dense.attention < cost.attention * 1.2 and dense != cost


def test_a_model_that_does_not_name_its_sizes_costs_its_tokens():
    assert RowCost.of_model({"model_type": "other"}) == TOKENS and TOKENS.work(7, 3) == 7.0


def test_tokens_that_are_not_trained_do_not_pay_for_the_output_layer():
    cost = RowCost.of_model(QWEN3_06B)
    assert cost.work(4000, 100) < 0.82 * cost.work(4000, 4000)


@pytest.mark.parametrize(
    ("layout", "unit", "even"),
    [({}, 1, False), ({"tp": 2}, 2, False), ({"cp": 2}, 4, False), ({"cp": 2, "tp": 2}, 8, False), ({"dp": 2}, 1, False)],
)
def test_the_layout_says_what_lengths_are_padded_to_and_whether_ranks_meet(layout, unit, even):
    settings = [f"trainer.{name}={value}" for name, value in layout.items()]
    config = load_config(ROOT / "examples/sort_digits/config.yaml", settings)
    terms = Terms.of(config, json.loads((config.model.path / "config.json").read_text()))
    assert (terms.unit, terms.even, terms.ranks) == (unit, even, layout.get("dp", 1))
    assert terms.budget_tokens == 4096 and terms.cost.attention > 0 and 0 < terms.cost.head < 1
    assert terms.padded(PlanRow("r", 0, 9)) == -(-9 // unit) * unit


def test_ranks_that_share_experts_meet_in_every_micro_batch():
    config = load_config(ROOT / "examples/sort_digits/config.yaml")
    trainer = config.trainer.model_copy(update={"dp": 2, "ep": 2})
    assert Terms.of(config.model_copy(update={"trainer": trainer}), QWEN3_30B_A3B).even
