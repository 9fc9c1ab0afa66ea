"""What is kept of a trajectory when it ends: its text, tokens, mask, spans and lineage, in the archive, and then its rows are freed.

Trained ones are durable in the archive before the ledger says that they are finished; discarded ones follow within a minute.
"""

from __future__ import annotations

import asyncio
import time

import orjson

from driver.archive import Archive, FinishedTrajectory
from driver.core import Core
from driver.ledger import Sample, Trajectory
from rollout.tokens import TokenizerView
from store import Gone, Ref


class Finished:
    """Owns the archive of a run."""

    def __init__(self, core: Core, tokenizer: TokenizerView, archive: Archive) -> None:
        self.archive = archive
        self._core = core
        self._tokenizer = tokenizer

    async def committed(self, samples: list[Sample], outcome: str, reason: str | None) -> None:
        """Text, tokens and lineage of trajectories about to be finished, durable before the ledger says so."""
        done = [(s, t) for s in samples for t in s.in_state("consumed")]
        await asyncio.to_thread(self._write, done, outcome, reason)

    def _write(self, done: list[tuple[Sample, Trajectory]], outcome: str, reason: str | None) -> None:
        for sample, trajectory in done:
            self.archive.append(self._row(sample, trajectory, outcome, reason))
        self.archive.flush()

    def discarded(self, sample: Sample, trajectory: Trajectory) -> None:
        """To be written with the next flush: see `Archive.due`."""
        self.archive.append(self._row(sample, trajectory, "discarded", trajectory.reason))

    def _row(self, sample: Sample, trajectory: Trajectory, outcome: str, reason: str | None) -> FinishedTrajectory:
        row = self._core.feed.row(sample.segment, sample.row_index)
        leaf = trajectory.leaves[0] if trajectory.leaves else None
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        spans: list[list[int]] = []
        if leaf is not None:
            try:
                with self._core.store.open(Ref.from_wire(leaf.rollout)) as columns:
                    ids, mask = columns["input_ids"].tolist(), columns["response_mask"].tolist()
                    log_probs, spans = columns["rollout_log_probs"].tolist(), columns["version_spans"].tolist()
            except Gone:
                reason = f"{reason or ''} (its rows were gone)".strip()
        response = [token for token, trained in zip(ids[1:], mask, strict=True) if trained]
        prompt = row.prompt if row.prompt is not None else orjson.dumps(row.messages).decode()
        return FinishedTrajectory(
            traj_uid=trajectory.traj_uid,
            uid=sample.uid,
            run_id=self._core.run_id,
            dataset_id=self._core.feed.dataset_of(sample.segment),
            row_index=sample.row_index,
            outcome=outcome,
            reason=reason,
            version_tag=sample.version_tag,
            batch_id=sample.batch_id,
            reward=trajectory.reward,
            is_correct=leaf.is_correct if leaf else None,
            prompt=prompt,
            response=self._tokenizer.decode(response),
            input_ids=ids,
            response_mask=mask,
            rollout_log_probs=log_probs,
            version_spans=spans,
            attempts=1 + trajectory.infrastructure_attempts + trajectory.data_attempts,
            started_at=trajectory.started_at,
            finished_at=time.time(),
            parts="{}",
        )

    def texts(self, trajectory: Trajectory) -> list[str]:
        """The responses of a live trajectory's leaves, decoded from the store."""
        out = []
        for leaf in trajectory.leaves:
            with self._core.store.open(Ref.from_wire(leaf.rollout), ["input_ids", "response_mask"]) as columns:
                ids, mask = columns["input_ids"][1:], columns["response_mask"]
                out.append(self._tokenizer.decode(ids[mask == 1].tolist()))
        return out

    def free(self, trajectories: list[Trajectory]) -> None:
        """Their rows go."""
        self._core.store.free(Ref.from_wire(ref) for t in trajectories for leaf in t.leaves for ref in (leaf.rollout, leaf.reward))
