"""What is logged of a turn is always the beginning of what was really sampled, by weights that were verified, with their names."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from driver.prefixes import Logged, Prefixes, Record, TurnBuffer, assembled, usable
from rollout.answer import Prefix, merged

Token = tuple[int, float, str]  # id, log-prob, the version that made it
DIGEST = b"prompt"


def prefix_of(tokens: list[Token]) -> Prefix:
    spans = merged([(version, i, i + 1) for i, (_, _, version) in enumerate(tokens)])
    return Prefix([t[0] for t in tokens], [t[1] for t in tokens], spans)


def tokens_of(prefix: Prefix) -> list[Token]:
    versions = [version for version, start, end in prefix.spans for _ in range(start, end)]
    return list(zip(prefix.output_ids, prefix.log_probs, versions, strict=True))


def buffers(every_s: float = 2.0, every_tokens: int = 256) -> tuple[Prefixes, TurnBuffer, list[float]]:
    now = [0.0]
    prefixes = Prefixes(every_s, every_tokens, lambda: now[0])
    return prefixes, prefixes.begin("s0t0", 0, DIGEST, 0), now


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_W1_A5_the_log_is_a_prefix_of_what_verified_weights_sampled_whatever_happens_to_the_requests(data: st.DataObject) -> None:
    prefixes, buffer, _ = buffers()
    records: list[Record] = []
    kept: list[Token] = []
    verified = {"v0"}
    decided = {f"v{i}": data.draw(st.booleans(), label=f"v{i} passes") or i == 0 for i in range(6)}
    counter = 0
    newest = 0

    def log() -> list[Token]:
        records.extend(prefixes.take(lambda version: version in verified, everything=True))
        found = assembled(records).get(0, Logged(Prefix(), None, DIGEST))
        assert all(version in verified for _, _, version in tokens_of(found.prefix))
        return tokens_of(found.prefix)

    for _ in range(data.draw(st.integers(1, 5), label="requests")):
        version = label = f"v{newest}"
        buffer.asks(version, None)
        made: list[Token] = []  # the truth, of this request
        sure: int | None = None
        for size in data.draw(st.lists(st.integers(1, 4), max_size=5), label="chunks"):
            old = 0
            if newest < 5 and data.draw(st.booleans(), label="a push"):
                newest += 1
                version = f"v{newest}"
                old = data.draw(st.integers(0, size), label="tokens from before it")
                if sure is None:
                    sure = len(made)
            chunk = [(counter + i, -0.5 - i, label if i < old else version) for i in range(size)]
            counter += size
            label = version
            made += chunk
            buffer.got([t[0] for t in chunk], [t[1] for t in chunk], version)
            if data.draw(st.booleans(), label="flush"):
                truth = kept + made[: len(made) if sure is None else sure]
                assert log() == truth[: len(log())]
            if data.draw(st.booleans(), label="the push is decided"):
                verified |= {v for v in decided if decided[v] and int(v[1:]) <= newest}
        verified |= {v for v in decided if decided[v] and int(v[1:]) <= newest}  # `trusted` waits for that
        whole = data.draw(st.booleans(), label="whole")
        received = made if whole or sure is None else made[:sure]
        trusted = next((i for i, token in enumerate(received) if token[2] not in verified), len(received))
        kept += received[:trusted]
        finish = "stop" if whole and trusted == len(made) else None
        buffer.kept(prefix_of(kept), finish)
        assert log() == kept
        assert assembled(records).get(0, Logged(Prefix(), None, DIGEST)).finish == finish
        assert prefixes.lost() == 0
        if finish:
            break
        if not decided[f"v{newest}"]:
            verified.add(f"v{newest}")  # the next request goes to an engine that serves
            decided[f"v{newest}"] = True


def test_a_record_is_due_after_2_seconds_or_256_tokens_and_never_before():
    prefixes, buffer, now = buffers()
    buffer.asks("v0", None)
    for token in range(255):
        buffer.got([token], [-0.5], "v0")
        assert prefixes.take(lambda _: True) == []
    now[0] = 1.99
    assert prefixes.take(lambda _: True) == [] and not prefixes.full
    buffer.got([255], [-0.5], "v0")
    (record,) = prefixes.take(lambda _: True)
    assert (record.start, len(record.output_ids)) == (0, 256), "256 tokens"
    buffer.got([256], [-0.5], "v0")
    now[0] = 3.98
    assert prefixes.take(lambda _: True) == []
    now[0] = 4.0
    (record,) = prefixes.take(lambda _: True)
    assert (record.start, record.output_ids) == (256, [256]), "2 s after the first that was pending"


def test_an_answer_that_ends_before_it_is_due_is_never_written():
    prefixes, buffer, now = buffers()
    buffer.asks("v0", None)
    buffer.got([1, 2], [-0.5, -0.5], "v0")
    buffer.kept(Prefix([1, 2], [-0.5, -0.5], [("v0", 0, 2)]), "stop")
    now[0] = 1.0
    prefixes.end("s0t0")
    now[0] = 9.0
    assert prefixes.take(lambda _: True) == []


def test_tokens_of_a_push_not_yet_decided_wait_and_are_taken_when_it_is():
    prefixes, buffer, now = buffers()
    verified: set[str] = set()
    buffer.asks("v1", None)
    buffer.got([1, 2], [-0.5, -0.5], "v1")
    now[0] = 2.0
    assert prefixes.take(verified.__contains__) == []
    verified.add("v1")
    assert prefixes.take(verified.__contains__) == [], "it is asked again after as long"
    now[0] = 4.0
    assert [record.output_ids for record in prefixes.take(verified.__contains__)] == [[1, 2]]


def test_behind_a_router_a_first_chunk_of_weights_that_nobody_served_is_not_sure():
    prefixes, buffer, _ = buffers()
    buffer.asks(None, frozenset({"v0"}))
    buffer.got([1], [-0.5], "v1")
    buffer.got([2], [-0.5], "v1")
    assert prefixes.take(lambda _: True, everything=True) == []
    buffer.asks(None, frozenset({"v0", "v1"}))
    buffer.got([3], [-0.5], "v1")
    assert [record.output_ids for record in prefixes.take(lambda _: True, everything=True)] == [[3]]


def test_what_the_engine_took_back_is_cut_from_the_log():
    prefixes, buffer, _ = buffers()
    buffer.asks("v0", None)
    buffer.got([1, 2, 3], [-0.5] * 3, "v0")
    records = prefixes.take(lambda _: True, everything=True)
    buffer.kept(Prefix([1], [-0.5], [("v0", 0, 1)]))
    records += prefixes.take(lambda _: True, everything=True)
    assert assembled(records)[0].prefix == Prefix([1], [-0.5], [("v0", 0, 1)])


def test_turns_are_logged_in_order_and_a_turn_without_the_ones_before_it_is_no_use():
    prefixes, first, _ = buffers(every_tokens=4)
    first.asks("v0", None)
    first.kept(Prefix([1], [-0.5], [("v0", 0, 1)]), "stop")
    second = prefixes.begin("s0t0", 1, b"longer", 0)
    second.asks("v0", None)
    second.got([2, 3, 4, 5], [-0.5] * 4, "v0")
    records = prefixes.take(lambda _: True)
    assert [(record.turn, record.finish) for record in records] == [(0, "stop"), (1, None)], "the first is due with the second"
    assert assembled(records)[1].prefix.output_ids == [2, 3, 4, 5]
    assert assembled(records[1:]) == {}


def test_records_with_a_gap_or_of_another_prompt_are_read_up_to_there_and_a_new_beginning_replaces_all():
    def record(start: int, ids: list[int], digest: bytes = DIGEST, turn: int = 0) -> Record:
        return Record("s0t0", turn, start, ids, [-0.5] * len(ids), [("v0", start, start + len(ids))], None, digest)

    gap = [record(0, [1, 2]), record(5, [6]), record(6, [7])]
    assert assembled(gap)[0].prefix.output_ids == [1, 2]
    other = [record(0, [1, 2]), record(2, [3], b"other")]
    assert assembled(other)[0].prefix.output_ids == [1, 2]
    anew = [record(0, [1, 2]), record(0, [9], DIGEST, 1), record(0, [3], b"other"), record(1, [4], b"other")]
    assert {turn: logged.prefix.output_ids for turn, logged in assembled(anew).items()} == {0: [3, 4]}
    assert assembled(anew)[0].prefix.spans == [("v0", 0, 2)]


def test_E15_a_prefix_is_used_up_to_its_first_stop_and_never_beyond_the_budget():
    prefix = Prefix([5, 6, 2, 7], [-0.1, -0.2, -0.3, -0.4], [("v0", 0, 1), ("v1", 1, 4)])
    assert usable(prefix, {9}, 10) is prefix
    assert usable(prefix, {2}, 10) == Prefix([5, 6, 2], [-0.1, -0.2, -0.3], [("v0", 0, 1), ("v1", 1, 3)])
    assert usable(prefix, {9}, 1) == Prefix([5], [-0.1], [("v0", 0, 1)])
    assert usable(prefix, {9}, 0) == Prefix([], [], [])


def test_a_log_that_is_off_holds_no_tokens_and_still_counts_them():
    prefixes = Prefixes(None, 1, lambda: 0.0)
    buffer = prefixes.begin("s0t0", 0, b"", 0)
    buffer.asks("v0", None)
    buffer.got([1, 2], [-0.5, -0.5], "v0")
    assert buffer.pending == 0 and prefixes.lost() == 2 and prefixes.take(lambda _: True, everything=True) == []
    buffer.kept(Prefix([1, 2, 3], [-0.5] * 3, [("v0", 0, 3)]), "stop")
    assert buffer.pending == 0 and prefixes.lost() == 3
