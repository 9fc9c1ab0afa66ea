"""What must hold between any two instants, read from outside: from the ledger on the disk and from the trainer's own log.

`check` may be called while the driver lives, is stopped, or is dead; `check_end` when the run has ended by its rules. Both raise an
AssertionError that names every breach. The trainer's log counts by its last line for a batch: a replay writes its batch again.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from driver import ledger_load
from driver.archive import read_trajectories
from driver.ledger_state import EVALUATION, traj_uid_of

FILTERED = "filtered: "  # how the filter's reasons begin
RESTARTED = "evaluation: the driver was restarted"
"""For this reason a trajectory of an evaluation may be discarded, beside those of the test's."""


class Books:
    """One reading of both, in one transaction."""

    def __init__(self, run_dir: Path) -> None:
        connection = sqlite3.connect(f"file:{run_dir}/ledger.sqlite?mode=ro", uri=True, timeout=30)
        try:
            connection.execute("BEGIN")
            self.meta = {name: json.loads(value) for name, value in connection.execute("SELECT name, value FROM meta")}
            self.samples = {
                row[0]: row[1:]
                for row in connection.execute(
                    "SELECT uid, segment, row_index, pass_index, version_tag, deadline_batch, batch_id, over FROM samples ORDER BY uid"
                )
            }
            self.trajectories: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
            for uid, *rest in connection.execute("SELECT uid, idx, state, outcome, reason, leaves FROM trajectories ORDER BY uid, idx"):
                self.trajectories[uid].append(tuple(rest))
            self.batches = {
                batch_id: (state, json.loads(uids) if uids else [], skipped)
                for batch_id, state, uids, skipped in connection.execute("SELECT batch_id, state, uids, skipped FROM batches")
                if state != "unmade"
            }
            self.solved = connection.execute("SELECT segment, row_index, pass_index, skipped_at IS NOT NULL FROM solved_rows").fetchall()
            self.left_out = set(connection.execute("SELECT segment, row_index FROM left_out_rows").fetchall())
            self.segments = {
                segment: (name, rows) for segment, name, rows in connection.execute("SELECT segment, dataset_id, rows FROM segments")
            }
        finally:
            connection.close()
        self.lines: dict[int, dict[str, Any]] = {}
        log = run_dir / "trained_rows.jsonl"
        if log.exists():
            *whole, _torn = log.read_bytes().split(b"\n")
            for text in whole:
                line = json.loads(text)
                self.lines[line["batch_id"]] = line

    def number(self, name: str) -> int:
        return int(self.meta.get(name, 0))

    @property
    def evaluated(self) -> dict[int, int]:
        """The samples of evaluations, by uid, with the version that was evaluated."""
        return {uid: facts[3] for uid, facts in self.samples.items() if facts[0] == EVALUATION}

    def walks(self) -> dict[str, dict[str, Any]]:
        """By dataset."""
        return {name.partition("/")[2]: walk for name, walk in self.meta.items() if name.startswith("cursor/")}

    def results(self) -> list[Any]:
        """What was told of each evaluation, by version."""
        return [value for name, value in sorted(self.meta.items()) if name.startswith("evaluation/")]

    def rows_of(self, uid: int) -> set[str]:
        """Of the trajectories of a sample that were, or will be, trained: row ids, or what every row id of one that is finished begins
        with, since the ledger then forgets where its rows were."""
        found = set()
        for index, state, outcome, _, leaves in self.trajectories[uid]:
            if outcome == "trained" and not leaves:
                found.add(traj_uid_of(uid, index))
            elif state in ("ready", "consumed") or outcome == "trained":
                found |= {leaf["row_id"] for leaf in json.loads(leaves or b"[]")}
        return found


def check(run_dir: Path, n: int, bound: int) -> Books:
    """A1, A2, A3 and the order of the protocol, at this instant."""
    books = Books(run_dir)
    found = ledger_load.check(run_dir / "ledger.sqlite")  # its counters against its rows, as `headrace ledger check` does
    wrong = [
        *_registered(books, n, bound),
        *_walked(books),
        *_states(books),
        *_evaluated(books),
        *_trained(books),
        *(trouble.words for trouble in (*found.damage, *found.wrong)),
    ]
    assert not wrong, "\n".join(wrong[:20])
    return books


