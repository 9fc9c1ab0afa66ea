"""The plan of a run: its own roles and the user's, on the hosts there are."""

from __future__ import annotations

from collections.abc import Mapping

from driver import roles
from driver.hosts import this_host
from driver.planner import Placement, Plan, make_plan
from driver.settings import RunConfig


def plan_of(
    config: RunConfig,
    counts: Mapping[str, int] | None = None,
    standing: Mapping[str, Placement] | None = None,
    others: Mapping[str, Plan] | None = None,
) -> Plan:
    """With so many instances of each role that can be scaled, else as configured; what stands, stays where it is, and what the runs beside
    it hold, is theirs. PlanError."""
    host = this_host()
    numbers = roles.configured(config) | dict(counts or {})
    return make_plan([*roles.builtin(config, numbers, len(host.devices)), *roles.own(config, numbers)], [host], standing, others)
