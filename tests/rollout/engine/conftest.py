"""Tiny random checkpoints made by transformers, real engine processes that serve them, and a plain HTTP client."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

VOCAB = 259
EOS = 2
START_S = 90.0
SOURCES = Path(__file__).parents[3]  # -P keeps the current directory out of the way


def save_tokenizer(directory: Path) -> None:
    """Byte level: id = 3 + byte, after <pad>, <bos> and <eos>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {char: 3 + byte for byte, char in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<pad>", "<bos>", "<eos>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")
    fast.save_pretrained(directory)


def make_checkpoint(kind: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model of the demo's size or smaller; weights are wide enough that tokens differ."""
    import torch
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "tie_word_embeddings": kind == "Qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    } | changes
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`checkpoints("Qwen3", seed=1)`: made once for each set of arguments."""
    made: dict[str, Path] = {}

    def get(kind: str, **arguments: Any) -> Path:
        key = f"{kind}{sorted(arguments.items())}"
        if key not in made:
            made[key] = make_checkpoint(kind, tmp_path_factory.mktemp(kind), **arguments)
        return made[key]

    return get


@dataclass
class Served:
    """One engine process and what a test does with it."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    headers: dict[str, str] = field(default_factory=dict)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, timeout_s: float = 20.0) -> httpx.Response:
        content = None if body is None else orjson.dumps(body)
        return self.client.request(method, self.url + path, content=content, timeout=timeout_s, headers=self.headers)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any, expect: int = 200, timeout_s: float = 20.0) -> Any:
        """The reply's JSON (or text), after its status was checked."""
        response = self.request("POST", path, body, timeout_s)
        assert response.status_code == expect, f"{path}: {response.status_code} {response.text}"
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json and response.content else response.text

    def generate(
        self, input_ids: Any, expect: int = 200, timeout_s: float = 20.0, top: dict[str, Any] | None = None, **sampling: Any
    ) -> Any:
        body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True} | (top or {})
        return self.post("/generate", body, expect, timeout_s)

    def load(self, name: str) -> int:
        return self.get("/v1/loads").json()["loads"][0][name]

    def log(self) -> str:
        return self.log_path.read_text()

    def wait_log(self, text: str, deadline_s: float = 5.0) -> None:
        wait_for(lambda: text in self.log(), f"{text!r} in the engine's log", deadline_s)


def wait_for(holds: Callable[[], bool], what: str, deadline_s: float = 5.0) -> None:
    until_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until_s, f"waited {deadline_s} s for {what}"
        time.sleep(0.01)


def launch(model: Path, log_path: Path, *flags: str, env: dict[str, str] | None = None) -> Served:
    """Start an engine on a free port (which it names in its log) and wait until it is healthy."""
    command = [sys.executable, "-P", "-m", "rollout.engine", "--model-path", str(model), "--port", "0", *flags]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(SOURCES), **(env or {})})
    served = Served(process, 0, log_path)
    marker = "on http://127.0.0.1:"
    wait_for(lambda: marker in served.log() or process.poll() is not None, "the engine to serve", START_S)
    assert process.poll() is None, served.log()
    served.port = int(served.log().split(marker)[1].split()[0])
    assert served.get("/health").status_code == 200
    return served


def end(served: Served) -> None:
    served.process.send_signal(signal.SIGTERM)
    try:
        served.process.wait(5)
    finally:
        served.client.close()
        if served.process.poll() is None:
            served.process.kill()
            served.process.wait(5)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Served]]:
    """Start engines; all that still run are ended with the session."""
    started: list[Served] = []

    def go(model: Path, *flags: str, env: dict[str, str] | None = None) -> Served:
        served = launch(model, tmp_path_factory.mktemp("engine") / "engine.log", *flags, env=env)
        started.append(served)
        return served

    yield go
    for served in started:
        if served.process.poll() is None:
            end(served)


@pytest.fixture(scope="session")
def shared(start: Callable[..., Served], checkpoints: Callable[..., Path]) -> Served:
    return start(checkpoints("Qwen3"), "--max-running-requests", "8", "--context-length", "200")


@pytest.fixture
def engine(shared: Served) -> Iterator[Served]:
    """The shared engine, left as it was found: nothing running, unpaused, at full speed, no session, all memory its own."""
    yield shared
    shared.post("/slow_down", {"forward_sleep_time": None})
    shared.post("/continue_generation", {})
    shared.post("/update_weight_version", {"new_version": "default", "abort_all_requests": True})
    shared.request("POST", "/end_weight_update", {})
    for tag in ("weights", "kv_cache", "cuda_graph"):
        shared.request("POST", "/resume_memory_occupation", {"tags": [tag]})
    wait_for(lambda: shared.load("num_running_reqs") == 0, "the engine to be idle")
