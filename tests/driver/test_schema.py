"""What an item must look like, in words when it does not."""

import pytest

from driver.schema import check_schema, lacking, misfit


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"n": 1, "x": 2}, None),
        ({"n": 1, "x": 0.5, "more": object()}, None),
        ({"n": 1, "x": None}, "'x' (float) is missing"),
        ({"x": 1.0}, "'n' (int) is missing"),
        ({"n": True, "x": 1.0}, "'n' is True"),
        ({"n": 1.5, "x": 1.0}, "'n' is 1.5"),
        ({"n": 1, "x": 1.0, "note": 3}, "'note' is 3"),
        ([1], "a dict of fields"),
    ],
)
def test_an_item_fits_or_the_field_is_named(item: object, words: str | None) -> None:
    found = misfit(item, {"n": "int", "x": "float", "note": "str?"})
    assert found is None if words is None else words in str(found)


def test_any_takes_anything_and_a_type_that_there_is_not_is_refused_with_the_nearest() -> None:
    assert misfit({"a": True}, {"a": "any"}) is None and misfit({"a": []}, {"a": "list"}) is None
    with pytest.raises(ValueError, match="did you mean 'float'"):
        check_schema({"x": "flaot"})


def test_a_subscriber_may_want_less_but_no_more_than_is_promised() -> None:
    assert lacking({}, {}) is None and lacking({"n": "int"}, {"n": "int", "m": "str"}) is None
    assert "which is not in" in str(lacking({"n": "int"}, {}))
