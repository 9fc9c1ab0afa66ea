"""The client, the pool and rows against a real engine process: what the scripted server promises is what an engine does."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

import rollout
from rollout.answer import EngineError, joined
from rollout.client import EngineClient, make_http
from rollout.pool import EnginePool
from rollout.tokens import TokenizerView
from rollout.tree import row_columns
from rollout.version import Version
from rollout.workflow import Task, single_turn

safetensors = pytest.importorskip("safetensors.numpy")

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 64, 2, 4, 2, 16, 96, 261
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": INNER,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return random.normal(0.0, 0.15, shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, outer in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(outer, HIDDEN)
        tensors[f"{at}self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * HEAD)
        tensors |= {f"{at}self_attn.{name}_norm.weight": np.ones(HEAD, np.float32) for name in ("q", "k")}
        tensors |= {f"{at}mlp.{name}_proj.weight": matrix(INNER, HIDDEN) for name in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        tensors |= {f"{at}{name}.weight": np.ones(HIDDEN, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    return tensors


@pytest.fixture(scope="module")
def model(tmp_path_factory, write_tokenizer) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"), files={"config.json": CONFIG})
    safetensors.save_file(weights(), str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def process(model):
    """One engine for the module, with its URL in `.url`."""
    log_path = model / "engine.log"
    command = [sys.executable, "-P", "-m", "rollout.engine", "--model-path", str(model), "--port", "0", "--max-running-requests", "32"]
    environment = os.environ | {"PYTHONPATH": str(Path(rollout.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    with log_path.open("wb") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    marker = "on http://127.0.0.1:"
    until_s = time.monotonic() + 60
    while marker not in log_path.read_text():
        assert running.poll() is None and time.monotonic() < until_s, log_path.read_text()
        time.sleep(0.02)
    running.url = "http://127.0.0.1:" + log_path.read_text().split(marker)[1].split()[0]
    yield running
    running.kill()
    running.wait(10)


@pytest.fixture
async def engine(process):
    """A client of the engine, which runs unpaused and at full speed."""
    slow_down(process.url, None)
    async with make_http() as http:
        client = EngineClient(process.url, http, vocab_size=VOCAB)
        await client.set_version("run/0/0/1")
        yield client
        if process.poll() is None:
            await client.continue_generation()


def slow_down(url: str, seconds: float | None) -> None:
    httpx.post(f"{url}/slow_down", json={"forward_sleep_time": seconds}, trust_env=False).raise_for_status()


def sampling(**changes):
    return {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True} | changes


async def test_streamed_and_unstreamed_answers_agree(engine):
    one = await engine.generate([5, 6, 7], sampling(temperature=0.0), "streamed", stall_s=20)
    other = await engine.generate([5, 6, 7], sampling(temperature=0.0), "whole", stall_s=20, stream=False)
    assert one.output_ids == other.output_ids
    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert (one.finish_reason, len(one.output_ids), one.prompt_tokens) == ("length", 12, 3)
    assert one.spans == [("run/0/0/1", 0, 12)]


async def test_M5_the_engines_log_probs_are_those_of_its_own_scoring(engine):
    prompt = [5, 6, 7, 8]
    answer = await engine.generate(prompt, sampling(), "scored", stall_s=20)
    scores = await engine.score_sequence([*prompt, *answer.output_ids])
    assert len(scores) == 15
    assert answer.log_probs == pytest.approx(scores[3:], abs=1e-4)


async def test_a_single_turn_goes_from_text_to_a_row(engine, model):
    view = TokenizerView(model)
    pool = EnginePool()
    slot = pool.register("e0", engine, 1, capacity=4)
    pool.open(slot, Version("run", 0, 0, 1))

    async def generate(input_ids):
        async with pool.acquire(10, "test") as lease:
            return await lease.client.generate(input_ids, sampling(temperature=0.7), "turn", stall_s=20, clock=lease.slot.clock)

    trajectory = await single_turn(Task(tuple(view.prompt_ids("sort 31 =")), {}), generate)
    row = row_columns(trajectory.leaves()[0], 0.7)
    assert view.decode(row["input_ids"].tolist()[:9]) == "sort 31 ="
    assert row["response_mask"].sum() == 12
    assert (row["rollout_log_probs"][row["response_mask"] == 1] < 0).all()
    assert row["version_spans"].tolist() == [[0, 0, 8, 20]]
    assert slot.busy_s() > 0


async def test_an_engine_reports_requests_of_others_and_ours_are_not_taken_for_them(engine, process):
    slow_down(process.url, 0.02)
    pool = EnginePool()
    slot = pool.register("e0", engine, 1, capacity=4)
    pool.open(slot, Version("run", 0, 0, 1))
    heard = [asyncio.Event() for _ in range(3)]

    async def request(number):
        await engine.generate([5], sampling(max_new_tokens=200), f"load-{number}", stall_s=20, on_tokens=lambda *_: heard[number].set())

    async def ours():
        async with pool.acquire(10, "test"):
            await request(2)

    requests = [asyncio.create_task(call) for call in (request(0), request(1), ours())]
    for event in heard:
        await asyncio.wait_for(event.wait(), 20)
    async with asyncio.timeout(20):
        while slot.load is None or slot.load.running < 3:  # it says what was true a step ago
            slot.reported(await engine.loads(), 3.0)
    assert (slot.load.running, slot.load.foreign, slot.load.max_running) == (3, 2, 32)
    assert 0 < slot.load.kv_use < 1 and slot.load.max_total_tokens == 32 * 256
    for one in requests:
        one.cancel()
    await asyncio.gather(*requests, return_exceptions=True)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_V5_a_request_in_flight_sees_a_pause_as_time_and_a_new_version_as_a_span(engine, process, mode):
    slow_down(process.url, 0.02)
    pool = EnginePool()
    slot = pool.register("e0", engine, 1, capacity=4)
    pool.open(slot, Version("run", 0, 0, 1))
    some = asyncio.Event()
    count = 0

    def on_tokens(ids, log_probs, version):
        nonlocal count
        count += len(ids)
        if count >= 3:
            some.set()

    call = engine.generate([5, 6], sampling(max_new_tokens=20), f"paused-{mode}", stall_s=0.5, clock=slot.clock, on_tokens=on_tokens)
    request = asyncio.create_task(call)
    await asyncio.wait_for(some.wait(), 20)
    pool.shut(slot, "test")
    await engine.pause(mode)
    await asyncio.sleep(0.9)  # longer than stall_s: the slot's clock stands still
    assert not request.done()
    assert await engine.flush() is (mode == "retract")
    await engine.set_version("run/0/1/1")
    await engine.continue_generation()
    pool.open(slot, Version("run", 0, 1, 1))
    answer = await asyncio.wait_for(request, 20)
    assert [version for version, _, _ in answer.spans] == ["run/0/0/1", "run/0/1/1"]
    assert answer.spans[0][2] >= 3
    assert len(answer.output_ids) == 20


async def test_E15_an_aborted_request_keeps_its_tokens_and_can_be_continued(engine, process):
    whole = await engine.generate([5, 6], sampling(temperature=0.0), "uncut", stall_s=20)
    slow_down(process.url, 0.02)
    heard = asyncio.Event()
    call = engine.generate([5, 6], sampling(temperature=0.0), "cut", stall_s=20, on_tokens=lambda *_: heard.set())
    request = asyncio.create_task(call)
    await asyncio.wait_for(heard.wait(), 20)
    await engine.abort("cut")
    partial = await asyncio.wait_for(request, 20)
    assert partial.finish_reason == "abort"
    kept = len(partial.output_ids)
    assert 1 <= kept < 12
    slow_down(process.url, None)
    rest = await engine.generate([5, 6, *partial.output_ids], sampling(temperature=0.0, max_new_tokens=12 - kept), "rest", stall_s=20)
    again = joined(partial, rest)
    assert again.output_ids == whole.output_ids
    assert again.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    assert (again.prompt_tokens, again.finish_reason) == (2, "length")


async def test_H3_a_prompt_longer_than_the_context_is_the_prompts_fault(engine):
    for stream in (True, False):
        with pytest.raises(EngineError) as caught:
            await engine.generate([5] * 300, sampling(), f"long-{stream}", stall_s=20, stream=stream)
        assert caught.value.kind == "data"


async def test_a_caller_that_leaves_frees_its_place(engine, process):
    slow_down(process.url, 0.02)
    heard = asyncio.Event()
    call = engine.generate([5], sampling(max_new_tokens=200), "left", stall_s=20, on_tokens=lambda *_: heard.set())
    request = asyncio.create_task(call)
    await asyncio.wait_for(heard.wait(), 20)
    request.cancel()
    async with asyncio.timeout(5):
        while (await engine.loads())["loads"][0]["num_running_reqs"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_L3_the_calls_of_a_push_are_taken_in_their_order(engine, model):
    before = await engine.checksums()
    await engine.pause("retract")
    await engine.release(["kv_cache"])
    await engine.begin_update()
    with pytest.raises(EngineError, match="already open"):
        await engine.begin_update()
    await engine.end_update()
    await engine.set_version("run/0/2/1")
    await engine.resume(["kv_cache"])
    await engine.continue_generation()
    await engine.update_from_disk(str(model))
    assert (await engine.model_info())["weight_version"] == "run/0/2/1"
    assert await engine.checksums() == before
    await engine.health()


async def test_sixty_requests_on_thirty_two_places_all_come_back(engine):
    calls = (engine.generate([5, n], sampling(), f"many-{n:02d}", stall_s=30) for n in range(3, 63))
    answers = await asyncio.gather(*calls)
    assert all(len(answer.output_ids) == 12 for answer in answers)


async def test_W1_an_engine_killed_in_mid_answer_hands_over_what_it_had_said(engine, process):
    """Last, because the engine is gone afterwards."""
    slow_down(process.url, 0.02)
    heard = asyncio.Event()
    tokens = []

    def on_tokens(ids, log_probs, version):
        tokens.extend(ids)
        if len(tokens) >= 3:
            heard.set()

    call = engine.generate([5], sampling(max_new_tokens=200), "killed", stall_s=20, on_tokens=on_tokens)
    request = asyncio.create_task(call)
    await asyncio.wait_for(heard.wait(), 20)
    process.kill()
    with pytest.raises(EngineError) as caught:
        await asyncio.wait_for(request, 5)
    process.wait(10)
    assert caught.value.kind == "infrastructure"
    assert caught.value.prefix.output_ids == tokens
    assert caught.value.prefix.spans == [("run/0/0/1", 0, len(tokens))]
