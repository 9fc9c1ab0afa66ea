"""Each side's sentence says what binds, with its numbers (L1)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from driver.lost_time import FULL
from driver.why import Because, Engine, Facts, Missing, Push, Straggler, Training, Waiting, explain, replaying, sentence

STALENESS = "staleness bound 3: 128 live samples are all that batches 7 to 10 can take"
NOTHING = "Nothing waits: engines and trainer are both at work."


def waiting(side: str, reason: str, kind: str = "other", seconds: float = 2.0, idle_s: float = 41.0) -> Waiting:
    return Waiting(side, kind, reason, seconds, idle_s)


def on_engine(tokens: int, place: str = "on engine-2", age_s: float = 9.0) -> Missing:
    return Missing("s1t0", place, tokens, age_s)


def engine(engine_id: str = "engine-1", state: str = "open", requests: int = 4, **more) -> Engine:
    return Engine(engine_id, state, more.get("reason", ""), more.get("seconds", 0.4), requests, more.get("idle_s", 0.0))


SHORT = waiting("trainer", "31 of 32 samples are ready; the oldest unfinished is sample 812", "samples")
HELD = waiting("trainer", "batch 7 is held for sample 812, which must be trained by batch 7", "held", idle_s=3.0)


@pytest.mark.parametrize(
    ("wait", "missing", "rollout", "words"),
    [
        (
            SHORT,
            (on_engine(18_211),),
            waiting("rollout", STALENESS, "staleness"),
            "trainer idle 41.0 s: 31 of 32 samples are ready; sample 812 misses 1 of 8, on engine-2, 18,211 tokens so far; "
            f"and no new sample may start: {STALENESS}",
        ),
        (
            SHORT,
            (on_engine(40), on_engine(900, "on engine-3"), on_engine(0, "not sent yet")),
            None,
            "trainer idle 41.0 s: 31 of 32 samples are ready; sample 812 misses 3 of 8: the longest on engine-3, 900 tokens so far",
        ),
        (
            SHORT,
            (on_engine(0, "at its scorer", 12.0),),
            None,
            "trainer idle 41.0 s: 31 of 32 samples are ready; sample 812 misses 1 of 8, at its scorer for 12.0 s",
        ),
        (
            HELD,
            (on_engine(77),),
            None,
            "trainer idle 3.0 s: batch 7 is held for sample 812, which must be trained by batch 7; it misses 1 of 8, on engine-2, "
            "77 tokens so far",
        ),
        (HELD, (), None, "trainer idle 3.0 s: batch 7 is held for sample 812, which must be trained by batch 7; it is whole by now"),
    ],
)
def test_L1_a_trainer_that_waits_for_samples_is_told_which_trajectory_is_missing_where_and_how_far_it_is(wait, missing, rollout, words):
    waits = (wait,) if rollout is None else (rollout, wait)
    assert explain(Facts(waits, straggler=Straggler(812, 8, missing)))[0].sentence == words
    assert sentence(Facts(waits, straggler=Straggler(812, 8, missing))) == words, "and the bound is not said twice"


@pytest.mark.parametrize(
    ("wait", "words"),
    [
        (waiting("trainer", "the trainer loads its weights", "loading"), "trainer idle 41.0 s: the trainer loads its weights"),
        (waiting("reward", "5 answers wait for their score, the first for over 10 s", "slow"), "reward idle 41.0 s: 5 answers wait"),
        (
            waiting("rollout", "no dataset was submitted yet (headrace submit FILE)", "data"),
            "rollout idle 41.0 s: no dataset was submitted",
        ),
        (
            waiting("rollout", "watermark 160 reached with 160 in flight; demand binds: the trainer takes 8", "demand"),
            "rollout idle 41.0 s",
        ),
    ],
)
def test_L1_each_side_that_waits_has_its_sentence(wait, words):
    facts = Facts((wait,))
    assert sentence(facts).startswith(words)
    assert explain(facts) == [Because(wait.side, wait.kind, wait.reason, 41.0)]


def test_L1_a_replay_is_work_that_makes_nothing_new_and_tells_how_far_it_is():
    words = replaying(12, range(10, 15), 15)
    assert words == "replaying batch 3 of 5 since checkpoint 10 (batch_id 12)"
    assert replaying(12, range(10, 15), 13) == "replaying batch 3 of 3 since checkpoint 10 (batch_id 12)", "two of them were unmade"
    assert replaying(15, range(10, 15), 16) is None and replaying(0, range(0), 1) is None
    lag = waiting("rollout", "the engines serve version 9, too old for batch 15 with bound 2", "lag")
    facts = Facts((lag, waiting("trainer", words, "replay")))
    assert sentence(facts) == f"trainer busy 41.0 s: {words}; rollout: {lag.reason}"


def test_L1_the_trainers_sentence_goes_on_with_what_its_upstream_waits_for():
    trainer = waiting("trainer", "3 of 4 samples are ready and none is running", "samples")
    rollout = waiting("rollout", "all rows were sent", "input over")
    reward = waiting("reward", "the reward service is starting again: killed", "starting")
    assert sentence(Facts((rollout, trainer))).endswith("none is running; rollout: all rows were sent")
    assert sentence(Facts((rollout, reward, trainer))).endswith("; reward: the reward service is starting again: killed")


def test_L1_the_bound_that_stops_rollout_while_the_trainer_works_says_whether_training_is_the_slower_side():
    waits = (waiting("rollout", STALENESS, "staleness"),)
    whole = Facts(waits, Training("batch 6", 8.25, 40, 32))
    words = f"rollout idle 41.0 s: {STALENESS}; trainer busy 8.2 s: batch 6; the next has its 32 samples, so training is the slower side"
    assert sentence(whole) == words == explain(whole)[0].sentence
    part = Facts(waits, Training("storing version 7", 0.5, 31, 32))
    assert sentence(part).endswith("; trainer busy 0.5 s: storing version 7; 31 of 32 samples of the next are ready")
    assert sentence(Facts(waits)).endswith("can take"), "a trainer that does not work has a wait of its own"


def test_L1_an_engine_whose_version_is_too_old_does_not_make_training_the_slower_side():
    """The push may be."""
    lag = waiting("rollout", "the engines serve version 3, too old for batch 6 with bound 2", "lag")
    words = f"rollout idle 41.0 s: {lag.reason}; trainer busy 8.2 s: batch 6; 32 of 32 samples of the next are ready"
    assert sentence(Facts((lag,), Training("batch 6", 8.25, 40, 32))) == words


def test_the_trainer_is_not_brought_up_where_it_is_not_what_rollout_waits_for():
    kv = waiting("rollout", "no engine is open: engine-0 is shut (version 7 is being pushed)", "engines")
    assert sentence(Facts((kv,), Training("batch 6", 8.2, 40, 32))) == f"rollout idle 41.0 s: {kv.reason}"


def test_engines_that_are_full_lose_nothing():
    full = waiting("rollout", "watermark 160 reached with 160 in flight; kv binds: 128 requests at once", FULL)
    assert sentence(Facts((full,))) == NOTHING == sentence(Facts())
    assert sentence(Facts((full, SHORT))) == "trainer idle 41.0 s: " + SHORT.reason


@pytest.mark.parametrize(
    ("push", "engines", "words"),
    [
        (Push(12, 0.4, under_way=("engine-0", "engine-1")), (), "push idle 0.4 s: version 12 is on its way to engine-0 and engine-1"),
        (
            Push(12, 3.0, lacking=("engine-1",)),
            (engine(state="starting", requests=0, reason="registered, not verified yet"),),
            "push idle 3.0 s: version 12 waits for engine-1 (starting: registered, not verified yet)",
        ),
    ],
)
def test_L1_a_push_says_which_engines_it_is_at_and_which_it_waits_for(push, engines, words):
    assert next(because for because in explain(Facts(engines=engines, push=push)) if because.side == "push").sentence == words


def test_L1_each_engine_that_does_not_work_says_why():
    rollout = waiting("rollout", STALENESS, "staleness")
    shut = engine("engine-0", "shut", 12, reason="version 12 is being pushed")
    idle = engine("engine-1", requests=0, idle_s=2.5)
    gone = engine("engine-2", "quarantined", 0, reason="push of version 12 failed: 500", seconds=7.0)
    facts = Facts((rollout,), engines=(shut, idle, gone, engine("engine-3")), absent={"10.0.0.7:30000": "no answer, 3 times in a row"})
    found = {because.side: because for because in explain(facts)}
    assert found["engine-0"].sentence == "engine-0 idle 0.4 s: is shut: version 12 is being pushed, 12 requests are held"
    assert (found["engine-1"].seconds, found["engine-1"].reason) == (2.5, f"has no request: {STALENESS}")
    assert found["engine-2"].reason == "is quarantined: push of version 12 failed: 500"
    assert found["10.0.0.7:30000"].reason == "no answer, 3 times in a row" and "engine-3" not in found
    said = sentence(facts)
    assert said.endswith("; engine-2 is quarantined: push of version 12 failed: 500; 10.0.0.7:30000 no answer, 3 times in a row")
    assert "engine-0" not in said, "a shut gate is the moment of a push"


def test_L1_the_sentence_names_an_engine_that_is_being_replaced_whoever_waits_for_it():
    hangs = waiting("engine engine-0", "engine-0 is out of use: it hangs", "hangs")
    assert sentence(Facts((hangs,))) == "engine-0 is out of use: it hangs"
    both = Facts((hangs, waiting("rollout", "all rows were sent", "input over"), replace(SHORT, reason="3 of 4 samples are ready")))
    assert sentence(both).endswith("s: 3 of 4 samples are ready; rollout: all rows were sent; engine-0 is out of use: it hangs")


def test_a_push_that_goes_on_is_no_reason_to_wait_and_no_engine_is_named_twice():
    pushing, shut = Push(12, 0.2, under_way=("engine-0",)), engine("engine-0", "shut", 3, reason="version 12 is being pushed")
    assert sentence(Facts(push=pushing, engines=(shut,))) == NOTHING
    starting = engine("engine-0", "starting", 0, reason="registered, not verified yet")
    rollout = waiting("rollout", "no engine is open: engine-0 is starting (registered, not verified yet)", "engines")
    assert sentence(Facts((rollout,), engines=(starting,))) == f"rollout idle 41.0 s: {rollout.reason}"


def test_H7_the_sentence_names_a_filter_that_takes_everything_whoever_waits_for_it():
    takes = waiting("filter", "the filter took the last 80 samples one after another", "filter")
    assert sentence(Facts((takes,))) == takes.reason
    short = replace(SHORT, reason="3 of 4 samples are ready")
    assert sentence(Facts((short, takes))).endswith("s: 3 of 4 samples are ready; the filter took the last 80 samples one after another")


def test_a_run_that_is_over_says_so_and_nothing_else():
    assert sentence(Facts((SHORT,), over="The run has stopped: disk full")) == "The run has stopped: disk full"
