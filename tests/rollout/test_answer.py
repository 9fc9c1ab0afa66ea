"""Chunks folded into answers, whatever the server's way of streaming; everything else refused."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.answer import Answer, EngineError, EventSplitter, Generation, Prefix, check_log_probs, error_text, joined, merged, refusal


def fold(chunks, **how):
    answer = Answer(3, **how)
    for part in chunks:
        answer.fold(orjson.dumps(part))
    return answer


def refused(chunks, **how) -> EngineError:
    with pytest.raises(EngineError) as caught:
        fold(chunks, **how)
    return caught.value


@given(cuts=st.lists(st.integers(0, 4), max_size=8), incremental=st.booleans())
def test_cumulative_and_incremental_streams_give_the_same_answer(make_chunk, cuts, incremental):
    ids = [2, 2, 2, 7, 2, 5, 5, 1][: sum(cuts)]
    chunks, have = [], 0
    for index, cut in enumerate(cuts):
        upto = min(have + cut, len(ids))
        new = make_chunk(ids[have:upto] if incremental else ids[:upto], finish="stop" if index == len(cuts) - 1 else None)
        new["meta_info"] |= {"completion_tokens": upto}
        if "weight_versions" in new["meta_info"]:
            new["meta_info"]["weight_versions"] = [{"version": "run/0/0/1", "start": 0, "end": upto}]
        chunks.append(new)
        have = upto
    answer = fold(chunks)
    assert answer.prefix.output_ids == ids[:have]
    assert answer.prefix.log_probs == [-token / 100 for token in ids[:have]]
    if cuts:
        assert answer.generation.output_ids == ids[:have]


def test_V5_the_last_chunks_spans_are_the_truth(make_chunk):
    spans = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": 1}, {"version": "c", "start": 1, "end": 3}]
    answer = fold([make_chunk([5, 6], "a"), make_chunk([5, 6, 7], "c", finish="stop", weight_versions=spans)])
    assert answer.generation.spans == [("a", 0, 1), ("c", 1, 3)]


@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
def test_V5_without_spans_an_answer_of_two_versions_ends_where_the_first_is_sure(make_chunk, finish):
    assert fold([make_chunk([5], "a"), make_chunk([5, 6], "a", finish=finish, weight_versions=None)]).generation.spans == [("a", 0, 2)]
    answer = fold([make_chunk([5], "a"), make_chunk([5, 6], "a")])
    with pytest.raises(EngineError, match="which weights made which"):
        answer.fold(orjson.dumps(make_chunk([5, 6, 7, 8], "b", finish=finish, weight_versions=None)))
    assert answer.generation is None and answer.prefix.spans == [("a", 0, 2)]


def test_V5_a_prefix_ends_where_a_chunk_came_with_another_version_for_it_may_hold_tokens_of_the_one_before(make_chunk):
    chunks = [make_chunk([5], "a"), make_chunk([5, 6], "a"), make_chunk([5, 6, 7, 8], "b"), make_chunk([5, 6, 7, 8, 9], "b")]
    assert fold(chunks).prefix == Prefix([5, 6], [-0.05, -0.06], [("a", 0, 2)])
    assert fold(chunks, version="b").prefix == Prefix(), "the engine had moved on when it was asked"
    assert fold(chunks[2:], version="b").prefix.spans == [("b", 0, 5)]
    assert fold(chunks[2:], version="a").prefix == Prefix(), "pushed to before the first chunk"


@pytest.mark.parametrize(
    "changes",
    [
        {"output_token_logprobs": [[-0.05, 5, None]]},
        {"output_token_logprobs": None},
        {"output_token_logprobs": [[-0.05, 5, None], [-0.06, 9, None]]},
        {"output_token_logprobs": [[-0.05, 5, None], [None, 6, None]]},
        {"output_token_logprobs": [[-0.05, 5, None], [0.5, 6, None]]},
        {"output_token_logprobs": [[-0.05, 5, None], "text"]},
        {"weight_versions": [{"version": "a", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "a", "start": 0, "end": 3}]},
        {"weight_versions": [{"version": "a", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 0, "end": 2}]},
        {"weight_versions": [{"start": 0}]},
        {"weight_version": None},
        {"completion_tokens": 3},
        {"completion_tokens": None},
        {"finish_reason": {"type": "exploded"}},
        {"finish_reason": "stop"},
    ],
    ids=str,
)
def test_E13_a_malformed_answer_is_infrastructure(make_chunk, changes):
    error = refused([make_chunk([5, 6], finish="stop", **changes)])
    assert error.kind == "infrastructure"
    assert "malformed" in str(error)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5, None, "-1", True])
def test_E13_a_log_prob_that_is_no_finite_number_is_malformed(value):
    with pytest.raises(EngineError, match=rf"malformed answer: {value!r} is not a log-prob"):
        check_log_probs([-0.5, value, -1])
    check_log_probs([-0.5, 0.0, -1])


@pytest.mark.parametrize("token", [1000, -1, 1.5, "5", True])
def test_E13_a_token_outside_the_vocabulary_is_malformed(make_chunk, token):
    part = make_chunk([5, 6], finish="stop", output_token_logprobs=[[-0.05, 5, None], [-0.06, token, None]])
    part["output_ids"] = [5, token]
    assert "vocabulary" in str(refused([part], vocab_size=1000))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"meta_info": 3}', b"{}", b'{"meta_info": {}}', b"{\x00", b'{"output_ids": [1], "meta_info"']
)
def test_E13_bodies_that_are_not_an_answer_are_malformed(body):
    with pytest.raises(EngineError, match="malformed"):
        Answer(3).fold(body)


def test_E13_a_log_prob_that_rounds_to_a_hair_above_zero_is_taken(make_chunk):
    assert fold([make_chunk([5], finish="stop", output_token_logprobs=[[1e-7, 5, None]])]).generation


def test_a_history_that_changes_is_malformed_and_trusted_no_more(make_chunk):
    answer = Answer(3)
    answer.fold(orjson.dumps(make_chunk([5, 6])))
    with pytest.raises(EngineError, match="changed"):
        answer.fold(orjson.dumps(make_chunk([5, 7, 8])))
    assert answer.prefix == Prefix()


def test_E15_an_abort_keeps_its_tokens_and_one_at_the_limit_is_complete(make_chunk):
    partial = fold([make_chunk([5, 6], finish="abort")], max_new_tokens=4).generation
    assert (partial.finish_reason, partial.output_ids) == ("abort", [5, 6])
    assert fold([make_chunk([5, 6], finish="abort")], max_new_tokens=2).generation.finish_reason == "length"


def test_E15_more_tokens_than_asked_for_are_malformed(make_chunk):
    assert "more than the 2 tokens" in str(refused([make_chunk([5, 6, 7], finish="length")], max_new_tokens=2))


@pytest.mark.parametrize("total", [{}, {"completion_tokens": 0}])
def test_E15_an_abort_in_the_waiting_queue_says_little_and_loses_nothing(make_chunk, total):
    meta = {"id": "rid", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "a"} | total
    answer = fold([make_chunk([5, 6]), {"output_ids": [], "meta_info": meta}])
    assert (answer.generation.finish_reason, answer.generation.output_ids) == ("abort", [5, 6])
    assert fold([{"output_ids": [], "meta_info": meta}]).generation.output_ids == []


@pytest.mark.parametrize(("status", "kind"), [(400, "data"), (500, "infrastructure"), (503, "infrastructure")])
def test_an_abort_that_carries_a_status_is_a_failed_request(make_chunk, status, kind):
    finish = {"type": "abort", "message": "no room", "status_code": status}
    error = refused([make_chunk([5], finish="abort", finish_reason=finish)])
    assert (error.kind, error.status) == (kind, status)


def test_E15_a_continued_answer_is_one_answer():
    prefix = Prefix([5, 6], [-0.1, -0.2], [("a", 0, 2)])
    rest = Generation([7], [-0.3], [("a", 0, 1)], "stop", prompt_tokens=5)
    whole = joined(prefix, rest)
    assert whole == Generation([5, 6, 7], [-0.1, -0.2, -0.3], [("a", 0, 3)], "stop", prompt_tokens=3)
    other = joined(prefix, Generation([7], [-0.3], [("b", 0, 1)], "stop", prompt_tokens=5))
    assert other.spans == [("a", 0, 2), ("b", 2, 3)]


def test_neighbouring_spans_of_one_version_are_one():
    assert merged([("a", 0, 0), ("b", 0, 2), ("c", 2, 2), ("b", 2, 3)]) == [("b", 0, 3)]


@given(st.lists(st.binary(max_size=6).filter(lambda part: b"\n" not in part), max_size=6), st.lists(st.integers(1, 9), min_size=1))
def test_events_come_out_whole_however_the_bytes_are_cut(parts, cuts):
    stream = b"".join(b"data: " + part + b"\n\n: comment\n" for part in parts)
    splitter, out, at, turn = EventSplitter(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        out += splitter.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert out == [part.strip() for part in parts]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "data"), (413, "data"), (401, "configuration"), (404, "configuration"), (429, "infrastructure"), (502, "infrastructure")],
)
def test_each_status_has_its_kind(status, kind):
    assert refusal(status, "text").kind == kind


@pytest.mark.parametrize(
    "body",
    [b'{"error":{"message":"too long"}}', b'{"object":"error","message":"too long","code":400}', b'{"error":"too long"}', b"too long"],
)
def test_every_error_envelope_of_sglang_is_read(body):
    assert error_text(body) == "too long"