def _registered(books: Books, n: int, bound: int) -> list[str]:
    wrong = []
    uids = list(books.samples)
    first = uids[0] if uids else 0
    if uids != list(range(first, first + len(uids))) or (books.number("next_uid") != first + len(uids) and uids):
        wrong.append(f"A1: samples {first} to {uids[-1]} are {len(uids)}, next_uid is {books.number('next_uid')}")
    if set(books.trajectories) != set(uids):
        wrong.append("A1: trajectories without their sample, or a sample without trajectories")
    for uid, (segment, _, _, tag, deadline, batch_id, _) in books.samples.items():
        if segment == EVALUATION:
            continue
        if len(books.trajectories[uid]) != n:
            wrong.append(f"A1: sample {uid} has {len(books.trajectories[uid])} trajectories of {n}")
        if deadline != tag + bound:
            wrong.append(f"A3: sample {uid} has tag {tag} and deadline {deadline}")
        if batch_id is not None and batch_id > deadline:
            wrong.append(f"A3: sample {uid} with deadline {deadline} is in batch {batch_id}")
    return wrong


def _walked(books: Books) -> list[str]:
    """Each row of a dataset is registered once a pass, or left out of it because it was solved in the one before, and is so counted; one
    that can never be sampled is in none."""
    registered = Counter((segment, pass_index, row) for segment, row, pass_index, *_ in books.samples.values() if segment != EVALUATION)
    left_out = Counter((segment, pass_index + 1, row) for segment, row, pass_index, skipped in books.solved if skipped)
    filtered = Counter(books.samples[uid][0] for uid, found in books.trajectories.items() if any(FILTERED in str(row[3]) for row in found))
    came = registered + left_out
    wrong = [f"W2: row {row} of segment {segment} came {n} times in pass {walked}" for (segment, walked, row), n in came.items() if n > 1]
    wrong += [
        f"H3: row {row} of segment {segment} came in pass {walked}, and is left out of all"
        for segment, walked, row in came
        if (segment, row) in books.left_out
    ]
    for name, walk in books.walks().items():
        segments = {segment: rows for segment, (dataset_id, rows) in books.segments.items() if dataset_id == name}
        for segment, rows in segments.items():
            now = walk.get("pass_index", 0)
            first = min((walked for other, walked, _ in came if other == segment), default=now)
            taken = {
                walked: sum((segment, walked, row) in came or (segment, row) in books.left_out for row in range(rows))
                for walked in range(first + 1, now)
            }
            wrong += [f"W2: pass {walked} took {n} of the {rows} rows of segment {segment}" for walked, n in taken.items() if n != rows]
        there = [sum(n for (segment, *_), n in places.items() if segment in segments) for places in (registered, left_out)]
        there.append(sum(filtered[segment] for segment in segments))
        counted = [walk.get(what, 0) for what in ("registered", "skipped", "filtered")]
        if counted != there:
            wrong.append(f"A1: dataset {name} counts {counted} rows registered, left out and filtered; there are {there}")
    return wrong


def _evaluated(books: Books) -> list[str]:
    """An evaluation is in no batch, and no answer counts as evaluated without the result of its version."""
    wrong = []
    answers: Counter[int] = Counter()
    for uid, version in books.evaluated.items():
        for index, state, outcome, *_ in books.trajectories[uid]:
            answers[version] += outcome == "evaluated"
            if state not in ("running", "finished") or outcome == "trained" or books.samples[uid][5] is not None:
                wrong.append(f"A1: {traj_uid_of(uid, index)} of an evaluation is {outcome or state}, batch {books.samples[uid][5]}")
    told: Counter[int] = Counter()
    for result in books.results():
        told[result["version"]] += result["answers"]
    if +answers != +told:
        wrong.append(f"A2: answers evaluated {dict(answers)}, and told in results {dict(told)}, by version")
    evaluated = {uid for uid, found in books.trajectories.items() for *_, outcome, _, _ in found if outcome == "evaluated"}
    return wrong + [f"A1: sample {uid} was evaluated, and is of a dataset" for uid in evaluated - set(books.evaluated)]


