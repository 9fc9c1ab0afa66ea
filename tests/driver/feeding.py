"""A run reduced to what feeds it: real ledger, database, feed and store, with rows named by their prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from driver.config import load_config
from driver.core import Core
from driver.datasets import DataRow, read_rows
from driver.dispatch import Dispatch
from driver.events import MixChanged, RowSkipped, SampleRegistered, TrajectoryReady
from driver.feed import Feed
from driver.ledger_db import LedgerDB
from driver.ledger_state import traj_uid_of
from driver.mix import Change
from driver.scoring import Scoring
from driver.watermark import Watermark
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from store import EmbeddedStore
from tests.driver.conftest import leaf

ROOT = Path(__file__).parents[2]
BATCH_SAMPLES = 4


def rows(*names: str) -> Iterator[list[DataRow]]:
    return read_rows("".join(json.dumps({"prompt": name, "answer": ""}) + "\n" for name in names).encode())


class Fed:
    """`register` is what dispatch does, without engines."""

    def __init__(self, path: Path, **more: object) -> None:
        self.path = path
        self.more = {"seed": 1, "shuffle": True, "passes": 1} | more
        self.open()

    def open(self) -> None:
        self.db = LedgerDB(self.path)
        self.ledger = self.db.load()
        self.feed = Feed(self.db, **self.more)  # type: ignore[arg-type]

    def restart(self) -> None:
        self.db.close()
        self.open()

    async def add(self, *names: str, to: str | None = None, key: str | None = None, share: Change | None = None) -> str:
        def also(made: str):
            return self.ledger.apply(MixChanged(changes={made: share}, by="submit", time=1.0)) if share else []

        dataset_id, _, _ = await self.feed.add(to, "d", rows(*names), key, also=also)
        return dataset_id

    def mix(self, **weights: float) -> None:
        changes = {name: Change(weight) for name, weight in weights.items()}
        self.db.write(self.ledger.apply(MixChanged(changes=changes, by="request", time=1.0)))

    def register(self, at_most: int = 1000) -> list[str]:
        """The prompts of the next samples, as many as there are."""
        seen: list[str] = []
        while len(seen) < at_most and (place := self.feed.next_place(self.ledger.cursor)) is not None:
            if self.ledger.solved.get((place.segment, place.row_index), -2) == place.pass_index - 1:
                self.db.write(self.ledger.apply(self._skipped(place)))
                continue
            event = SampleRegistered(
                uid=self.ledger.next_uid,
                segment=place.segment,
                row_index=place.row_index,
                pass_index=place.pass_index,
                position=place.position,
                version_tag=0,
                deadline_batch=1 << 40,
                n=1,
                time=1.0,
                dataset_id=place.dataset_id,
                credits=dict(place.credits),
            )
            self.db.write(self.ledger.apply(event))
            seen.append(self.feed.row(place.segment, place.row_index).prompt or "")
        return seen

    @staticmethod
    def _skipped(place) -> RowSkipped:
        facts = {name: getattr(place, name) for name in ("dataset_id", "segment", "row_index", "pass_index", "position")}
        return RowSkipped(**facts, time=1.0)

    @property
    def exhausted(self) -> bool:
        return self.feed.exhausted(self.ledger.cursor)


class Lab:
    """A run's dispatch over a real ledger, database and store, with answers made by hand in place of engines and scorers."""

    def __init__(self, directory: Path, *settings: str) -> None:
        flags = [f"batch.samples={BATCH_SAMPLES}", "rollout.n=2", "rollout.min_group=2", *settings]
        self.config = load_config(ROOT / "examples/sort_digits/config.yaml", flags)
        self.db = LedgerDB(directory / "ledger.sqlite")
        self.store = EmbeddedStore(directory / "store", 1 << 20)
        feed = Feed(self.db, seed=0, shuffle=False, passes=None)
        self.core = Core(self.config, self.db.load(), self.db, feed, self.store)
        self.discarded: list[tuple[str, str]] = []
        scoring = Scoring(self.core, wait_s=0.0, deadline_s=1.0)
        self.dispatch = Dispatch(
            self.core,
            EnginePool(),
            SimpleNamespace(verified=lambda text: True),  # type: ignore[arg-type]
            scoring,
            TokenizerView(self.config.model.path),
            Watermark(BATCH_SAMPLES * 2),
            on_discarded=lambda sample, trajectory: self.discarded.append((trajectory.traj_uid, trajectory.reason or "")),
        )
        self.paused = 0

        def pause() -> None:
            self.paused += 1
            self.core.paused = True

        self.dispatch.judge.pause = pause

    async def with_data(self, count: int = 3) -> Lab:
        dataset_id, _, _ = await self.core.feed.add(None, "d", rows(*[f"p{i}" for i in range(count)]), None)
        await self.core.feed.close(dataset_id)
        return self

    def sample(self, *rewards: float) -> int:
        """One sample registered, answered with these rewards and settled as dispatch does it; its uid."""
        ledger = self.core.ledger
        assert self.dispatch.next_row.look()
        place = self.core.feed.next_place(ledger.cursor)
        assert place is not None
        uid, bound = ledger.next_uid, self.config.staleness.bound
        facts = {name: getattr(place, name) for name in ("segment", "row_index", "pass_index", "position", "dataset_id")}
        deadline = ledger.serving_version + bound + 100
        self.core.apply(
            SampleRegistered(uid=uid, version_tag=0, deadline_batch=deadline, n=2, time=1.0, credits=dict(place.credits), **facts)
        )
        sample = ledger.samples[uid]
        self.dispatch._row(sample)
        for index, reward in enumerate(rewards):
            name = traj_uid_of(uid, index)
            made = self.store.put(f"run/{name}/rollout", {"input_ids": np.arange(3, dtype=np.int32)})
            row = leaf(name, reward)
            row = type(row)(row.row_id, made.to_wire(), made.to_wire(), row.length, row.response_tokens, reward, reward == 1.0)
            self.core.apply(TrajectoryReady(traj_uid=name, leaves=(row,), reward=reward, finish_reason="stop", time=2.0))
            self.dispatch.settle(sample)
        return uid

    def close(self) -> None:
        self.db.close()
        self.store.remove()
