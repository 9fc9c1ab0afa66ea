"""A run made from another: numbers may change; code, files, hosts and keys are the service's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from driver.config import ConfigError, parse_config
from driver.derive import CHANGEABLE, derived, other_engines, same_reward
from driver.keys import section_at
from driver.settings import RunConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def origin(tmp_path: Path) -> RunConfig:
    raw = {
        "run_id": "a",
        "run_dir": str(tmp_path / "a"),
        "model": {"path": str(ROOT / "examples/sort_digits/base")},
        "reward": {"scorers": {"*": {"function": str(ROOT / "examples/sort_digits/reward.py") + ":score"}}},
        "service": {"port": 0, "data_roots": [str(tmp_path)]},
        "store": {"directory": "/dev/shm/headrace-test-a"},
    }
    return parse_config(raw, tmp_path)


def test_it_has_the_others_configuration_but_for_what_was_changed_and_a_place_of_its_own(origin, tmp_path):
    config = derived(origin, "b", {"trainer.learning_rate": 0.001, "batch.samples": 4, "trainer.loss.clip_high": 0.4})
    assert (config.trainer.learning_rate, config.batch.samples, config.trainer.loss.clip_high) == (0.001, 4, 0.4)
    assert config.directory == tmp_path / "b" and config.store_directory == Path("/dev/shm/headrace-test-a-b")
    same = {"run_id", "run_dir", "store", "trainer", "batch"}
    assert config.model_dump(exclude=same) == origin.model_dump(exclude=same)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run_dir", "/etc"),
        ("model.path", "/etc"),
        ("reward.scorers", {"*": {"function": "os:system"}}),
        ("rollout.engine_args", ["--x"]),
        ("rollout.sglang.python", "/bin/sh"),
        ("rollout.engine_urls", ["http://10.0.0.1:1"]),
        ("rollout.router_url", "http://10.0.0.1:1"),
        ("rollout.engine_api_key", "x"),
        ("store.directory", "/dev/shm/other"),
        ("service.token", "x"),
        ("push.address", "10.0.0.1"),
        ("data", "/etc/passwd"),
        ("trainer.loss.policy", "os:system"),
        ("trainer.loss.policy", str(ROOT / "examples/sort_digits/reward.py") + ":score"),
        ("trainer.loss.kl.reference", str(ROOT / "examples/sort_digits/base")),
        ("trainer.critic", {"model_path": str(ROOT / "examples/sort_digits/base")}),
        ("trainer.loss", {"policy": "os:system"}),
        ("trainerx", 1),
    ],
)
def test_code_files_hosts_and_keys_can_not_be_named_in_a_request(origin, key, value):
    with pytest.raises(ConfigError):
        derived(origin, "b", {key: value})


def test_what_is_wrong_with_a_change_is_said_as_for_a_file(origin):
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        derived(origin, "b", {"trainer.learning_rat": 1.0})


def test_every_key_that_may_be_changed_exists(origin):
    for key in CHANGEABLE:
        section, _, leaf = key.rpartition(".")
        fields = section_at(section).model_fields if section else RunConfig.model_fields
        assert leaf in fields, key


def test_engines_serve_another_run_where_they_were_started_with_the_same(origin):
    assert other_engines(origin, derived(origin, "b", {"trainer.learning_rate": 1.0, "rollout.n": 4, "batch.samples": 2})) is None
    assert other_engines(origin, derived(origin, "b", {"rollout.max_running_requests": 3})) == "rollout.max_running_requests"
    assert other_engines(origin, derived(origin, "b", {"trainer.dtype": "bfloat16"})) == "trainer.dtype"
    assert same_reward(origin, derived(origin, "b", {})) and not same_reward(origin, derived(origin, "b", {"reward.workers": 2}))
