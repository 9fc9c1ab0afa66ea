"""The REST surface without a run: tokens, errors, and the OpenAPI page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from driver.service import create_app


def client(token: str | None = None, loopback: bool = True) -> TestClient:
    return TestClient(
        create_app(SimpleNamespace(runs={}, waiting={}), token=token, loopback=loopback, shutdown=lambda: None),
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
