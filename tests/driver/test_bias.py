"""The bias meter: what it counts, when it speaks, and that chance alone does not make it."""

from __future__ import annotations

import io
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from driver.bias import KEPT_WINDOWS, End, Meter, Window, bin_of, deciles, judge, least_of, length_alone, rise, rows
from driver.bias_watch import _table
from driver.commands_bias import show

TOLERANCE = 0.02


def trained(tokens: int, reward: float = 1.0) -> End:
    return End("trained", tokens, reward)


def lost(tokens: int | None, reason: str = "partial: 7 of 8") -> End:
    return End("discarded", tokens, None, reason)


def window_of(samples: list[list[End]], task: str = "t", dataset: str = "d") -> Window:
    meter = Meter(10)
    for ends in samples:
        meter.add(0, task, dataset, ends)
    return meter.windows[0]


@given(st.integers(0, 1 << 24))
def test_a_bin_holds_its_length_and_is_a_sixteenth_of_an_octave(tokens):
    number = bin_of(tokens)
    assert least_of(number) <= tokens < least_of(number + 1)
    assert least_of(number + 1) - least_of(number) <= max(1, tokens // 16)


def test_deciles_are_tenths_of_what_was_sampled():
    window = window_of([[trained(tokens)] for tokens in range(1, 2001)])
    shares = [row.share_sampled for row in rows(window, "length")]
    assert len(shares) == 10 and all(0.06 < share < 0.14 for share in shares) and sum(shares) == pytest.approx(1)
    assert rows(window, "length")[9].name.endswith("tokens")
    assert set(deciles([window_of([[trained(5)]] * 10)]).values()) == {5}, "one length is one bin, in the middle"


def test_V4_what_was_lost_among_the_long_answers_is_seen():
    rng = random.Random(1)
    samples = []
    for _ in range(200):
        ends = [trained(rng.randint(10, 1000)) for _ in range(8)]
        samples.append([lost(e.tokens) if e.tokens is not None and e.tokens > 900 and rng.random() < 0.8 else e for e in ends])
    (alarm,) = judge(window_of(samples), TOLERANCE)
    said = alarm.words
    assert said.startswith("bias by length: answers of") and "most were lost to: partial: 7 of 8" in said and "versions 0 to 9" in said


@pytest.mark.parametrize("whole", [False, True])
def test_V4_losses_by_chance_are_no_bias_even_where_siblings_of_one_length_go_together(whole):
    rng = random.Random(2)
    for _ in range(60):
        samples = []
        for _ in range(40):
            tokens = rng.randint(10, 1000)  # a prompt makes its answers' length
            all_go = rng.random() < 0.2
            samples.append([lost(tokens) if (all_go if whole else rng.random() < 0.2) else trained(tokens) for _ in range(16)])
        assert judge(window_of(samples), 0.001) == []


def test_a_gap_within_the_tolerance_is_no_alarm_however_certain():
    samples = [[trained(10)] * 9 + [lost(1000) if i % 10 == 0 else trained(1000)] for i in range(20_000)]
    window = window_of(samples)
    assert max(abs(row.z) for row in rows(window, "length")) > 4.0
    assert judge(window, TOLERANCE) == []


@pytest.mark.parametrize("dimension", ["task_type", "dataset"])
def test_a_task_or_a_dataset_that_is_lost_more_than_others_is_named(dimension):
    meter = Meter(10)
    rng = random.Random(3)
    for number in range(400):
        hard = number % 4 == 0
        names = {"task_type": "t", "dataset": "d"} | {dimension: "hard" if hard else "easy"}
        ends = [lost(50, "reward: raised") if hard and rng.random() < 0.5 else trained(50) for _ in range(8)]
        meter.add(0, names["task_type"], names["dataset"], ends)
    (alarm,) = judge(meter.windows[0], TOLERANCE)
    assert f"bias by {dimension.replace('_', ' ')}" in alarm.words and "reward: raised" in alarm.words


def test_what_was_filtered_and_what_the_end_cut_off_are_counted_apart():
    filtered = [End("discarded", 900, 1.0, "filtered")] * 8
    ended = [End("discarded", None, None, "run ended: all batches trained")] * 8
    window = window_of([[trained(10 + i) for i in range(8)], filtered, ended] * 50)
    assert (window.whole.sampled, window.whole.trained, window.whole.filtered, window.ended) == (400, 400, 400, 400)
    assert judge(window, TOLERANCE) == [] and window.lost == 0
    assert sum(row.filtered for row in rows(window, "length")) == 400


def test_a_length_that_nobody_knows_has_a_row_of_its_own():
    window = window_of([[trained(10), lost(None)]] * 10)
    assert [(row.name, row.sampled) for row in rows(window, "length")] == [("10 to 10 tokens", 10), ("unknown", 10)]


# ---- rewards ---------------------------------------------------------------------------------------------------------------


def answers(rng: random.Random, share_long: float, short: float, long: float) -> Window:
    """Samples of which each trajectory is long with this chance, and right with the chance of its length."""
    samples = []
    for _ in range(400):
        made = [rng.random() < share_long for _ in range(8)]
        samples.append([trained(1000 if is_long else 100, float(rng.random() < (long if is_long else short))) for is_long in made])
    return window_of(samples)


def test_a_rise_that_is_only_a_change_of_lengths_is_told():
    rng = random.Random(4)
    before, after = answers(rng, 0.2, 0.3, 0.8), answers(rng, 0.7, 0.3, 0.8)
    told = length_alone(before, after)
    assert told is not None and "is a change of lengths" in told.words
    found = rise(before, after)
    assert found is not None and found.rise == pytest.approx(0.25, abs=0.03) and found.by_length == pytest.approx(found.rise, abs=0.03)


@pytest.mark.parametrize(
    ("share", "short", "long"),
    [(0.2, 0.6, 0.95), (0.7, 0.8, 0.95), (0.2, 0.3, 0.8), (0.1, 0.3, 0.8)],
    ids=["better", "better and longer", "chance", "worse"],
)
def test_a_rise_within_lengths_no_rise_and_a_fall_are_not_told(share, short, long):
    rng = random.Random(5)
    assert length_alone(answers(rng, 0.2, 0.3, 0.8), answers(rng, share, short, long)) is None


# ---- windows ---------------------------------------------------------------------------------------------------------------


def test_a_window_is_judged_when_nothing_of_it_lives_any_more():
    meter = Meter(5)
    rng = random.Random(6)
    for version in range(12):
        for _ in range(50):
            meter.add(version, "t", "d", [lost(1000) if rng.random() < 0.5 else trained(1000), *[trained(10)] * 7])
    assert [w.first for w in meter.closed(9)] == [0] and [w.first for w in meter.closed(10)] == [0, 5]
    assert meter.alarms(4, TOLERANCE) == [] and meter.alarms(5, TOLERANCE)


def test_a_small_gap_that_lasts_is_seen_in_all_windows_together():
    meter = Meter(5)
    rng = random.Random(7)
    for version in range(150):
        for _ in range(4):
            ends = [(lost if rng.random() < (0.15 if i else 0.4) else trained)(rng.randint(10, 99) if i else 1000) for i in range(8)]
            meter.add(version, "t", "d", ends)
    assert judge(meter.closed(150)[-1], TOLERANCE) == [], "of one window it could be chance"
    assert "versions 0 to 149" in meter.alarms(150, TOLERANCE)[0].words


def test_V7_what_is_kept_is_bounded():
    meter = Meter(1)
    for version in range(100):
        for task in range(150):
            meter.add(version, f"t{task}", "d", [trained(10)])
    assert len(meter.windows) == KEPT_WINDOWS
    assert max(len(w.cells["task_type"]) for w in meter.windows.values()) <= 101
    meter.add(3, "t", "d", [trained(10)])  # of a window that is gone already
    assert 3 not in meter.windows and len(meter.windows) == KEPT_WINDOWS and meter.changed <= set(meter.windows)


def test_windows_of_another_width_are_not_taken_over():
    meter = Meter(5)
    meter.add(7, "t", "d", [trained(10)])
    saved = list(meter.windows.values())
    assert Meter(5, saved).windows == meter.windows and not Meter(4, saved).windows


def test_the_command_shows_a_window_as_tables_and_its_alarms(monkeypatch):
    out = Console(record=True, width=120, file=io.StringIO())
    monkeypatch.setattr("driver.commands_bias.out", out)
    rng = random.Random(8)
    samples = [[lost(900) if rng.random() < 0.6 else trained(900, 1.0), *[trained(20, 0.0)] * 7] for _ in range(300)]
    window = window_of(samples, task="a[b]")
    facts = {"window": _table(window), "total": None, "window_versions": 10, "alarms": [alarm.words for alarm in judge(window, TOLERANCE)]}
    show(facts, total=False)
    show(facts, total=True)
    text = out.export_text()
    assert "versions 0 to 9: 2400 trajectories sampled" in text and "partial: 7 of 8" in text
    assert "a[b]" in text and "12.5%" in text and " σ" in text and "alarm bias by length: answers of" in text
    assert "no window of 10 versions is closed yet" in text
