"""The collector's settings, in a process of their own: they last as long as the process."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from driver.collector import OLD, OLD_S, YOUNG_MOST_S, YOUNG_S, Collector

COUNT = """
import gc, sys
from driver import collector

collector.settle()
before = gc.get_stats()
alive = [[] for _ in range(150_000)]
looks = [after["collections"] - was["collections"] for after, was in zip(gc.get_stats(), before)]
print(looks, gc.get_freeze_count() > 1000, sys.getswitchinterval() < 0.001)
"""


class Looked:
    """The generation of each look that the collector took, and what each freed."""

    def __init__(self) -> None:
        self.at: list[int] = []
        self.freed = 0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "stop":
            self.at.append(info["generation"])
            self.freed += info["collected"]


@pytest.fixture
def looked() -> Iterator[Looked]:
    gc.collect()
    gc.disable()
    looked = Looked()
    gc.callbacks.append(looked)
    yield looked
    gc.callbacks.remove(looked)
    gc.enable()


def circle() -> None:
    one: list[object] = []
    one.append(one)


def test_O3_what_thousands_of_requests_hold_for_a_moment_is_not_looked_through():
    done = subprocess.run([sys.executable, "-P", "-c", COUNT], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "[0, 0, 0] True True", done.stdout + done.stderr


def test_O3_a_look_is_at_what_was_born_since_the_last_and_frees_what_died_in_a_circle(looked):
    collector = Collector(0.0, lambda: pytest.fail("nobody asks for the memory so soon"))
    for number in range(1, 4):
        circle()
        collector.look(number * YOUNG_S)
        assert looked.freed >= number
    assert looked.at == [0, 0, 0], "never at what lives on"


def test_O3_looks_that_take_long_come_seldom(looked):
    clock = iter([0.0, 0.001, 1.0, 1.04, 2.0, 3.0])
    collector = Collector(0.0, lambda: pytest.fail("nobody asks for the memory so soon"), lambda: next(clock))
    assert [round(collector.look(1.0), 6) for _ in range(3)] == [YOUNG_S, 2.0, YOUNG_MOST_S]
    assert looked.at == [0, 0, 0]


def test_O3_everything_is_looked_at_when_the_memory_has_grown(looked):
    memory = [100]
    collector = Collector(0.0, lambda: memory[0])
    collector.look(OLD_S)  # from here on growth is known
    memory[0] = int(100 * OLD)
    collector.look(2 * OLD_S)
    assert looked.at == [0, 0], "not for what comes and goes"
    memory[0] += 1
    collector.look(2 * OLD_S + YOUNG_S)
    collector.look(3 * OLD_S)
    assert looked.at == [0, 0, 0, 2]
    collector.look(4 * OLD_S)
    assert looked.at[-1] == 0, "it is that much by itself"
