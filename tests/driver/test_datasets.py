"""Datasets: what is accepted, and what is refused with its line and its remedy (fault O4)."""

from __future__ import annotations

import datetime
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from driver.datasets import BATCH_ROWS, MAX_DEPTH, DataRow, DatasetError, read_rows, resolve_under, validate

GOOD = {"prompt": "sort 312 =", "answer": "123", "task_type": "sort"}


def jsonl(*rows: Any, end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in rows).encode()


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def rows_of(source: Any, **options: Any) -> list[DataRow]:
    return [row for batch in read_rows(source, **options) for row in batch]


def refusal(source: Any, **options: Any) -> DatasetError:
    """The error of the first `next`, so that nothing was handed out before it; validate says the same."""
    with pytest.raises(DatasetError) as reading:
        next(read_rows(source, **options))
    with pytest.raises(DatasetError) as validating:
        validate(source, **options)
    assert str(reading.value) == str(validating.value)
    return reading.value


def test_a_row_has_its_prompt_answer_task_type_and_all_other_fields() -> None:
    assert rows_of(jsonl(GOOD | {"level": 3})) == [DataRow(0, "sort 312 =", None, "123", "sort", {"level": 3})]


def test_a_mapping_names_the_fields_of_the_file() -> None:
    mapping = {"prompt": "question", "answer": "reward_model.ground_truth", "task_type": "source", "id": "key"}
    source = jsonl({"question": "1+1", "reward_model": {"ground_truth": 2}, "source": "sum", "key": "a", "prompt": "unused"})
    fields = {"reward_model": {"ground_truth": 2}, "key": "a", "prompt": "unused"}
    assert rows_of(source, mapping=mapping) == [DataRow(0, "1+1", None, 2, "sum", fields)]


@pytest.mark.parametrize("name", ["prompt", "messages"])
def test_a_list_of_messages_is_a_conversation_under_either_name(name: str) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None, "tool_calls": []}]
    (row,) = rows_of(jsonl({name: messages, "answer": "x"}))
    assert (row.prompt, row.messages, row.fields) == (None, messages, {})


def test_a_dataset_may_say_that_it_has_no_answers() -> None:
    (row,) = rows_of(jsonl({"prompt": "write a poem"}), mapping={"answer": None})
    assert row.answer is None


def test_a_path_is_read_like_its_content(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": jsonl(GOOD), "b.parquet": parquet([GOOD]), "c": parquet([GOOD])}.items():
        (tmp_path / name).write_bytes(content)
        assert rows_of(tmp_path / name) == rows_of(content) == rows_of(jsonl(GOOD))


def test_many_rows_come_in_batches_numbered_through() -> None:
    count = BATCH_ROWS * 2 + 1
    batches = list(read_rows(jsonl(*[GOOD] * count)))
    assert [len(batch) for batch in batches] == [BATCH_ROWS, BATCH_ROWS, 1]
    assert [row.row_index for batch in batches for row in batch] == list(range(count))
    assert validate(jsonl(*[GOOD] * count)) == count


# ---- fault O4 ------------------------------------------------------------------------------------------------------------------------


def test_O4_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    assert "0 bytes" in str(refusal(tmp_path / "data.jsonl"))
    assert "0 bytes" in str(refusal(b""))


@pytest.mark.parametrize("source", [b"\n\n", b"\xef\xbb\xbf", b" \r\n"], ids=["blank", "only a BOM", "only CRLF"])
def test_O4_a_file_without_rows_is_refused(source: bytes) -> None:
    assert "no rows" in str(refusal(source))


def test_O4_a_parquet_without_rows_is_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), sink)
    assert "no rows" in str(refusal(sink.getvalue()))


def test_O4_a_byte_order_mark_is_accepted() -> None:
    assert rows_of(b"\xef\xbb\xbf" + jsonl(GOOD)) == rows_of(jsonl(GOOD))


def test_O4_crlf_is_accepted() -> None:
    assert rows_of(jsonl(GOOD, GOOD, end="\r\n")) == rows_of(jsonl(GOOD, GOOD))


