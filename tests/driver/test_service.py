"""The REST surface without a run: tokens, errors, and the OpenAPI page."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from driver.config import load_config
from driver.limits import Limits
from driver.lost_time import LostTime
from driver.measured import Measured
from driver.service import create_app

CONFIG = Path(__file__).parents[2] / "examples/sort_digits/config.yaml"


def run_with(measured: Measured, config) -> SimpleNamespace:
    core = SimpleNamespace(run_id="run", measured=measured, lost_time=LostTime(), limits=Limits(2, 16))
    return SimpleNamespace(core=core, config=config, dispatch=SimpleNamespace(kv_room=SimpleNamespace(slots=64)))


def fleet(runs) -> SimpleNamespace:
    return SimpleNamespace(runs=runs, waiting={})


def client(token: str | None = None, loopback: bool = True) -> TestClient:
    return TestClient(
        create_app(fleet({}), token=token, loopback=loopback, shutdown=lambda: None),
        raise_server_exceptions=False,
    )


@pytest.mark.parametrize(
    "header", [{}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer secret2"}]
)
def test_with_a_token_nothing_but_health_answers_without_it(header):
    service = client("secret", loopback=False)
    for path in ("/v1/runs", "/metrics", "/openapi.json", "/v1/runs/x/datasets", "/docs"):
        reply = service.get(path, headers=header)
        assert reply.status_code == 401 and "Authorization: Bearer" in reply.json()["error"]["message"], path
    assert service.post("/v1/shutdown", headers=header).status_code == 401
    assert service.get("/health", headers=header).status_code == 200
    assert service.get("/v1/runs", headers={"authorization": "Bearer secret"}).json() == []


def test_errors_say_what_to_do():
    service = client()
    assert "there is no run 'x'" in service.get("/v1/runs/x").json()["error"]["message"]
    assert "see /docs" in service.get("/v2").json()["error"]["message"]
    bad = service.post("/v1/config/check", json={"run_id": "r", "modle": {}})
    assert bad.status_code == 400 and "did you mean 'model'?" in bad.json()["error"]["message"]


def test_the_openapi_names_every_call_of_the_command_line():
    paths = client().get("/openapi.json").json()["paths"]
    run = "/v1/runs/{run}"
    wanted = ["", "/datasets", "/datasets/{dataset_id}/rows", "/datasets/{dataset_id}/close", "/trajectories", "/trajectories/{traj_uid}"]
    wanted += ["/datasets/{dataset_id}", "/datasets/{dataset_id}/solved", "/mixes"]
    wanted += ["/staleness", "/queues", "/engines", "/why", "/pause", "/resume", "/drain", "/cancel", "/logs/{role}", "/batches", "/bias"]
    wanted += ["/why/history", "/whatif"]
    assert {run + tail for tail in wanted} <= paths.keys()
    assert {
        "/v1/runs",
        "/v1/staleness",
        "/v1/queues",
        "/v1/engines",
        "/v1/why",
        "/v1/shutdown",
        "/v1/config/check",
        "/health",
    } <= paths.keys()


def test_a_page_of_another_site_can_not_use_the_service_through_a_browser():
    service = client()
    assert service.post("/v1/shutdown", headers={"origin": "http://evil.example"}).status_code == 403
    assert service.get("/v1/runs", headers={"origin": "http://testserver"}).status_code == 200


def test_whatif_answers_for_a_run_that_has_measured_itself_and_says_what_is_missing_for_one_that_has_not(tmp_path):
    fresh = run_with(Measured(), load_config(CONFIG, [f"run_dir={tmp_path}"]))
    known = Measured()
    for count in range(300):
        known.trajectory(engine_s=1.0, aside_s=0.0, tokens=1 + count % 16)
        known.decoded(10, 1.0)
    known.training_s.observe(2.0)
    runs = {"fresh": fresh, "known": run_with(known, load_config(CONFIG, [f"run_dir={tmp_path}"]))}
    service = TestClient(create_app(fleet(runs), token=None, loopback=True, shutdown=lambda: None), raise_server_exceptions=False)
    missing = service.get("/v1/runs/fresh/whatif")
    assert missing.status_code == 409 and "give a trace" in missing.json()["error"]["message"]
    found = service.get("/v1/runs/known/whatif", params={"s": [1, 4]}).json()
    assert [one["bound"] for one in found["reached"]] == [1, 2, 4] and found["sentence"].startswith("S = 2 reaches ")
    assert (found["slots"], found["seconds"]["training"], found["seconds"]["token"]) == (64, 2.0, 0.1)
    both = service.get("/v1/staleness/whatif", params={"s": 1}).json()
    assert "give a trace" in both["fresh"]["error"] and both["known"]["bound"] == 2
    assert service.get("/v1/runs/known/whatif", params={"s": 65}).status_code == 422
    assert service.get("/v1/runs/known/whatif", params={"s": list(range(17))}).status_code == 422


def test_L1_the_history_of_why_is_asked_for_a_run_or_for_all(tmp_path):
    run = run_with(Measured(), load_config(CONFIG, [f"run_dir={tmp_path}"]))
    for number in range(5):
        run.core.lost_time.waits("trainer", f"kind {number}", "7 of 8 samples are ready", float(number))
    service = TestClient(create_app(fleet({"run": run}), token=None, loopback=True, shutdown=lambda: None))
    one = service.get("/v1/runs/run/why/history", params={"last": 2}).json()
    assert [item["kind"] for item in one["items"]] == ["kind 3", "kind 4"] and one["seconds"]["trainer"]["kind 3"] == 1.0
    assert service.get("/v1/why/history").json()["run"]["items"][0]["kind"] == "kind 0"
    assert service.get("/v1/why/history", params={"last": 301}).status_code == 422


@pytest.mark.parametrize("origin", ["http://[::1", "null", "http://", "//testserver:99999999"])
def test_O1_an_origin_that_is_no_url_is_another_site_and_no_fault_of_ours(origin):
    reply = client().get("/v1/runs", headers={"origin": origin})
    assert reply.status_code == 403 and "another site" in reply.json()["error"]["message"]


@pytest.mark.parametrize("base", ["a\0b", "x" * 5000, "𝄞" * 300])
def test_O1_a_path_that_no_file_system_takes_is_refused_in_words(base):
    for params, path in (({"base": base}, "model"), ({}, base)):
        reply = client().post("/v1/config/check", params=params, json={"run_id": "r", "model": {"path": path}})
        assert reply.status_code == 400 and reply.json()["error"]["message"], (reply.status_code, reply.text[:300])


def test_every_answer_that_is_no_success_is_declared():
    for path, methods in client().get("/openapi.json").json()["paths"].items():
        for method, call in methods.items():
            refused = call["responses"]["4XX"]["content"]["application/json"]["schema"]
            assert refused["required"] == ["error"] and {"4XX", "503"} < call["responses"].keys(), (method, path)
    submit = client().get("/openapi.json").json()["paths"]["/v1/runs/{run}/datasets"]["post"]
    assert submit["requestBody"]["content"].keys() == {"application/octet-stream", "application/json"}


@pytest.mark.parametrize("command", ["pause", "resume", "drain"])
def test_A2_a_run_that_was_cancelled_can_not_be_paused_resumed_or_drained(command):
    run = SimpleNamespace(core=SimpleNamespace(run_id="r", ending="cancelled", ledger=SimpleNamespace(ended=None)))
    service = TestClient(create_app(fleet({"r": run}), token=None, loopback=True, shutdown=lambda: None), raise_server_exceptions=False)
    reply = service.post(f"/v1/runs/r/{command}")
    assert reply.status_code == 409 and "run r is ending (cancelled)" in reply.json()["error"]["message"]
