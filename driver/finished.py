"""What is kept of a trajectory when it ends: its text, tokens, mask, spans and lineage, in the archive, and then its rows are freed.

Trained ones are durable in the archive before the ledger says that they are finished; discarded ones follow within a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import orjson

from driver.archive import Archive, FinishedTrajectory
from driver.core import Core
from driver.datasets import DataRow
from driver.ledger_state import Sample, Trajectory, traj_uid_of
from rollout.answer import Generation
from rollout.tokens import TokenizerView
from store import Gone, Ref, Unavailable, open_ref
from store.rows import row_of

AGAIN_S = 0.2


class Finished:
    """Owns the archive of a run."""

    def __init__(self, core: Core, tokenizer: TokenizerView, archive: Archive) -> None:
        self.archive = archive
        self._core = core
        self._tokenizer = tokenizer

    async def committed(self, samples: list[Sample], outcome: str, reason: str | None) -> None:
        """Text, tokens and lineage of trajectories about to be finished, durable before the ledger says so."""
        done = [(s, s.in_state("consumed")) for s in samples]
        gate = self._core.gate
        while True:
            await gate.usable()
            try:
                return await asyncio.to_thread(self._write, done, outcome, reason)
            except Unavailable as error:
                if not gate.elsewhere:
                    raise
                gate.doubt(str(error))  # what was appended is appended again, and readers keep the last
                await asyncio.sleep(AGAIN_S)

    def _write(self, done: list[tuple[Sample, list[Trajectory]]], outcome: str, reason: str | None) -> None:
        for sample, trajectories in done:
            row = self._core.feed.row(sample.segment, sample.row_index)
            for trajectory in trajectories:
                self.archive.append(self._row(sample, row, trajectory, outcome, reason))
        self.archive.flush()

    def discarded(self, sample: Sample, trajectory: Trajectory) -> None:
        """To be written with the next flush: see `Archive.due`."""
        row, reason = self._core.feed.row(sample.segment, sample.row_index), trajectory.reason
        self._core.gate.behind(lambda: self.archive.append(self._row(sample, row, trajectory, "discarded", reason)))

    def _row(self, sample: Sample, row: DataRow, trajectory: Trajectory, outcome: str, reason: str | None) -> FinishedTrajectory:
        leaf = trajectory.leaves[0] if trajectory.leaves else None
        ids: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        spans: list[list[int]] = []
        if leaf is not None:
            try:
                with open_ref(Ref.from_wire(leaf.rollout), store=self._core.store) as lease:
                    columns = row_of(lease, leaf.row)
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

    def evaluated(
        self,
        row: DataRow,
        *,
        uid: int,
        index: int,
        version: int,
        prompt_ids: Sequence[int],
        made: Generation | None,
        reward: float | None,
        is_correct: bool | None,
        reason: str | None,
        attempts: int,
        began: float,
    ) -> None:
        """A trajectory of an evaluation, scored or failed; to be written with the next flush."""
        output = list(made.output_ids) if made is not None else []
        spans = [] if made is None else [(*map(int, text.split("/")[1:3]), start, end) for text, start, end in made.spans]
        before = len(prompt_ids) - 1 if output else 0  # positions of the prompt that come before the answer's
        self.archive.append(
            FinishedTrajectory(
                traj_uid=traj_uid_of(uid, index),
                uid=uid,
                run_id=self._core.run_id,
                dataset_id="evaluation",
                row_index=row.row_index,
                outcome="discarded" if reward is None else "evaluated",
                reason=reason,
                version_tag=version,
                reward=reward,
                is_correct=is_correct,
                prompt=row.prompt if row.prompt is not None else orjson.dumps(row.messages).decode(),
                response=self._tokenizer.decode(output),
                input_ids=[*prompt_ids, *output] if output else [],
                response_mask=[0] * before + [1] * len(output),
                rollout_log_probs=[0.0] * before + (list(made.log_probs) if made is not None else []),
                version_spans=[[epoch, number, before + start, before + end] for epoch, number, start, end in spans],
                attempts=attempts,
                started_at=began,
                finished_at=time.time(),
            )
        )

    def evaluation_cut(self, rows: Sequence[DataRow], samples: list[Sample], reason: str) -> None:
        """Of an evaluation that did not come to its end; written at once. All of it may be there as evaluated, and the last line counts."""
        for sample in samples:
            if sample.row_index >= len(rows):
                continue  # the held-out file is another one now
            for trajectory in sample.trajectories:
                self.evaluated(
                    rows[sample.row_index],
                    uid=sample.uid,
                    index=trajectory.index,
                    version=sample.version_tag,
                    prompt_ids=(),
                    made=None,
                    reward=None,
                    is_correct=None,
                    reason=reason,
                    attempts=1,
                    began=trajectory.started_at,
                )
        self.archive.flush()

    def texts(self, trajectory: Trajectory) -> list[str]:
        """The responses of a live trajectory's leaves, decoded from the store."""
        out = []
        for leaf in trajectory.leaves:
            with open_ref(Ref.from_wire(leaf.rollout), store=self._core.store) as lease:
                columns = row_of(lease, leaf.row)
                ids, mask = columns["input_ids"][1:], columns["response_mask"]
                out.append(self._tokenizer.decode(ids[mask == 1].tolist()))
        return out

    def free(self, trajectories: list[Trajectory]) -> None:
        """Their rows go."""
        self._core.gate.free(ref for t in trajectories for leaf in t.leaves for ref in leaf.stored)
