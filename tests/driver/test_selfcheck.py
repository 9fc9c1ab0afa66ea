"""Which loss `headrace selfcheck loss` means, and what it says when that cannot be told. The check itself is the trainer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from driver.cli import app
from driver.config import ConfigError
from driver.selfcheck import command, loss_spec

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/sort_digits/config.yaml"


def test_the_help_says_what_the_exit_status_means():
    done = CliRunner().invoke(app, ["selfcheck", "loss", "--help"])
    assert done.exit_code == 0
    assert "0: it is; 1: it is not; 2: it cannot be used" in " ".join(done.output.split())


def test_a_loss_is_a_target_with_its_keys_set():
    spec = loss_spec("gspo", None, ["clip_low=3e-4", "clip_high=4e-4", "kl.coefficient=0.5", "aggregation=sequence_mean_token_mean"])
    assert (spec.policy, spec.clip_low, spec.clip_high, spec.kl.coefficient) == ("gspo", 3e-4, 4e-4, 0.5)
    own = loss_spec("my.py:loss", None, ["params.width=1e-1", "params.kind=soft", "params.both=true", "params.n=3"])
    assert own.params == {"width": 0.1, "kind": "soft", "both": True, "n": 3.0}, "to YAML 1e-1 is a word"


def test_the_config_s_loss_is_taken_with_its_file_found_from_where_the_config_is(tmp_path):
    (tmp_path / "my.py").write_text("def loss(tokens, spec): ...\n")
    raw = yaml.safe_load(CONFIG.read_text())
    raw["model"]["path"] = str(CONFIG.parent / raw["model"]["path"])
    raw["reward"] = {"scorers": {"*": {"rule": "exact"}}}
    raw["trainer"]["loss"] = {"policy": "my.py:loss", "params": {"x": 2.0}}
    raw.pop("data", None)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    spec = loss_spec(None, tmp_path / "run.yaml", ["params.y=3"])
    assert spec.policy == f"{tmp_path}/my.py:loss" and spec.params == {"x": 2.0, "y": 3.0}
    raw["trainer"]["loss"] = {"entropy_bonus": 0.1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    assert loss_spec("cispo", tmp_path / "run.yaml", []).entropy_bonus == 0.1
    with pytest.raises(ConfigError, match="set clip_low and clip_high"):
        loss_spec("gspo", tmp_path / "run.yaml", [])
    raw["trainer"]["loss"] = {"policy": "my.py:los"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ConfigError, match=r"trainer\.loss\.policy: .*did you mean 'loss'"):
        loss_spec(None, tmp_path / "run.yaml", [])


def test_the_check_is_a_process_of_the_trainer_s_that_the_user_s_folder_does_not_shadow():
    argv = command("cispo", None, [], 12, 3, False)
    assert argv[1:5] == ["-P", "-m", "trainer.selfcheck", "loss"]
    assert json.loads(argv[argv.index("--loss") + 1])["policy"] == "cispo" and argv[-5:] == ["--rows", "12", "--seed", "3", "--no-layouts"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "say which loss"),
        (["gspo"], "policy gspo clips the ratio of a whole row: set clip_low and clip_high"),
        (["pp0_clip"], "'pp0_clip' is not known: did you mean 'ppo_clip'?"),
        (["ppo_clip", "--set", "clip_lo=1"], "unknown key 'clip_lo' of the loss"),
        (["ppo_clip", "--set", "clip_low"], "write it as key.key=value"),
        (["ppo_clip", "--set", "clip_low=x"], "clip_low is 'x': give a number"),
        (["--config", "absent.yaml"], "there is no configuration file"),
    ],
)
def test_a_loss_that_cannot_be_told_ends_with_2_and_words(argv, words):
    done = CliRunner().invoke(app, ["selfcheck", "loss", *argv, "--no-layouts"] if argv else ["selfcheck", "loss", "--no-layouts"])
    assert done.exit_code == 2
    assert words in " ".join((done.output + getattr(done, "stderr", "")).split())
