"""What one server can do, from what it says of itself: asked once, when an engine registers.

Flags come from /server_info. What no flag tells follows from the version, by reading the releases: pauses in three modes and a flush in a
retract are in 0.5.9, version spans came with 0.5.20, begin and end of an update with 0.5.21. A server that lacks what a run depends on is
refused here, in a sentence, and not by a 404 in the middle of its first push.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.answer import EngineError
from rollout.extras import STORED

PAUSES_SINCE = (0, 5, 9)
SPANS_SINCE = (0, 5, 20)
SESSIONS_SINCE = (0, 5, 21)
OLDEST = "0.5.21"
TRIED = "0.5.23"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`speculative` names the algorithm. `routed_experts` says that answers may carry them, `stores_extras` that it can put them into a
    store instead. `memory_saver`: a release frees memory.

    `device` is cpu or cuda.
    """

    version: str
    embedded: bool
    spans: bool
    sessions: bool
    pause_modes: tuple[str, ...]
    flush_under_retract: bool
    memory_saver: bool
    speculative: str | None
    expert_parallel: int
    routed_experts: bool
    stores_extras: bool
    tensor_parallel: int
    dp_size: int
    device: str
    generates: bool

    @property
    def lacks(self) -> list[str]:
        """Why a run cannot use this server, each with what to do; empty when it can."""
        checks = (
            (self.pause_modes != (), f"SGLang {self.version} is older than anything tried here; install {OLDEST} or newer"),
            (self.spans, f"SGLang {self.version} does not say which weights made which token; install {OLDEST} or newer"),
            (self.sessions, f"SGLang {self.version} has no /begin_weight_update and /end_weight_update; install {OLDEST} or newer"),
            (self.generates, "it does not generate whole answers (an embedding model, or half of a split server); give another one"),
            (self.dp_size == 1, f"it has dp_size {self.dp_size}, and takes no weights so; start one server a replica, each with dp_size 1"),
        )
        return [reason for holds, reason in checks if not holds]

    def demand_usable(self, url: str) -> None:
        """EngineError `configuration` when a run cannot use this server."""
        if self.lacks:
            raise EngineError("configuration", f"{url} cannot serve a run: {'; '.join(self.lacks)}")


def capabilities_of(server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> Capabilities:
    """EngineError `configuration` when the server does not say its version."""
    version = server_info.get("version")
    numbers = version_numbers(version)
    return Capabilities(
        version=str(version),
        embedded=bool(server_info.get("embedded", False)),
        spans=numbers >= SPANS_SINCE,
        sessions=numbers >= SESSIONS_SINCE,
        pause_modes=("abort", "retract", "in_place") if numbers >= PAUSES_SINCE else (),
        flush_under_retract=numbers >= PAUSES_SINCE,
        memory_saver=bool(server_info.get("enable_memory_saver", False)),
        speculative=server_info.get("speculative_algorithm"),
        expert_parallel=_size(server_info, "ep_size"),
        routed_experts=bool(server_info.get("enable_return_routed_experts", False)),
        stores_extras=bool(server_info.get(STORED, False)),
        tensor_parallel=_size(server_info, "tp_size"),
        dp_size=_size(server_info, "dp_size"),
        device=str(server_info.get("device") or "cpu"),
        generates=bool(model_info.get("is_generation", True)) and model_info.get("disaggregation_mode") in (None, "null"),
    )


def _size(server_info: Mapping[str, Any], name: str) -> int:
    value = server_info.get(name)
    if value is not None and type(value) is not int:
        raise EngineError(
            "configuration", f"the server says {name} is {value!r}, which is no number; check that the URL is that of an SGLang"
        )
    return value or 1


def version_numbers(version: Any) -> tuple[int, ...]:
    """The release of "0.5.23", "0.5.21.post1" or "0.5.24.dev3+gabc"."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version) if isinstance(version, str) else None
    if found is None:
        raise EngineError(
            "configuration",
            f"the server says its version is {version!r}; check that the URL is that of SGLang {OLDEST} or newer",
        )
    return tuple(int(number) for number in found.groups())
