"""What a batch held is gone with it: thousands of trajectories that are trained, filtered, failed, cut and evaluated leave a store without
their rows, and processes as large as before.
"""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from store import INLINE, EmbeddedStore
from tests.service import ServiceUnderTest
from tests.test_whole import check_accounts

N, SAMPLES = 4, 2
REWARD = """
import zlib

def score(response, row):
    drawn = zlib.crc32((response + row["prompt"]).encode()) % 16
    if drawn == 0:
        raise ValueError("no such unit")
    return float(drawn % 2)
"""
SETTINGS = (
    f"rollout.n={N}",
    f"batch.samples={SAMPLES}",
    "staleness.preset=partial",  # as soon as three of four are ready the last one is cut
    "filter.equal_rewards=true",
    "filter.pause_batches=null",
    "rollout.data_retries=0",
    "rollout.min_group=2",
    "evaluation.samples=4",
    "evaluation.n=2",
    "checkpoint.every=5",
    "checkpoint.keep_last=1",
    "trainer.schedule=constant",
    "stop.batches=null",
    "rollout.max_running_requests=8",  # a push lets go of the KV cache: of 128 requests, 33 MB that come and go would hide what grows
)
PACED = ("--paced", "1000", "--paced-pushes", "--paced-lengths")
ROWS = "".join(json.dumps({"prompt": f"sort {n} =", "answer": str(n)}) + "\n" for n in range(100, 160))
STRAGGLERS = [{"fault": "slow", "call": "/generate", "after": after, "times": 1, "seconds": 0.2} for after in range(5, 5000, 7)]
REASONS = {"filtered", "data", "partial"}
GROWTH_BYTES, GROWTH_OF_A_BATCH = 4 << 20, 3 << 10


def begun(tmp_path: Path, *settings: str, scripted: bool) -> ServiceUnderTest:
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "heldout.jsonl").write_text(ROWS)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, [3, 5, 8, 4, 6, 300])))  # some would take a third of a second
    scorers = json.dumps({"*": {"function": f"{tmp_path}/reward.py:score"}})
    made = [*SETTINGS, f"reward.scorers={scorers}", f"evaluation.data={tmp_path}/heldout.jsonl"]
    if not scripted:
        (tmp_path / "stragglers.json").write_text(json.dumps(STRAGGLERS))
        made.append(f"rollout.engine_args={json.dumps(['--faults', str(tmp_path / 'stragglers.json')])}")
    else:
        made += [
            f"rollout.engine_args={json.dumps([*PACED, str(tmp_path / 'lengths.txt')])}",
            "rollout.sampling.max_new_tokens=180",
            "rollout.context_length=256",
        ]
    service = ServiceUnderTest(tmp_path / "run", *made, *settings, module="tests.scripted" if scripted else "driver.cli")
    service.up()
    assert service.submit(ROWS.encode()).status_code == 201
    return service


def post(service: ServiceUnderTest, command: str) -> None:
    assert service.http.post(f"{service.url}/v1/runs/sort-digits/{command}").status_code == 202


def check_store(service: ServiceUnderTest) -> None:
    """In the midst of a run, with nothing under way: what the store holds is the rows that the ledger knows, and one version's weights."""

    def still(status: dict[str, Any]) -> bool:
        trained = status["batches"] == status["trained_version"] == status["serving_version"]
        return trained and not status["in_flight"] and status["evaluation"]["running"] is None

    post(service, "pause")
    service.wait(still, "nothing under way", 120)
    service.wait(lambda _: not strays(service), f"what nobody owns is gone: {sorted(strays(service))[:5]}", 30)
    store = EmbeddedStore(service.store)
    assert store.stats().used_bytes == sum(store.ref(key).size_bytes for key in store.keys()), "nothing freed is held"  # noqa: SIM118
    post(service, "resume")


def strays(service: ServiceUnderTest) -> set[str]:
    """Keys in the store that are neither rows in the ledger nor weights that are served."""
    with sqlite3.connect(f"file:{service.directory}/ledger.sqlite?mode=ro", uri=True) as ledger:
        leaves = [leaf for (made,) in ledger.execute("SELECT leaves FROM trajectories WHERE leaves NOTNULL") for leaf in json.loads(made)]
    ledger.close()
    owned = {leaf[hop]["key"] for leaf in leaves for hop in ("rollout", "reward") if leaf[hop]["location"] != INLINE}
    version = f"sort-digits/weights/0/{service.run()['serving_version']}/"
    return {key for key in EmbeddedStore(service.store).keys() if not key.startswith(version)} - owned  # noqa: SIM118