def test_O4_blank_lines_at_the_end_and_a_missing_last_newline_are_accepted() -> None:
    assert rows_of(jsonl(GOOD) + b"\n \r\n\n") == rows_of(jsonl(GOOD)) == rows_of(jsonl(GOOD).rstrip())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": "a", "answer": "b"\n', "not JSON"),
        (b"{'prompt': 'a'}\n", "not JSON"),
        (b'{"prompt": "a", "answer": "b"} {}\n', "not JSON"),
        (b'{"prompt": "a", "answer": NaN}\n', "not JSON"),
        (b'["prompt"]\n', "a list, not a JSON object"),
        (b'{"prompt": 5, "answer": "b"}\n', "prompt is a number"),
        (b'{"prompt": "", "answer": "b"}\n', "prompt is an empty text"),
        (b'{"prompt": [{"content": "a"}], "answer": "b"}\n', "prompt[0] is not a message"),
        (b'{"prompt": [{"role": "user", "content": 1}], "answer": "b"}\n', "content is a number"),
        (b'{"prompt": "a", "answer": "b", "task_type": null}\n', "task_type is null"),
        (b'{"prompt": "a", "answer": 123456789012345678901}\n', "beyond 64 bits"),
        (b'{"prompt": "a", "answer": "\\ud800"}\n', "not JSON"),
    ],
)
def test_O4_one_bad_line_of_ten_thousand_refuses_the_file_with_its_number(line: bytes, words: str) -> None:
    good = jsonl(GOOD)
    error = refusal(good * 8765 + line + good * 1234)
    assert error.line == 8766 and "line 8766" in str(error) and words in str(error)


def test_O4_a_line_number_counts_blank_lines_too() -> None:
    assert refusal(jsonl(GOOD) + b"\n\n{\n").line == 4


def test_O4_what_is_not_utf8_is_refused_with_its_line() -> None:
    error = refusal(jsonl(GOOD) + '{"prompt": "é", "answer": "b"}\n'.encode("latin-1"))
    assert error.line == 2 and "not UTF-8 (byte 0xe9 at position 13)" in str(error)
    assert "UTF-16" in str(refusal(jsonl(GOOD).decode().encode("utf-16")))


def test_O4_duplicate_ids_are_refused_when_an_id_is_mapped_and_only_then() -> None:
    source = jsonl(*[GOOD | {"key": key} for key in ("a", "b", "a")])
    error = refusal(source, mapping={"id": "key"})
    assert error.line == 3 and 'line 3: the key "a" was seen before, at line 1' in str(error)
    assert len(rows_of(source)) == 3
    assert len(rows_of(jsonl(GOOD | {"key": 1}, GOOD | {"key": "1"}), mapping={"id": "key"})) == 2
    assert "null" in str(refusal(jsonl(GOOD | {"key": None}), mapping={"id": "key"}))


def test_O4_a_missing_field_is_refused_with_its_line_and_the_nearest_present_one() -> None:
    error = refusal(jsonl(GOOD, {"prompt": "a", "anwser": "b"}))
    assert error.line == 2 and "the field 'answer' is missing; the nearest present is 'anwser'" in str(error)
    error = refusal(jsonl({"questions": "a", "answer": "b"}), mapping={"prompt": "question"})
    assert error.line == 1 and "'question' (mapped to prompt)" in str(error) and "'questions'" in str(error)
    assert "the object has none" in str(refusal(b"{}\n"))
    assert refusal(jsonl(GOOD, {"prompt": "a", "answer": "b"}), mapping={"task_type": "task_type"}).line == 2


def test_O4_a_parquet_with_nested_columns_is_accepted() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    day = datetime.date(2024, 2, 29)
    source = parquet([{"prompt": messages, "reward_model": {"ground_truth": "2", "tags": ["a", "b"]}, "day": day}] * 2)
    rows = rows_of(source, mapping={"answer": "reward_model.ground_truth"})
    assert rows[1] == DataRow(
        1, None, messages, "2", "default", {"reward_model": {"ground_truth": "2", "tags": ["a", "b"]}, "day": "2024-02-29"}
    )


def test_O4_a_bad_parquet_row_is_refused_with_its_number() -> None:
    error = refusal(parquet([GOOD] * 700 + [GOOD | {"prompt": None}] + [GOOD] * 10))
    assert error.line == 701 and "row 701: prompt is null" in str(error)