def _states(books: Books) -> list[str]:
    wrong = []
    committed, trained = books.number("committed_version"), books.number("trained_version")
    for uid, (*_, batch_id, over) in books.samples.items():
        states = Counter(state for _, state, *_ in books.trajectories[uid])
        if over != (set(states) == {"finished"}):
            wrong.append(f"sample {uid} over={over} with {dict(states)}")
        for index, state, outcome, reason, leaves in books.trajectories[uid]:
            name = traj_uid_of(uid, index)
            if state not in ("running", "ready", "consumed", "finished") or (state == "finished") != (outcome is not None):
                wrong.append(f"A1: {name} is {state} with outcome {outcome}")
            if outcome == "discarded" and not reason:
                wrong.append(f"A2: {name} was discarded without a reason")
            if state in ("ready", "consumed") and not leaves:
                wrong.append(f"{name} is {state} without a row")
            in_batch = state == "consumed" or outcome == "trained"
            if in_batch and batch_id not in books.batches:
                wrong.append(f"A2: {name} is {outcome or state} in no batch")
            if state in ("running", "ready") and batch_id is not None:
                wrong.append(f"A2: {name} is {state} in batch {batch_id}")
            if outcome == "trained" and batch_id is not None and batch_id >= committed:
                wrong.append(f"A2: {name} of batch {batch_id} is trained, and committed is {committed}")
    taken: dict[int, list[int]] = defaultdict(list)
    for uid, (*_, batch_id, _) in books.samples.items():
        if batch_id is not None:
            taken[batch_id].append(uid)
    for batch_id, (state, uids, _) in books.batches.items():
        if sorted(uids) != taken.pop(batch_id, []):
            wrong.append(f"A2: batch {batch_id} and its samples disagree")
        expected = "committed" if batch_id < committed else "applied" if batch_id < trained else "assembled"
        if state != expected:
            wrong.append(f"batch {batch_id} is {state} at trained {trained}, committed {committed}")
    wrong += [f"A2: samples of batch {batch_id}, which is not there" for batch_id in taken]
    ids = sorted(books.batches)
    if ids and ids != list(range(ids[0], ids[0] + len(ids))):
        wrong.append(f"A2: a gap in the batches {ids}")
    return wrong


def _trained(books: Books) -> list[str]:
    """The trainer's log against the ledger. With a critic every row of a batch is trained."""
    wrong = []
    times: Counter[str] = Counter()
    for batch_id, (state, uids, skipped) in books.batches.items():
        if state == "assembled":
            continue  # the trainer may have trained it, or an older plan of this number
        line = books.lines.get(batch_id)
        if line is None:
            wrong.append(f"A2: batch {batch_id} is {state}, and the trainer knows nothing of it")
            continue
        if line["skipped"] != skipped:
            wrong.append(f"A2: batch {batch_id}: the trainer says skipped: {line['skipped']}, the ledger {skipped}")
        rows = set(line["row_ids"]) | set(line.get("skipped_row_ids") or [])
        times.update(line["row_ids"])
        expected = set().union(*(books.rows_of(uid) for uid in uids)) if not skipped else rows
        # One row a trajectory here; of which try it is, the ledger knows while it is not finished.
        rows = {row if row in expected else row.partition("a")[0] for row in rows} if len(rows) == len(expected) else rows
        if rows != expected:
            wrong.append(f"A2: batch {batch_id}: the trainer's rows but not the ledger's {sorted(rows - expected)[:4]}, "
                         f"the ledger's but not the trainer's {sorted(expected - rows)[:4]}")  # fmt: skip
    wrong += [f"A2: row {row} is in {count} applied batches" for row, count in times.items() if count > 1]
    return wrong


def check_end(run_dir: Path, n: int, bound: int, explained: tuple[str, ...]) -> Books:
    """The run has ended: everything registered is finished once, and whatever was discarded has one of these words in its reason."""
    books = check(run_dir, n, bound)
    ends = [(uid, *rest) for uid, found in books.trajectories.items() for rest in found]
    unfinished = [traj_uid_of(uid, index) for uid, index, state, *_ in ends if state != "finished"]
    assert not unfinished, f"A1: not finished at the end: {unfinished[:10]}"
    reasons = {(uid in books.evaluated, reason) for uid, *_, outcome, reason, _ in ends if outcome == "discarded"}
    foreign = [reason for held_out, reason in reasons if not any(words in reason for words in (*explained, *[RESTARTED] * held_out))]
    assert not foreign, f"discarded, and no kill explains it: {foreign[:10]}"
    archived = {row.traj_uid: row.outcome for row in read_trajectories(run_dir / "archive")}
    outcomes = {traj_uid_of(uid, index): outcome for uid, index, _, outcome, *_ in ends}
    apart = [name for name, outcome in archived.items() if outcomes.get(name) != outcome]
    assert not apart, f"A2: archive and ledger do not agree on {[(name, archived[name], outcomes.get(name)) for name in apart[:10]]}"
    missing = [name for name, outcome in outcomes.items() if outcome != "discarded" and name not in archived]
    assert not missing, f"A2: not in the archive: {missing[:10]}"
    if books.evaluated:
        last = max(result["version"] for result in books.results())
        assert last == books.number("trained_version"), f"H11: the last version was not evaluated, only {last}"
    assert books.number("committed_version") == books.number("trained_version") == max(books.lines, default=-1) + 1
    return books
