"""The REST API as strangers use it: anything its OpenAPI allows, and much that it does not; two users at once, over a crash of the driver.

Schemathesis makes the calls from the schema that the service itself serves: no 5xx, no hang, no answer that the schema does not declare.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from driver.service import create_app
from tests.service import ServiceUnderTest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is in the dev extra")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENDS_THE_RUN = ("/shutdown", "/cancel", "/drain")
EXAMPLES = 25
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    found = ServiceUnderTest(
        tmp_path_factory.mktemp("api") / "run",
        "stop.batches=null",
        "trainer.schedule=constant",
        "service.engine_hosts=['127.0.0.1:1']",
        f"service.data_roots=['{Path(__file__).parent}']",
    )
    found.up()
    assert found.submit(close="false").status_code == 201
    yield found
    found.close()


OPERATIONS = [
    f"{method.upper()} {path}"
    for path, methods in create_app(SimpleNamespace(runs={}, waiting={}), token=None, loopback=True, shutdown=lambda: None)
    .openapi()["paths"]
    .items()
    for method in methods
    if not path.endswith(ENDS_THE_RUN)
]


@pytest.fixture(scope="module")
def schema(service: ServiceUnderTest) -> Any:
    found = schemathesis.openapi.from_url(service.url + "/openapi.json")
    found.config.update(base_url=service.url)
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_O1_O4_no_call_is_answered_with_a_5xx_or_not_at_all(schema: Any, operation: str) -> None:
    method, path = operation.split(" ")

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=schema[path][method].as_strategy(), known=st.integers(0, 3))
    def asked(case: Any, known: int) -> None:
        if known and "run" in (case.path_parameters or {}):
            case.path_parameters["run"] = "sort-digits"  # mostly one that is there
        reply = case.call(timeout=DEADLINE_S)
        case.validate_response(reply, checks=CHECKS)

    asked()


ODD = [
    "\0",
    "a\0b",
    "%00",
    "\ud7ff",
    "𝄞" * 300,
    "x" * 70_000,
    "../../etc/passwd",
    "9" * 400,
    "-1",
    "1e999",
    "NaN",
    "s" + "9" * 18 + "t0000",
]


@pytest.mark.parametrize("odd", ODD, ids=lambda text: ascii(text[:12]))
def test_O4_odd_text_wherever_text_goes_is_refused_or_taken_in_words(service: ServiceUnderTest, odd: str) -> None:
    base = f"{service.url}/v1/runs"
    quoted = "".join(f"%{byte:02x}" for byte in odd[:4000].encode())
    calls: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", f"{base}/{quoted}", {}),
        ("GET", f"{base}/sort-digits/trajectories/{quoted}", {}),
        ("GET", f"{base}/sort-digits/trajectories", {"params": {"after": odd[:4000]}}),
        ("GET", f"{base}/sort-digits/trajectories", {"params": {"limit": odd[:4000]}}),
        ("GET", f"{base}/sort-digits/batches", {"params": {"last": odd[:4000]}}),
        ("GET", f"{base}/sort-digits/logs/{quoted}", {}),
        (
            "POST",
            f"{base}/sort-digits/datasets/{quoted}/rows",
            {"content": b'{"prompt": "sort 1 =", "answer": "1", "task_type": "sort"}\n'},
        ),
        ("POST", f"{base}/sort-digits/datasets/{quoted}/close", {}),
        ("POST", f"{base}/sort-digits/datasets", {"params": {"mapping": odd[:4000]}, "content": b"{}"}),
        ("POST", f"{base}/sort-digits/datasets", {"json": {"path": odd}}),
        ("POST", f"{base}/sort-digits/datasets", {"content": odd.encode()}),
        ("POST", f"{base}/sort-digits/engines", {"json": {"url": odd}}),
        ("POST", f"{base}/sort-digits/engines", {"json": {"url": f"http://127.0.0.1:{odd}"}}),
        ("DELETE", f"{base}/sort-digits/engines/{quoted}", {}),
        ("POST", f"{service.url}/v1/config/check", {"json": {"run_id": odd, "model": {"path": odd}}}),
        ("POST", f"{service.url}/v1/config/check", {"json": {"run_id": "a", "model": {"path": "b"}}, "params": {"base": odd[:4000]}}),
        ("POST", f"{service.url}/v1/config/check", {"content": odd.encode(), "headers": {"content-type": "application/json"}}),
    ]
    taken = {"after": odd} if odd.startswith("s9") else None  # that looks like an id, of nothing
    for method, url, more in calls:
        reply = service.http.request(method, url, **more)
        if reply.status_code == 200 and taken is not None and more.get("params") == taken:
            assert reply.json()["items"] == []
            continue
        assert 400 <= reply.status_code < 500, (method, url[:200], str(more)[:200], reply.status_code, reply.text[:300])
        assert reply.json()["error"]["message"], reply.text[:300]
    named = service.http.post(
        f"{base}/sort-digits/datasets",
        params={"name": odd[:4000], "close": "false"},
        content=json.dumps({"prompt": f"sort {odd[:200]} =", "answer": odd[:200], "task_type": "sort"}).encode(),
    )
    assert named.status_code in (201, 400), named.text[:300]
    assert service.get("/health")["ok"] is True


def test_O4_bytes_that_are_no_text_in_headers_and_bodies_are_refused_in_words(service: ServiceUnderTest) -> None:
    base = f"{service.url}/v1/runs/sort-digits"
    row = b'{"prompt": "sort 1 =", "answer": "1", "task_type": "sort"}\n'
    for headers in (
        {b"idempotency-key": b"\xff\xfe"},
        {b"content-type": b"\xff"},
        {b"origin": b"http://[::1"},
        {b"authorization": b"\xff"},
    ):
        reply = service.http.post(f"{base}/datasets", params={"close": "false"}, headers=headers, content=row)  # type: ignore[arg-type]
        assert reply.status_code < 500, (headers, reply.text)
    for body in (
        b"\xff\xfe\x00",
        row[:-3] + b'\xff"}\n',
        b'{"prompt": "\\ud800", "answer": "1", "task_type": "sort"}\n',
        b"[" * 100_000,
        b'{"a":' * 50_000,
    ):
        reply = service.http.post(f"{base}/datasets", params={"close": "false"}, content=body)
        assert reply.status_code == 400, (body[:40], reply.status_code, reply.text[:300])
    for body in (b"[" * 100_000, b'{"run_id": 1e400}', b'{"seed": ' + b"9" * 5000 + b"}"):
        reply = service.http.post(f"{service.url}/v1/config/check", content=body, headers={"content-type": "application/json"})
        assert 400 <= reply.status_code < 500, (body[:40], reply.status_code, reply.text[:300])
    assert service.get("/health")["ok"] is True


# ---- two users at once -----------------------------------------------------------------------------------------------------


class User(threading.Thread):
    """Submits and appends, each with a key, each sent until it is answered and then once more; pauses and resumes in between."""

    def __init__(self, service: ServiceUnderTest, name: str, submits: int) -> None:
        super().__init__(name=name, daemon=True)
        self._service = service
        self._submits = submits
        self.sent: Counter[str] = Counter()
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self.failed: list[str] = []
        self.http = httpx.Client(timeout=30.0, trust_env=False)

    def run(self) -> None:
        try:
            for number in range(self._submits):
                prompts = [f"sort {self.name} {number} {row} =" for row in range(7)]
                dataset = self._send("/datasets", prompts[:4], close="false")
                self._send(f"/datasets/{dataset}/rows", prompts[4:])
                self._act("pause" if number % 3 == 1 else "resume")
                self._act("resume")
        except Exception as error:
            self.failed.append(repr(error))

    def _send(self, path: str, prompts: list[str], **params: str) -> str:
        key = uuid.uuid4().hex
        body = "".join(json.dumps({"prompt": prompt, "answer": "1", "task_type": "sort"}) + "\n" for prompt in prompts).encode()
        self.sent.update(prompts)
        replies = [self._insist(path, body, key, params) for _ in range(2)]
        self.answers[key] = replies
        return str(replies[0]["dataset_id"])

    def _insist(self, path: str, body: bytes, key: str, params: dict[str, str]) -> dict[str, Any]:
        """Like a careful client: an answer that did not come is asked for again, with the same key, wherever the service is now."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                url = f"{self._service.url}/v1/runs/sort-digits{path}"
                reply = self.http.post(url, params=params, content=body, headers={"idempotency-key": key})
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            assert reply.status_code == 201, reply.text
            found: dict[str, Any] = reply.json()
            return found
        raise AssertionError(f"{path} was not answered in 120 s")

    def _act(self, action: str) -> None:
        try:
            reply = self.http.post(f"{self._service.url}/v1/runs/sort-digits/{action}")
        except httpx.TransportError:
            return
        assert reply.status_code == 202, reply.text


