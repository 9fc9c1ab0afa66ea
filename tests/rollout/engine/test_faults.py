"""Scripted faults of a real engine process, as the client sees them: an EngineError of the right kind, with what had arrived."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.answer import EngineError, Generation
from rollout.client import EngineClient, make_http

from .conftest import SOURCES, Served, wait_for
from .test_process import one_sentence, run_engine

BASE = SOURCES / "examples" / "sort_digits" / "base"
PROMPT = [80, 81, 82, 35, 60]
SAMPLING = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}
GENERATE = "/generate"
VERSION = "run/0/0/1"

Start = Callable[..., Served]


class Scripted:
    """An engine that takes scripts, and its client."""

    def __init__(self, served: Served, client: EngineClient) -> None:
        self.served = served
        self.client = client
        self.heard: list[int] = []

    def script(self, *faults: dict[str, Any]) -> None:
        self.served.post("/faults", list(faults))

    @property
    def struck(self) -> list[int]:
        return [fault["struck"] for fault in self.served.get("/faults").json()]

    async def generate(self, rid: str = "rid", **changes: Any) -> Generation:
        self.heard = []

        def on_tokens(ids: list[int], log_probs: list[float], version: str) -> None:
            self.heard += ids

        return await self.client.generate(PROMPT, SAMPLING, rid, version=VERSION, **({"stall_s": 20.0, "on_tokens": on_tokens} | changes))

    async def failure(self, **changes: Any) -> EngineError:
        return await failed(self.generate(**changes))


async def failed(call: Awaitable[Any]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await call
    return caught.value


@pytest.fixture(scope="module")
def faulty(start: Start) -> Iterator[Served]:
    yield start(BASE, "--allow-faults", "--weight-version", VERSION)


@pytest.fixture
async def engine(faulty: Served) -> AsyncIterator[Scripted]:
    """Without a script, and slow enough that each token is a chunk of its own."""
    faulty.post("/slow_down", {"forward_sleep_time": 0.005})
    async with make_http() as http:
        yield Scripted(faulty, EngineClient(faulty.url, http, vocab_size=259))
    faulty.post("/faults", [])
    faulty.post("/continue_generation", {})
    faulty.post("/update_weight_version", {"new_version": VERSION, "abort_all_requests": True})


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"fault": "reset"}, "connection failed"),
        ({"fault": "reset", "done": True}, "connection failed"),
        ({"fault": "status", "status": 503, "message": "starting"}, "engine answered 503: starting"),
        ({"fault": "status"}, "engine answered 500"),
        ({"fault": "truncate"}, "not JSON"),
        ({"fault": "log_prob_missing"}, "12 tokens with 11 log-probs"),
    ],
)
async def test_E13_W4_an_answer_at_once_that_fails_is_infrastructure_and_the_next_one_is_good(engine: Scripted, fault, words) -> None:
    whole = await engine.generate()
    engine.script({"call": GENERATE} | fault)
    error = await engine.failure(stream=False)
    assert error.kind == "infrastructure" and words in str(error)
    assert error.prefix.output_ids == []
    assert engine.struck == [1]
    assert (await engine.generate(stream=False)).output_ids == whole.output_ids


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"fault": "reset"}, "connection failed"),
        ({"fault": "truncate"}, "the answer ended before it was complete"),
        ({"fault": "log_prob_missing"}, "log-probs"),
        ({"fault": "status", "status": 503}, "engine answered 503"),
    ],
)
@pytest.mark.parametrize("chunks", [0, 3])
async def test_E13_a_stream_that_breaks_is_infrastructure_with_what_had_arrived(engine: Scripted, fault, words, chunks) -> None:
    whole = await engine.generate()
    engine.script({"call": GENERATE, "chunks": chunks} | fault)
    error = await engine.failure()
    assert error.kind == "infrastructure" and words in str(error)
    kept = len(error.prefix.output_ids)
    assert (kept == 0) == (chunks == 0) and kept < 12
    assert error.prefix.output_ids == engine.heard == whole.output_ids[:kept]
    assert len(error.prefix.log_probs) == kept
    assert error.prefix.spans == ([(VERSION, 0, kept)] if kept else [])
    assert (await engine.generate()).output_ids == whole.output_ids


async def test_E13_a_reset_right_after_continue_is_infrastructure_and_nothing_is_left_behind(engine: Scripted) -> None:
    engine.script({"fault": "reset", "call": GENERATE})
    await engine.client.pause("retract")
    await engine.client.continue_generation()
    assert (await engine.failure()).kind == "infrastructure"
    assert len((await engine.generate()).output_ids) == 12


@pytest.mark.parametrize("fault", [{}, {"chunks": 0}, {"chunks": 3}])
async def test_E14_an_engine_that_makes_no_tokens_is_found_by_that_and_not_by_its_health(engine: Scripted, fault) -> None:
    engine.script({"fault": "hang", "call": GENERATE} | fault)
    error = await engine.failure(stall_s=0.5)
    assert error.kind == "infrastructure" and "no new token" in str(error)
    assert error.prefix.output_ids == engine.heard and (len(engine.heard) > 0) == ("3" in str(fault))
    await engine.client.health()
    wait_for(lambda: engine.served.load("num_running_reqs") == 0, "the request to end with its client")


async def test_L1_slow_tokens_are_waited_for_as_long_as_they_come(engine: Scripted) -> None:
    slow = {"fault": "slow", "call": GENERATE, "seconds": 0.4}
    engine.script(slow)
    assert "no new token" in str(await engine.failure(stall_s=0.2))
    engine.script(slow)
    assert len((await engine.generate(stall_s=20.0)).output_ids) == 12


@pytest.mark.parametrize("done", [False, True])
async def test_E6_a_pause_that_never_returns_is_bounded(engine: Scripted, done: bool) -> None:
    engine.script({"fault": "hang", "call": "/pause_generation", "done": done})
    error = await failed(engine.client.pause("retract", deadline_s=0.5))
    assert error.kind == "infrastructure" and "no answer in 0.5 s" in str(error)
    assert (engine.served.get("/ready").status_code == 503) == done
    await engine.client.continue_generation()
    assert len((await engine.generate()).output_ids) == 12


async def test_a_call_whose_answer_is_lost_has_had_its_effect_and_one_that_failed_has_not(engine: Scripted) -> None:
    fault = {"fault": "status", "call": "/update_weight_version"}
    engine.script(fault, fault | {"after": 1, "done": True})
    for version, held in (("run/0/1/1", VERSION), ("run/0/2/1", "run/0/2/1")):
        assert (await failed(engine.client.set_version(version))).status == 500
        assert (await engine.client.model_info())["weight_version"] == held


async def test_E1_a_refused_flush_is_an_answer(engine: Scripted) -> None:
    engine.script({"fault": "status", "call": "/flush_cache", "status": 400, "message": "Flush cache failed."})
    assert [await engine.client.flush(), await engine.client.flush()] == [False, True]


async def test_A5_a_lie_about_the_version_is_told_alike_in_model_info_and_in_the_spans_of_answers(engine: Scripted) -> None:
    lie = {"fault": "lie_version", "version": "run/0/9/1", "times": None}
    engine.script(lie | {"call": "/model_info"}, lie | {"call": GENERATE})
    assert (await engine.client.model_info())["weight_version"] == "run/0/9/1"
    assert (await engine.generate()).spans == [("run/0/9/1", 0, 12)]
    assert (await engine.generate(stream=False)).spans == [("run/0/9/1", 0, 12)]


async def test_W1_an_engine_that_kills_itself_in_mid_answer_leaves_what_it_had_said(start: Start) -> None:
    served = start(BASE, "--allow-faults", "--weight-version", VERSION)
    served.post("/slow_down", {"forward_sleep_time": 0.005})
    async with make_http() as http:
        engine = Scripted(served, EngineClient(served.url, http))
        engine.script({"fault": "die", "call": GENERATE, "chunks": 3})
        error = await engine.failure()
    assert served.process.wait(10) == -9
    assert error.kind == "infrastructure" and 3 <= len(error.prefix.output_ids) < 12
    assert error.prefix.output_ids == engine.heard


async def test_a_fault_lets_calls_pass_then_takes_some_and_the_first_in_the_list_has_the_call(engine: Scripted) -> None:
    reset, status = {"fault": "reset", "call": GENERATE}, {"fault": "status", "call": GENERATE}
    engine.script(status | {"after": 1, "times": 2}, reset | {"after": 2, "times": None})
    found = []
    for _ in range(4):
        try:
            await engine.generate(stream=False)
            found.append("good")
        except EngineError as error:
            found.append(str(error.status))
    assert found == ["good", "500", "500", "None"]
    assert engine.struck == [2, 1]
    engine.script()
    assert len((await engine.generate()).output_ids) == 12


async def test_a_script_from_a_file_counts_from_the_start_and_opens_nothing(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "faults.json"
    script.write_text(json.dumps([{"fault": "status", "call": "/v1/loads"}]))
    served = start(BASE, "--faults", str(script))
    assert [served.get("/v1/loads").status_code for _ in range(2)] == [500, 200]
    assert served.get("/faults").status_code == served.request("POST", "/faults", []).status_code == 404
    assert served.get("/server_info").json()["faults"] == str(script)
    assert "fails on command: 1 faults" in served.log()


def test_an_engine_without_the_flags_has_no_faults_to_reach(shared: Served) -> None:
    assert shared.request("POST", "/faults", []).status_code == 404
    assert "fails on command" not in shared.log()


def test_faults_are_an_operators_call(start: Start) -> None:
    served = start(BASE, "--allow-faults", "--admin-api-key", "secret")
    assert served.request("POST", "/faults", []).status_code == 401
    served.headers["authorization"] = "Bearer secret"
    assert served.post("/faults", []) == []


WRONG = [
    ("{}", "a JSON list of objects"),
    ('[{"fault": "slwo", "call": "/generate"}]', "fault 0: there is no fault 'slwo'; there are slow, truncate"),
    (
        '[{"fault": "slow", "call": "/generate", "second": 1}]',
        "unknown field `second`; the keys of slow are call, after, times, chunks, seconds",
    ),
    ('[{"fault": "die", "call": "/generate", "after": -1}]', "Expected `int` >= 0 - at `$.after`"),
    ('[{"fault": "die", "call": "/generate", "done": true, "chunks": 1}]', "done and chunks exclude each other"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_O1_a_script_that_is_none_is_refused_with_what_is_wrong_before_anything_starts(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "faults.json"
    script.write_text(text)
    says = one_sentence(run_engine("--model-path", str(BASE), "--port", "0", "--faults", str(script)))
    assert words in says and str(script) in says


@pytest.mark.parametrize(("text", "words"), [*WRONG, ('[{"fault": "die", "call": "/generat"}]', "no call of this server is '/generat'")])
def test_O1_a_script_that_is_none_is_refused_by_a_running_engine_and_the_one_before_stays(faulty: Served, text: str, words: str) -> None:
    good = faulty.post("/faults", [{"fault": "drop", "call": "/begin_weight_update"}])
    answer = faulty.client.post(faulty.url + "/faults", content=text)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert faulty.get("/faults").json() == good
    faulty.post("/faults", [])


async def test_the_callers_leaving_ends_a_hanging_call(engine: Scripted) -> None:
    engine.script({"fault": "hang", "call": GENERATE})
    request = asyncio.create_task(engine.generate())
    async with asyncio.timeout(10):
        while engine.struck != [1]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert len((await engine.generate()).output_ids) == 12