def resident(service: ServiceUnderTest) -> dict[str, int]:
    """By role: bytes of its processes, with their children; all others are the driver's children."""
    found: dict[str, int] = {}
    for process in service.run("/processes"):
        top = psutil.Process(process["pid"])
        children = [] if process["role"] == "driver" else top.children(recursive=True)
        found[process["role"]] = sum(each.memory_info().rss for each in (top, *children))
    return found


def check_flat(sizes: list[tuple[int, dict[str, int]]]) -> None:
    """The last quarter against the second, each by its median: what a start takes is in the first."""
    quarter = len(sizes) // 4
    assert quarter >= 5, "too few to say anything"
    early, late = sizes[quarter : 2 * quarter], sizes[-quarter:]
    batches = median(batch for batch, _ in late) - median(batch for batch, _ in early)
    for role in ("driver", "engine", "reward", "trainer"):
        grown = median(size[role] for _, size in late) - median(size[role] for _, size in early)
        assert grown <= GROWTH_BYTES + batches * GROWTH_OF_A_BATCH, f"{role} grew by {grown:,.0f} bytes in {batches:.0f} batches: {sizes}"


def check_ended(service: ServiceUnderTest, batches: int) -> None:
    """A1 and A2 at the end, all kinds of ends among them, and nothing in the store."""
    status = service.wait(lambda s: s["state"] == "finished", "the end", 120)
    check_accounts(service, status)
    counted = status["trajectories"]
    assert counted["trained"] + counted["evaluated"] + counted["discarded"] == counted["registered"]
    assert counted["evaluated"] and status["trained_version"] == status["committed_version"] >= batches
    kinds = {reason.partition(":")[0] for reason in counted["reasons"]}
    assert kinds >= REASONS, f"{REASONS - kinds} did not happen: {counted['reasons']}"
    (objects, left), *_ = re.findall(r"its store holds (\d+) objects, (\d+) bytes", service.log())
    assert (objects, left) == ("0", "0"), "A1: at rest the store holds nothing"
    assert not service.store.exists()


def cancelled(service: ServiceUnderTest) -> None:
    """While rows are ready."""
    service.wait(lambda s: s["trajectories"]["ready"] > 0, "rows that are ready")
    post(service, "cancel")


def through(service: ServiceUnderTest, batches: int, looks: int) -> list[tuple[int, dict[str, int]]]:
    """So many batches, with looks at the memory on the way; cancelled behind them."""
    sizes = []
    for look in range(1, looks + 1):
        status = service.wait(lambda s, due=batches * look // looks: s["trained_version"] >= due, f"look {look} of {looks}", 600)
        sizes.append((status["trained_version"], resident(service)))
    return sizes


@pytest.mark.parametrize("inline_bytes", [0, 4096], ids=["stored", "inline"])
def test_W8_A1_batches_with_rejects_cuts_failures_and_evaluations_leave_nothing_in_the_store(tmp_path: Path, inline_bytes: int) -> None:
    service = begun(tmp_path, "evaluation.every=8", f"store.inline_bytes={inline_bytes}", scripted=True)
    try:
        through(service, 20, 1)
        check_store(service)
        through(service, 30, 1)
        cancelled(service)
        check_ended(service, 30)
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("inline_bytes", [0, 4096], ids=["stored", "inline"])
def test_W8_A1_a_thousand_batches_leave_nothing_in_the_store_and_no_process_grows(tmp_path: Path, inline_bytes: int) -> None:
    service = begun(tmp_path, "evaluation.every=50", f"store.inline_bytes={inline_bytes}", scripted=True)
    try:
        sizes = through(service, 1000, 100)
        check_store(service)
        cancelled(service)
        check_ended(service, 1000)
        check_flat(sizes)
    finally:
        service.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_W8_A1_a_hundred_batches_of_the_real_trainer_and_engine_leave_nothing_and_no_process_grows(tmp_path: Path) -> None:
    service = begun(tmp_path, "evaluation.every=25", "store.inline_bytes=0", scripted=False)
    try:
        sizes = through(service, 100, 40)
        check_store(service)
        cancelled(service)
        check_ended(service, 100)
        check_flat(sizes)
    finally:
        service.close()
