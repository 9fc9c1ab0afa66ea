"""What counts as a checkpoint (W7)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer import checkpoints

VERSIONS = {"torch": "2", "megatron": "0"}


def write(directory: Path, trained_version: int) -> checkpoints.Checkpoint:
    partial = checkpoints.begin(directory)
    (partial / "hf").mkdir()
    (partial / "optimizer/exp_avg").mkdir(parents=True)
    (partial / "hf" / "model.safetensors").write_bytes(bytes(100))
    (partial / "optimizer/exp_avg/model.safetensors").write_bytes(bytes(trained_version + 1))
    return checkpoints.publish(partial, trained_version, 0, {"dp": 1}, VERSIONS, {"policy": trained_version})


def test_the_newest_whole_one_is_found_and_nothing_is_no_error(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path / "none") is None
    for trained_version in (2, 10, 9):
        write(tmp_path, trained_version)
    found = checkpoints.newest(tmp_path)
    assert found is not None and found.trained_version == 10 and found.path.name == "step_00000010"
    assert found.hf_path.is_dir() and found.meta.files == {"hf/model.safetensors": 100, "optimizer/exp_avg/model.safetensors": 11}
    assert found.meta.optimizer_steps == {"policy": 10} and found.meta.batch_id == 9
    assert found.directory_of("policy") == found.path and found.directory_of("critic") == found.path / "critic"


@pytest.mark.parametrize("damage", ["no meta", "cut meta", "file missing", "file short", "never renamed"])
def test_W7_half_a_checkpoint_is_passed_over_for_the_older_one(tmp_path: Path, damage: str) -> None:
    write(tmp_path, 1)
    newer = write(tmp_path, 2).path
    if damage == "no meta":
        (newer / "meta.json").unlink()
    elif damage == "cut meta":
        (newer / "meta.json").write_text((newer / "meta.json").read_text()[:40])
    elif damage == "file missing":
        (newer / "hf" / "model.safetensors").unlink()
    elif damage == "file short":
        (newer / "optimizer/exp_avg/model.safetensors").write_bytes(b"")
    else:
        newer.rename(tmp_path / ".partial-x")
    found = checkpoints.newest(tmp_path)
    assert found is not None and found.trained_version == 1
    if damage != "never renamed":
        with pytest.raises(ValueError, match="Use an older"):
            checkpoints.read(newer)


def test_an_interrupted_save_leaves_nothing_behind_after_the_next(tmp_path: Path) -> None:
    left = checkpoints.begin(tmp_path)
    (left / "optimizer/exp_avg").mkdir(parents=True)
    (left / "optimizer/exp_avg/model.safetensors").write_bytes(b"half")
    write(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_the_same_version_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 3)
    partial = checkpoints.begin(tmp_path)
    (partial / "hf").mkdir()
    (partial / "optimizer/exp_avg").mkdir(parents=True)
    (partial / "optimizer/exp_avg/model.safetensors").write_bytes(b"new")
    checkpoints.publish(partial, 3, 1, {"dp": 1}, VERSIONS)
    checkpoints.prune(tmp_path, 5)
    found = checkpoints.newest(tmp_path)
    assert found is not None and found.meta.epoch == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_prune_keeps_the_newest_and_what_is_not_whole(tmp_path: Path) -> None:
    for trained_version in range(1, 6):
        write(tmp_path, trained_version)
    (tmp_path / "step_00000002" / "meta.json").write_text(json.dumps({}))
    checkpoints.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004", "step_00000005"]


def test_one_of_the_old_format_is_whole_and_says_that_it_knows_no_steps(tmp_path: Path) -> None:
    """So that the trainer can say what to do with it, instead of a run that begins anew without a word."""
    path = write(tmp_path, 1).path
    meta = json.loads((path / "meta.json").read_text())
    del meta["optimizer_steps"], meta["batch_id"]
    (path / "meta.json").write_text(json.dumps(meta))
    found = checkpoints.newest(tmp_path)
    assert found is not None and found.meta.optimizer_steps is None
