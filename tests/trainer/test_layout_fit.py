"""What fits a layout is said before anything starts."""

from __future__ import annotations

import pytest

from trainer.layout import misfit

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


def test_a_configuration_of_another_kind_is_left_to_the_trainer() -> None:
    assert misfit({"n_head": 12}, 5, 5) is None
