"""The whole of it, for real: service, engine, reward pool, trainer rank and store as processes, on the demo's model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from collections import Counter

import psutil
import pytest
from transformers import AutoModelForCausalLM

from tests.service import ServiceUnderTest, trained_rows

BATCHES = 40


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    found = ServiceUnderTest(
        tmp_path_factory.mktemp("whole") / "run",
        f"stop.batches={BATCHES}",
        "checkpoint.every=4",
        "batch.samples=6",
        "rollout.n=4",
        "rollout.engines=2",
    )
    found.up()
    yield found
    found.close()


def check_accounts(service: ServiceUnderTest, status: dict) -> None:
    """A1 and A2 from the ledger and from the trainer's own log."""
    counted = status["trajectories"]
    assert counted["registered"] == sum(counted[state] for state in ("running", "ready", "consumed", "finished"))
    assert counted["finished"] == sum(counted[outcome] for outcome in ("trained", "evaluated", "discarded"))
    last = {line["batch_id"]: line for line in trained_rows(service.directory)}  # a replay writes its batch again
    times = Counter(row for line in last.values() for row in line["row_ids"])
    assert not times or max(times.values()) == 1, "A2: a row in two applied batches"
    assert sorted(last) == list(range(len(last))), "batches without a gap"


def test_O1_O4_bad_input_is_refused_with_a_sentence_and_the_service_is_unharmed(service):
    bad = service.submit(b'{"prompt": "sort 1 =", "answer": "1"}\n{"prompt": 3}\n')
    assert bad.status_code == 400 and "line 2" in bad.json()["error"]["message"] and bad.json()["error"]["line"] == 2
    assert service.submit(b"\n").status_code == 400
    unknown = service.submit(b'{"prompt": "sort 1 =", "answer": "1"}\n')
    assert unknown.status_code == 400 and "no scorer takes; known: sort" in unknown.json()["error"]["message"]
    assert service.run("/datasets") == []
    missing = service.http.get(f"{service.url}/v1/runs/other")
    assert missing.status_code == 404 and "sort-digits" in missing.json()["error"]["message"]
    assert service.http.get(f"{service.url}/v1/runs/sort-digits/trajectories/nonsense").status_code == 404
    assert service.http.get(f"{service.url}/v1/runs/sort-digits/trajectories", params={"limit": 0}).status_code == 422
    path = service.http.post(f"{service.url}/v1/runs/sort-digits/datasets", json={"path": "/etc/passwd"})
    assert path.status_code == 400 and "data_roots" in path.json()["error"]["message"]
    assert service.http.post(f"{service.url}/v1/runs/sort-digits/explode").status_code == 404
    assert service.get("/health")["ok"] is True


def test_L1_a_run_without_data_says_what_it_waits_for(service):
    status = service.wait(lambda s: "no dataset" in s["why"].get("rollout", {}).get("reason", ""), "the reason")
    assert status["state"] == "running"


def test_W6_the_same_submit_twice_with_one_key_is_one_dataset(service):
    def submit():
        url = f"{service.url}/v1/runs/sort-digits/datasets"
        body = (
            json.dumps({"prompt": f"sort {n} =", "answer": "".join(sorted(str(n))), "task_type": "sort"}) + "\n" for n in range(1000, 1300)
        )
        return service.http.post(url, content="".join(body).encode(), headers={"idempotency-key": "once"}, params={"close": "false"})

    first, again = submit(), submit()
    assert first.status_code == again.status_code == 201
    assert first.json()["rows_added"] == 300 and again.json()["rows_added"] == 0
    assert first.json()["dataset_id"] == again.json()["dataset_id"] and again.json()["created"] is False
    assert len(service.run("/datasets")) == 1


def test_staleness_and_queues_answer_while_it_runs(service):
    service.wait(lambda s: s["trained_version"] >= 2, "two batches")
    staleness, queues = service.get("/v1/staleness")["sort-digits"], service.get("/v1/queues")["sort-digits"]
    assert staleness["bound"] == 2 and staleness["max"] <= 2 and sum(staleness["histogram"].values()) >= 12
    assert all(sample["deadline_batch"] >= staleness["next_batch"] for sample in staleness["worst_in_flight"]), "A3"
    assert {"not_sent", "generating", "scoring", "ready", "consumed", "store", "watermark", "engine_requests"} <= queues.keys()
    assert queues["watermark"]["binding"] in ("kv", "staleness", "demand", "store")
    engines = service.get("/v1/engines")["sort-digits"]
    assert {engine["state"] for engine in engines} <= {"open", "shut"}
    assert all(engine["capabilities"]["embedded"] and engine["capabilities"]["sessions"] for engine in engines)
    metrics = service.http.get(f"{service.url}/metrics").text
    assert 'headrace_ledger_trained_version{run_id="sort-digits"}' in metrics
    assert service.run("/why")["sentence"]


