"""One engine process as a test sees it, and the tiny checkpoints that both engines serve."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

VOCAB = 320
EOS = 2
PROMPT = [80, 81, 82, 35, 60]
SLOW_S = 0.05  # one step of the engine while it is slowed down
CALL_S = 90.0  # a call that a busy machine may take long to answer
DIES_S = 60.0
# Idle connections are closed before the servers do it, which both do after some seconds.
LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=1.0)


def wait_for(holds: Callable[[], bool], what: str, deadline_s: float = CALL_S) -> None:
    until_s = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < until_s, f"waited {deadline_s} s for {what}"
        time.sleep(0.02)


@dataclass
class Server:
    """`kind` is "embedded" or "sglang". `request` returns any answer, `post` one whose status was checked."""

    kind: str
    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    model: Path
    headers: dict[str, str] = field(default_factory=dict)
    client: httpx.Client = field(default_factory=lambda: httpx.Client(trust_env=False, limits=LIMITS))
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(32))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def embedded(self) -> bool:
        return self.kind == "embedded"

    def alive(self) -> bool:
        return self.process.poll() is None

    def request(self, method: str, path: str, body: Any = None, *, key: str | None = None, timeout_s: float = CALL_S) -> httpx.Response:
        """`body` is sent as JSON; bytes as they are. None sends none."""
        headers = self.headers if key is None else {"authorization": f"Bearer {key}"}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = headers | ({"content-type": "application/json"} if content is not None else {})
        return self.client.request(method, self.url + path, content=content, headers=headers, timeout=timeout_s)

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any, expect: int = 200) -> Any:
        response = self.request("POST", path, body)
        assert response.status_code == expect, f"{path}: {response.status_code} {response.text}"
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json and response.content else response.text

    def generate(self, input_ids: Any = PROMPT, *, expect: int = 200, top: dict[str, Any] | None = None, **sampling: Any) -> Any:
        """Greedy and past the end of the text, unless said otherwise; `top` holds keys beside sampling_params."""
        sampling = {"temperature": 0, "ignore_eos": True} | sampling
        return self.post("/generate", {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True} | (top or {}), expect)

    def stream(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a streamed call; the last must be [DONE].

        On a connection of its own: two seconds after it refused a streamed request, SGLang drops the connection that brought it, whatever
        other request is on it by then.
        """
        headers = self.headers | {"connection": "close"}
        response = self.client.post(self.url + "/generate", json=body | {"stream": True}, headers=headers, timeout=CALL_S)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = response.text.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def slow(self) -> None:
        self.post("/slow_down", {"forward_sleep_time": SLOW_S})

    def fast(self) -> None:
        self.post("/slow_down", {"forward_sleep_time": None})

    def load(self, name: str = "num_running_reqs") -> Any:
        return self.get("/v1/loads").json()["loads"][0][name]

    def info(self) -> dict[str, Any]:
        return self.get("/model_info").json()

    def start_running(self, *rids: str, tokens: int = 60, prompt: list[int] = PROMPT, **sampling: Any) -> list[Future[Any]]:
        """Slow the engine down and have these requests run, some tokens into their answers."""
        self.slow()
        asked = [
            self.background.submit(self.generate, [*prompt, 5 + i], top={"rid": rid}, max_new_tokens=tokens, **sampling)
            for i, rid in enumerate(rids)
        ]
        least = len(rids) * (len(prompt) + 1) + 3

        def all_run() -> bool:
            for one in asked:
                assert not one.done(), one.result()
            return self.load() == len(rids) and self.load("num_used_tokens") >= least

        wait_for(all_run, "the requests to run")
        return asked


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


def save_checkpoint(directory: Path, seed: int) -> Path:
    """A random Llama of 100,000 parameters; its weights are wide enough that greedy tokens differ from prompt to prompt."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory
