"""What an attacker sends: refused with a 4xx, at bounded cost, and the next request works."""

from __future__ import annotations

import asyncio
import json
import socket
import zlib

import pytest

from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.raw_http import Connection, connect
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


async def still_works(server: Server) -> None:
    reply = await server.complete(max_tokens=9)
    assert reply.json()["choices"][0]["text"] == "hello"
    assert (await server.get("/health")).status == 200


async def send_until_closed(connection: Connection, start: bytes, more: bytes, limit: int) -> int:
    """Bytes taken of a request that never ends."""
    await connection.send(start)
    sent = 0
    try:
        while sent < limit:
            await connection.send(more)
            sent += len(more)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return sent


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /", b"a" * 65536),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx-long: ", b"a" * 65536),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n", b"x-many: 1\r\n" * 5000),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"f" * 65536),
    ],
    ids=["path", "header", "headers", "chunk-size"],
)
async def test_a_request_line_header_or_chunk_size_without_end_is_not_collected(
    start: bytes, more: bytes
) -> None:
    limit = 64 * 2**20
    settings = ServerSettings(header_seconds=30, body_seconds=30)
    async with a_server(says("hello"), settings=settings) as server:
        async with connect(server.port) as connection:
            assert await send_until_closed(connection, start, more, limit) < limit
        await still_works(server)


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"content-length: 9999\r\n\r\n", b" "),
        (b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        # The parser drops an extension as it reads it, however long it is.
        (b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 1000),
    ],
    ids=["length", "chunks", "chunk-extension"],
)
async def test_a_body_that_trickles_has_the_same_deadline_as_one_that_stops(
    start: bytes, more: bytes
) -> None:
    settings = ServerSettings(body_seconds=0.3)
    async with a_server(says("hello"), settings=settings) as server:
        async with connect(server.port) as connection:
            await connection.send(HEAD + start)

            async def trickle() -> None:
                while True:
                    await connection.send(more)
                    await asyncio.sleep(0.01)

            trickling = asyncio.create_task(trickle())
            try:
                reply = await connection.read_reply()
            finally:
                trickling.cancel()
                await asyncio.gather(trickling, return_exceptions=True)
            assert (reply.status, reply.error["code"]) == (408, "request_timeout")
        await still_works(server)


@pytest.mark.parametrize("coding", ["deflate", "gzip, gzip", "gzip, deflate", "zstd", "br", "x"])
async def test_a_body_that_swells_or_is_coded_unknowably_is_refused(coding: str) -> None:
    bomb = zlib.compress(b" " * 50_000_000)
    async with a_server(says("hello")) as server:
        reply = await server.post("/v1/completions", bomb, {"content-encoding": coding})
        assert 400 <= reply.status < 500
        assert reply.error["type"] == "invalid_request_error"
        await still_works(server)


@pytest.mark.parametrize(
    "document",
    [
        {"prompt": "say:", **{f"key{i}": i for i in range(200_000)}},
        {"prompt": "say:", "logit_bias": {str(i): 0 for i in range(200_000)}},
        {"prompt": "say:", "stop": ["x"] * 500_000},
        {"prompt": [1] * 1_000_000},
        {"prompt": "x" * 5_000_000},
        {"prompt": "say:", "prediction": {"type": "content", "content": "x" * 5_000_000}},
        {"prompt": "say:", "x": json.loads("[" * 300 + "]" * 300)},
    ],
    ids=["keys", "bias", "stop", "ids", "text", "prediction", "depth"],
)
async def test_the_largest_bodies_are_answered_and_the_loop_goes_on(
    document: dict[str, object],
) -> None:
    async with a_server(says("hello")) as server:
        body = {"temperature": 0, "max_tokens": 9, **document}
        asked = asyncio.create_task(server.post("/v1/completions", body))
        while not asked.done():
            assert (await server.get("/health")).status == 200
        reply = await asked
        assert reply.status in (200, 400)
        await still_works(server)


async def test_nothing_that_a_request_names_is_ever_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = "http://169.254.169.254/latest/meta-data"
    part = {"type": "image_url", "image_url": {"url": url}}
    async with a_server(says("hello")) as server:

        def refuse(*args: object) -> None:
            raise AssertionError(f"an outbound name was looked up: {args}")

        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        reply = await server.chat(messages=[{"role": "user", "content": [part]}])
        assert reply.status == 400
        assert reply.error["param"].startswith("messages")
        for field in ("chat_template", "documents"):
            assert (await server.chat(**{field: url})).status == 400
        headers = {"x-request-id": url, "x-forwarded-host": url, "referer": url}
        assert (await server.post("/v1/completions", {"prompt": "say:"}, headers)).status == 200


async def test_a_line_break_in_what_is_logged_makes_no_second_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with a_server(says("hello")) as server:
        await server.get("/nowhere%0d%0a2026-01-01%20[error]%20forged")
        forged = "x\\r\\n2026-01-01 [error] forged"
        reply = await server.complete(model=json.loads(f'"{forged}"'))
        assert reply.status == 404
        assert "\n" not in reply.json()["error"]["message"]
    out = capfd.readouterr()
    assert not [line for line in (out.out + out.err).splitlines() if line.startswith("2026-01-01")]
