"""What a run shows: status, staleness, queues, engines, trajectories, why. Plain dicts, read from the live view and the ledger's database.

Nothing here changes state, and nothing scans all trajectories: totals are kept by the ledger, lists are paged by key.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec

from driver import engine_facts, observe_data
from driver.alarms import Alarm
from driver.events import named
from driver.ledger_state import CONSUMED, DISCARDED, EVALUATED, EVALUATION, FINISHED, READY, RUNNING, TRAINED, Trajectory, traj_uid_of
from driver.why import BOUND, Engine, Facts, Missing, Straggler, Training, Waiting, explain, sentence

if TYPE_CHECKING:
    from driver.evaluation import Evaluator
    from driver.run import Run

PAGE_ROWS = 100
ALARM_SKIPPED_BATCHES = 5
CAPS = ("kv", "staleness", "demand", "store")


def status(run: Run) -> dict[str, Any]:
    """One page for a person: where the run is."""
    ledger, config = run.core.ledger, run.core.config
    last = run.history.recent[-1] if run.history.recent else {}
    return {
        "run_id": config.run_id,
        "state": run.state,
        "failure": run.failure,
        "ended": ledger.ended,
        "run_dir": str(config.directory),
        "uptime_s": round(time.monotonic() - run.core.started, 3),
        "epoch": ledger.epoch,
        "batches": ledger.next_batch,
        "batches_wanted": config.stop.batches,
        "trained_version": ledger.trained_version,
        "committed_version": ledger.committed_version,
        "serving_version": ledger.serving_version,
        "publish_lag": ledger.trained_version - ledger.serving_version,
        "checkpoint": ledger.checkpoint,
        "reward_mean": last.get("reward_mean"),
        "in_flight": run.dispatch.in_flight,
        "watermark": run.dispatch.decision.watermark if run.dispatch.decision else None,
        "watermark_binding": run.dispatch.decision.binding if run.dispatch.decision else None,
        "engine_busy": run.history.busy_shares.get("engines"),
        "trainer_busy": run.history.busy_shares.get("trainer"),
        "trajectories": counts(run),
        "staleness_max": max((s for s, c in ledger.staleness.items() if c), default=0),
        "staleness_bound": run.core.limits.bound,
        "staleness_preset": config.staleness.preset,
        "logprob_gap_max": run.history.gap_max,
        "datasets": observe_data.datasets(run),
        "filtered_samples": observe_data.filtered_samples(run),
        "left_out_rows": observe_data.left_out_rows(run),
        "restarts": run.core.ledger.restarts,
        "found_at_start": None if run.found is None else msgspec.to_builtins(run.found),
        "tokens_resampled": run.dispatch.turns.tokens_resampled,
        "snapshot": run.snapshot.facts(),
        "store": {"kind": run.config.store_kind, "location": run.store.location, **run.store_watch.facts()},
        "evaluation": None if run.evaluator is None else _last_evaluation(run.evaluator),
        "alarms": [*alarms(run), *engine_facts.alarms(run)],
        "engines_out_of_use": engine_facts.out_of_use(run),
        "why": why(run)["waits"],
    }


def _last_evaluation(evaluator: Evaluator) -> dict[str, Any]:
    last = evaluator.results[-1] if evaluator.results else None
    return {
        "running": evaluator.running,
        "version": last.version if last else None,
        "reward_mean": last.reward_mean if last else None,
    }


def alarms(run: Run) -> list[str]:
    """What a person should look at, though the run goes on."""
    found = [] if run.evaluator is None or run.evaluator.alarm is None else [run.evaluator.alarm]
    return [*found, *run.core.alarms.values(), *run.holds.alarms(), *(alarm.words for alarm in lasting(run))]


def lasting(run: Run) -> list[Alarm]:
    """Those that nobody logs when they are raised: `alarms.Said` does."""
    off = {"the prefix log is off": run.prefixes.failure, "the snapshot of ready rows is behind": run.snapshot.failure}
    found = [*(Alarm(name, words) for name, words in off.items() if words is not None), *run.bias.alarms]
    skipped = list(itertools.takewhile(lambda batch: batch.get("skipped"), reversed(run.history.recent)))
    if len(skipped) >= ALARM_SKIPPED_BATCHES:
        words = f"the last {len(skipped)} batches trained nothing ({skipped[0]['skipped']}); look at the rewards: headrace show TRAJ"
        found.append(Alarm("batches that train nothing", words, len(skipped)))
    return found


def counts(run: Run) -> dict[str, Any]:
    c = run.core.ledger.counts
    return {
        "registered": c.registered,
        **{state: c.by_state[state] for state in ("running", "ready", "consumed", "finished")},
        **{outcome: c.by_outcome[outcome] for outcome in ("trained", "evaluated", "discarded")},
        "last_discard": None
        if run.core.ledger.last_discard is None
        else dict(zip(("traj_uid", "reason"), run.core.ledger.last_discard, strict=True)),
        "reasons": {reason: count for reason, count in c.by_reason.most_common(20)},
    }


def staleness(run: Run) -> dict[str, Any]:
    """The histogram of what was taken into batches, and the live samples that are nearest to their deadline."""
    ledger = run.core.ledger
    histogram = {str(s): c for s, c in sorted(ledger.staleness.items()) if c}
    taken = sum(ledger.staleness.values())
    mean = sum(s * c for s, c in ledger.staleness.items()) / taken if taken else None
    now = time.time()
    worst = sorted(ledger.live(), key=lambda s: (s.deadline_batch, s.uid))[:10]
    return {
        "bound": run.core.limits.bound,
        "samples": run.core.limits.samples,
        "samples_now": run.core.samples_per_batch,
        **run.holds.facts(),
        "tokens_cut": run.dispatch.cut_tokens,
        "histogram": histogram,
        "mean": mean,
        "max": max((s for s, c in ledger.staleness.items() if c), default=None),
        "next_batch": ledger.next_batch,
        "trained_version": ledger.trained_version,
        "serving_version": ledger.serving_version,
        "publish_lag": ledger.trained_version - ledger.serving_version,
        "live_by_deadline": {str(d): c for d, c in sorted(ledger.live_by_deadline.items())},
        "worst_in_flight": [
            {
                "uid": s.uid,
                "version_tag": s.version_tag,
                "deadline_batch": s.deadline_batch,
                "staleness_if_next": ledger.next_batch - s.version_tag,
                "running": [t.traj_uid for t in s.in_state("running")],
                "age_s": round(now - s.trajectories[0].started_at, 3),
            }
            for s in worst
        ],
    }


def queues(run: Run) -> dict[str, Any]:
    """The depth of every queue, in trajectories unless the name says otherwise."""
    ledger, stats = run.core.ledger, run.store_stats()
    oldest = next(ledger.live(), None)
    decision = run.dispatch.decision
    return {
        "not_sent": run.dispatch.queued,
        "generating": run.dispatch.generating,
        "scoring": run.scoring.in_flight,
        "in_flight": run.dispatch.in_flight,
        "ready": ledger.counts.by_state["ready"],
        "ready_samples": sum(1 for s in ledger.live() if run.holds.is_ready(s)),
        "live_samples": sum(ledger.live_by_deadline.values()),
        "consumed": ledger.counts.by_state["consumed"],
        "batches_uncommitted": len(ledger.batches),
        "pushes_pending": int(run.publisher.pending),
        "engine_requests": {slot.engine_id: slot.open_requests for slot in run.pool.slots.values()},
        "store": {
            **asdict(stats),
            "location": run.store.location,
        },
        "watermark": {
            "target": decision.watermark if decision else None,
            "binding": decision.binding if decision else None,
            "caps": vars(decision.caps) if decision else None,
            "kv_bound": run.dispatch.kv_room.bound if run.dispatch.kv_room else None,
            "demand": run.watermark.wanted(),
        },
        "oldest_open": None
        if oldest is None
        else {
            "uid": oldest.uid,
            "version_tag": oldest.version_tag,
            "age_s": round(time.time() - oldest.trajectories[0].started_at, 3),
            "held_by": [t.traj_uid for t in oldest.in_state("running")],
        },
    }


def why(run: Run) -> dict[str, Any]:
    """For each side that waits, the constraint that binds, since when, in a sentence."""
    facts = why_facts(run)
    waits = {
        because.side: {"kind": because.kind, "reason": because.reason, "seconds": round(because.seconds, 3)} for because in explain(facts)
    }
    return {"run_id": run.core.run_id, "state": run.state, "waits": waits, "sentence": sentence(facts)}


def why_history(run: Run, last: int = PAGE_ROWS) -> dict[str, Any]:
    """The newest waits, oldest first, and the seconds that each side has lost to each kind of reason since the service started."""
    now, epoch = time.monotonic(), time.time() - time.monotonic()
    entries = [
        {
            "side": entry.side,
            "kind": entry.kind,
            "reason": entry.reason,
            "began_at": round(epoch + entry.began, 3),
            "ended_at": None if entry.ended is None else round(epoch + entry.ended, 3),
            "seconds": round(entry.seconds(now), 3),
            "times": entry.times,
        }
        for entry in run.core.lost_time.newest(last)
    ]
    return {"run_id": run.core.run_id, "items": entries, "seconds": run.core.lost_time.seconds(now)}


def why_facts(run: Run) -> Facts:
    """What the sentences are made of."""
    now = time.monotonic()
    waits = tuple(Waiting(side, w.kind, w.reason, now - w.since, now - w.began) for side, w in run.core.waits.items())
    if run.failure:
        return Facts(over=f"The run has stopped: {run.failure}")
    if run.state in ("finished", "stopped"):
        return Facts(over=f"The run is {run.state}" + (f": {run.core.ledger.ended}." if run.core.ledger.ended else "."))
    return Facts(
        waits=waits,
        training=_training(run),
        straggler=_straggler(run),
        engines=tuple(
            Engine(slot.engine_id, slot.state, slot.reason, slot.state_s(), slot.open_requests, slot.idle_s())
            for slot in run.pool.slots.values()
        ),
        absent=engine_facts.absent(run),
        push=run.publisher.why,
    )


def _training(run: Run) -> Training | None:
    """While rollout waits for it; there are many samples to look through."""
    seconds, rollout, ledger = run.training.busy.now_s, run.core.waits.get("rollout"), run.core.ledger
    if seconds is None or rollout is None or rollout.kind not in BOUND or "trainer" in run.core.waits:
        return None
    version = ledger.trained_version
    what = f"batch {version}" if ledger.next_batch > version else f"storing version {version}"
    return Training(what, seconds, sum(map(run.holds.is_ready, ledger.live())), run.core.samples_per_batch)


def _straggler(run: Run) -> Straggler | None:
    """The sample that the trainer waits for, if it does."""
    uid = run.holds.blocking_uid if "trainer" in run.core.waits else None
    sample = None if uid is None else run.core.ledger.samples.get(uid)
    if sample is None:
        return None
    now = time.time()
    missing = tuple(
        Missing(t.traj_uid, run.dispatch.place(t.traj_uid), run.dispatch.turns.progress.get(t.traj_uid, 0), now - t.started_at)
        for t in sample.in_state("running")
    )
    return Straggler(sample.uid, len(sample.trajectories), missing)


def gauges(run: Run) -> dict[str, float]:
    """Names are headrace_<component>_<what>_<unit>."""
    ledger = run.core.ledger
    decision, stats = run.dispatch.decision, run.store_stats()
    return {
        **{
            f"headrace_ledger_{state}_trajectories": float(ledger.counts.by_state[state])
            for state in ("running", "ready", "consumed", "finished")
        },
        **{f"headrace_ledger_{o}_trajectories_total": float(ledger.counts.by_outcome[o]) for o in ("trained", "evaluated", "discarded")},
        "headrace_ledger_registered_trajectories_total": float(ledger.counts.registered),
        "headrace_ledger_trained_version": float(ledger.trained_version),
        "headrace_ledger_committed_version": float(ledger.committed_version),
        "headrace_ledger_serving_version": float(ledger.serving_version),
        "headrace_ledger_staleness_max_batches": float(max((s for s, c in ledger.staleness.items() if c), default=0)),
        "headrace_ledger_staleness_bound_batches": float(run.core.limits.bound),
        "headrace_dispatch_in_flight_trajectories": float(run.dispatch.in_flight),
        "headrace_dispatch_watermark_trajectories": float(decision.watermark if decision else 0),
        **({f"headrace_watermark_{cap}_trajectories": float(value) for cap, value in vars(decision.caps).items()} if decision else {}),
        **{f"headrace_watermark_{name}_binds": float(decision is not None and decision.binding == name) for name in CAPS},
        "headrace_dispatch_asking_trajectories": float(run.dispatch.turns.asking),
        "headrace_dispatch_tokens_total": float(run.dispatch.tokens_sampled),
        "headrace_dispatch_resampled_tokens_total": float(run.dispatch.turns.tokens_resampled),
        "headrace_dispatch_resumed_tokens_total": float(run.prefixes.tokens_resumed),
        "headrace_reward_pending_leaves": float(run.scoring.in_flight),
        "headrace_reward_failed_leaves_total": float(run.scoring.failed),
        "headrace_trainer_busy_seconds_total": run.training.busy.seconds(),
        "headrace_trainer_replayed_batches_total": float(run.training.replayed),
        "headrace_push_last_seconds": run.pusher.seconds,
        "headrace_store_used_bytes": float(stats.used_bytes),
        "headrace_store_capacity_bytes": float(run.config.store.capacity_bytes),
        "headrace_store_spare_bytes": float(stats.spare_bytes),
        "headrace_store_pending_frees_count": float(stats.pending_frees),
        "headrace_store_oldest_pending_free_seconds": stats.oldest_pending_s,
        "headrace_store_losses_total": float(len(run.store_watch.losses)),
        "headrace_store_away_ratio": float(run.core.gate.reason is not None),
        "headrace_dispatch_cut_tokens_total": float(run.dispatch.cut_tokens),
        **run.holds.gauges(),
        **run.dispatch.turns.extras.gauges(),
        **run.bias.gauges(),
        **(run.evaluator.gauges() if run.evaluator is not None else {}),
        **observe_data.gauges(run),
        **run.pool.gauges(),
    }


# ---- trajectories ----------------------------------------------------------------------------------------------------------

_COLUMNS = (
    "t.uid, t.idx, t.state, t.outcome, t.reason, t.reward, t.infrastructure_attempts, t.data_attempts, t.started_at, t.ready_at, "
    "s.version_tag, s.deadline_batch, s.batch_id, s.segment, s.row_index, t.finish_reason"
)


def trajectories(run: Run, state: str | None, outcome: str | None, after: str | None, limit: int) -> dict[str, Any]:
    """A page of trajectories in order of registration, from the committed ledger; `next` is the `after` of the next page."""
    at = (-1, -1) if after is None else _parse(after)
    if at is None:
        raise ValueError(f"{after!r} is not a trajectory id; they look like {traj_uid_of(12, 3)}")
    rows = run.core.db.query(_page_sql(state, outcome), (at[0], *at, limit))
    items = [_row(run, row) for row in rows]
    return {"items": items, "next": items[-1]["traj_uid"] if len(items) == limit else None}


def _page_sql(state: str | None, outcome: str | None) -> str:
    """A page is found by an index, however many trajectories have ended: what is in flight by its live samples, what was not trained by an
    index of its own. State and outcome are of our own lists, and written out because SQLite chooses an index by the text."""
    assert state in (None, RUNNING, READY, CONSUMED, FINISHED) and outcome in (None, TRAINED, EVALUATED, DISCARDED)
    filters = [f"t.{column} = '{value}'" for column, value in (("state", state), ("outcome", outcome)) if value]
    if state not in (None, FINISHED):
        tables, more = "samples s CROSS JOIN trajectories t ON t.uid = s.uid", ["s.over = 0"]
        place, order = "s.uid >= ?", "s.uid, t.idx"
    else:
        by = "trajectories_untrained" if outcome in (EVALUATED, DISCARDED) else None
        tables, more = f"trajectories t {f'INDEXED BY {by}' if by else ''} CROSS JOIN samples s ON s.uid = t.uid", []
        place, order = "t.uid >= ?", "t.uid, t.idx"
    where = " AND ".join([place, "(t.uid, t.idx) > (?, ?)", *more, *filters])
    return f"SELECT {_COLUMNS} FROM {tables} WHERE {where} ORDER BY {order} LIMIT ?"


def trajectory(run: Run, traj_uid: str) -> dict[str, Any] | None:
    """One trajectory with its lineage; text and tokens from the archive once it is finished."""
    at = _parse(traj_uid)
    if at is None:
        return None
    rows = run.core.db.query(f"SELECT {_COLUMNS} FROM trajectories t JOIN samples s ON s.uid = t.uid WHERE t.uid = ? AND t.idx = ?", at)
    if not rows:
        return None
    found = _row(run, rows[0])
    found["dataset_row"] = _dataset_row(run, found["segment"], found["row_index"])
    live: Trajectory | None = run.core.ledger.trajectory(traj_uid)
    if live is not None and live.state == "running":
        found["tokens_so_far"] = run.dispatch.turns.progress.get(traj_uid, 0)
    if live is not None and live.leaves:
        found["leaves"] = [
            msgspec.to_builtins(leaf) | {"rollout": named(leaf.rollout), "reward": named(leaf.reward)} for leaf in live.leaves
        ]
        found["response"] = run.finished.texts(live)
    archived = run.finished.archive.find(traj_uid)
    if archived is not None:
        found["archive"] = msgspec.to_builtins(archived)
    return found


def _dataset_row(run: Run, segment: int, row_index: int) -> dict[str, Any] | None:
    """None: a held-out row of a configuration that was."""
    if segment != EVALUATION:
        return dict(msgspec.to_builtins(run.core.feed.row(segment, row_index)))
    rows = run.evaluator.rows if run.evaluator is not None else []
    return dict(msgspec.to_builtins(rows[row_index])) if row_index < len(rows) else None


def _parse(traj_uid: str) -> tuple[int, int] | None:
    uid, separator, index = traj_uid.removeprefix("s").partition("t")
    if not (traj_uid.startswith("s") and separator and uid.isdecimal() and index.isdecimal() and len(uid) <= 18 and len(index) <= 9):
        return None
    return int(uid), int(index)


def _row(run: Run, row: tuple[Any, ...]) -> dict[str, Any]:
    (
        uid,
        idx,
        state,
        outcome,
        reason,
        reward,
        infrastructure,
        data,
        started,
        ready,
        tag,
        deadline,
        batch_id,
        segment,
        row_index,
        finish,
    ) = row
    return {
        "traj_uid": traj_uid_of(uid, idx),
        "uid": uid,
        "run_id": run.core.run_id,
        "state": state,
        "outcome": outcome,
        "reason": reason,
        "reward": reward,
        "finish_reason": finish,
        "version_tag": tag,
        "deadline_batch": deadline,
        "batch_id": batch_id,
        "staleness": None if batch_id is None else batch_id - tag,
        "attempts": 1 + infrastructure + data,
        "dataset_id": "evaluation" if segment == EVALUATION else run.core.feed.dataset_of(segment),
        "segment": segment,
        "row_index": row_index,
        "started_at": started,
        "ready_at": ready,
    }
