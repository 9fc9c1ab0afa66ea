"""The what-if model is the one that the project's figures come from, keeps A3 and A4 under lags, and answers from a process of its own."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from driver.cli import app
from driver.config import load_config
from driver.limits import Limits
from driver.measured import Measured
from driver.whatif import Facts, Reached, advice, simulate, what_if
from driver.whatif_facts import NothingKnown, answer, ask, bounds_with, keep, of_config, of_run, read_kept, read_lengths
from tests.driver.hard_bound_des import run as given_model

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/sort_digits/config.yaml"
MILD, HEAVY = ROOT / "benchmarks/data/lengths_mild.csv", ROOT / "benchmarks/data/lengths_heavy.csv"


def chosen(lengths, seed):
    rng = random.Random(seed)
    return (rng.choice(lengths) for _ in itertools.count())


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.floats(0.5, 300.0), min_size=1, max_size=20),
    slots=st.integers(8, 48),
    samples=st.integers(1, 8),
    n=st.sampled_from([1, 4, 8]),
    bound=st.integers(0, 6),
    ratio=st.sampled_from([0.50321, 1.00731, 1.99413]),  # no two ends at one instant, whose order the two may see differently
    seed=st.integers(0, 3),
)
def test_A4_without_lags_it_is_the_given_model_draw_by_draw(lengths, slots, samples, n, bound, ratio, seed):
    fraction, mean, most, held, _ = given_model(lengths, C=slots, P=samples, n=n, S=bound, r=ratio, batches=30, seed=seed)
    facts = Facts(slots, samples, n, tuple(lengths))
    facts = replace(facts, training_s=ratio * facts.tau_s)
    found = simulate(facts, bound, batches=30, draws=chosen(lengths, seed))
    assert found.fraction == pytest.approx(fraction, rel=1e-9)
    # The given one also counts the batch that could be taken at the very end.
    assert found.staleness_mean == pytest.approx(mean, abs=(bound + 1) / 27) and found.held == pytest.approx(held, abs=0.1)
    assert most - 1 <= found.staleness_max <= most


@pytest.mark.parametrize(
    ("trace", "samples", "known"),
    [
        (MILD, 32, {1: 0.32, 2: 0.46, 3: 0.60, 5: 0.86, 7: 1.00}),
        (HEAVY, 32, {1: 0.31, 2: 0.47, 3: 0.62, 5: 0.89, 7: 1.00}),
        (MILD, 128, {1: 0.65, 2: 0.94, 3: 1.00}),
        (HEAVY, 128, {1: 0.67, 2: 0.95, 3: 1.00}),
    ],
)
def test_it_gives_the_known_figures_in_the_second_that_a_call_may_take(trace, samples, known):
    found = what_if(Facts(256, samples, 8, tuple(read_lengths(trace))), list(known))
    assert {reached.bound: pytest.approx(reached.fraction, abs=0.02) for reached in found} == known
    assert all(reached.staleness_max <= reached.bound for reached in found)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.floats(0.1, 50.0), min_size=1, max_size=10),
    bound=st.integers(0, 4),
    samples=st.integers(1, 4),
    n=st.integers(1, 4),
    slots=st.integers(1, 12),
    lags=st.tuples(*[st.sampled_from([0.0, 0.3, 20.0])] * 4),
    ahead=st.sampled_from([None, 5]),
)
def test_A3_L0_under_any_lag_pause_queue_and_scoring_time_no_sample_is_too_old_and_it_never_sticks(
    lengths, bound, samples, n, slots, lags, ahead
):
    overhead, publish, pause, score = lags
    facts = Facts(slots, samples, n, tuple(lengths), overhead_s=overhead, publish_s=publish, pause_s=pause, score_s=score, ahead=ahead)
    if ahead is not None and slots + ahead < n:
        return  # a sample that never fits: the driver's cap is a sample at least
    found = simulate(facts, bound, batches=20)
    assert found.staleness_max <= bound and 0 < found.fraction <= 1.5  # few batches: what was generated before the warm-up counts


def test_V1_lags_cost_and_S_buys_them_back():
    facts = Facts(64, 8, 8, (2.0, 4.0, 6.0))
    slow = replace(facts, publish_s=1.0, pause_s=0.5, score_s=1.0)
    plain, lagged = ({reached.bound: reached.fraction for reached in what_if(f, (1, 2, 6))} for f in (facts, slow))
    assert all(lagged[bound] < plain[bound] - 0.02 for bound in (1, 2))
    assert lagged[1] < lagged[2] < lagged[6]


def test_an_engine_makes_no_token_in_a_pause():
    """A batch of 8 trajectories of 1 s on 8 slots, and half a second of pause for each: two thirds of the time is left."""
    facts = Facts(8, 2, 4, (1.0,), training_s=0.01, pause_s=0.5)
    assert simulate(facts, 9, batches=100).fraction == pytest.approx(2 / 3, abs=0.05)
    assert simulate(replace(facts, pause_s=0.0, publish_s=0.5), 9, batches=100).fraction == pytest.approx(1.0, abs=0.05)


def reached(bound, fraction):
    return Reached(bound, fraction, 1.0, 0.0, bound, 0.0)


@pytest.mark.parametrize(
    ("fractions", "bound", "words"),
    [
        ({1: 0.32, 2: 0.46, 3: 0.60, 5: 0.86, 7: 1.0}, 2, "S = 2 reaches 0.46 of the bound; S = 5 would reach 0.86"),
        ({1: 0.32, 2: 0.46, 3: 0.60}, 1, "S = 1 reaches 0.32 of the bound; S = 3 would reach 0.60"),
        ({5: 0.86, 7: 1.0}, 5, "S = 5 reaches 0.86 of the bound; S = 7 would reach 1.00"),
        ({2: 0.99, 3: 1.0}, 2, "S = 2 reaches 0.99 of the bound"),
    ],
)
def test_the_advice_names_the_bound_that_is_set_and_the_smallest_that_is_worth_naming(fractions, bound, words):
    assert advice([reached(b, fraction) for b, fraction in fractions.items()], bound) == words


# ---- where the facts come from -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "arrival,tokens\n" + "1,2\n" * 200, "has no column output_tokens; its columns are arrival, tokens"),
        ("b.csv", "output_tokens\n7\n", "has 1 answers; a tail needs at least 100"),
        ("c.csv", "output_tokens\n" + "many\n" * 200, "not every row has a number"),
        ("d.jsonl", '{"tokens": 4}\n' * 200, "not every row has a number"),
    ],
)
def test_a_trace_that_cannot_be_read_is_refused_in_words(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        read_lengths(tmp_path / name)
    with pytest.raises(ValueError, match="there is no trace"):
        read_lengths(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "timestamp,output_tokens\n" + "0,7\n" * 150),
        ("b.txt", "7\n" * 150),
        ("c.jsonl", '{"output_tokens": 7}\n' * 150),
    ],
)
def test_a_trace_is_a_csv_jsonl_or_plain_numbers(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert read_lengths(tmp_path / name) == [7.0] * 150


def measured() -> Measured:
    made = Measured()
    for count in range(200):
        made.trajectory(engine_s=2.0, aside_s=0.0, tokens=10 + count % 50)
        made.decoded(40, 2.0)
        made.scored(0.3, 0.1)
    made.training_s.observe(4.0)
    made.pushed(0.5, 0.25)
    return made


def test_a_run_is_asked_about_with_what_it_has_measured(tmp_path):
    config = load_config(CONFIG, [f"run_dir={tmp_path}", "rollout.sampling.max_new_tokens=40", "rollout.context_length=128"])
    core, dispatch = SimpleNamespace(measured=measured(), limits=Limits(2, 16)), SimpleNamespace(kv_room=SimpleNamespace(slots=96))
    asked = of_run(SimpleNamespace(core=core, dispatch=dispatch, config=config))
    facts = asked.facts
    assert (facts.slots, facts.samples, facts.n, facts.ahead) == (96, 16, 8, 24)
    assert facts.lengths_s == pytest.approx([min(10 + count % 50, 40) * 0.05 for count in range(200)])
    assert (facts.training_s, facts.publish_s, facts.pause_s, facts.score_s) == pytest.approx((4.0, 0.5, 0.25, 0.3))
    assert "the run's last 200 answers, 20 tokens a second each; 4 s of training a batch" in asked.source
    shown = answer(asked, [reached(2, 0.5)], 2)
    assert shown["training_per_s"] == pytest.approx(32.0) and shown["sentence"] == "S = 2 reaches 0.50 of the bound"


def test_what_was_measured_is_there_for_the_next_start_and_for_config_check(tmp_path):
    config = load_config(CONFIG, [f"run_dir={tmp_path}"])
    with pytest.raises(NothingKnown, match="no lengths are known yet: give a trace"):
        of_config(config)
    keep(Measured(), tmp_path)
    assert read_kept(tmp_path) is None, "a few lengths say nothing of a tail"
    keep(measured(), tmp_path)
    asked = of_config(config)
    assert asked.facts.training_s == 4.0 and "200 answers that this run has seen" in asked.source
    (tmp_path / "measured.json").write_text('{"lengths": [1, 2')
    assert read_kept(tmp_path) is None


async def test_the_process_gives_the_answer_of_the_model():
    facts = Facts(32, 4, 4, (1.0, 2.0, 9.0), publish_s=0.1)
    assert await ask(facts, (1, 3)) == what_if(facts, (1, 3))
    with pytest.raises(RuntimeError, match="the model ended with status 1"):
        await ask(facts, (-1,))
    assert bounds_with(4, (1, 7)) == [1, 4, 7]


# ---- the command line ----------------------------------------------------------------------------------------------------------


def test_headrace_whatif_of_a_trace_and_of_a_configuration(tmp_path):
    words = [*["whatif", "--slots", "64", "--samples", "8", "--bounds", "1,4"], "--trace", str(MILD)]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "64 slots, batches of 64 trajectories; 12031 answers of lengths_mild.csv" in shown.output
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert [one["bound"] for one in found["reached"]] == [1, 2, 4] and found["sentence"].startswith("S = 2 reaches 0.")
    short = ["--set", f"run_dir={tmp_path}", "--set", "rollout.context_length=256", "--set", "rollout.sampling.max_new_tokens=200"]
    found = json.loads(CliRunner().invoke(app, ["whatif", str(CONFIG), "--trace", str(MILD), *short, "--json"]).output)
    assert (found["slots"], found["batch_trajectories"]) == (128, 128)


def test_config_check_says_what_S_reaches_where_lengths_are_known(tmp_path):
    silent = CliRunner().invoke(app, ["config", "check", str(CONFIG), "--set", f"run_dir={tmp_path}"])
    assert silent.exit_code == 0 and "of the bound" not in silent.output
    keep(measured(), tmp_path)
    said = CliRunner().invoke(app, ["config", "check", str(CONFIG), "--set", f"run_dir={tmp_path}"])
    assert "# S = 2 reaches" in said.output and "of the bound" in said.output


def test_a_trace_of_the_configuration_must_be_there(tmp_path):
    refused = CliRunner().invoke(app, ["config", "check", str(CONFIG), "--set", "rollout.lengths_trace=none.csv"])
    assert refused.exit_code == 2 and "rollout.lengths_trace: there is no file" in refused.output
