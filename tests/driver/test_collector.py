"""The collector's settings, in a process of their own: they last as long as the process."""

import subprocess
import sys

COUNT = """
import gc
from driver import collector

collector.settle()
before = gc.get_stats()
alive = [[] for _ in range(150_000)]
print([after["collections"] - was["collections"] for after, was in zip(gc.get_stats(), before)], gc.get_freeze_count() > 1000)
"""


def test_O3_what_thousands_of_requests_hold_for_a_moment_is_not_looked_through():
    done = subprocess.run([sys.executable, "-P", "-c", COUNT], capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[0] == "[0, 0, 0] True", done.stdout + done.stderr