def test_O4_a_damaged_parquet_and_a_wrong_extension_are_refused(tmp_path: Path) -> None:
    assert "damaged" in str(refusal(parquet([GOOD])[:-20]))
    (tmp_path / "data.parquet").write_bytes(jsonl(GOOD))
    assert "does not begin with PAR1" in str(refusal(tmp_path / "data.parquet"))
    assert "begins with PAR1" in str(refusal(parquet([GOOD]), format="jsonl"))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1], pa.timestamp("ns")), "Nanosecond resolution"),
        (pa.array([2**60], pa.timestamp("us")), "out of range"),
        (pa.array([2**30], pa.date32()), "days=1073741824"),
        (pa.array([b"\xff"], pa.binary()).view(pa.string()), "can't decode byte 0xff"),
        (pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]), "duplicate field names"),
    ],
    ids=["nanoseconds", "far time", "far day", "no UTF-8", "one name twice"],
)
def test_O4_a_parquet_column_that_python_has_no_value_for_is_refused_with_the_reason(column: pa.Array, words: str) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"], "more": column}), sink)
    said = str(refusal(sink.getvalue()))
    assert words in said and "write such a column as text" in said


@pytest.mark.parametrize("inner", ["", "1234567890123456789"])
@pytest.mark.parametrize("way", ["[]", '{"a": }'])
def test_O4_a_row_that_is_nested_too_deep_for_its_readers_is_refused_with_its_line(way: str, inner: str) -> None:
    def nested(depth: int) -> bytes:
        opened, closed = way[:-1] * depth, way[-1] * depth
        return jsonl(GOOD) + f'{{"prompt": "a", "answer": {opened}{inner or "null"}{closed}}}\n'.encode()

    assert len(rows_of(nested(99))) == 2
    for depth in (100, 300, 985, 1015):
        assert f"line 2 has lists and objects more than {MAX_DEPTH} deep" in str(refusal(nested(depth)))


def test_O4_a_long_flat_row_is_not_taken_for_a_deep_one() -> None:
    assert len(rows_of(jsonl(GOOD | {"pairs": [[1, {"a": 2}]] * 1000}))) == 1


def test_O4_a_large_file_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    line = jsonl(GOOD | {"key": 0, "text": "x" * 4000})
    with path.open("wb") as file:
        for _ in range(8):
            file.write(line * 400)
    tracemalloc.start()
    assert sum(len(batch) for batch in read_rows(path)) == 3200
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size > 12e6 and peak_bytes < 8e6


def test_O4_one_endless_line_is_refused_without_reading_it_all(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # sparse: 3 GiB that cost nothing
    assert "longer than 16 MiB" in str(refusal(path))


# ---- mapping and paths ---------------------------------------------------------------------------------------------------------------


def test_a_bad_mapping_is_refused_with_the_nearest_target() -> None:
    assert "did you mean 'prompt'" in str(refusal(jsonl(GOOD), mapping={"promt": "x"}))
    assert "not both" in str(refusal(jsonl(GOOD), mapping={"prompt": "a", "messages": "b"}))
    assert "only answer may be null" in str(refusal(jsonl(GOOD), mapping={"prompt": None}))


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    assert "no dataset file" in str(refusal(tmp_path / "none.jsonl"))
    assert "not a regular file" in str(refusal(tmp_path))


def test_a_path_under_a_data_root_is_resolved(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    file = root / "deep" / "data.jsonl"
    file.write_bytes(jsonl(GOOD))
    (tmp_path / "alias").symlink_to(root)
    assert resolve_under(file, [tmp_path / "other", root]) == file
    assert resolve_under("deep/data.jsonl", [root]) == file
    assert resolve_under("deep/../deep/data.jsonl", [tmp_path / "alias"]) == file


def test_a_path_that_leaves_the_data_roots_is_refused_whether_or_not_it_exists(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret.jsonl"
    root.mkdir()
    secret.write_bytes(jsonl(GOOD))
    (root / "link.jsonl").symlink_to(secret)
    (root / "loop").symlink_to(root / "loop")
    for path in [secret, "../secret.jsonl", "link.jsonl", "../none.jsonl", "loop", "a\0b", ".", tmp_path / "root-2" / "x"]:
        with pytest.raises(DatasetError, match="is not a file under"):
            resolve_under(path, [root])
    with pytest.raises(DatasetError, match="or upload the file"):
        resolve_under(secret, [])