def test_W1_W6_two_users_at_once_and_a_driver_that_dies_under_them_lose_and_double_nothing(tmp_path: Path) -> None:
    service = ServiceUnderTest(tmp_path / "run", "stop.batches=null", "stop.epochs=1", "trainer.schedule=constant", "batch.samples=8")
    users = []
    try:
        service.up()
        users = [User(service, name, 25) for name in ("ann", "ben")]
        for user in users:
            user.start()
        for _ in range(2):
            time.sleep(1.5)
            service.kill()
            service.up()
        for user in users:
            user.join(240)
            assert not user.is_alive() and not user.failed, user.failed
        for user in users:
            for first, again in user.answers.values():
                assert first["dataset_id"] == again["dataset_id"] and again["created"] is False and again["rows_added"] == 0
        for dataset in service.run("/datasets"):
            assert service.http.post(f"{service.url}/v1/runs/sort-digits/datasets/{dataset['dataset_id']}/close").status_code == 200
        service.http.post(f"{service.url}/v1/runs/sort-digits/resume")
        status = service.wait(lambda s: s["state"] == "finished", "the end", 240)
    finally:
        service.close()
    with sqlite3.connect(service.directory / "ledger.sqlite") as ledger:
        visible = "SELECT payload FROM dataset_rows r JOIN segments s ON s.segment = r.segment AND r.row_index < s.rows"
        kept = Counter(json.loads(payload)["prompt"] for (payload,) in ledger.execute(visible))
        walked = ledger.execute("SELECT count(*), count(DISTINCT segment * 1000 + row_index) FROM samples").fetchone()
    assert kept == users[0].sent + users[1].sent, "every row once"
    assert walked == (sum(kept.values()), sum(kept.values())), "W2: each was registered once"
    counted = status["trajectories"]
    assert counted["trained"] + counted["discarded"] == counted["registered"] == 8 * sum(kept.values())
