"""`headrace config keys`: every key that the configuration takes is there, with its choices."""

from __future__ import annotations

from typer.testing import CliRunner

from driver.cli import app
from driver.keys import keys, section_at
from driver.settings import RunConfig


def test_every_key_is_listed_once_with_those_of_a_section_that_is_absent_by_default() -> None:
    found = {key.name: key for key in keys()}
    assert len(found) == len(list(keys())) > 90
    assert found["run_id"].default == "required" and found["batch.samples"].default == "16"
    assert found["trainer.loss.kl.estimator"].choices == "k1 k2 k3"
    assert found["trainer.loss.sequence"].choices == "leaf trajectory" and found["trainer.loss.sequence"].default == "leaf"
    assert found["trainer.critic"].default == "null" and found["trainer.critic.rho_cap"].meaning
    assert found["trainer.sequence_parallel"].default == "false"
    assert section_at("trainer.critic") is not None and section_at("trainer.nothing") is None
    for name in RunConfig.model_fields:
        assert any(key == name or key.startswith(f"{name}.") for key in found), name


def test_a_section_is_printed_alone_and_a_wrong_one_is_named() -> None:
    shown = CliRunner().invoke(app, ["config", "keys", "trainer.loss"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0 and "trainer.loss.kl.estimator" in shown.output and "batch.samples" not in shown.output
    wrong = CliRunner().invoke(app, ["config", "keys", "trainer.los"])
    assert wrong.exit_code == 2 and "trainer.los" in wrong.output
