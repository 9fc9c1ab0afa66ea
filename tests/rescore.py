"""Were the tokens of a run made by the weights they name? Every archived row is scored again, by transformers, with those weights.

The run must have kept a checkpoint of every version. Beside the largest difference, it is counted in how many rows the neighbouring
version would have been told apart: a check that could not fail proves nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from driver.archive import FinishedTrajectory, read_trajectories
from trainer import checkpoints

BATCH_ROWS = 256
disable_progress_bar()


@dataclass
class Rescored:
    rows: int = 0
    rows_of_several_versions: int = 0
    tokens: int = 0
    gap_max: float = 0.0
    told_apart: int = 0  # spans whose tokens the version before, or after, would have scored otherwise by more than the tolerance
    spans: int = 0
    not_kept: int = 0  # spans whose weights were lost with their trainer before they were saved, and made anew in a later epoch
    wrong: list[str] = field(default_factory=list)


def rescore(run_dir: Path, base: Path, tolerance: float = 1e-3, temperature: float = 1.0) -> Rescored:
    """Of all trained rows. `wrong` names each row with a token that is not of the version it names.

    A version that was made anew in a later epoch is other weights under the same number: what was sampled with the first is left out.
    """
    rows = [row for row in read_trajectories(run_dir / "archive") if row.outcome == "trained"]
    wanted: dict[int, list[int]] = defaultdict(list)  # version → rows it is asked about, its own and its neighbours'
    for number, row in enumerate(rows):
        for _, version, _, _ in row.version_spans:
            for other in (version - 1, version, version + 1):
                wanted[other].append(number)
    found = Rescored(rows=len(rows), rows_of_several_versions=sum(len(row.version_spans) > 1 for row in rows))
    gaps: dict[tuple[int, int], np.ndarray] = {}
    made_in = {kept.trained_version: kept.meta.epoch for kept in checkpoints.whole(run_dir / "checkpoints")}  # version → epoch
    for version, numbers in sorted(wanted.items()):
        directory = base if version == 0 else run_dir / "checkpoints" / f"step_{version:08d}" / "hf"
        if version and version not in made_in:
            assert not any(span[1] == version for n in numbers for span in rows[n].version_spans), f"no weights of version {version}"
            continue
        unique = sorted(set(numbers))
        for number, scores in zip(unique, _log_probs(directory, [rows[n] for n in unique], temperature), strict=True):
            gaps[version, number] = np.abs(scores - np.asarray(rows[number].rollout_log_probs))
    for number, row in enumerate(rows):
        mask = np.asarray(row.response_mask, dtype=bool)
        covered = np.zeros_like(mask)
        for epoch, version, start, end in row.version_spans:
            inside = np.zeros_like(mask)
            inside[start:end] = mask[start:end]
            covered |= inside
            if not inside.any():
                continue
            if epoch < made_in.get(version, 0):
                found.not_kept += 1
                continue
            gap = float(gaps[version, number][inside].max())
            found.gap_max = max(found.gap_max, gap)
            found.spans += 1
            found.tokens += int(inside.sum())
            others = [gaps[other, number][inside].max() for other in (version - 1, version + 1) if (other, number) in gaps]
            found.told_apart += bool(others) and min(others) > tolerance
            if not gap <= tolerance:
                found.wrong.append(f"{row.traj_uid}: tokens {start} to {end} of version {version} differ by {gap:.1e}")
        if not (covered == mask).all():
            found.wrong.append(f"{row.traj_uid}: tokens without a version")
    return found


def _log_probs(directory: Path, rows: list[FinishedTrajectory], temperature: float) -> list[np.ndarray]:
    """For each row, of its tokens 1.., under the weights in `directory`."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found: list[np.ndarray] = []
    for begin in range(0, len(rows), BATCH_ROWS):
        part = rows[begin : begin + BATCH_ROWS]
        longest = max(len(row.input_ids) for row in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        for line, row in enumerate(part):
            ids[line, : len(row.input_ids)] = torch.tensor(row.input_ids)
        with torch.no_grad():  # padding is on the right, behind every token that is asked about
            logits = model(ids).logits / temperature
        scores = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0].numpy()
        found += [scores[line, : len(row.input_ids) - 1] for line, row in enumerate(part)]
    return found