def test_A2_V6_sigterm_in_mid_run_and_a_restart_go_on_from_the_same_version(service):
    before = service.wait(lambda s: s["trained_version"] >= 3, "three batches")
    assert service.terminate() == 0
    assert not service.store.exists(), "nothing is left in memory"
    held = max(line["batch_id"] for line in trained_rows(service.directory)) + 1
    assert held >= before["trained_version"]
    service.up()
    after = service.wait(lambda s: s["trained_version"] >= held, "the restart")
    assert after["epoch"] == 0, "nothing was replayed"
    service.wait(lambda s: s["serving_version"] == s["trained_version"] or s["serving_version"] >= held, "engines at the ledger's version")
    check_accounts(service, service.run())


def test_A1_L2_killing_an_engine_a_rank_and_the_driver_loses_nothing(service):
    def open_engines(_status: dict) -> bool:
        return [engine["state"] for engine in service.run("/engines")].count("open") == 2

    service.wait(open_engines, "both engines")
    pids = {f"{p['role']}-{p['index']}": p["pid"] for p in service.run("/processes")}
    os.kill(pids["engine-0"], signal.SIGKILL)
    (rank,) = psutil.Process(pids["trainer-0"]).children()
    rank.kill()  # its warm parent forks another
    version = service.run()["trained_version"]
    service.wait(lambda s: s["trained_version"] >= version + 2, "two batches after both")
    service.wait(open_engines, "the second engine is back")
    service.kill()
    service.up()
    version = service.run()["trained_version"]
    service.wait(lambda s: s["trained_version"] >= version + 2, "two batches after the driver")
    service.kill()
    shutil.rmtree(service.store)  # as after a restart of the host: the rows in memory are gone
    service.up()
    status = service.wait(lambda s: s["state"] == "finished", "the end")
    assert status["trained_version"] == BATCHES and status["committed_version"] == BATCHES
    check_accounts(service, status)
    counted = status["trajectories"]
    assert counted["trained"] == BATCHES * 6 * 4 == counted["registered"], counted
    assert counted["running"] == counted["ready"] == counted["consumed"] == 0
    assert status["staleness_max"] <= 2


def test_what_is_left_at_the_end(service):
    """Checkpoint, archive, metrics, and a store that is gone."""
    status = service.run()
    model = AutoModelForCausalLM.from_pretrained(status["checkpoint"] + "/hf")
    assert sum(p.numel() for p in model.parameters()) == 427_264
    assert not service.store.exists()
    lines = [json.loads(line) for line in (service.directory / "metrics.jsonl").read_text().splitlines()]
    by_batch = {line["batch_id"]: line for line in lines}
    assert sorted(by_batch) == list(range(BATCHES))
    gaps = [line["logprob_gap_max"] for line in by_batch.values() if line["logprob_gap_rows"]]
    assert gaps and max(gaps) <= 1e-4
    page = service.run("/trajectories", state="finished", limit=50)
    assert len(page["items"]) == 50 and page["next"]
    second = service.run("/trajectories", state="finished", limit=1000, after=page["next"])
    assert len(second["items"]) == BATCHES * 24 - 50
    one = service.run(f"/trajectories/{page['items'][0]['traj_uid']}")
    assert one["outcome"] == "trained" and one["archive"]["prompt"].startswith("sort ")
    assert one["archive"]["response"] and len(one["archive"]["rollout_log_probs"]) == len(one["archive"]["input_ids"]) - 1
    assert service.submit().status_code == 409
    with sqlite3.connect(service.directory / "ledger.sqlite") as ledger:
        late = ledger.execute("SELECT count(*) FROM samples WHERE batch_id > deadline_batch").fetchone()[0]
    assert late == 0, "A3"


def test_H6_it_ends_at_once_when_there_is_nothing_to_do(service):
    began = time.monotonic()
    assert service.terminate() == 0
    assert time.monotonic() - began < 15
