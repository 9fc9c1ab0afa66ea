"""What a router answers, believed or not."""

import pytest

from rollout.answer import EngineError
from rollout.client import make_http
from rollout.router import RouterClient


@pytest.mark.parametrize("body", [b"<html>hello</html>", {"workers": ["http://a"]}, {}])
async def test_E13_an_answer_that_is_not_a_routers_is_told_in_words(server, body):
    server.replies["/workers"] = [(200, body)]
    async with make_http() as http:
        with pytest.raises(EngineError, match="check that router_url"):
            await RouterClient(server.url, http).workers()


async def test_a_change_that_is_answered_without_a_body_is_made(server):
    server.replies["/workers/7"] = [(202, b"")]
    async with make_http() as http:
        await RouterClient(server.url, http).remove("7")
