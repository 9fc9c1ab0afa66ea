"""Routed experts by key: each row gets those of just its tokens, and whatever no row took is freed, however its request ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from driver import extras
from driver.extras import Extras
from driver.store_gate import StoreGate
from rollout.extras import Place, put
from rollout.tree import Leaf, Turn
from store import EmbeddedStore

V1, V2 = "run/0/1/3", "run/0/2/3"


class Alarms(dict[str, str]):
    def __call__(self, who: str, words: str | None) -> None:
        if words is None:
            self.pop(who, None)
        else:
            self[who] = words


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    made = EmbeddedStore(tmp_path / "store", 1 << 20)
    yield made
    made.remove()


@pytest.fixture
def core(store: EmbeddedStore) -> Any:
    return SimpleNamespace(run_id="run", store=store, gate=StoreGate(store), alarm=Alarms())


def slot(**changes: Any) -> Any:
    can = {"routed_experts": True, "stores_extras": True, "here": True} | changes
    capabilities = SimpleNamespace(routed_experts=can["routed_experts"], stores_extras=can["stores_extras"])
    return SimpleNamespace(engine_id="engine-0", capabilities=capabilities, client=SimpleNamespace(on_this_host=can["here"]))


def answered(place: Any, tokens: list[int]) -> dict[str, Any]:
    """What the engine's side does, and says in the answer to a request whose prompt and answer are `tokens`."""
    return {"routed_experts": orjson.loads(orjson.dumps(put(Place(**place), np.zeros((len(tokens) - 1, 2, 2), np.int32))))}


def leaf(*parts: tuple[list[int], str | None]) -> Leaf:
    """Turns of (tokens, the version that sampled them)."""
    turns = [
        Turn("any", tuple(ids), (-0.5,) * len(ids) if version else (), ((version, 0, len(ids)),) if version else (), version and "policy")
        for ids, version in parts
    ]
    return Leaf(0, tuple(turns), tuple(version is not None for _, version in parts))


def ended(*keys: str | None) -> Any:
    return SimpleNamespace(traj_uid="t", leaves=[SimpleNamespace(extras=key and {"key": key}) for key in keys])


def test_a_leaf_gets_the_routing_of_just_its_tokens_and_an_earlier_turns_goes(core: Any, store: EmbeddedStore) -> None:
    ours = Extras(core, wanted=True)
    first, second, other = (ours.ask("t", f"run.t.{turn}", slot()) for turn in range(3))
    assert first == {"location": store.location, "key": "run/extras/run.t.0"}
    ours.came("t", [1, 2, 3], answered(first, [1, 2, 3]))
    assert store.keys() == ["run/extras/run.t.0"]
    ours.came("t", [1, 2, 3, 4, 5], answered(second, [1, 2, 3, 4, 5]))
    assert store.keys() == ["run/extras/run.t.1"], "it speaks of the first turn's tokens too"
    ours.came("t", [1, 9, 6], answered(other, [1, 9, 6]))
    chain, rewritten = leaf(([1], None), ([2, 3], V1), ([4], None), ([5], V1)), leaf(([1], None), ([9, 6], V1))
    refs = [ours.of("t", one) for one in (chain, rewritten)]
    assert [ref and ref["key"] for ref in refs] == ["run/extras/run.t.1", "run/extras/run.t.2"]
    assert ours.of("t", leaf(([1], None), ([2, 3], V1))) is None and ours.of("another", chain) is None
    ours.forget(ended("run/extras/run.t.1", None))
    assert store.keys() == ["run/extras/run.t.1"], "the ledger has this one, the other row was discarded"
    assert ours.gauges() == {"headrace_extras_rows_count": 1, "headrace_extras_rows_without_count": 1}


def test_A5_a_leaf_that_two_versions_sampled_gets_none_and_the_object_goes(core: Any, store: EmbeddedStore) -> None:
    """It was routed again under the weights of the later one: the first tokens' routing is not that of their sampling."""
    ours = Extras(core, wanted=True)
    ours.came("t", [1, 2, 3, 4], answered(ours.ask("t", "r", slot()), [1, 2, 3, 4]))
    assert ours.of("t", leaf(([1], None), ([2], V1), ([3, 4], V2))) is None
    engines = leaf(([1], None), ([2], V1), ([3, 4], V1.replace("/3", "/4")))
    assert ours.of("t", engines) is not None, "the same weights on another engine are the same weights"
    ours.forget(ended())
    assert store.keys() == []


def test_what_a_lost_request_leaves_is_freed_though_its_engine_puts_later(core: Any, store: EmbeddedStore, monkeypatch: Any) -> None:
    monkeypatch.setattr(extras, "AGAIN_S", 0.0)
    ours = Extras(core, wanted=True)
    lost = ours.ask("t", "r0", slot())
    ours.lost("t", lost)
    answered(lost, [1, 2])
    assert len(store.keys()) == 1, "nobody is there to hear of it"
    again, cut_off = ours.ask("t", "r1", slot()), ours.ask("t", "r2", slot())
    answered(cut_off, [1, 2])
    ours.came("t", [1, 2], answered(again, [1, 2]))
    ours.forget(ended("run/extras/r1"))
    ours.forget(SimpleNamespace(traj_uid="u", leaves=()))
    assert store.keys() == ["run/extras/r1"]


def test_what_came_before_the_store_was_lost_is_no_rows_routing(core: Any) -> None:
    ours = Extras(core, wanted=True)
    ours.came("t", [1, 2], answered(ours.ask("t", "r", slot()), [1, 2]))
    assert ours.of("t", leaf(([1], None), ([2], V1))) is not None
    core.gate.lost()
    assert ours.of("t", leaf(([1], None), ([2], V1))) is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda said: {"error": "the store is full"},
        lambda said: said | {"key": "run/somebody/else"},
        lambda said: said | {"location": "tmpfs:/dev/shm/another"},
        lambda said: said | {"shape": [5, 2, 2]},
    ],
    ids=["not put", "another key", "another store", "other tokens"],
)
def test_an_answer_that_does_not_speak_of_what_was_asked_gives_no_routing_and_leaves_nothing(
    core: Any, store: EmbeddedStore, wrong: Any
) -> None:
    ours = Extras(core, wanted=True)
    said = answered(ours.ask("t", "r", slot()), [1, 2, 3])["routed_experts"]
    ours.came("t", [1, 2, 3], {"routed_experts": wrong(said)})
    assert ours.of("t", leaf(([1], None), ([2, 3], V1))) is None
    ours.forget(ended())
    assert store.keys() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"routed_experts": False}, "started without --enable-return-routed-experts"),
        ({"stores_extras": False}, "let its requests pass through the sidecar"),
        ({"here": False}, "store is of one host, and it is on another: take store mooncake"),
    ],
)
def test_an_engine_that_cannot_put_them_is_not_asked_and_it_is_said_with_the_remedy(
    core: Any, changes: dict[str, bool], words: str
) -> None:
    ours = Extras(core, wanted=True)
    assert ours.ask("t", "r", slot(**changes)) is None
    assert words in core.alarm["extras engine-0"]
    assert ours.ask("t", "r", slot()) is not None and not core.alarm, "it was replaced"


def test_nothing_is_asked_for_without_a_need_nor_through_a_router_which_is_said(core: Any) -> None:
    assert Extras(core, wanted=False).ask("t", "r", slot()) is None and not core.alarm
    assert Extras(core, wanted=False).gauges() == {}
    assert Extras(core, wanted=True, through_router=True).ask("t", "r", slot()) is None
    assert "a router does not say" in core.alarm["extras"]
