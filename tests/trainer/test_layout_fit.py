"""What fits a layout is said before anything starts."""

from __future__ import annotations

import pytest

from trainer.layout import misfit, sparse_layers

MODEL = {"num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 97}


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 3), (4, 6), (8, 2), (24, 1)])
def test_what_divides_fits_whatever_the_vocabulary_and_key_value_heads_are_shared(tp: int, pp: int) -> None:
    assert misfit(MODEL, tp, pp) is None


@pytest.mark.parametrize(
    ("tp", "pp", "words"),
    [
        (5, 1, "num_attention_heads (24) does not divide by tp (5)"),
        (6, 1, "num_key_value_heads (4) is neither a multiple nor a divisor of tp (6)"),
        (1, 4, "num_hidden_layers (6) does not divide by pp (4)"),
    ],
)
def test_what_does_not_is_named_with_the_number_to_change(tp: int, pp: int, words: str) -> None:
    assert words in (misfit(MODEL, tp, pp) or "")


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tp": 1, "pp": 2, "ep": 2}, "ep (2) does not divide tp x cp x dp (1)"),
        ({"tp": 1, "pp": 1, "cp": 2, "dp": 3, "ep": 4}, "ep (4) does not divide tp x cp x dp (6)"),
        ({"tp": 1, "pp": 1, "dp": 3, "ep": 3}, "the model's experts (8) do not divide by ep (3)"),
        ({"tp": 2, "pp": 1, "ep": 1}, "ep (1) must be a multiple of tp (2): raise ep to one, or lower tp"),
        ({"tp": 4, "pp": 1, "dp": 2, "ep": 2}, "ep (2) must be a multiple of tp (4)"),
    ],
)
def test_experts_are_split_over_ranks_that_divide_them_and_never_held_by_two_tensor_parallel_ranks(
    name: str, layout: dict[str, int], words: str
) -> None:
    assert words in (misfit({**MODEL, name: 8}, **layout) or "")  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [(1, 1), (1, 2, 1, 2, 2), (2, 3, 1, 1, 2), (2, 1, 2, 2, 8), (1, 1, 3, 4, 4), (2, 1, 1, 4, 4)], ids=str)
def test_experts_fit_where_each_is_on_as_many_ranks_as_any_other(layout: tuple[int, ...]) -> None:
    assert misfit({**MODEL, "num_experts": 8}, *layout, routing_replay=True) is None


def test_a_model_without_experts_has_none_to_split_or_to_replay() -> None:
    assert "leave ep at 1" in (misfit(MODEL, 1, 1, 1, 2, 2) or "")
    assert "leave it off" in (misfit(MODEL, 1, 1, routing_replay=True) or "")


def test_which_layers_have_experts() -> None:
    model = {**MODEL, "num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert sparse_layers(model) == [False, True, False, False, False, True]
    assert sparse_layers(MODEL) == [False] * 6


def test_a_configuration_of_another_kind_is_left_to_the_trainer() -> None:
    assert misfit({"n_head": 12}, 5, 5) is None
