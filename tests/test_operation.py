"""From options to the settings of the server's HTTP side."""

from __future__ import annotations

import asyncio
import resource
import ssl
from pathlib import Path

import pytest

from specserve.errors import ConfigError
from specserve.operation import allow_connections, settings_of, tls_context, warn_if_open
from specserve.options import ServeOptions
from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from specserve_observability.metrics import Metrics
from specserve_observability.server_tracer import ServerTracer
from tests.certificates import a_certificate, needs_openssl
from tests.http_server import a_server
from tests.raw_http import Connection
from tests.scripted import says

KEY = "k-0123456789abcdef"


def test_keys_of_the_environment_are_asked_for_and_an_empty_variable_is_no_open_door() -> None:
    options = ServeOptions(max_concurrent_per_key=3)
    settings = settings_of(options, {"SPECSERVE_API_KEYS": KEY})
    assert settings.keys is not None
    assert settings.keys.find(KEY.encode()) == 0
    assert settings.max_concurrent_per_key == 3
    assert settings_of(ServeOptions(), {}).keys is None
    with pytest.raises(ConfigError, match="SPECSERVE_API_KEYS holds no key"):
        settings_of(ServeOptions(), {"SPECSERVE_API_KEYS": ""})


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", None, False),
        ("localhost", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("example.org", None, True),
        ("0.0.0.0", KeyRing([KEY]), False),
    ],
)
def test_an_open_server_is_warned_about_and_no_other(
    host: str, keys: KeyRing | None, warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    warn_if_open(host, ServerSettings(keys=keys))
    out = capfd.readouterr()
    assert ("open_to_the_network" in out.out + out.err) == warns


def test_keep_alive_comments_can_be_turned_off() -> None:
    assert settings_of(ServeOptions(sse_keepalive_seconds=0), {}).keep_alive_seconds is None
    assert settings_of(ServeOptions(sse_keepalive_seconds=2.5), {}).keep_alive_seconds == 2.5


def test_the_limit_of_open_files_is_raised_to_what_connections_need() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        allow_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256
        allow_connections(300)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- TLS -------------------------------------------------------------------------------------


@needs_openssl
async def test_https_serves_whoever_trusts_the_certificate_and_nobody_in_the_clear(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = a_certificate(tmp_path)
    settings = ServerSettings(tls=tls_context(cert, key))
    tracer = ServerTracer(Metrics())
    async with a_server(says("hello"), settings=settings, tracer=tracer) as server:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", server.port, ssl=ssl.create_default_context(cafile=cert)
        )
        connection = Connection(reader, writer)
        for stream in (False, True):
            body = {"prompt": "say:", "temperature": 0, "max_tokens": 9, "stream": stream}
            await connection.request("POST", "/v1/completions", body)
            reply = await connection.read_reply()
            assert reply.status == 200
            events = reply.events[:-1] if stream else [reply.json()]
            assert "".join(event["choices"][0]["text"] for event in events) == "hello"
        writer.close()
        await writer.wait_closed()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await server.get("/health")
        trusts_nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=trusts_nobody)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert [one.attributes["url.scheme"] for one in tracer.ended.take()] == ["https"] * 2


@needs_openssl
def test_a_certificate_that_cannot_be_used_is_said_at_start(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir()
    cert, key = a_certificate(tmp_path)
    _, locked = a_certificate(tmp_path / "locked", password="secret")
    assert tls_context(cert, key) is not None
    for bad in ((key, cert), (cert, None), (cert, locked), (cert, "/nowhere.pem"), (key, key)):
        with pytest.raises(ConfigError, match=r"--ssl-certfile .* no certificate with its private"):
            tls_context(*bad)
