"""Judged by what it does: busy, and no further than before."""

from driver.progress import Progress, is_busy


def test_E14_a_process_that_is_busy_and_does_not_get_on_is_found_when_its_time_is_over() -> None:
    progress = Progress(5.0)
    assert progress.stands_for_s({"state": "busy", "progress": 7}, 0.0) is None
    assert progress.stands_for_s({"state": "busy", "progress": 7}, 4.9) is None
    assert progress.stands_for_s({"state": "busy", "progress": 7}, 5.0) == 5.0
    progress.again()
    assert progress.stands_for_s({"state": "busy", "progress": 7}, 6.0) is None, "what was done about it has its own time"


def test_one_that_gets_on_or_has_nothing_to_do_may_take_as_long_as_it_likes() -> None:
    progress = Progress(5.0)
    for second in range(100):
        assert progress.stands_for_s({"busy_workers": 1, "progress": second // 4}, float(second)) is None
    for second in range(100, 200):
        assert progress.stands_for_s({"busy_workers": 0, "progress": 24}, float(second)) is None
    assert progress.stands_for_s({"busy_workers": 1, "progress": 24}, 200.0) is None, "the time without work does not count"
    assert Progress(None).stands_for_s({"state": "busy", "progress": 0}, 1e9) is None
    assert Progress(1.0).stands_for_s({"state": "busy"}, 1e9) is None, "it says no number to judge it by"


def test_each_of_our_processes_says_in_its_own_words_that_it_works() -> None:
    assert is_busy({"state": "busy"}) and is_busy({"busy": True}) and is_busy({"busy_workers": 2})
    assert not is_busy({"state": "idle", "busy": False, "busy_workers": 0}) and not is_busy({})
