"""How streams of items and blocks end when the server stops, the engine dies, or clients leave."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from specserve.server.app import drain
from specserve.server.state import ServerSettings
from tests.http_server import Pace, a_server
from tests.raw_http import connect
from tests.scripted import says
from tests.test_server_messages import USER
from tests.test_server_messages import named_events as message_events
from tests.test_server_responses import named_events as response_events

pytestmark = pytest.mark.timeout(60)

RESPONSES = ("/v1/responses", {"input": "say", "max_output_tokens": 200, "temperature": 0})
MESSAGES = ("/v1/messages", {"messages": [USER], "max_tokens": 200, "temperature": 0})
ENDPOINTS = pytest.mark.parametrize(("path", "body"), [RESPONSES, MESSAGES])


def ending(path: str, events: list[Any]) -> tuple[str, str]:
    """The last event's type and what it says the reason is."""
    last = events[-1]
    if path == "/v1/responses":
        return last["type"], last["response"]["error"]["code"]
    return last["type"], last["error"]["type"]


@ENDPOINTS
async def test_a_stream_that_shutdown_cuts_says_so(path: str, body: dict[str, Any]) -> None:
    pace = Pace()
    settings = ServerSettings(drain_seconds=0.05)
    async with (
        a_server(says("x", then=None), on_forward=pace, settings=settings) as server,
        connect(server.port) as one,
    ):
        await one.request("POST", path, {**body, "stream": True})
        pace.allow(5)
        await server.has(running=1)
        await drain(server.app)
        reply = await one.read_reply()
        assert await one.is_closed()
        pace.allow(500)
    read = response_events if path == "/v1/responses" else message_events
    kind, reason = ending(path, read(reply))
    assert (kind, reason) in (
        ("response.failed", "server_stopping"),
        ("error", "overloaded_error"),
    )


@ENDPOINTS
async def test_while_nothing_happens_comments_leave_and_the_stream_goes_on(
    path: str, body: dict[str, Any]
) -> None:
    pace = Pace()
    settings = ServerSettings(keep_alive_seconds=0.03)
    async with (
        a_server(says("hello"), on_forward=pace, settings=settings) as server,
        connect(server.port) as one,
    ):
        await one.request("POST", path, {**body, "stream": True})
        status, _ = await one.read_head()  # before any step has run
        assert status == 200
        while await one.read_chunk() != b": keep-alive\n\n":
            pass
        pace.allow(100)
        rest = b""
        while chunk := await one.read_chunk():
            assert chunk.endswith(b"\n\n")
            rest += chunk
    assert b'"delta":"h"' in rest or b'"text":"h"' in rest
    assert b"[DONE]" not in rest


@ENDPOINTS
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(
    path: str, body: dict[str, Any]
) -> None:
    chance = random.Random(5)
    async with a_server(says("x", then=None)) as server:

        async def leave(stream: bool) -> None:
            async with connect(server.port) as one:
                await one.request("POST", path, {**body, "stream": stream})
                await asyncio.sleep(chance.random() * 0.03)
                one.reset()

        for _ in range(4):
            await asyncio.gather(*(leave(i % 2 == 0) for i in range(8)))
        await server.is_idle()
        assert (await server.post(path, body)).status == 200
