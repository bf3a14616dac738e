"""What a server writes of its requests: ids and numbers on every line, nobody's text on any."""

from __future__ import annotations

import asyncio

import pytest

from specserve.errors import RequestError
from specserve.server import operations
from specserve.server.state import ServerSettings
from specserve.server.traffic import TrafficClasses
from specserve_observability.logs import configure_logging
from tests.http_server import Server, a_server
from tests.log_lines import json_lines
from tests.scripted import says

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

TRACE_ID = "a" * 32
TRACEPARENT = f"00-{TRACE_ID}-{'b' * 16}-01"
SECRET = "my secret prompt; say:"


async def ask(server: Server, body: dict[str, object], **headers: str) -> int:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = await server.post("/v1/completions", body, sent)
    return reply.status


async def test_a_requests_line_has_its_ids_its_outcome_and_its_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(json=True)
    settings = ServerSettings(traffic_classes=TrafficClasses(("batch",)))
    async with a_server(says("hello"), settings=settings) as server:
        headers = {"traceparent": TRACEPARENT, "x_request_id": "mine", "x_traffic_class": "batch"}
        assert await ask(server, {"prompt": SECRET, "temperature": 0}, **headers) == 200
    (line,) = json_lines(capsys)
    assert line.pop("seconds") >= 0
    assert line.pop("accepted_tokens") <= line.pop("draft_tokens")
    line.pop("timestamp")
    assert line == {
        "event": "request_finished",
        "level": "info",
        "logger": "specserve.server",
        "request_id": "mine",
        "trace_id": TRACE_ID,
        "span_id": "b" * 16,
        "method": "POST",
        "route": "/v1/completions",
        "status": 200,
        "traffic_class": "batch",
        "prompt_tokens": len(SECRET),
        "cached_tokens": 0,
        "output_tokens": len("hello") + 1,
        "finish_reasons": ["stop"],
    }


async def test_neither_what_was_asked_nor_what_was_said_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(json=False, level="debug")
    async with a_server(says("a confidential answer")) as server:
        assert await ask(server, {"prompt": SECRET, "temperature": 0}) == 200
        assert await ask(server, {"prompt": SECRET, "temperature": 9}) == 400
        assert await ask(server, {"prompt": SECRET, "model": f"{SECRET}\r\nforged"}) == 404
        assert (await server.get("/v1/my-secret")).status == 404
        assert (await server.chat()).status == 200
    written = capsys.readouterr().err
    assert written.count("request_finished") == 5
    assert "secret" not in written
    assert "confidential" not in written
    assert "forged" not in written
    assert len(written.splitlines()) == 5


async def test_an_id_that_comes_in_the_body_is_the_lines_id(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(json=True)
    async with a_server(says("hello")) as server:
        body = {"prompt": "say:", "temperature": 0}
        await ask(server, {**body, "request_id": "from-the-body"})
        await ask(server, body)
    first, second = json_lines(capsys)
    assert first["request_id"] == "from-the-body"
    assert second["request_id"].startswith("req-")
    assert "trace_id" not in second


async def test_requests_beside_each_other_keep_their_own_ids(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(json=True)
    async with a_server(says("hello" * 20)) as server:
        body = {"prompt": "say:", "temperature": 0}
        asked = [
            asyncio.create_task(ask(server, body, x_request_id=f"id-{idx}")) for idx in range(6)
        ]
        assert await asyncio.gather(*asked) == [200] * 6
    ids = [line["request_id"] for line in json_lines(capsys)]
    assert sorted(ids) == [f"id-{idx}" for idx in range(6)]


async def test_what_supervisors_ask_is_written_only_for_those_who_look_closely(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for level, expected in (("info", []), ("debug", ["/health", "/metrics"])):
        configure_logging(json=True, level=level)
        async with a_server(says("hello")) as server:
            await server.get("/health")
            await server.get("/metrics")
        routes = [line["route"] for line in json_lines(capsys) if "route" in line]
        assert routes == expected


async def test_a_failure_of_ours_is_a_warning_and_its_traceback_has_the_ids(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(state: object) -> RequestError:
        raise ZeroDivisionError("on purpose")

    configure_logging(json=True)
    monkeypatch.setattr(operations, "_card", broken)
    async with a_server(says("hello")) as server:
        reply = await server.get("/v1/models")
        assert reply.status == 500
        request_id = reply.headers["x-request-id"]
    failed, finished = json_lines(capsys)
    assert (failed["event"], failed["level"]) == ("request_failed", "error")
    assert "on purpose" in failed["exception"]
    assert (finished["event"], finished["level"]) == ("request_finished", "warning")
    assert finished["status"] == 500
    assert failed["request_id"] == finished["request_id"] == request_id
