"""The trainer's side of a run: assemble, train, snapshot, commit, and come back after a loss.

    ready samples ──choose──▶ BatchAssembled (durable) ──/v1/train──▶ BatchApplied ──/v1/snapshot──▶ push
                                                              every k batches: /v1/save ──▶ VersionCommitted ──▶ archive, free rows

The order is the promise. A plan is durable before the trainer sees it, so a batch that was applied can always be replayed from its
plan and its rows, which stay in the store until a durable checkpoint holds them. After a loss the trainer resumes the newest whole
checkpoint on disk, which may be newer than the ledger knows (a crash between save and commit), and gets the batches after it again,
in order, under a new epoch when weights that were already applied are made anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from driver.advantage import advantages
from driver.balance import PlanRow, Terms, plan
from driver.core import Busy, Core
from driver.events import BatchApplied, BatchAssembled, BatchUnmade, EpochBegan, VersionCommitted, named
from driver.holds import Holds
from driver.ledger_state import DISCARDED, TRAINED, Batch, Sample
from driver.snapshot import Snapshot
from driver.store_gate import moved
from driver.why import REPLAY, replaying
from store import INLINE, Gone, Ref, TensorForm, Unavailable, open_ref
from trainer.checkpoints import newest
from trainer.client import TrainerClient, TrainerLost, TrainerRefused
from trainer.wire import MiniBatch, TrainReport, WireRef
from trainer.wire import PlanRow as WireRow

log = logging.getLogger("headrace.training")
STORE_STATUS = (410, 507)  # the trainer's answers when it can not read a row, or not write its weights
STORE_TRIES = 10


class CheckpointMissing(RuntimeError):
    """What was committed is not on disk any more; nothing of it can be replayed. A sentence for the user."""


class Training:
    """Owns everything that is said to the trainer. `run()` is its loop; one command is in flight at a time."""

    def __init__(
        self,
        core: Core,
        http: httpx.AsyncClient,
        *,
        canary_ids: list[int],
        on_snapshot: Callable[[Snapshot], None],
        on_applied: Callable[[int, TrainReport], None],
        archive: Callable[[list[Sample], str, str | None], Awaitable[None]],
        on_running_again: Callable[[Sample], None],
        replace: Callable[[str], Awaitable[None]],
        holds: Holds,
        terms: Terms,
    ) -> None:
        self._core = core
        self._terms = terms
        self._http = http
        self._holds = holds
        self._canary_ids = canary_ids
        self._on_snapshot = on_snapshot
        self._on_applied = on_applied
        self._archive = archive
        self._on_running_again = on_running_again
        self._replace = replace
        self._bell = core.bell()
        self._client: TrainerClient | None = None
        self._incarnation: int | None = None
        self._lost = asyncio.Event()
        self._looked_at = 0.0
        self._recording: asyncio.Task[None] | None = None
        self._store_epoch = core.gate.epoch
        self._rows_in_doubt = False
        self._unpublished = False  # the newest version is in no store: its export failed, or was lost
        self._unread = 0  # times in a row that the trainer could not read or write the store though it is there
        self.busy = Busy()
        self.replayed = 0
        self._replay = range(0)  # batches that were assembled before the trainer came up last

    # ---- the trainer comes and goes ------------------------------------------------------------------------------------

    def attach(self, url: str, token: str | None) -> None:
        """A trainer process answers at this address; `run` brings it to the newest version before it trains."""
        self._client = TrainerClient(url, self._http, token)
        self._incarnation = None
        self._lost.set()
        self._bell.ring()

    def detach(self, reason: str) -> None:
        """The process is gone."""
        self._client = None
        self._core.waiting("trainer", f"the trainer is starting again: {reason.splitlines()[0]}", "starting")

    @property
    def ready(self) -> bool:
        return self._client is not None and not self._lost.is_set()

    # ---- the loop ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Consumes ready samples; waits for P of them, or for the trainer; unblocked by any change of the ledger. Ends when no
        batch can come any more (stop rule, input exhausted, drain)."""
        core = self._core
        self._lost.set()
        while not core.stopping:
            self._bell.clear()
            if self._recording is not None and self._recording.done():
                await self._recorded()
            if self._client is None:
                if "trainer" not in core.waits:
                    core.waiting("trainer", "the trainer process is starting", "starting")
                await self._bell.wait(5.0)
                continue
            if core.gate.reason is not None:
                core.waiting("trainer", f"the store is away: {core.gate.reason}", "store")
                await self._bell.wait(5.0)
                continue
            try:
                if self._lost.is_set() or await self._reborn():
                    await self._bring_up()
                await self._mend()
                if core.ledger.trained_version < core.ledger.next_batch:
                    await self._train(core.ledger.trained_version, again=True)  # assembled before a restart
                    continue
                if self._over():
                    await self._commit()
                    await self._recorded()
                    return
                began = time.monotonic()
                if self._assemble() is not None:
                    await core.db.durable()
                    await self._train(core.ledger.trained_version)
                    core.measured.training_s.observe(time.monotonic() - began)
                    continue
            except (TrainerLost, TrainerRefused) as error:
                if isinstance(error, TrainerRefused) and self._may_be_the_store(error):
                    continue
                if isinstance(error, TrainerRefused) and self._incarnation == await self._living_incarnation():
                    raise  # the group we brought up says no: that is no loss
                log.warning("trainer lost: %s", error)
                if isinstance(error.__cause__, httpx.ReadTimeout):
                    # A rank hangs while rank 0 still answers for its health: no heartbeat would find it.
                    await self._replace(f"no answer: {error}")
                core.waiting("trainer", f"the trainer was lost ({error}); its group is being restarted", "lost")
                self._lost.set()
                await self._bell.wait(0.2)
                continue
            except Unavailable as error:
                if not core.gate.elsewhere:
                    raise
                core.gate.doubt(str(error))
                continue
            await self._bell.wait(self._holds.again_s)

    async def _reborn(self) -> bool:
        """The group's incarnation has changed since we brought it up: ranks died while nothing was asked of them. Asked every 2 s."""
        if time.monotonic() - self._looked_at < 2.0:
            return False
        self._looked_at = time.monotonic()
        return (await self._trainer().health()).incarnation != self._incarnation

    def _trainer(self) -> TrainerClient:
        """The client; its process may have gone since the last await."""
        if self._client is None:
            raise TrainerLost("the trainer process is gone")
        return self._client

    async def _living_incarnation(self) -> int | None:
        """The group that answers now; None when none does."""
        try:
            return (await self._client.health()).incarnation if self._client is not None else None
        except (TrainerLost, TrainerRefused):
            return None

    def _over(self) -> bool:
        """No further batch will be made: the batches wanted are done, or the input and everything in flight have ended."""
        core = self._core
        ledger = core.ledger
        if core.ending is not None:
            return True
        if core.config.stop.batches is not None and ledger.next_batch >= core.config.stop.batches:
            return True
        no_more = core.draining is not None or core.feed.exhausted(ledger.cursor)
        return no_more and not ledger.live_by_deadline

    # ---- one batch -----------------------------------------------------------------------------------------------------

    def _assemble(self) -> int | None:
        """Take the oldest P ready samples, plan them, and record both. Returns the batch id, or None while it is held."""
        core, ledger = self._core, self._core.ledger
        batch_id = ledger.next_batch
        last = core.draining is not None or core.feed.exhausted(ledger.cursor)
        uids = self._holds.look(short_allowed=last)
        if uids is None:
            return None
        chosen = [ledger.samples[uid] for uid in uids]
        core.apply(BatchAssembled(batch_id=batch_id, uids=uids, plan=self._plan(batch_id, chosen, "ready"), time=time.time()))
        return batch_id

    def _plan(self, batch_id: int, samples: list[Sample], state: str) -> bytes:
        """The plan as it will be sent, but for epoch and rate. Without a critic rows of advantage 0 have no effect and stay out (N6)."""
        config = self._core.config
        rows: dict[str, WireRow] = {}
        to_plan: list[PlanRow] = []
        groups = {sample.uid: sample.in_state(state) for sample in samples}
        rewards = {uid: [t.reward for t in group if t.reward is not None] for uid, group in groups.items()}
        assert all(len(rewards[uid]) == len(group) for uid, group in groups.items())
        lengths = {uid: [sum(leaf.response_tokens for leaf in t.leaves) for t in group] for uid, group in groups.items()}
        made = advantages(rewards, config.trainer.loss.advantage, lengths)
        for uid, group in groups.items():
            for trajectory, advantage in zip(group, made[uid], strict=True):
                for leaf in trajectory.leaves:
                    if advantage != 0.0 or config.trainer.critic is not None:
                        rows[leaf.row_id] = WireRow(
                            row_id=leaf.row_id,
                            rollout=WireRef.model_validate(named(leaf.rollout)),
                            row=leaf.row,
                            extras=None if leaf.extras is None else WireRef.model_validate(leaf.extras),
                            advantage=advantage,
                            score=leaf.score,
                            sequence=trajectory.traj_uid,
                            length=leaf.length,
                        )
                        to_plan.append(PlanRow(leaf.row_id, uid, leaf.length, leaf.response_tokens))
        planned = plan(to_plan, self._terms, mini_batch_count=config.batch.mini_batches, seed=config.seed, batch_id=batch_id)
        wire = [MiniBatch(ranks=[[[rows[row_id] for row_id in micro] for micro in rank] for rank in mini]).model_dump() for mini in planned]
        return msgspec.json.encode(wire)

    def _sendable(self, batch: Batch, plan: bytes) -> list[MiniBatch]:
        """The plan with the rows that ride along, which the ledger keeps with their trajectories."""
        consumed = (t for uid in batch.uids for t in self._core.ledger.samples[uid].in_state("consumed"))
        riding = {leaf.row_id: leaf.rollout for t in consumed for leaf in t.leaves if leaf.rollout["location"] == INLINE}
        return decode_plan(plan, self._core.store.location, riding)

    async def _train(self, batch_id: int, *, again: bool = False) -> None:
        """Send one assembled batch, record that it was applied, publish its weights, commit when due."""
        core = self._core
        batch = core.ledger.batches[batch_id]
        mini_batches = self._sendable(batch, batch.plan)
        if any(len(mini.ranks) != core.config.trainer.dp for mini in mini_batches):
            # Planned for another number of ranks before a restart: the same rows, dealt out anew.
            mini_batches = self._sendable(batch, self._plan(batch_id, [core.ledger.samples[uid] for uid in batch.uids], "consumed"))
        trainer = core.config.trainer
        rate = trainer.learning_rate_at(batch_id, core.config.stop.batches)
        critic_rate = trainer.critic.learning_rate * rate / trainer.learning_rate if trainer.critic is not None else 0.0
        core.waiting("trainer", replaying(batch_id, self._replay, core.ledger.next_batch) if again else None, REPLAY)
        with self.busy.working():
            report = await self._trainer().train(
                batch_id, core.ledger.epoch, rate, mini_batches, trainer.step_deadline_s, critic_lr=critic_rate
            )
            core.apply(
                BatchApplied(
                    batch_id=batch_id,
                    epoch=core.ledger.epoch,
                    skipped=report.skipped,
                    report=report.model_dump_json().encode(),
                    time=time.time(),
                )
            )
            self._on_applied(batch_id, report)
            self._unread = 0
            await self._snapshot()
            if core.ledger.trained_version % core.config.checkpoint.every == 0:
                await self._commit()

    async def _snapshot(self) -> None:
        core, ledger = self._core, self._core.ledger
        self._unpublished = True
        reply = await self._trainer().snapshot(ledger.epoch, ledger.trained_version, core.config.push.bucket_bytes, self._canary_ids)
        self._unpublished = False
        # No token may name a version that a restart would make again under the same name.
        await core.db.durable()
        self._on_snapshot(
            Snapshot(
                core.run_id,
                ledger.epoch,
                ledger.trained_version,
                tuple(bucket.model_dump() for bucket in reply.buckets),
                {name: facts.sha256 for name, facts in reply.tensors.items()},
                tuple(reply.canary.input_ids),
                tuple(reply.canary.log_probs),
                {name: TensorForm(facts.dtype, tuple(facts.shape)) for name, facts in reply.tensors.items()},
            )
        )

    # ---- when the store was away -----------------------------------------------------------------------------------------

    def _may_be_the_store(self, refused: TrainerRefused) -> bool:
        """It could not read a row, or write its weights: nothing has changed there. Looked into, and tried again, some times."""
        gate = self._core.gate
        if not gate.elsewhere or refused.status not in STORE_STATUS:
            return False
        self._unread += 1
        if self._unread > STORE_TRIES:
            return False
        log.warning("the trainer and the store: %s", refused)
        gate.doubt(f"the trainer says {refused}")
        self._rows_in_doubt = True
        return True

    async def _mend(self) -> None:
        """After a loss of the store: what was applied is committed while the trainer has it, batches without their rows are made again, and
        the weights are exported anew."""
        core, epoch = self._core, self._core.gate.epoch
        if self._store_epoch != epoch or self._rows_in_doubt:
            if core.ledger.trained_version > core.ledger.committed_version:
                await self._commit()
            await self._unmake_lost_batches()
            self._unpublished |= self._store_epoch != epoch
            self._store_epoch, self._rows_in_doubt = epoch, False
        if self._unpublished:
            await self._snapshot()

    # ---- durable -------------------------------------------------------------------------------------------------------

    @property
    def checkpoint_directory(self) -> Path:
        return self._core.config.directory / "checkpoints"

    async def _commit(self) -> None:
        """Save a checkpoint of the trained version; recording that it holds everything up to it goes on beside the next step."""
        ledger = self._core.ledger
        await self._recorded()
        if ledger.trained_version == ledger.committed_version and ledger.checkpoint is not None:
            return
        saved = await self._trainer().save(str(self.checkpoint_directory), self._core.config.checkpoint.keep_last)
        await self._recorded()
        self._recording = asyncio.create_task(self._record_commit(saved.trained_version, saved.path), name="commit")

    async def _recorded(self) -> None:
        """Wait for the commit that is being recorded beside the training; its exception is raised here."""
        if self._recording is not None:
            await self._recording
            self._recording = None

    async def _record_commit(self, version: int, path: str) -> None:
        """Finish what the checkpoint holds: archive it, then record it, then free its rows.

        A crash in between archives twice (the reader keeps the last) or leaves rows that the next start frees; it loses nothing.
        """
        core, ledger = self._core, self._core.ledger
        done: list[Ref] = []
        for batch in [b for b in ledger.batches.values() if b.batch_id < version]:
            samples = [ledger.samples[uid] for uid in batch.uids]
            outcome, reason = (DISCARDED, f"step skipped: {batch.skipped}") if batch.skipped else (TRAINED, None)
            await self._archive(samples, outcome, reason)
            done += [ref for s in samples for t in s.in_state("consumed") for leaf in t.leaves for ref in leaf.stored]
        core.apply(VersionCommitted(version=version, checkpoint=path, time=time.time()))
        await core.db.durable()
        await core.gate.free_many(done)

    async def save_now(self) -> None:
        """On SIGTERM, once `run` has ended: hold what was applied in a checkpoint, so that nothing has to be replayed."""
        if self.ready:
            try:
                await self._commit()
                await self._recorded()
            except (TrainerLost, TrainerRefused) as error:
                log.warning("stopped without a last checkpoint: %s; the batches since are replayed", error)

    async def abandon(self) -> None:
        """At the end of the run, whatever it was: a commit still being recorded is left to the next start, which replays it."""
        if self._recording is not None:
            self._recording.cancel()
            await asyncio.wait([self._recording])

    # ---- after a loss --------------------------------------------------------------------------------------------------

    async def _bring_up(self) -> None:
        """Bring an empty trainer to the ledger's version: newest whole checkpoint, then the batches after it, in order."""
        core, ledger = self._core, self._core.ledger
        core.waiting("trainer", "the trainer loads its weights", "loading")
        store_epoch = core.gate.epoch
        incarnation = self._incarnation = (await self._trainer().health()).incarnation
        checkpoint = newest(self.checkpoint_directory)
        held = checkpoint.trained_version if checkpoint is not None else 0
        if held < ledger.committed_version:
            raise CheckpointMissing(
                f"version {ledger.committed_version} was committed to {ledger.checkpoint}, which is missing or damaged; the newest whole "
                f"checkpoint in {self.checkpoint_directory} holds version {held}. Put the directory back, or begin a new run_id with "
                "model.path at an older checkpoint's hf folder"
            )
        with self.busy.working():
            if checkpoint is None:
                version = (await self._trainer().load()).trained_version
            else:
                version = (await self._trainer().resume(str(checkpoint.path))).trained_version
        log.info("trainer %d holds version %d; the ledger is at %d", incarnation, version, ledger.trained_version)
        await self._reconcile(version, str(checkpoint.path) if checkpoint else None)
        self._lost.clear()
        self._replay = range(ledger.trained_version, ledger.next_batch)
        if self._replay:
            log.info("replaying batches %d to %d", self._replay[0], self._replay[-1])
            self.replayed += len(self._replay)
        self._store_epoch, self._rows_in_doubt = store_epoch, False  # what is missing was looked at since
        await self._snapshot()

    async def _reconcile(self, version: int, path: str | None) -> None:
        core, ledger = self._core, self._core.ledger
        while ledger.trained_version < version:
            # Trained and saved, but the driver died before it wrote so: the checkpoint is the truth.
            batch_id = ledger.trained_version
            if batch_id not in ledger.batches:
                raise CheckpointMissing(
                    f"the checkpoint {path} holds version {version}, but the ledger knows no batch {batch_id}: it is an older copy, or its "
                    "newest part is damaged. Put the ledger of this checkpoint back, or begin a new run_id with model.path at its hf folder"
                )
            skipped = skipped_reason(core.config.directory / "trained_rows.jsonl", batch_id)
            core.apply(BatchApplied(batch_id=batch_id, epoch=ledger.epoch, skipped=skipped, report=b"{}", time=time.time()))
        await self._recorded()
        if path is not None and version > ledger.committed_version:
            await self._record_commit(version, path)
        if version < ledger.trained_version:
            core.apply(EpochBegan(epoch=ledger.epoch + 1, version=version))
        await self._unmake_lost_batches()
        await core.db.durable()

    async def _unmake_lost_batches(self) -> None:
        """A batch with missing rows that is still to be trained, and every batch after it, can not be: its samples go back and are made
        again."""
        core, ledger = self._core, self._core.ledger
        missing: dict[int, frozenset[str]] = {}
        first: int | None = None
        for batch in sorted((b for b in ledger.batches.values() if b.batch_id >= ledger.trained_version), key=lambda b: b.batch_id):
            consumed = [t for uid in batch.uids for t in ledger.samples[uid].in_state("consumed")]
            lost = await core.gate.ask(lambda: frozenset(t.traj_uid for t in consumed if not rows_present(core, t.leaves)))  # noqa: B023
            missing[batch.batch_id] = lost
            if lost and first is None:
                first = batch.batch_id
        if first is None:
            return
        for batch_id in sorted((b for b in missing if b >= first), reverse=True):
            log.warning("batch %d is made again: %d of its rows are gone", batch_id, len(missing[batch_id]))
            uids = ledger.batches[batch_id].uids
            core.apply(BatchUnmade(batch_id=batch_id, lost=missing[batch_id]))
            for uid in uids:
                self._on_running_again(ledger.samples[uid])


