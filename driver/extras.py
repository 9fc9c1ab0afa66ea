"""Routed experts of the answers, by key: asked for, taken by the rows that they fit, freed when no row did.

    a request ──key──▶ engine's side ──put──▶ store          the driver sees keys only (B1)
       answer ──reference──▶ here ──the leaf of just these tokens──▶ its row's refs ──▶ trainer

A request's routes speak of its whole prompt and answer, so they fit one leaf: that whose tokens they are. A later turn's, or a later
part's, speak of the earlier tokens too and replace them. A leaf that weights of two versions sampled gets none (`trainer.routes`): a
request that was continued or retracted was routed again, under the weights of that moment.

The keys are chosen here, so everything that was asked for can be freed, answered or not. An engine that lost its asker may still put
afterwards: such keys are freed once more a while later.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollout.slot import EngineSlot
from store import Ref

if TYPE_CHECKING:
    from driver.core import Core
    from driver.ledger_state import Trajectory
    from rollout.tree import Leaf

log = logging.getLogger("headrace.extras")
AGAIN_S = 60.0
ONE_HOST = "tmpfs:"
SIDECAR = "let its requests pass through the sidecar (python -m rollout.sglang.sidecar, on its host)"


@dataclass
class _Asked:
    """Of one trajectory: keys that are asked for and not answered, and the references by the tokens that they speak of."""

    open: set[str] = field(default_factory=set)
    found: dict[tuple[int, ...], tuple[Ref, int]] = field(default_factory=dict)
    """with the store's epoch (`driver.store_gate`): what came before the last loss is lost"""


class Extras:
    """`wanted`: some row is to be trained with its routing."""

    def __init__(self, core: Core, *, wanted: bool, through_router: bool = False) -> None:
        self._core = core
        self._wanted = wanted
        self._router = through_router
        self._asked: dict[str, _Asked] = {}  # by trajectory
        self._late: deque[tuple[float, Ref]] = deque()
        self.rows = 0  # that have theirs
        self.rows_without = 0
        if wanted and through_router:
            core.alarm("extras", "rows have no routed experts: a router does not say which engine answers; set rollout.engine_urls instead")

    def ask(self, traj_uid: str, rid: str, slot: EngineSlot) -> dict[str, Any] | None:
        """What a request says of them; None where they are not wanted, or this engine cannot give them (which is said)."""
        if not self._wanted or self._router or not self._usable(slot):
            return None
        key = f"{self._core.run_id}/extras/{rid}"
        self._asked.setdefault(traj_uid, _Asked()).open.add(key)
        return {"location": self._core.store.location, "key": key}

    def _usable(self, slot: EngineSlot) -> bool:
        reason = None
        if slot.capabilities is not None and not slot.capabilities.routed_experts:
            reason = "it was started without --enable-return-routed-experts"
        elif slot.capabilities is not None and not slot.capabilities.stores_extras:
            reason = f"it cannot put them into the store: {SIDECAR}"
        elif self._core.store.location.startswith(ONE_HOST) and not slot.client.on_this_host:
            reason = "this run's store is of one host, and it is on another: take store mooncake"
        name = f"extras {slot.engine_id}"
        self._core.alarm(name, reason and f"rows of engine {slot.engine_id} have no routed experts: {reason}")
        return reason is None

    def lost(self, traj_uid: str, place: dict[str, Any] | None) -> None:
        """This request gave no whole answer to its turn."""
        asked = self._asked.get(traj_uid)
        if place is not None and asked is not None and place["key"] in asked.open:
            asked.open.remove(place["key"])
            self._free_late([place["key"]])

    def came(self, traj_uid: str, tokens: Sequence[int], meta: dict[str, Any]) -> None:
        """The whole answer to a turn: prompt and answer are `tokens`. What speaks only of the first of them goes."""
        asked = self._asked.get(traj_uid)
        said = meta.get("routed_experts")
        if asked is None or not isinstance(said, dict):
            return
        known, where = tuple(tokens), self._core.store.location
        if "error" in said or said["location"] != where or said["key"] not in asked.open or said["shape"][0] != len(known) - 1:
            log.warning("the routed experts of %s are not used: %s", traj_uid, said.get("error", said))
            return
        asked.open.remove(said["key"])
        earlier = [tokens for tokens in asked.found if known[: len(tokens)] == tokens]
        self._core.gate.free([asked.found.pop(tokens)[0] for tokens in earlier])
        asked.found[known] = Ref.from_wire(said), self._core.gate.epoch

    def of(self, traj_uid: str, leaf: Leaf) -> dict[str, Any] | None:
        """The reference for a row of these tokens. It stays ours until `forget` sees it in the ledger."""
        asked = self._asked.get(traj_uid)
        if asked is None:
            return None
        versions = {text.rpartition("/")[0] for turn in leaf.turns for text, _, _ in turn.spans}
        ref, epoch = asked.found.get(tuple(leaf.token_ids), (None, 0)) if len(versions) == 1 else (None, 0)
        return None if ref is None or epoch != self._core.gate.epoch else ref.to_wire()

    def forget(self, trajectory: Trajectory) -> None:
        """It is in flight no more: what its rows did not take goes, and so does what came late elsewhere."""
        asked = self._asked.pop(trajectory.traj_uid, None)
        if asked is not None:
            taken = {leaf.extras["key"] for leaf in trajectory.leaves if leaf.extras is not None}
            self.rows += len(taken)
            self.rows_without += len(trajectory.leaves) - len(taken)
            self._core.gate.free([ref for ref, _ in asked.found.values() if ref.key not in taken])
            self._free_late(asked.open)
        now = time.monotonic()
        late = []
        while self._late and self._late[0][0] <= now:
            late.append(self._late.popleft()[1])
        self._core.gate.free(late)

    def _free_late(self, keys: Iterable[str]) -> None:
        refs = [Ref(key, 0, self._core.store.location) for key in keys]
        self._late.extend((time.monotonic() + AGAIN_S, ref) for ref in refs)
        self._core.gate.free(refs)

    def gauges(self) -> dict[str, float]:
        return {"headrace_extras_rows_count": self.rows, "headrace_extras_rows_without_count": self.rows_without} if self._wanted else {}
