"""What is wrong with a value is said with its key, what was given and what is allowed, by the configuration and by REST alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from driver.config import ConfigError, load_config
from driver.service import create_app

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"
RAW = ("input should", "valid", "unable to parse", "instance of", "match pattern", "<class")
"""Pydantic's own words."""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("batch.samples=0", "batch.samples is 0: it must be at least 1"),
        ("batch.samples=abc", "batch.samples is 'abc': give a whole number"),
        ("batch.samples=1.5", "batch.samples is 1.5: give a whole number"),
        ("batch.samples=null", "batch.samples is null: give a whole number"),
        ("batch=[1]", "batch is [1]: it is a section: give keys with values, {key: value}"),
        ("data=[5]", "data.0 is 5: it is a section"),
        ("rollout.engine=vllm", "rollout.engine is 'vllm': known: embedded, sglang"),
        ("trainer.loss.advantage=grpoo", "trainer.loss.advantage is 'grpoo': did you mean 'grpo'? known: group_mean, dr_grpo, grpo"),
        ("service.port=99999", "service.port is 99999: it must be at most 65,535"),
        ("run_id=5", "run_id is 5: give a text, in quotes"),
        ("run_id=a/b", "run_id is 'a/b': write letters, digits, '_', '.' and '-', at most 64"),
        ("run_dir=5", "run_dir is 5: give a path"),
        ("shuffle=maybe", "shuffle is 'maybe': give true or false"),
        ("trainer.learning_rate=fast", "trainer.learning_rate is 'fast': give a number"),
        ("rollout.sampling.temperature=-1", "rollout.sampling.temperature is -1: it must be above 0"),
        ("filter.min_pass_rate=2", "filter.min_pass_rate is 2: it must be below 1"),
        ("rollout.engine_urls=http://x", "rollout.engine_urls is 'http://x': give a list: [one, another]"),
        ("reward.scorers=[]", "reward.scorers is []: give names with values"),
        ("evaluation={}", "evaluation.data is required"),
        (f"seed={'x' * 500}", "seed is 'xxxxx"),
    ],
)
def test_O1_a_wrong_value_in_the_configuration_is_told_in_our_words(setting, words):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, [setting])
    said = str(caught.value)
    assert words in said and not any(raw in said.lower() for raw in RAW) and len(said) < 300, said


@pytest.mark.parametrize("setting", ["service.token=[s3cret]", "service=[s3cret]", "rollout.engine_api_key={a: s3cret}"])
def test_a_secret_that_is_written_wrongly_is_not_shown(setting):
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, [setting])
    assert "s3cret" not in str(caught.value)


def service() -> TestClient:
    run = SimpleNamespace(core=SimpleNamespace(run_id="r"))
    app = create_app(SimpleNamespace(runs={"r": run}, waiting={}), token=None, loopback=True, shutdown=lambda: None)
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("method", "path", "more", "words"),
    [
        ("GET", "/trajectories", {"params": {"limit": "x"}}, "query parameter limit is 'x': give a whole number"),
        ("GET", "/trajectories", {"params": {"limit": 0}}, "query parameter limit is '0': it must be at least 1"),
        (
            "GET",
            "/trajectories",
            {"params": {"state": "runing"}},
            "query parameter state is 'runing': did you mean 'running'? known: running",
        ),
        ("GET", "/datasets/d/solved", {"params": {"after": "x"}}, "query parameter after is 'x': give what `next` of the page before says"),
        ("POST", "/datasets", {"params": {"epochs": "often"}}, "query parameter epochs is 'often': give a number of passes, or forever"),
        ("POST", "/datasets", {"params": {"close": "perhaps"}}, "query parameter close is 'perhaps': give true or false"),
        ("PUT", "/staleness", {"json": {"bound": -1}}, "the body's bound is -1: it must be at least 0"),
        ("PUT", "/staleness", {"json": {"bond": 1}}, "unknown field 'bond' in the body: did you mean 'bound'? known: bound, samples"),
        ("PUT", "/staleness", {"json": [1]}, "the body is [1]: give an object with its fields"),
        ("PUT", "/staleness", {"content": b"{", "headers": {"content-type": "application/json"}}, "the body is not JSON"),
        ("PATCH", "/datasets/d", {"json": {"weight": "x"}}, "the body's weight is 'x': give a number"),
        ("PATCH", "/datasets/d", {"json": {"weight": True}}, "the body's weight: give a number, not true or false"),
    ],
)
def test_O1_a_wrong_value_over_rest_is_told_in_our_words(method: str, path: str, more: dict[str, Any], words: str):
    reply = service().request(method, f"/v1/runs/r{path}", **more)
    said = reply.json()["error"]["message"]
    assert reply.status_code == 422 and words in said and not any(raw in said.lower() for raw in RAW), said


@pytest.mark.parametrize(
    ("method", "url", "words"),
    [
        (
            "GET",
            "/v1/runs/r/trajectories?limt=5",
            "unknown query parameter 'limt': did you mean 'limit'? known: after, limit, outcome, state",
        ),
        ("GET", "/v1/runs?limit=5", "unknown query parameter 'limit': this call takes none"),
        (
            "POST",
            "/v1/runs/r/datasets?keep_open=1",
            "unknown query parameter 'keep_open': known: close, epochs, mapping, name, priority, weight",
        ),
        ("POST", "/v1/runs/r/pause?really", "this call takes none"),
        ("GET", "/v1/runs/r/trajectories?limit=5&limit=6", "query parameter limit is given 2 times: give it once"),
    ],
)
def test_O1_a_query_parameter_that_a_call_does_not_have_is_refused_and_the_known_are_named(method: str, url: str, words: str):
    reply = service().request(method, url)
    assert reply.status_code == 422 and words in reply.json()["error"]["message"], reply.text


def test_a_parameter_that_is_a_list_may_be_given_more_than_once_and_probes_may_add_what_they_like():
    assert service().get("/v1/staleness/whatif?s=1&s=2&x=1").status_code == 422
    assert "'x'" in service().get("/v1/staleness/whatif?s=1&s=2&x=1").json()["error"]["message"]
    assert service().get("/metrics?x=1").status_code != 422
