"""API keys: no route but the supervisor's is open, no guess is near, no key leaks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from specserve.errors import ConfigError
from specserve.server.app import ROUTES
from specserve.server.keys import OPEN_ROUTES, KeyRing, read_keys
from specserve.server.state import ServerSettings
from specserve_observability.metrics import Metrics
from specserve_observability.server_tracer import ServerTracer
from tests.http_server import Pace, a_server
from tests.raw_http import Reply, connect, parse_events
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

KEY = "k-0123456789abcdef"
OTHER = "another-key-of-somebody"
BEARER = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": "say:", "temperature": 0, "max_tokens": 9}


def settings(**more: int) -> ServerSettings:
    return ServerSettings(keys=KeyRing([KEY, OTHER]), **more)


def check_401(reply: Reply, code: str) -> None:
    assert (reply.status, reply.error["code"]) == (401, code), reply.body
    assert reply.error["type"] == "authentication_error"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"]


def spellings(path: str) -> list[str]:
    path = path.replace("{id}", "test")
    return [path, f"/{path}", f"{path}?api_key={KEY}", path.upper(), f"{path}/", f"/x/..{path}"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE"])
async def test_without_a_key_nothing_answers_but_what_a_supervisor_asks(method: str) -> None:
    paths = {path for _, path in ROUTES} | {"/", "/nowhere", "/v1", "/docs"}
    async with a_server(says("hello"), settings=settings()) as server:
        for path in sorted(paths - OPEN_ROUTES):
            for spelled in spellings(path):
                async with connect(server.port) as connection:
                    await connection.request(method, spelled, headers={"x-forwarded-for": "::1"})
                    status, headers = await connection.read_head()
                assert (status, headers["www-authenticate"]) == (401, "Bearer"), (method, spelled)
        for path in sorted(OPEN_ROUTES):
            assert (await server.get(path)).status == 200
            # A path that only looks like an open one is none.
            assert (await server.get(f"/v1/..%2f{path}")).status == 401


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "invalid_api_key"),
        ("Bearer ", "invalid_api_key"),
        (KEY, "missing_api_key"),
        (f"Basic {KEY}", "missing_api_key"),
        (f"Bearer {KEY[:-1]}", "invalid_api_key"),
        (f"Bearer {KEY}x", "invalid_api_key"),
        (f"Bearer {KEY.upper()}", "invalid_api_key"),
        (f"Bearer {KEY},{OTHER}", "invalid_api_key"),
        ("Bearer schlüssel-ohne-ascii", "invalid_api_key"),
        ("Bearer " + "x" * 8000, "invalid_api_key"),
    ],
)
async def test_what_is_no_key_is_refused(value: str | None, code: str) -> None:
    async with a_server(says("hello"), settings=settings()) as server:
        headers = {} if value is None else {"authorization": value}
        check_401(await server.post("/v1/completions", BODY, headers), code)
        assert (await server.post("/v1/completions", BODY, BEARER)).status == 200


async def test_bytes_that_are_no_text_and_two_headers_are_refused() -> None:
    async with a_server(says("hello"), settings=settings()) as server:
        for lines, code in (
            (b"authorization: Bearer \xff\xfe\xfd0123456789abc\r\n", "invalid_api_key"),
            (f"authorization: Bearer {KEY}\r\n".encode() * 2, "missing_api_key"),
        ):
            async with connect(server.port) as connection:
                await connection.send(b"GET /v1/models HTTP/1.1\r\nhost: t\r\n" + lines + b"\r\n")
                check_401(await connection.read_reply(), code)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_each_key_opens_every_route_under_any_spelling_of_the_scheme(scheme: str) -> None:
    async with a_server(says("hello"), settings=settings()) as server:
        for key in (KEY, OTHER):
            headers = {"authorization": f"{scheme} {key}"}
            assert (await server.post("/v1/completions", BODY, headers)).status == 200
            async with connect(server.port) as connection:
                for path in ("/v1/models", "/metrics", "/v1//models"):
                    await connection.request("GET", path, headers=headers)
                    assert (await connection.read_reply()).status == 200
                await connection.request("GET", "/nowhere", headers=headers)
                assert (await connection.read_reply()).status == 404


async def test_a_body_is_not_asked_for_before_the_key_is_seen() -> None:
    async with a_server(says("hello"), settings=settings()) as server, connect(server.port) as one:
        head = {"expect": "100-continue", "content-length": "9", "connection": "close"}
        await one.request("POST", "/v1/completions", headers=head)
        check_401(await one.read_reply(), "missing_api_key")


async def test_no_key_is_in_a_reply_a_span_a_log_line_or_a_repr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    tracer = ServerTracer(Metrics())
    ring = settings()
    async with a_server(says("hello"), settings=ring, tracer=tracer) as server:
        good = await server.post("/v1/completions", BODY, BEARER)
        bad = await server.post("/v1/completions", BODY, {"authorization": f"Bearer {KEY}wrong"})
    spans = str(tracer.ended.take())
    out = capfd.readouterr()
    ours = (repr(ring), str(vars(ring.keys)))
    for text in (str(good), str(bad), spans, out.out, out.err, *ours):
        assert KEY not in text
    assert spans.count("/v1/completions") >= 2


# ---- how many at a time ----------------------------------------------------------------------


async def test_a_key_has_so_many_requests_at_a_time_and_others_have_their_own() -> None:
    pace = Pace()
    limited = settings(max_concurrent_per_key=2)
    async with a_server(says("hello"), settings=limited, on_forward=pace) as server:
        asked = {**BODY, "stream": True}
        async with connect(server.port) as one, connect(server.port) as two:
            for connection in (one, two):
                await connection.request("POST", "/v1/completions", asked, headers=BEARER)
                await connection.read_head()
            refused = await server.post("/v1/completions", BODY, BEARER)
            assert (refused.status, refused.error["code"]) == (429, "too_many_concurrent_requests")
            assert refused.headers["retry-after"] == "1"
            assert "has 2 requests under way, the limit is 2" in refused.error["message"]
            # Questions to the server itself are no load.
            async with connect(server.port) as models:
                await models.request("GET", "/v1/models", headers=BEARER)
                assert (await models.read_reply()).status == 200
            pace.allow(1000)
            reply = await server.post("/v1/completions", BODY, {"authorization": f"Bearer {OTHER}"})
            assert reply.status == 200
        await server.is_idle()  # both have left, one way or the other
        assert (await server.post("/v1/completions", BODY, BEARER)).status == 200


async def test_a_client_that_leaves_and_a_bad_request_give_their_place_back() -> None:
    pace = Pace()
    limited = settings(max_concurrent_per_key=1)
    async with a_server(says("hello"), settings=limited, on_forward=pace) as server:
        for _ in range(3):
            async with connect(server.port) as connection:
                body = {**BODY, "stream": True}
                await connection.request("POST", "/v1/completions", body, headers=BEARER)
                assert (await connection.read_head())[0] == 200
            pace.allow(100)
            await server.is_idle()
            reply = await server.post("/v1/completions", {"n": 0}, BEARER)
            assert reply.status == 400
        reply = await server.post("/v1/completions", {**BODY, "stream": True}, BEARER)
        assert parse_events(reply.body)[-1] == "[DONE]"


# ---- where they come from --------------------------------------------------------------------


def test_keys_come_from_a_file_and_from_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\r\n\n  {OTHER}  \n{KEY}\n")
    assert read_keys(None, None) is None
    for ring in (read_keys(str(file), None), read_keys(None, f"{KEY}, {OTHER},")):
        assert ring is not None
        assert len(ring) == 2
        assert [ring.find(key.encode()) for key in (KEY, OTHER, "", "x")] == [0, 1, None, None]
    both = read_keys(str(file), "yet-another-long-key")
    assert both is not None
    assert len(both) == 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["", "  "], "holds no key"),
        ([KEY, "short"], "2 has 5 characters, a key is 16 to 256"),
        (["x" * 257], "1 has 257 characters"),
        ([f"{KEY} {KEY}"], "without spaces"),
        (["schlüssel-ohne-ascii"], "printable ASCII"),
    ],
)
def test_what_cannot_be_a_key_is_named_by_its_place_and_not_shown(
    lines: Sequence[str], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(lines), encoding="utf-8")
    for from_file, variable in ((str(file), None), (None, ",".join(lines))):
        with pytest.raises(ConfigError, match=said) as caught:
            read_keys(from_file, variable)
        assert all(line.strip() not in str(caught.value) for line in lines if len(line) > 5)


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 20)
    for name in ("missing", "binary"):
        with pytest.raises(ConfigError, match=f"--api-key-file .*{name} cannot be read"):
            read_keys(str(tmp_path / name), None)