def decode_plan(plan: bytes, location: str, riding: Mapping[str, dict[str, Any]] | None = None) -> list[MiniBatch]:
    """As it is on disk, but for the references of rows that ride along, by row id, and for where the store is: that may be another place
    than in the run's last life."""
    decoded, carried = msgspec.json.decode(plan), riding or {}
    for row in (row for mini in decoded for rank in mini["ranks"] for micro_batch in rank for row in micro_batch):
        row["rollout"] = carried.get(row["row_id"], row["rollout"])
        row |= {hop: moved(row[hop], location) for hop in ("rollout", "extras") if row.get(hop)}
    return [MiniBatch.model_validate(mini) for mini in decoded]


def skipped_reason(trained_rows: Path, batch_id: int) -> str | None:
    """Why the trainer's own account says that it skipped this batch; None when it trained it. A replay's line counts, not the first."""
    found = None
    *lines, _torn = trained_rows.read_bytes().split(b"\n")  # after the last newline: nothing, or what a crash cut off
    for line in lines:
        entry = msgspec.json.decode(line)
        if entry["batch_id"] == batch_id:
            found = entry["skipped"]
    return found


def rows_present(core: Core, leaves: tuple[Any, ...]) -> bool:
    """Are all rows of these leaves still there?"""
    for ref in [ref for leaf in leaves for ref in leaf.refs if ref is not leaf.reward]:
        try:
            open_ref(Ref.from_wire(ref), [], store=core.store).close()
        except Gone:
            return False
    return True
