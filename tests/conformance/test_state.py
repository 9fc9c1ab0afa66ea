"""What an engine says of itself, and the small switches: info, loads, probes, flush, slow_down."""

import time

from .lab import PROMPT, Server, wait_for

CORE = {
    *("timestamp", "dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens", "num_total_tokens"),
    *("num_active_tokens", "num_prealloc_ready_tokens", "max_total_num_tokens", "max_running_requests", "token_usage", "gen_throughput"),
    *("cache_hit_rate", "utilization", "total_prefill_uncached_tokens", "total_prefill_busy_us", "decode_moments"),
}
QUEUES = {"waiting", "grammar", "paused", "retracted", "prealloc_ready"}
MEMORY = {"weight_gb", "kv_cache_gb", "graph_gb", "token_capacity"}


def test_model_info_names_the_model_and_its_version(engine: Server) -> None:
    about = engine.info()
    path = str(engine.model)
    assert {key: about[key] for key in about if key != "embedding"} == {
        "model_path": path,
        "served_model_name": path,
        "tokenizer_path": path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }
    assert about["embedding"]["enabled"] is False
    assert engine.get("/get_model_info").json() == about


def test_server_info_has_the_flags_of_the_start(engine: Server) -> None:
    about = engine.get("/server_info").json()
    wanted = {
        "version": "0.5.23",
        "frontend": "python",
        "status": "ready",
        "model_path": str(engine.model),
        "context_length": 512,
        "max_running_requests": 8,
        "max_total_tokens": 4096,
        "max_total_num_tokens": 4096,
        "max_req_input_len": 506,
        "weight_version": "default",
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "ep_size": 1,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_return_routed_experts": False,
        "speculative_algorithm": None,
        "disaggregation_mode": "null",
        "stream_interval": 1,
        "skip_tokenizer_init": False,
        "host": "127.0.0.1",
        "port": engine.port,
    }
    assert {key: about.get(key) for key in wanted} == wanted
    assert about["startup_time"]["scheduler_e2e"] > 0
    (state,) = about["internal_states"]
    assert (state["effective_max_running_requests_per_dp"], state["world_size"]) == (8, 1)
    assert state["memory_usage"].keys() >= {"weight", "kvcache", "token_capacity", "graph"}
    assert engine.get("/get_server_info").json()["version"] == "0.5.23"


def test_loads_have_this_shape(engine: Server) -> None:
    reply = engine.get("/v1/loads").json()
    assert reply.keys() == {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
    assert (reply["version"], reply["accelerator"], reply["num_accelerators"]) == ("0.5.23", None, 1)
    (load,) = reply["loads"]
    assert load.keys() == CORE | {"memory", "disaggregation", "queues"}
    assert load["memory"].keys() == MEMORY and load["queues"].keys() == QUEUES
    assert (load["dp_rank"], load["max_total_num_tokens"], load["max_running_requests"]) == (0, 4096, 8)
    assert load["memory"]["token_capacity"] == 4096 and len(load["decode_moments"]) == 6
    assert load["disaggregation"]["mode"] == "null"


def test_loads_show_the_sections_that_were_asked_for(engine: Server) -> None:
    def sections(query: str) -> set[str]:
        (load,) = engine.get(f"/v1/loads?{query}").json()["loads"]
        return load.keys() - CORE

    assert sections("include=core") == set()
    assert sections("include=core,queues") == {"queues"}
    assert sections("include=memory") == {"memory"}
    assert sections("include=all") == sections("include=") == sections("dp_rank=0") == {"memory", "disaggregation", "queues"}
    assert engine.get("/v1/loads?dp_rank=1").json()["loads"] == []
    assert engine.get("/v1/loads?dp_rank=x").status_code == 400
    # Alone on its connection, which a real server closes after a 500.
    assert engine.client.get(f"{engine.url}/v1/loads?include=tea", headers={"connection": "close"}).status_code == 500


def test_loads_count_what_runs_and_what_waits(engine: Server) -> None:
    asked = engine.start_running(*(f"r{i}" for i in range(8)), tokens=400)
    more = [engine.background.submit(engine.generate, [7] * 10, max_new_tokens=5) for _ in range(3)]
    wait_for(lambda: engine.load("num_waiting_reqs") == 3, "three to wait")
    (load,) = engine.get("/v1/loads").json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["queues"]["waiting"]) == (8, 3, 3)
    assert load["num_waiting_uncached_tokens"] == 30
    assert load["num_used_tokens"] >= 8 * (len(PROMPT) + 1)
    assert load["token_usage"] == round(load["num_used_tokens"] / 4096, 4)
    engine.post("/abort_request", {"abort_all": True})
    for one in (*asked, *more):
        one.result(timeout=10)
    wait_for(lambda: engine.load() == 0 and engine.load("num_waiting_reqs") == 0, "an idle engine")


def test_loads_stand_still_in_a_pause(engine: Server) -> None:
    """They are those of the last step before: after a retract the requests that were sent back are still counted as running."""
    asked = engine.start_running("a", "b")
    engine.post("/pause_generation", {"mode": "retract"})
    held = engine.background.submit(engine.generate, max_new_tokens=2)
    time.sleep(0.3)
    assert (engine.load(), engine.load("num_waiting_reqs")) == (2, 0)
    engine.fast()
    engine.post("/continue_generation", {})
    for one in (*asked, held):
        one.result()


def test_probes_have_no_body(engine: Server) -> None:
    for path in ("/ready", "/health", "/health_generate"):
        reply = engine.get(path)
        assert (reply.status_code, reply.content) == (200, b""), path


def test_a_flush_succeeds_when_idle_and_is_refused_under_load(engine: Server) -> None:
    for method in ("GET", "POST"):
        reply = engine.request(method, "/flush_cache")
        assert reply.status_code == 200 and reply.text.startswith("Cache flushed.\n")
    asked = engine.start_running("busy", tokens=400)
    refused = engine.request("POST", "/flush_cache")
    assert (refused.status_code, refused.text) == (400, "Flush cache failed.\n")
    engine.post("/pause_generation", {"mode": "in_place"})
    assert engine.request("POST", "/flush_cache").status_code == 400
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.request("POST", "/flush_cache").status_code == 200
    engine.post("/continue_generation", {})
    engine.post("/abort_request", {"abort_all": True})
    asked[0].result(timeout=10)


def test_a_flush_with_a_time_out_waits_for_the_running(engine: Server) -> None:
    (one,) = engine.start_running("short", tokens=30)
    assert engine.request("POST", "/flush_cache?timeout=60").status_code == 200
    assert len(one.result(timeout=5)["output_ids"]) == 30


def test_slow_down_slows_and_null_ends_it(engine: Server) -> None:
    (one,) = engine.start_running("slow", tokens=100)
    assert not one.done()
    assert engine.post("/slow_down", {"forward_sleep_time": None}) is None
    assert len(one.result()["output_ids"]) == 100
