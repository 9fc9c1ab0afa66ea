"""The smallest cap binds and is named; caps gate new samples only."""

from __future__ import annotations

import pytest

from driver.watermark import Watermark


def decide(watermark: Watermark, **more):
    given = {
        "kv_slots": 128,
        "in_flight": 64,
        "ready": 0,
        "admissible_samples": 100,
        "n": 8,
        "store_free_bytes": 1 << 30,
        "sample_bytes": 1 << 16,
    }
    return watermark.decide(**(given | more))


@pytest.mark.parametrize(
    ("more", "binding", "target"),
    [
        ({}, "kv", 160),
        ({"admissible_samples": 2}, "staleness", 64 + 16),
        ({"admissible_samples": 0}, "staleness", 64),
        ({"store_free_bytes": 3 << 16}, "store", 64 + 24),
    ],
)
def test_the_smallest_cap_binds_and_is_named(more, binding, target):
    decision = decide(Watermark(128), **more)
    assert (decision.binding, decision.watermark) == (binding, target)


def test_V7_ready_piling_up_lowers_demand_and_a_waiting_trainer_raises_it():
    watermark = Watermark(32)
    for _ in range(50):
        watermark.observe_batch(4.0)  # 8 trajectories a second
        watermark.observe_trajectory(2.0)  # 16 in flight by Little's law
    starved, flooded = decide(watermark, ready=0), decide(watermark, ready=64)
    assert starved.caps.demand_cap == 16 + 64
    assert flooded.caps.demand_cap == 16 + 8 and flooded.binding == "demand"


def test_L0_a_sample_larger_than_the_engines_slots_still_goes():
    assert decide(Watermark(128), kv_slots=4, in_flight=0).caps.kv_cap >= 8


def test_demand_does_not_bind_before_anything_was_measured():
    assert decide(Watermark(32)).caps.demand_cap >= decide(Watermark(32)).caps.kv_cap
