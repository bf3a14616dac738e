"""Web pages: those named may use the server, and no other can read what it says."""

from __future__ import annotations

import pytest

from specserve.errors import ConfigError
from specserve.server.cors import CorsPolicy
from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.raw_http import Reply, ask
from tests.scripted import BROKEN, says

pytestmark = pytest.mark.timeout(60)

KEY = "k-0123456789abcdef"
PAGE = "https://chat.example.org"
LOCAL = "http://localhost:3000"
ALLOW = "access-control-allow-origin"


def settings(origins: str, *, keys: KeyRing | None = None) -> ServerSettings:
    return ServerSettings(cors=CorsPolicy.parse(origins), keys=keys)


async def preflight(server: Server, origin: str, **more: str) -> Reply:
    headers = {"origin": origin, "access-control-request-method": "POST", **more}
    return await ask(server.port, "OPTIONS", "/v1/chat/completions", headers=headers)


async def test_without_origins_there_is_no_cors() -> None:
    async with a_server(says("hello")) as server:
        assert (await preflight(server, PAGE)).status == 405
        reply = await server.post("/v1/completions", {"prompt": "say:"}, {"origin": PAGE})
        assert not any(name.startswith("access-control") for name in reply.headers)
        assert "vary" not in reply.headers


async def test_a_preflight_needs_no_key_and_allows_what_the_page_asked_for() -> None:
    keyed = settings(f"{PAGE}, {LOCAL}", keys=KeyRing([KEY]))
    async with a_server(says("hello"), settings=keyed) as server:
        for origin in (PAGE, LOCAL):
            asked = "authorization,content-type, x-stainless-retry-count"
            reply = await preflight(server, origin, **{"access-control-request-headers": asked})
            assert (reply.status, reply.body) == (204, b"")
            assert reply.headers[ALLOW] == origin
            assert reply.headers["access-control-allow-headers"] == asked
            assert "POST" in reply.headers["access-control-allow-methods"]
            assert reply.headers["access-control-max-age"] == "600"
            assert reply.headers["vary"] == "Origin"
            assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example.org",
        "null",
        "",
        f"{PAGE}.evil.org",
        f"{PAGE}:444",
        "http://chat.example.org",
        f"{PAGE}, {LOCAL}",
        "*",
    ],
)
async def test_a_page_that_is_not_named_can_read_nothing(origin: str) -> None:
    async with a_server(says("hello"), settings=settings(f"{PAGE},{LOCAL}")) as server:
        refused = await preflight(server, origin)
        assert (refused.status, refused.error["code"]) == (403, "origin_not_allowed")
        reply = await server.post("/v1/completions", {"prompt": "say:"}, {"origin": origin})
        for each in (refused, reply):
            assert ALLOW not in each.headers
            assert each.headers["vary"] == "Origin"


async def test_a_page_can_read_replies_streams_errors_and_why_its_key_was_refused() -> None:
    keyed = settings(PAGE, keys=KeyRing([KEY]))
    async with a_server(says("hi", then=BROKEN), settings=keyed) as server:
        for path, body, key, status in (
            ("/v1/completions", {"prompt": "say:", "max_tokens": 2, "temperature": 0}, KEY, 200),
            ("/v1/completions", {"prompt": "say:", "stream": True}, KEY, 200),
            ("/v1/completions", {"prompt": "say:", "n": 0}, KEY, 400),
            ("/v1/completions", {"prompt": "say:"}, "wrong", 401),
            ("/nowhere", {}, KEY, 404),
            ("/health", {}, KEY, 405),
        ):
            headers = {"origin": PAGE, "authorization": f"Bearer {key}"}
            reply = await server.post(path, body, headers)
            assert (reply.status, reply.headers[ALLOW]) == (status, PAGE)
            assert "x-request-id" in reply.headers["access-control-expose-headers"]


async def test_any_origin_is_a_star_and_never_has_credentials() -> None:
    async with a_server(says("hello"), settings=settings("*")) as server:
        for reply in (
            await preflight(server, PAGE),
            await preflight(server, "null"),
            await server.post("/v1/completions", {"prompt": "say:"}, {"origin": PAGE}),
        ):
            assert reply.headers[ALLOW] == "*"
            assert "access-control-allow-credentials" not in reply.headers


async def test_header_names_that_are_none_are_not_repeated() -> None:
    async with a_server(says("hello"), settings=settings(PAGE)) as server:
        for asked in ("a b", "x:y", "x," * 100, "x" * 65, "é"):
            reply = await preflight(server, PAGE, **{"access-control-request-headers": asked})
            assert reply.status == 204
            assert "access-control-allow-headers" not in reply.headers


@pytest.mark.parametrize(
    "text",
    [
        "",
        "localhost:3000",
        "https://a/",
        "https://a/path",
        "null",
        "https://",
        "a,*",
        "https://a:x",
    ],
)
def test_what_is_no_origin_is_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins has"):
        CorsPolicy.parse(text)


def test_origins_are_compared_as_browsers_write_them() -> None:
    policy = CorsPolicy.parse("HTTPS://Chat.Example.org , http://[::1]:3000,app://localhost")
    for origin in (PAGE, "http://[::1]:3000", "app://localhost"):
        assert policy.allows(origin)
