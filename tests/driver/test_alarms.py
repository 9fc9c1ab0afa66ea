"""An alarm that lasts stands in the log when there is something new to it, and in the status all the time."""

from __future__ import annotations

import logging
import random

import pytest

from driver.alarms import Alarm, Said
from driver.bias import End, Meter

log = logging.getLogger("headrace.test_alarms")


def bias(share: float) -> Alarm:
    return Alarm("bias by length", f"bias by length: {share:.1%}", share)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, log.name)

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return lines


def test_an_alarm_is_logged_when_it_begins_when_it_is_much_worse_and_when_it_is_over(said):
    watched = Said(log)
    for batch, share in enumerate((0.10, 0.11, 0.12, 0.14, 0.16, 0.20, 0.25)):
        watched.look([bias(share)])
        assert said() == {0: ["bias by length: 10.0%"], 4: ["worse: bias by length: 16.0%"], 6: ["worse: bias by length: 25.0%"]}.get(
            batch, []
        )
    watched.look([bias(0.12)])
    assert said() == [], "better is no news as long as it holds"
    watched.look([])
    assert said() == ["over: bias by length"]
    watched.look([])
    assert said() == []
    watched.look([bias(0.05)])
    assert said() == ["bias by length: 5.0%"], "and it may begin again"


def test_alarms_are_told_apart_by_their_names(said):
    watched = Said(log)
    watched.look([bias(0.1), Alarm("the prefix log is off", "disk full")])
    assert said() == ["bias by length: 10.0%", "disk full"]
    watched.look([Alarm("the prefix log is off", "disk full"), bias(0.1)])
    assert said() == []
    watched.look([bias(0.1)])
    assert said() == ["over: the prefix log is off"]


def test_H7_batches_that_train_nothing_are_said_again_when_there_are_half_as_many_more(said):
    watched = Said(log)
    for batches in range(5, 13):
        watched.look([Alarm("batches that train nothing", f"the last {batches}", batches)])
    assert said() == ["the last 5", "worse: the last 8"]


def test_a_bias_that_lasts_over_many_windows_has_one_name(said):
    rng = random.Random(3)
    meter, watched = Meter(1), Said(log)
    for version in range(12):
        for _ in range(100):
            ends = [End("discarded", 900, None, "partial: 7 of 8") if rng.random() < 0.7 else End("trained", 900, 1.0)]
            meter.add(version, "t", "d", ends + [End("trained", 20, 1.0)] * 7)
        watched.look(meter.alarms(version + 1, 0.02))
    lines = said()
    assert lines and len(lines) <= 2 and all("bias by length" in line for line in lines), lines
