"""Anthropic's official client against a real port: whole, streamed, tools, counts, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.scripted import BROKEN, says
from tests.test_server_messages import KEY, TOOL, USER
from tests.test_server_reasoning import THINK_TEMPLATE
from tests.test_server_responses import REPLY
from tests.test_server_tools import LARGE

anthropic = pytest.importorskip("anthropic", reason="anthropic's client is not installed")

pytestmark = pytest.mark.timeout(60)


@asynccontextmanager
async def a_client(server: Server, key: str = KEY) -> AsyncIterator[Any]:
    url = server.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


async def collect(manager: Any, texts: list[str]) -> None:
    async with manager as stream:
        async for text in stream.text_stream:
            texts.append(text)  # noqa: PERF401 - kept when the stream raises


def a_keyed_server(reply: str, **more: Any) -> Any:
    settings = ServerSettings(keys=KeyRing([KEY]))
    script = says(reply, **more)
    return a_server(script, config=LARGE, settings=settings, template=THINK_TEMPLATE)


async def test_the_official_client_reads_blocks_whole_and_streamed() -> None:
    asked: dict[str, Any] = {
        "model": "test",
        "messages": [USER],
        "max_tokens": 400,
        "tools": [TOOL],
        "extra_body": {"temperature": 0},
    }
    async with a_keyed_server(REPLY) as server, a_client(server) as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            texts = [text async for text in stream.text_stream]
            streamed = await stream.get_final_message()
        assert "".join(texts) == "Let me see.\n"
        for message in (whole, streamed):
            assert message.stop_reason == "tool_use"
            kinds = [block.type for block in message.content]
            assert kinds == ["thinking", "text", "tool_use", "tool_use"]
            assert message.content[2].input == {"a": 1, "b": "é🎉"}
        assert whole.usage.output_tokens == streamed.usage.output_tokens
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "3"}
            for block in whole.content
            if block.type == "tool_use"
        ]
        history = [USER, whole.to_param(), {"role": "user", "content": results}]
        after = await client.messages.create(**{**asked, "messages": history, "max_tokens": 3})
        assert after.stop_reason == "max_tokens"
        count = await client.messages.count_tokens(model="test", messages=[USER], tools=[TOOL])
        usage = streamed.usage
        assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


async def test_the_official_client_tells_failures_apart() -> None:
    async with a_keyed_server("hello", then=BROKEN) as server:
        asked: dict[str, Any] = {"model": "test", "messages": [USER], "max_tokens": 99}
        asked["extra_body"] = {"temperature": 0}
        async with a_client(server, key="wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(**asked)
        async with a_client(server) as client:
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.create(**{**asked, "model": "other"})
            with pytest.raises(anthropic.BadRequestError, match="stop"):
                await client.messages.create(**asked, stop_sequences=[""])
            with pytest.raises(anthropic.InternalServerError):
                await client.messages.create(**asked)
            texts: list[str] = []
            with pytest.raises(anthropic.APIStatusError, match="engine failed"):
                await collect(client.messages.stream(**asked), texts)
            assert "".join(texts) == "hello"
