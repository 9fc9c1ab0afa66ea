"""EngineClient against a real HTTP server with scripted answers and faults."""

import asyncio
import base64
import socket
import time

import orjson
import pytest
from aiohttp import web

from rollout.answer import EngineError
from rollout.client import EngineClient, make_http, ref_payload

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}


async def generate(client, **changes):
    return await client.generate([1, 2, 3], SAMPLING, "rid-1", **({"stall_s": 2.0} | changes))


async def failure(client, **changes) -> EngineError:
    with pytest.raises(EngineError) as caught:
        await generate(client, **changes)
    return caught.value


async def test_a_streamed_answer_comes_back_as_tokens_log_probs_and_versions(server, client, make_chunk):
    server.stream(make_chunk([5]), make_chunk([5, 6]), make_chunk([5, 6, 7], finish="stop"))
    heard = []
    answer = await generate(client, on_tokens=lambda *new: heard.append(new))
    assert answer.output_ids == [5, 6, 7]
    assert answer.log_probs == [-0.05, -0.06, -0.07]
    assert answer.spans == [("run/0/0/1", 0, 3)]
    assert (answer.finish_reason, answer.prompt_tokens) == ("stop", 3)
    assert heard == [([5], [-0.05], "run/0/0/1"), ([6], [-0.06], "run/0/0/1"), ([7], [-0.07], "run/0/0/1")]
    path, body = server.calls[0]
    assert path == "/generate"
    assert body == {"input_ids": [1, 2, 3], "sampling_params": SAMPLING, "rid": "rid-1", "return_logprob": True, "stream": True}


async def test_an_unstreamed_answer_is_the_same(server, client, make_chunk):
    server.reply(200, make_chunk([5, 6, 7], finish="length"))
    answer = await generate(client, stream=False)
    assert (answer.output_ids, answer.finish_reason) == ([5, 6, 7], "length")
    assert server.calls[0][1]["stream"] is False


async def test_chunks_cut_anywhere_are_put_together(server, client, make_chunk):
    whole = b"".join(b"data: " + orjson.dumps(part) + b"\n\n" for part in (make_chunk([5]), make_chunk([5, 6], finish="stop")))
    server.stream(*[part for at in range(0, len(whole), 37) for part in (whole[at : at + 37], 0.001)])
    assert (await generate(client)).output_ids == [5, 6]


@pytest.mark.parametrize("status", [200, 500])
async def test_E13_an_answer_that_cannot_be_decompressed_is_infrastructure(client, server, status):
    async def garbled(request, body):
        return web.Response(status=status, body=b"no gzip", headers={"content-encoding": "gzip", "content-type": "application/json"})

    server.script = [garbled] * 3
    assert (await failure(client)).kind == "infrastructure"
    assert (await failure(client, stream=False)).kind == "infrastructure"
    with pytest.raises(EngineError, match="connection failed"):
        await client.score_sequence([1, 2])


async def test_what_one_engine_sets_as_a_cookie_is_not_sent_to_another_on_its_host(server, client):
    async def setting(request, body):
        return web.Response(body=b"{}", headers={"set-cookie": "a=\xff"}, content_type="application/json")

    server.script = [setting]
    with pytest.raises(EngineError):
        await client.score_sequence([1, 2])
    await client.model_info()
    assert "cookie" not in server.headers[-1]


@pytest.mark.parametrize("cut", [1, 2])
async def test_E13_a_reset_in_mid_stream_hands_over_the_prefix(server, client, make_chunk, cut):
    server.stream(*[make_chunk([5, 6][: n + 1]) for n in range(cut)], ConnectionResetError)
    error = await failure(client)
    assert error.kind == "infrastructure"
    assert error.prefix.output_ids == [5, 6][:cut]
    assert error.prefix.log_probs == [-0.05, -0.06][:cut]
    assert error.prefix.spans == [("run/0/0/1", 0, cut)]


async def test_E13_a_body_that_ends_too_early_is_infrastructure_with_the_prefix(server, client, make_chunk):
    half = b"data: " + orjson.dumps(make_chunk([5, 6, 7], finish="stop"))[:60]
    for ending in ([], [half], [b"data: [DONE]\n\n"]):
        server.stream(make_chunk([5, 6]), *ending, done=False)
        error = await failure(client)
        assert error.kind == "infrastructure"
        assert error.prefix.output_ids == [5, 6]


async def test_E13_an_unstreamed_body_that_is_cut_is_infrastructure(server, client, make_chunk):
    server.reply(200, orjson.dumps(make_chunk([5, 6, 7], finish="stop"))[:60])
    assert (await failure(client, stream=False)).kind == "infrastructure"


async def test_an_answer_that_was_whole_before_the_reset_counts(server, client, make_chunk):
    server.stream(make_chunk([5, 6], finish="stop"), ConnectionResetError)
    assert (await generate(client)).output_ids == [5, 6]


