"""Scores over HTTP: every leaf gets its own answer, or its own reason."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from reward.client import RewardClient, RewardUnavailable
from reward.wire import Health, Job, Result

# What `returns` in scorers.py has under these names.
RETURNS = (
    *("nan", "inf", "too big", "bool", "none", "text", "list", "array"),
    *("no score", "unknown key", "correct 2", "parts list", "part nan"),
)


def job(leaf_id: str, task_type: str, response: str, **more: Any) -> Job:
    return Job(leaf_id=leaf_id, task_type=task_type, prompt="say", response=response, **more)


async def score(client: RewardClient, *jobs: Job, deadline_s: float = 30) -> dict[str, Result]:
    return {result.leaf_id: result for result in await client.score(jobs, deadline_s)}


async def test_results_go_home_by_leaf_whatever_the_order_and_the_task_types(client: RewardClient) -> None:
    jobs = [job(f"long-{n}", "length", "x" * n, fields={"scale": 10}) for n in range(100)]
    jobs += [job(f"exact-{n}", "words", str(n), answer=n % 2 and n) for n in range(100)]
    jobs += [job(f"number-{n}", "number", f"it is {n}.", answer=str(n + 0.001)) for n in range(50)]
    random.Random(0).shuffle(jobs)
    results = await score(client, *jobs)
    assert all(result.ok and result.error is None for result in results.values())
    assert all(results[f"long-{n}"].score == pytest.approx(n / 10) and results[f"long-{n}"].is_correct is None for n in range(100))
    assert all(results[f"exact-{n}"].is_correct is bool(n % 2 or n == 0) for n in range(100))
    assert all(results[f"number-{n}"].score == 1 for n in range(50))
    assert results["exact-1"].scorer_version == "exact@1"
    assert results["long-1"].scorer_version.startswith("scorers.py:length@") and len(results["long-1"].scorer_version) == 34


async def test_a_function_sees_the_row_and_may_tell_more_and_may_print(client: RewardClient) -> None:
    result = (await score(client, job("a", "told", "four", answer=1, fields={"level": 3}, finish_reason="length")))["a"]
    assert (result.ok, result.score, result.is_correct) == (True, 0.5, True)
    assert result.parts == {"length": 4.0, "note": "fine", "row": "answer,finish_reason,level,prompt,task_type"}
    assert 0 <= result.seconds < 1


async def test_L4_whatever_is_no_number_is_a_failure_with_a_reason_and_never_a_score(client: RewardClient) -> None:
    results = await score(client, *(job(kind, "returns", kind) for kind in RETURNS))
    for kind, result in results.items():
        assert not result.ok and result.score is None and result.is_correct is None, kind
        assert result.error and result.error.startswith("scorers.py:returns returned"), kind
    assert "must be finite" in str(results["nan"].error)
    assert "of shape (2,)" in str(results["array"].error)
    assert "True, a bool" in str(results["bool"].error)


async def test_L4_N4_a_scorer_that_raises_fails_its_leaf_alone_and_says_where(client: RewardClient) -> None:
    results = await score(
        client, job("a", "bad", "raise"), job("b", "bad", "well"), job("c", "bad", "exit"), job("d", "number", "1", answer="one")
    )
    assert results["b"].score == 1
    assert "scorers.py:bad raised KeyError: 'no such thing'" in str(results["a"].error)
    assert str(Path(__file__).parent / "scorers.py") in str(results["a"].error) and ", line " in str(results["a"].error)
    assert "raised SystemExit: enough" in str(results["c"].error)
    assert "numeric raised ValueError: the answer 'one' holds no number" in str(results["d"].error)
    assert [results[name].score for name in "acd"] == [None, None, None]


@pytest.mark.parametrize("how", ["loop", "hold the GIL"])
async def test_H5_a_function_that_never_ends_is_killed_at_its_limit_and_its_neighbours_are_scored(client: RewardClient, how: str) -> None:
    jobs = [job(str(n), "bad", how if n == 5 else "well") for n in range(16)]
    start = time.monotonic()
    results = await score(client, *jobs)
    assert 0.8 <= time.monotonic() - start < 5
    assert results["5"].error == "scorers.py:bad gave no answer within 0.8 s and was killed" and results["5"].score is None
    assert results["5"].seconds == 0.8
    assert all(result.score == 1 for leaf_id, result in results.items() if leaf_id != "5")
    assert (await score(client, job("again", "bad", "well")))["again"].ok


@pytest.mark.parametrize(("how", "said"), [("crash", "SIGSEGV"), ("quit", "exit code 3")])
async def test_H5_a_function_that_kills_its_process_fails_alone(client: RewardClient, how: str, said: str) -> None:
    results = await score(client, *(job(str(n), "bad", how if n in (0, 3) else "well") for n in range(8)))
    for leaf_id in ("0", "3"):
        assert results[leaf_id].error == f"scorers.py:bad ended its process twice: the worker ended ({said})"
    assert sum(result.ok for result in results.values()) == 6


async def test_L2_a_job_whose_worker_died_once_is_scored_after_all(client: RewardClient, tmp_path: Path) -> None:
    results = await score(client, job("a", "bad", "die once", fields={"marker": str(tmp_path / "died")}))
    assert (tmp_path / "died").exists() and results["a"].score == 1


async def test_L2_idle_workers_that_were_killed_are_replaced_and_nobody_notices(service: Any, client: RewardClient) -> None:
    await score(client, job("a", "bad", "well"))
    workers = psutil.Process(service.process.pid).children()
    for worker in workers:
        worker.kill()
    give_up = time.monotonic() + 5
    while any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers):
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the service sees its pipes close, whichever way it goes on from there
    results = await score(client, *(job(str(n), "bad", "well") for n in range(16)))
    assert all(result.score == 1 for result in results.values())


async def test_H5_L4_workers_that_somebody_stopped_are_replaced_and_their_jobs_are_scored_after_all(
    service: Any, client: RewardClient
) -> None:
    """A stopped worker is not the job's fault, so it costs it nothing."""
    await score(client, *(job(str(n), "bad", "well") for n in range(8)))
    workers = psutil.Process(service.process.pid).children()
    for worker in workers:
        worker.suspend()
    results = await score(client, *(job(str(n), "bad", "well") for n in range(16)))
    assert all(result.score == 1 for result in results.values())
    assert not any(worker.is_running() for worker in workers)


