"""A5 for a server that fuses its tensors: engines are compared with each other, and a push without effect is seen."""

from __future__ import annotations

import pytest

from driver.agreement import Agreements, EachTensor, WholeEngine
from driver.snapshot import PushRefused, Snapshot
from rollout.capabilities import capabilities_of


def snapshot(version: int, weights: str) -> Snapshot:
    return Snapshot("run", 0, version, (), {"a": weights}, (), ())


def sums(held: str | None) -> dict:
    return {"success": True, "per_engine_checksum": held}


def test_engines_with_the_same_weights_must_agree():
    agreement = WholeEngine()
    agreement.check(snapshot(1, "w1"), sums("e1"))
    agreement.check(snapshot(1, "w1"), sums("e2"))  # nobody has passed yet
    agreement.passed(snapshot(1, "w1"), sums("e1"))
    with pytest.raises(PushRefused, match="sum to e2, those of the engines with the same version to e1"):
        agreement.passed(snapshot(1, "w1"), sums("e2"))
    agreement.check(snapshot(2, "w1"), sums("e1"))  # a step that was skipped: another version, the same weights


def test_E3_a_sum_that_stood_for_other_weights_is_a_push_without_effect():
    agreement = WholeEngine()
    agreement.passed(snapshot(1, "w1"), sums("e1"))
    with pytest.raises(PushRefused, match="still holds other weights"):
        agreement.check(snapshot(2, "w2"), sums("e1"))
    agreement.passed(snapshot(2, "w2"), sums("e2"))
    agreement.passed(snapshot(1, "w1"), sums("e1"))  # a group that came back makes an old version again


@pytest.mark.parametrize("reply", [{}, sums(None), sums("")])
def test_an_engine_without_a_sum_is_not_believed(reply):
    with pytest.raises(PushRefused, match="no checksum"):
        WholeEngine().check(snapshot(1, "w1"), reply)


def test_the_kind_of_engine_decides():
    agreements, embedded = Agreements(), capabilities_of({"version": "0.5.23", "embedded": True}, {})
    real, wide = (capabilities_of({"version": "0.5.23", "tp_size": size}, {}) for size in (1, 2))
    assert isinstance(agreements.of(embedded), EachTensor) and isinstance(agreements.of(real), WholeEngine)
    assert agreements.of(real) is agreements.of(real) is not agreements.of(wide), "sums of two layouts are not comparable"