async def test_E13_503_and_resets_and_nobody_listening_are_infrastructure_and_not_sent_again(server, client):
    server.replies["/generate"] = [(503, {"object": "error", "message": "starting", "code": 503}), (200, ConnectionResetError)]
    for _ in range(2):
        assert (await failure(client)).kind == "infrastructure"
    assert len(server.calls) == 2
    async with make_http() as http:
        assert (await failure(EngineClient("http://127.0.0.1:1", http))).kind == "infrastructure"


async def test_E13_one_log_prob_too_few_is_malformed_infrastructure_and_keeps_what_was_checked(server, client, make_chunk):
    server.stream(make_chunk([5]), make_chunk([5, 6], finish="stop", output_token_logprobs=[[-0.05, 5, None]]))
    error = await failure(client)
    assert error.kind == "infrastructure"
    assert "malformed" in str(error)
    assert error.prefix.output_ids == [5]


async def test_W4_a_500_is_infrastructure_and_H3_a_400_is_the_prompts_fault(server, client):
    server.replies["/generate"] = [(500, b"oops"), (400, {"error": {"message": "The input (600 tokens) is longer than the context"}})]
    assert (await failure(client)).kind == "infrastructure"
    error = await failure(client)
    assert error.kind == "data"
    assert "600 tokens" in str(error)


async def test_a_refused_key_says_what_to_do_and_a_given_key_is_sent(server, client):
    server.replies["/generate"] = [(401, {"error": "Unauthorized"})]
    error = await failure(client)
    assert error.kind == "configuration"
    assert "--api-key" in str(error)
    async with make_http() as http:
        await EngineClient(server.url, http, api_key="secret").health()
    assert server.headers[-1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize(("code", "kind"), [(400, "data"), (503, "infrastructure")])
async def test_an_error_after_the_headers_is_told_by_its_code(server, client, make_chunk, code, kind):
    server.stream(make_chunk([5]), {"error": {"message": "too late", "code": code}})
    error = await failure(client)
    assert (error.kind, error.prefix.output_ids) == (kind, [5])


async def test_E14_H4_an_engine_that_makes_no_tokens_is_given_up_after_stall_s_with_the_prefix(server, client, make_chunk):
    server.stream(make_chunk([5]), 30.0)
    started = time.monotonic()
    error = await failure(client, stall_s=0.2)
    assert 0.15 < time.monotonic() - started < 2.0
    assert error.kind == "infrastructure"
    assert "no new token" in str(error)
    assert error.prefix.output_ids == [5]
    await asyncio.wait_for(server.disconnected.wait(), 5)  # the engine learns that nobody listens


async def test_E14_headers_and_chunks_without_new_tokens_are_no_progress(server, client, make_chunk):
    server.stream(*[part for _ in range(40) for part in (make_chunk([5]), 0.05)])
    assert "no new token" in str(await failure(client, stall_s=0.3))


async def test_L1_a_long_answer_that_keeps_coming_never_runs_out_of_time(server, client, make_chunk):
    parts = [part for n in range(1, 8) for part in (make_chunk(list(range(5, 5 + n))), 0.1)]
    server.stream(*parts, make_chunk(list(range(5, 13)), finish="length"))
    assert len((await generate(client, stall_s=0.4)).output_ids) == 8


async def test_L1_the_deadline_stands_still_while_the_callers_clock_does(server, client, make_chunk):
    gate_opens = asyncio.Event()
    server.stream(make_chunk([5]), gate_opens, make_chunk([5, 6], finish="stop"))
    frozen_at = time.monotonic()
    asyncio.get_running_loop().call_later(0.8, gate_opens.set)
    answer = await generate(client, stall_s=0.2, clock=lambda: frozen_at)
    assert answer.output_ids == [5, 6]


async def test_cancelling_the_caller_closes_the_request(server, client, make_chunk):
    first = asyncio.Event()
    server.stream(make_chunk([5]), 30.0)
    task = asyncio.create_task(generate(client, on_tokens=lambda *_: first.set()))
    await asyncio.wait_for(first.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(server.disconnected.wait(), 5)


async def test_an_error_of_the_callers_own_is_not_mistaken_for_the_engines(server, client, make_chunk):
    def disk_full(*_):
        raise OSError("disk full")

    server.stream(make_chunk([5]), make_chunk([5, 6], finish="stop"))
    with pytest.raises(OSError, match="disk full"):
        await generate(client, on_tokens=disk_full)


async def test_scoring_drops_the_first_position_and_samples_nothing(server, client):
    server.reply(200, {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None], [-0.25, 3, None]]}, "output_ids": []})
    assert await client.score_sequence([1, 2, 3]) == [-0.5, -0.25]
    body = server.calls[0][1]
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["logprob_start_len"] == 0


async def test_scoring_asks_for_one_token_where_none_is_refused(server, client):
    server.reply(400, {"error": {"message": "max_new_tokens must be positive"}})
    server.reply(200, {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 2, None]]}, "output_ids": [9]})
    assert await client.score_sequence([1, 2]) == [-0.5]


async def test_E13_scores_of_other_tokens_are_malformed(server, client):
    server.reply(200, {"meta_info": {"input_token_logprobs": [[None, 1, None], [-0.5, 7, None]]}, "output_ids": []})
    with pytest.raises(EngineError, match="malformed"):
        await client.score_sequence([1, 2])


