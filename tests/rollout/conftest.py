"""A real HTTP server that answers as SGLang does, from a script: the one test double here, because faults must come on cue."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from rollout.client import EngineClient, make_http

Handler = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def chunk(ids: list[int], version: str = "run/0/0/1", finish: str | None = None, **changes: Any) -> dict[str, Any]:
    """What SGLang says of `ids` so far; token t has the log-prob -t/100. `changes` overwrite entries of meta_info."""
    meta: dict[str, Any] = {
        "id": "rid",
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "weight_version": version,
        "finish_reason": None,
        "output_token_logprobs": [[-token / 100, token, None] for token in ids],
    }
    if finish is not None:
        meta |= {"finish_reason": {"type": finish}, "weight_versions": [{"version": version, "start": 0, "end": len(ids)}]}
    return {"text": "", "output_ids": ids, "meta_info": meta | changes}


class ScriptedEngine:
    """`script` holds handlers for the coming calls of /generate; `replies` says what other paths answer: (status, JSON or bytes)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any] | None]] = []
        self.headers: list[Mapping[str, str]] = []
        self.script: list[Handler] = []
        self.replies: dict[str, list[tuple[int, Any]]] = {}
        self.disconnected = asyncio.Event()
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = orjson.loads(raw) if raw else None
        self.calls.append((request.path, body))
        self.headers.append(request.headers)
        if request.path == "/generate" and self.script:
            return await self.script.pop(0)(request, body or {})
        replies = self.replies.get(request.path, [(200, {})])
        status, reply = replies.pop(0) if len(replies) > 1 else replies[0]
        if reply is ConnectionResetError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        content = reply if isinstance(reply, bytes) else orjson.dumps(reply)
        return web.Response(status=status, body=content, content_type="text/plain" if isinstance(reply, bytes) else "application/json")

    def stream(self, *parts: Any, done: bool = True) -> None:
        """Script one streamed answer. A part is a chunk, raw bytes, a number of seconds to wait, an event to wait for, or
        ConnectionResetError."""

        async def handler(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            try:
                for part in parts:
                    if isinstance(part, dict):
                        await response.write(b"data: " + orjson.dumps(part) + b"\n\n")
                    elif isinstance(part, bytes):
                        await response.write(part)
                    elif isinstance(part, asyncio.Event):
                        await part.wait()
                    elif part is ConnectionResetError:
                        assert request.transport is not None
                        await asyncio.sleep(0.02)  # let what was written go out first
                        request.transport.abort()
                        return response
                    else:
                        await asyncio.sleep(part)
                if done:
                    await response.write(b"data: [DONE]\n\n")
            except (asyncio.CancelledError, ConnectionError):
                self.disconnected.set()
                raise
            return response

        self.script.append(handler)

    def reply(self, status: int, body: Any) -> None:
        """Script one unstreamed answer of /generate."""

        async def handler(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
            content = body if isinstance(body, bytes) else orjson.dumps(body)
            return web.Response(status=status, body=content, content_type="application/json")

        self.script.append(handler)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    engine.url = f"http://{host}:{port}"
    yield engine
    await runner.cleanup()


@pytest.fixture
async def client(server: ScriptedEngine) -> AsyncIterator[EngineClient]:
    async with make_http() as http:
        yield EngineClient(server.url, http, vocab_size=1000)


@pytest.fixture(scope="session")
def make_chunk() -> Callable[..., dict[str, Any]]:
    return chunk


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., Path]:
    """Puts the small files of a checkpoint into a directory: a byte-level tokenizer without merges, and the configs."""

    def write(directory: Path, *, adds_bos: bool = False, files: dict[str, Any] | None = None, **settings: Any) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {char: 3 + n for n, char in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>"])
        if adds_bos:
            tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
        tokenizer.save(str(directory / "tokenizer.json"))
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"} | settings
        files = {"tokenizer_config.json": tokenizer_config, "config.json": {"vocab_size": 320, "eos_token_id": 2}} | (files or {})
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (directory / name).write_text(text, encoding="utf-8")
        return directory

    return write