async def test_workers_are_added_and_dismissed_while_jobs_are_scored_and_none_is_lost(start: Any, http: httpx.AsyncClient) -> None:
    grown = start(workers=1)
    grown.wait_until_up()
    client = RewardClient(grown.url, http)

    def workers() -> list[psutil.Process]:
        return psutil.Process(grown.process.pid).children()

    async def until(count: int, *jobs: asyncio.Task[Any]) -> None:
        give_up = time.monotonic() + 20
        while len(workers()) != count:
            assert time.monotonic() < give_up, f"{len(workers())} workers, not {count}"
            await asyncio.sleep(0.01)

    (first,) = workers()
    going = asyncio.create_task(score(client, *(job(str(n), "bad", "nap") for n in range(8))))
    await asyncio.sleep(0.1)
    await client.resize(4)
    more = asyncio.create_task(score(client, *(job(f"m{n}", "bad", "nap") for n in range(32))))
    await until(4)
    assert (await client.health()).workers == 4
    await client.resize(2)  # all are at a job, and end with it
    await client.resize(2)
    await until(2)
    results = await going | await more
    assert len(results) == 40 and all(result.score == 1 for result in results.values())
    await client.resize(1)  # now they are idle
    await until(1)
    assert workers() == [first], "the first is the last to go"
    for count in (3, 1, 2):
        await client.resize(count)
    results = await score(client, *(job(f"l{n}", "bad", "nap") for n in range(8)))
    assert all(result.score == 1 for result in results.values())
    await until(2)
    for nonsense in (b'{"count": 0}', b'{"count": "many"}', b"{}"):
        reply = await http.post(grown.url + "/v1/workers", content=nonsense)
        assert reply.status_code == 422 and "not a number of workers" in reply.text
    assert len(workers()) == 2