async def test_E2_naming_the_weights_never_aborts_requests(server, client):
    await client.set_version("run/0/3/1")
    assert server.calls == [("/update_weight_version", {"new_version": "run/0/3/1", "abort_all_requests": False})]


async def test_control_calls_say_what_sglang_expects(server, client):
    await client.pause("retract")
    await client.release(["kv_cache"])
    await client.begin_update()
    await client.update_from_tensor(ref_payload({"key": "run/weights/0/1/0"}))
    await client.end_update()
    await client.resume(["kv_cache"])
    await client.continue_generation()
    await client.abort("rid-1")
    await client.update_from_disk("/models/x")
    paths = [path for path, _ in server.calls]
    assert paths == [
        "/pause_generation",
        "/release_memory_occupation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/resume_memory_occupation",
        "/continue_generation",
        "/abort_request",
        "/update_weights_from_disk",
    ]
    bodies = [body for _, body in server.calls]
    assert all(body is not None for body in bodies), "SGLang refuses an empty body"
    assert bodies[0] == {"mode": "retract"}
    assert bodies[3]["load_format"] == "headrace_store"
    assert orjson.loads(base64.b64decode(bodies[3]["serialized_named_tensors"][0])) == {"key": "run/weights/0/1/0"}
    assert bodies[3]["abort_all_requests"] is False
    assert bodies[8]["abort_all_requests"] is False


async def test_a_paused_server_is_not_ready(server, client):
    server.replies["/ready"] = [(200, b""), (503, b""), (500, b"")]
    assert (await client.is_paused(), await client.is_paused()) == (False, True)
    with pytest.raises(EngineError):
        await client.is_paused()


async def test_E1_a_refused_flush_is_an_answer(server, client):
    server.replies["/flush_cache"] = [(400, b"running"), (200, b"done"), (500, b"broken")]
    assert await client.flush() is False
    assert await client.flush() is True
    with pytest.raises(EngineError):
        await client.flush()


async def test_a_refused_control_call_is_not_blamed_on_a_prompt(server, client):
    server.replies["/begin_weight_update"] = [(400, {"success": False, "message": "a weight-update session is already open"})]
    with pytest.raises(EngineError, match="already open") as caught:
        await client.begin_update()
    assert (caught.value.kind, caught.value.status) == ("infrastructure", 400)


async def test_E6_a_control_call_that_never_returns_is_bounded(client):
    silent = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    started = time.monotonic()
    async with make_http() as http:
        with pytest.raises(EngineError, match=r"no answer in 0.2 s") as caught:
            await EngineClient(f"http://127.0.0.1:{port}", http).pause("in_place", deadline_s=0.2)
    assert caught.value.kind == "infrastructure"
    assert time.monotonic() - started < 2.0
    silent.close()


async def test_E13_reads_of_state_are_tried_again_and_changes_are_not(server, client):
    server.replies["/model_info"] = [(503, b""), (200, ConnectionResetError), (200, {"weight_version": "run/0/0/1"})]
    assert (await client.model_info())["weight_version"] == "run/0/0/1"
    server.replies["/weights_checker"] = [(503, b""), (200, {"per_engine_checksum": "abc"})]
    assert (await client.checksums())["per_engine_checksum"] == "abc"
    server.calls.clear()
    server.replies["/end_weight_update"] = [(503, b""), (200, {})]
    with pytest.raises(EngineError):
        await client.end_update()
    assert len(server.calls) == 1


async def test_health_of_a_real_server_has_no_body_and_that_is_fine(server, client):
    server.replies["/health"] = [(200, b"")]
    assert await client.health() == {}


async def test_O3_hundreds_of_streams_are_open_at_the_same_time_on_one_client(server, client, make_chunk):
    all_are_open = asyncio.Event()
    first_tokens = 0

    def on_tokens(ids, log_probs, version):
        nonlocal first_tokens
        first_tokens += 1
        if first_tokens == 300:
            all_are_open.set()

    for _ in range(300):
        server.stream(make_chunk([5]), all_are_open, make_chunk([5, 6], finish="stop"))
    calls = (client.generate([1], SAMPLING, f"rid-{n:03d}", stall_s=20.0, on_tokens=on_tokens) for n in range(300))
    answers = await asyncio.gather(*calls)
    assert all(answer.output_ids == [5, 6] for answer in answers)


async def test_with_both_keys_an_engine_is_asked_for_its_load_with_the_api_key(server):
    async with make_http() as http:
        client = EngineClient(server.url, http, "api", admin_key="admin")
        await client.loads()
        await client.pause("retract")
    assert [headers["authorization"] for headers in server.headers] == ["Bearer api", "Bearer admin"]
    assert server.calls[0][0] == "/v1/loads"


async def test_a_port_where_nothing_listens_is_said_in_words():
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with make_http() as http:
            with pytest.raises(EngineError, match=f"^connection refused: nothing listens at {url}$"):
                await EngineClient(url, http).says_version(deadline_s=5.0)
