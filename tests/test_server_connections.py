"""Connections: so many and no more, none for ever, and nothing of them is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random

import pytest

from specserve.server.state import ServerSettings
from tests.http_server import Pace, Server, a_server
from tests.raw_http import Connection, connect
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

BODY = {"prompt": "say:", "temperature": 0, "max_tokens": 200, "stream": True}
# Some 50 KB in all: more than small socket buffers take, less than asyncio calls too much.
LONG = "abcdefghij" * 24
WIDE = {
    "messages": [{"role": "user", "content": "say"}],
    "temperature": 0,
    "max_tokens": 240,
    "logprobs": True,
    "top_logprobs": 1,
}


async def has_connections(server: Server, count: int) -> None:
    while server.num_connections != count:
        await asyncio.sleep(0.002)


async def stream(connection: Connection) -> None:
    await connection.request("POST", "/v1/completions", BODY)
    assert (await connection.read_head())[0] == 200


# ---- how many --------------------------------------------------------------------------------


async def test_when_all_connections_are_busy_the_next_is_told_to_come_later() -> None:
    pace = Pace()
    settings = ServerSettings(max_connections=2)
    async with (
        a_server(says("x", then=None), settings=settings, on_forward=pace) as server,
        connect(server.port) as one,
    ):
        await stream(one)
        async with connect(server.port) as two:
            await stream(two)
            async with connect(server.port) as three:
                refused = await three.read_reply()
                assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
                assert "2 connections" in refused.error["message"]
                assert refused.headers["retry-after"] == "1"
                assert await three.is_closed()
            await has_connections(server, 2)
        await has_connections(server, 1)
        assert (await server.get("/health")).status == 200
        pace.allow(1000)


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx-half"])
async def test_a_connection_without_a_request_gives_way_to_a_new_one(sent: bytes) -> None:
    settings = ServerSettings(max_connections=3)
    async with (
        a_server(says("hello"), settings=settings) as server,
        connect(server.port) as oldest,
        connect(server.port) as older,
        connect(server.port) as old,
    ):
        for connection in (oldest, older, old):
            await connection.request("GET", "/health")
            assert (await connection.read_reply()).status == 200
            await connection.send(sent)
        async with connect(server.port) as new:
            await new.request("GET", "/health")
            assert (await new.read_reply()).status == 200
            assert await oldest.is_closed()
            async with connect(server.port) as newer:
                await newer.request("GET", "/health")
                assert (await newer.read_reply()).status == 200
                assert await older.is_closed()
        await has_connections(server, 1)


async def test_a_busy_connection_never_gives_way() -> None:
    pace = Pace()
    settings = ServerSettings(max_connections=2)
    async with (
        a_server(says("hello"), settings=settings, on_forward=pace) as server,
        connect(server.port) as busy,
    ):
        await busy.request("POST", "/v1/completions", {**BODY, "stream": False})
        await server.has(running=1)
        for _ in range(5):
            assert (await server.get("/health")).status == 200
        async with connect(server.port) as idle, connect(server.port) as newest:
            await newest.request("GET", "/health")
            assert (await newest.read_reply()).status == 200
            assert await idle.is_closed()
        pace.allow(1000)
        assert (await busy.read_reply()).json()["choices"][0]["text"] == "hello"


# ---- how long --------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_a_whole_reply_is_cut_off() -> None:
    settings = ServerSettings(write_seconds=0.1)
    async with (
        a_server(says(LONG, then=None), settings=settings, send_buffer=4096) as server,
        connect(server.port, receive_buffer=4096) as stalled,
    ):
        await stalled.request("POST", "/v1/chat/completions", {**WIDE, "top_logprobs": 20})
        await has_connections(server, 1)
        await has_connections(server, 0)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await stalled.read_reply()


async def test_an_idle_connection_with_an_unread_reply_does_not_stay_either() -> None:
    settings = ServerSettings(idle_connection_seconds=0.1, write_seconds=0.1)
    async with (
        a_server(says(LONG, then=None), settings=settings, send_buffer=4096) as server,
        connect(server.port, receive_buffer=4096) as stalled,
    ):
        await stalled.request("POST", "/v1/chat/completions", WIDE)
        await has_connections(server, 1)
        await has_connections(server, 0)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: a\r\nx-half"])
async def test_a_kept_connection_is_closed_when_its_next_request_does_not_come(
    sent: bytes,
) -> None:
    settings = ServerSettings(idle_connection_seconds=1.0)
    async with a_server(says("hello"), settings=settings) as server, connect(server.port) as kept:
        await kept.request("GET", "/health")
        assert (await kept.read_reply()).status == 200
        await kept.send(sent)
        assert await kept.is_closed()


# ---- storms ----------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _visit(port: int, luck: random.Random) -> None:
    """Come, get so far, and vanish, by RST or in good order."""
    async with connect(port) as connection:
        stage = luck.randrange(5)
        if stage == 1:
            await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
        if stage == 2:
            await connection.send(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{"
            )
        if stage >= 3:
            await connection.request("POST", "/v1/completions", {**BODY, "stream": stage == 3})
        await asyncio.sleep(luck.random() * 0.02)
        if luck.random() < 0.5:
            connection.reset()
        else:
            connection.writer.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
async def test_a_storm_of_clients_that_vanish_leaves_nothing_behind() -> None:
    luck = random.Random(5)
    async with a_server(says("x", then=None)) as server:
        assert (await server.complete(max_tokens=3)).status == 200
        await has_connections(server, 0)
        gc.collect()  # what earlier tests left is not this one's
        files = open_files()
        for _ in range(10):
            await asyncio.gather(*(_visit(server.port, luck) for _ in range(50)))
        await server.is_idle()
        await has_connections(server, 0)
        assert open_files() <= files
        assert (await server.complete(max_tokens=3)).json()["choices"][0]["text"] == "xxx"
