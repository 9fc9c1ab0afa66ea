"""The smallest cap binds and is named; caps gate new samples only."""

from __future__ import annotations

import pytest

from driver.watermark import Watermark, kv_room
from rollout.load import Load


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


def test_V7_what_the_filter_takes_is_under_way_beside_what_the_trainer_does():
    watermark = Watermark(32)
    for _ in range(50):
        watermark.observe_batch(4.0)
        watermark.observe_trajectory(2.0)
    assert decide(watermark, kept_share=0.5).caps.demand_cap == 2 * (16 + 64)
    assert decide(watermark, kept_share=0.0).caps.demand_cap == 20 * (16 + 64), "and no more than so much"


def test_L0_a_sample_larger_than_the_engines_slots_still_goes():
    assert decide(Watermark(128), kv_slots=4, in_flight=0).caps.kv_cap >= 8


def test_demand_does_not_bind_before_anything_was_measured():
    assert decide(Watermark(32)).caps.demand_cap >= decide(Watermark(32)).caps.kv_cap


def load(max_running: int, max_total_tokens: int) -> Load:
    return Load(
        running=0,
        waiting=0,
        used_tokens=0,
        max_total_tokens=max_total_tokens,
        max_running=max_running,
        kv_use=0.0,
        foreign=0,
        at_s=0.0,
        trust_s=1.0,
    )


@pytest.mark.parametrize(
    ("engines", "mean_tokens", "slots", "bound"),
    [
        ([(None, 192), (None, 192)], 100.0, 256, "256 requests at once on 2 engines by rollout.max_running_requests"),
        ([(None, 64)], None, 64, "64 requests at once on 1 engine by rollout.max_open_requests"),
        ([(load(48, 10_000), 192)], None, 48, "48 requests at once on 1 engine by the engine's own limit"),
        ([(load(48, 10_000), 192)], 100.0, 48, "48 requests at once on 1 engine by the engine's own limit"),
        ([(load(48, 3_000), 192)], 100.0, 30, "30 requests at once on 1 engine by KV memory of 3000 tokens at a mean of 100"),
        ([(load(48, 50), 192)], 100.0, 1, "1 requests at once on 1 engine by KV memory of 50 tokens at a mean of 100"),
        ([(load(400, 90_000), 192)], 100.0, 192, "192 requests at once on 1 engine by rollout.max_open_requests"),
        ([], None, 0, "no engine is open"),
    ],
)
def test_what_engines_run_at_once_is_what_they_report_and_the_configuration_stands_in_for_a_report(engines, mean_tokens, slots, bound):
    room = kv_room(engines, max_running=128, mean_tokens=mean_tokens)
    assert (room.slots, room.bound) == (slots, bound)


def test_engines_with_different_bounds_are_told_apart():
    room = kv_room([(load(48, 10_000), 192), (load(48, 3_000), 192), (None, 192)], max_running=128, mean_tokens=100.0)
    assert room.slots == 48 + 30 + 128 and room.bound.count(" requests at once on 1 engine by ") == 3
