"""Every engine of a run, also those that serve nothing: in which state each is, why, and since when.

    starting     its process starts, or it was not asked or not pushed to yet       open, shut    it serves; a push shuts it for a moment
    away         somebody else's: it does not answer, or was started anew           quarantined   left alone for the reason given
    gone         the run's own: its process has died and is started anew

An engine has a slot in the pool from its first answer on; before that, and after it is lost, the launcher knows of the run's own and
`driver/outside.py` of the others. Nothing here changes state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from driver.run import Run
    from rollout.slot import EngineSlot


@dataclass(frozen=True)
class Unused:
    """An engine that no request can be sent to. `limit_s`: how long this may last, where that is bounded."""

    engine_id: str
    url: str
    incarnation: int
    state: str
    reason: str
    seconds: float
    limit_s: float | None = None


def engines(run: Run) -> list[dict[str, Any]]:
    """Those with a slot, then those without."""
    elsewhere = run.processes.outside.engines
    slots = [_of_slot(run, slot) | {"elsewhere": slot.engine_id in elsewhere} for slot in run.pool.slots.values()]
    return slots + [_of_unused(one) | {"elsewhere": one.engine_id in elsewhere} for one in _without_slot(run)]


def out_of_use(run: Run) -> list[str]:
    """A sentence for each engine, or several in the same state, that should serve and does not."""
    if run.state in ("finished", "failed", "stopped"):
        return []
    quarantined = [
        Unused(slot.engine_id, slot.url, slot.incarnation, slot.state, slot.reason, slot.state_s())
        for slot in run.pool.slots.values()
        if slot.state == "quarantined"
    ]
    together: dict[tuple[str, str, float | None], list[Unused]] = {}
    for one in [*quarantined, *_without_slot(run)]:
        together.setdefault((one.state, one.reason, one.limit_s), []).append(one)
    return [_sentence(those) for those in together.values()]


def alarms(run: Run) -> list[str]:
    """Engines of somebody else's that stay out of use until a person does something."""
    outside = run.processes.outside.engines.values()
    return [f"engine {one.engine_id}: {one.reason}" for one in outside if one.state == "quarantined" and one.engine_id in run.pool.absent]


def absent(run: Run) -> dict[str, str]:
    """For `driver/why.py`: what is to be said of each engine that has no slot."""
    return {one.engine_id: f"is {_lasting(one, one.seconds)}" for one in _without_slot(run)}


def _lasting(one: Unused, seconds: float) -> str:
    lasts = f"{seconds:.0f} s" if one.limit_s is None else f"({seconds:.0f} s of {one.limit_s:.0f})"
    return f"{one.state} {lasts}" + (f": {one.reason}" if one.reason else "")


def _sentence(those: list[Unused]) -> str:
    first, several = those[0], len(those) > 1
    names = ", ".join(one.engine_id for one in those)
    named = names if first.engine_id.startswith("engine-") else f"engine{'s' if several else ''} {names}"
    return f"{named} {'are' if several else 'is'} {_lasting(first, max(one.seconds for one in those))}"


def _without_slot(run: Run) -> Iterator[Unused]:
    slots = run.pool.slots
    yield from (one for one in run.processes.unused_engines() if one.engine_id not in slots)
    yield from (one for one in run.processes.outside.unused() if one.engine_id not in slots)


def _of_slot(run: Run, slot: EngineSlot) -> dict[str, Any]:
    return {
        "engine_id": slot.engine_id,
        "url": slot.url,
        "incarnation": slot.incarnation,
        "state": slot.state,
        "state_s": round(slot.state_s(), 3),
        "reason": slot.reason,
        "version": None if slot.verified is None else str(slot.verified),
        "open_requests": slot.open_requests,
        "capacity": slot.capacity,
        "served_requests": slot.served_requests,
        "preferred_share": slot.preferred_requests / slot.preferring_requests if slot.preferring_requests else None,
        "silent_s": round(slot.silent_s(), 3),
        "first_token_age_s": slot.first_token_age_s(),
        "load": _load(slot),
        "busy_s": round(slot.busy_s(), 3),
        "capabilities": None if slot.capabilities is None else asdict(slot.capabilities),
        "push_skipped": list(run.pusher.skipped.get(slot.engine_id, ())),
    }


def _of_unused(one: Unused) -> dict[str, Any]:
    """With the same keys."""
    return {
        "engine_id": one.engine_id,
        "url": one.url,
        "incarnation": one.incarnation,
        "state": one.state,
        "state_s": round(one.seconds, 3),
        "reason": one.reason,
        "version": None,
        "open_requests": 0,
        "capacity": 0,
        "served_requests": 0,
        "preferred_share": None,
        "silent_s": 0.0,
        "first_token_age_s": None,
        "load": None,
        "busy_s": 0.0,
        "capabilities": None,
        "push_skipped": [],
    }


def _load(slot: EngineSlot) -> dict[str, Any] | None:
    """What the engine last said of itself, and how old that is; `foreign` are the requests that are not ours."""
    load, age_s = slot.load, slot.load_age_s()
    if load is None or age_s is None:
        return None
    reported = {"running": load.running, "waiting": load.waiting, "foreign": load.foreign, "kv_use": load.kv_use}
    return reported | {"max_running": load.max_running, "max_total_tokens": load.max_total_tokens, "age_s": round(age_s, 3)}
