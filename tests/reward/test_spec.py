"""The spec refuses what cannot work, all mistakes at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reward.spec import load_spec

GOOD: dict[str, Any] = {"port": 8000, "scorers": {"*": {"rule": "exact", "function": None, "params": {}}, "sums": {"rule": "numeric"}}}


def written(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(GOOD | changes))
    return path


def test_a_good_spec_says_who_serves_a_task_type(tmp_path: Path) -> None:
    spec = load_spec(written(tmp_path))
    assert (spec.scorer_for("sums"), spec.scorer_for("words")) == ("sums", "*")
    assert load_spec(written(tmp_path, scorers={"sums": {"rule": "numeric"}})).scorer_for("words") is None
    assert load_spec(written(tmp_path, host="0.0.0.0", token="t")).token == "t"
    assert load_spec(written(tmp_path, host="::1")).host == "::1"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scorers": {"*": {"rule": "numeric", "params": {"tolerence": 1}}}}, "scorers.*: .*it takes tolerance"),
        ({"scorers": {"*": {"rule": "exact", "function": "a:b"}}}, "needs either `rule`"),
        ({"scorers": {"*": {}}}, "needs either `rule`"),
        ({"scorers": {"*": {"function": "a:b", "params": {"x": 1}}}}, "`params` belong to a rule"),
        ({"scorers": {"*": {"rule": "exact", "time_limit_s": 0}}}, "time_limit_s: .*greater than 0"),
        ({"scorers": {}}, "scorers: .*at least 1"),
        ({"host": "0.0.0.0"}, "set `token`, or listen on 127.0.0.1"),
        ({"host": "example.org"}, "can be reached from outside"),
        ({"wokers": 2, "port": 0}, "port: .*; wokers: Extra inputs"),
    ],
)
def test_O1_a_mistake_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_spec(written(tmp_path, **changes))


def test_a_spec_that_is_not_there_or_not_json_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot read the spec"):
        load_spec(tmp_path / "absent.json")
    (tmp_path / "spec.json").write_text("{")
    with pytest.raises(ValueError, match="Invalid JSON"):
        load_spec(tmp_path / "spec.json")
