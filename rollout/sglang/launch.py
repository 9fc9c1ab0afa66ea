"""The command line and environment of one SGLang server, from the same settings as the embedded engine's.

On a CPU a stock SGLang needs flags that choose its plain implementations, and the shims on its path. On a GPU it gets its own defaults and
the memory saver, so that a push really gives the KV cache's memory back.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rollout.sglang.spec import SglangSpec

SHIMS = Path(__file__).parent / "shims"
CPU_FLAGS = (
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
)
CPU_KV_BYTES = 1 << 30  # SGLang takes the KV cache's memory at its start
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Server:
    """What one server is told. `first_device`: its GPUs are that one and those after it."""

    model_path: Path
    port: int
    first_device: int
    context_length: int
    max_running_requests: int
    stream_interval: int
    seed: int
    dtype: str
    routed_experts: bool = False


def command(spec: SglangSpec, server: Server) -> list[str]:
    assert spec.python is not None and spec.device != "auto", "spec.located comes first"
    flags = {
        "--model-path": server.model_path,
        "--host": "127.0.0.1",
        "--port": server.port,
        "--device": spec.device,
        "--dtype": server.dtype,
        "--context-length": server.context_length,
        "--max-running-requests": server.max_running_requests,
        "--stream-interval": server.stream_interval,
        "--random-seed": server.seed,
        "--tp-size": spec.tp,
        "--log-level-http": "warning",
    }
    # Without the first an idle server keeps a core busy; the second saves seconds, and the push is a warm-up of its own.
    switches = ["--sleep-on-idle", "--skip-server-warmup"] + ["--enable-return-routed-experts"] * server.routed_experts
    if spec.device == "cpu":
        flags["--max-total-tokens"] = _kv_tokens(server)
        switches += CPU_FLAGS
    else:
        flags["--base-gpu-id"] = server.first_device
        switches.append("--enable-memory-saver")
    # `-P`: what lies in the user's current directory is never taken for a module.
    module = [str(spec.python), "-P", "-m", "sglang.launch_server"]
    return [*module, *(str(part) for flag in flags.items() for part in flag), *switches, *spec.args]


def environment(spec: SglangSpec, threads: int) -> dict[str, str]:
    """Beside the driver's own. Its PYTHONPATH is not handed on: SGLang's environment must not meet our packages."""
    common = {
        "PYTHONPATH": "",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Health that generates a token hangs while the server is paused, and then calls it unhealthy; ours is progress of requests.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if spec.device != "cpu":
        return common
    common |= {"PYTHONPATH": str(SHIMS), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads)}
    if spec.tp > 1:  # SGLang would otherwise want a NUMA node for each rank
        common["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(spec.tp))
    return common


def behind_sidecar(spec: SglangSpec, server: Server, port: int, store_location: str, threads: int) -> list[str]:
    """The command line of a sidecar at `port` that starts the server, at its own, in the environment which is the server's alone."""
    flags = {"--behind": f"127.0.0.1:{server.port}", "--port": port, "--store": store_location, "--model-path": server.model_path}
    inner = ["env", *(f"{name}={value}" for name, value in environment(spec, threads).items()), *command(spec, server)]
    module = [sys.executable, "-P", "-m", "rollout.sglang.sidecar"]
    return [*module, *(str(part) for flag in flags.items() for part in flag), "--", *inner]


def _kv_tokens(server: Server) -> int:
    """Room for every running request at full length, or for as many as CPU_KV_BYTES hold; one always fits."""
    model = json.loads((server.model_path / "config.json").read_text())
    heads = model["num_attention_heads"]
    kv_width = (model.get("num_key_value_heads") or heads) * (model.get("head_dim") or model["hidden_size"] // heads)
    token_bytes = 2 * model["num_hidden_layers"] * kv_width * ITEM_BYTES[server.dtype]
    wanted = server.max_running_requests * server.context_length
    return max(server.context_length, min(wanted, CPU_KV_BYTES // token_bytes))
