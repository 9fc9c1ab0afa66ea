"""Connection trouble of every kind is RewardUnavailable, in words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from reward.client import RewardClient, RewardUnavailable
from reward.wire import Job

JOB = Job(leaf_id="a", task_type="t", prompt="", response="")


async def answered(raw: bytes | None, http: httpx.AsyncClient, deadline_s: float = 5) -> None:
    """Ask a server that answers any request with these bytes, and closes; with None it never answers."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if raw is None:
            await asyncio.sleep(30)
        else:
            writer.write(raw)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        await RewardClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", http).score([JOB], deadline_s)
    finally:
        server.close()


def reply(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "cannot be reached"),
        (reply("200 OK", b"{}")[:-1], "cannot be reached"),
        (reply("500 Oops", b"it fell over"), "answered 500: it fell over"),
        (reply("200 OK", b"{}"), "cannot be read"),
        (reply("200 OK", b'{"results": []}'), "other leaves"),
        (reply("200 OK", b'{"results": [{"leaf_id": "b", "ok": true}]}'), "other leaves"),
    ],
)
async def test_L4_an_answer_that_is_none_is_unavailable_and_never_a_result(http: httpx.AsyncClient, raw: bytes, said: str) -> None:
    with pytest.raises(RewardUnavailable, match=said):
        await answered(raw, http)


async def test_nobody_listening_is_unavailable(http: httpx.AsyncClient, free_port: Callable[[], int]) -> None:
    with pytest.raises(RewardUnavailable, match="cannot be reached"):
        await RewardClient(f"http://127.0.0.1:{free_port()}", http).health()


async def test_L1_the_deadline_holds_for_the_whole_call(http: httpx.AsyncClient) -> None:
    start = time.monotonic()
    with pytest.raises(RewardUnavailable, match=r"did not answer within 0.1 s"):
        await answered(None, http, deadline_s=0.1)
    assert time.monotonic() - start < 3