async def test_what_a_killed_function_started_is_killed_with_it(client: RewardClient, tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    results = await score(client, job("a", "bad", "leave a child", fields={"marker": str(marker)}))
    assert not results["a"].ok
    pid = int(marker.read_text())
    give_up = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < give_up, "the child of a killed function lives"
        await asyncio.sleep(0.01)


async def test_a_batched_function_is_called_once_for_many(client: RewardClient) -> None:
    results = await score(client, *(job(str(n), "batch", "nan" if n == 3 else "well") for n in range(40)))
    assert all(result.score == 40 for leaf_id, result in results.items() if leaf_id != "3")
    assert not results["3"].ok and "must be finite" in str(results["3"].error)


@pytest.mark.parametrize(("how", "said"), [("loop", "gave no answer within 0.8 s"), ("quit", "ended its process twice")])
async def test_H5_a_batch_that_hangs_or_dies_is_scored_again_job_by_job(client: RewardClient, how: str, said: str) -> None:
    results = await score(client, *(job(str(n), "batch", how if n == 2 else "well") for n in range(6)))
    assert said in str(results["2"].error)
    assert all(result.score == 1 for leaf_id, result in results.items() if leaf_id != "2")


@pytest.mark.parametrize(("how", "said"), [("raise", "raised RuntimeError: the judge is away"), ("short", "returned 1 results for 3 jobs")])
async def test_L4_a_batch_that_raises_or_answers_short_fails_each_of_its_leaves(client: RewardClient, how: str, said: str) -> None:
    results = await score(client, *(job(str(n), "batch", how) for n in range(3)))
    assert all(not result.ok and said in str(result.error) for result in results.values())


async def test_calls_at_the_same_time_do_not_mix(client: RewardClient) -> None:
    async def one(scale: int) -> None:
        results = await score(client, *(job(str(n), "length", "x" * n, fields={"scale": scale}) for n in range(20)))
        assert all(results[str(n)].score == pytest.approx(n / scale) for n in range(20))

    await asyncio.gather(*(one(scale) for scale in range(1, 9)))


async def test_a_call_without_jobs_has_no_results(client: RewardClient) -> None:
    assert await client.score([], 5) == []


async def test_health_tells_role_incarnation_and_progress(client: RewardClient) -> None:
    before = await client.health()
    await score(client, *(job(str(n), "words", "a", answer="a") for n in range(5)))
    after = await client.health()
    assert before == Health("reward", 7, before.progress, 0, 0, before.workers) and after.progress == before.progress + 5


async def test_L1_while_a_function_hangs_health_answers_and_shows_who_is_busy(client: RewardClient) -> None:
    hanging = [asyncio.create_task(score(client, job(str(n), "bad", "loop"))) for n in range(3)]
    give_up = time.monotonic() + 5
    while (await client.health()).busy_workers != 2:
        assert time.monotonic() < give_up
    assert (await client.health()).queued == 1
    assert not any(results[str(n)].ok for n, results in enumerate(await asyncio.gather(*hanging)))
    assert (await client.health()).busy_workers == 0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"not json", "not a list of jobs"),
        (b'{"jobs": [{"leaf_id": "a"}]}', "missing required field"),
        (b'{"jobs": [{"leaf_id": "a", "task_type": "t", "prompt": "", "response": "", "score": 1}]}', "unknown field"),
        (b'{"jobs": [' + b",".join([b'{"leaf_id": "a", "task_type": "t", "prompt": "", "response": ""}'] * 2) + b"]}", "same leaf_id"),
    ],
)
async def test_a_malformed_call_is_refused_with_the_reason(service: Any, http: httpx.AsyncClient, body: bytes, said: str) -> None:
    reply = await http.post(service.url + "/v1/score", content=body)
    assert reply.status_code == 422 and said in reply.json()["detail"]


async def test_128_short_jobs_cost_milliseconds(client: RewardClient) -> None:
    jobs = [job(str(n), "words", "12 34", answer="12 35") for n in range(128)]
    times = []
    for _ in range(9):
        start = time.perf_counter()
        await client.score(jobs, 10)
        times.append(time.perf_counter() - start)
    # About 4 ms alone on two cores; the bound leaves room for a busy machine, not for a process or a round trip per job.
    assert statistics.median(times) < 0.15


async def test_a_task_type_without_scorer_fails_and_a_token_is_asked_for(start: Any, http: httpx.AsyncClient) -> None:
    guarded = start(scorers={"sums": {"rule": "numeric"}}, token="secret", workers=1)
    guarded.wait_until_up()
    with pytest.raises(RewardUnavailable, match=r"401.*token"):
        await RewardClient(guarded.url, http).health()
    with pytest.raises(RewardUnavailable, match="401"):
        await RewardClient(guarded.url, http, "wrong").score([], 5)
    results = await score(RewardClient(guarded.url, http, "secret"), job("a", "words", "1", answer="1"), job("b", "sums", "1", answer="1"))
    assert results["b"].ok and not results["a"].ok
    assert results["a"].error == "no scorer serves task type 'words'; reward.scorers has sums, and no '*'"
