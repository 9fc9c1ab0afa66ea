from collections import deque
from types import SimpleNamespace

from driver.observe import alarms


def test_H7_batches_that_train_nothing_raise_an_alarm_that_names_the_cause():
    batch = {"skipped": "every advantage is 0", "batch_id": 1}
    quiet = SimpleNamespace(recent=deque([{"skipped": None}, *[batch] * 4]))
    assert alarms(quiet) == []
    loud = SimpleNamespace(recent=deque([{"skipped": None}, *[batch] * 5]))
    assert "last 5 batches trained nothing (every advantage is 0)" in alarms(loud)[0]
