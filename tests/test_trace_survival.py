"""What tracing survives: odd records, a side process that fails to start, bytes that are no text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from specserve_observability.export import ExportSettings, Where
from specserve_observability.metrics import Metrics
from specserve_observability.tracing import Tracing, open_tracing
from tests.http_server import a_server
from tests.otlp_receiver import attributes_of
from tests.raw_http import connect
from tests.scripted import says
from tests.trace_reading import trace_of_file
from tests.trace_records import a_request, decode_id

BOTH = pytest.mark.parametrize("exporter", ["process", "thread"])


def to_file(path: Path, metrics: Metrics, **more: object) -> Tracing:
    settings = msgspec.structs.replace(ExportSettings(trace_file=str(path)), **more)
    return open_tracing(settings, service_version="1.2.3", metrics=metrics)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@BOTH
async def test_bytes_of_a_header_that_are_no_utf8_are_replaced(
    tmp_path: Path, exporter: Where
) -> None:
    path, metrics = tmp_path / "traces.jsonl", Metrics()
    tracing = to_file(path, metrics, exporter=exporter)
    async with (
        a_server(says("hello"), tracer=tracing.server_tracer) as server,
        connect(server.port) as connection,
    ):
        await connection.send(b"GET /health HTTP/1.1\r\nhost: h\xff\r\nuser-agent: a\xff\r\n\r\n")
        assert (await connection.read_reply()).status == 200
    await asyncio.to_thread(tracing.shutdown, 30)
    (span,) = trace_of_file(path).named("GET /health")
    attributes = attributes_of(span.attributes)
    assert (attributes["user_agent.original"], attributes["server.address"]) == ("a?", "h?")
    assert metrics.num_spans_dropped == 0


@BOTH
def test_a_batch_that_cannot_be_encoded_is_counted_and_the_next_one_arrives(
    tmp_path: Path, exporter: Where
) -> None:
    path, metrics = tmp_path / "traces.jsonl", Metrics()
    tracing = to_file(path, metrics, exporter=exporter)
    tracing.recorder.record_request(msgspec.structs.replace(a_request(0), model="\udcff"))
    wait_until(lambda: metrics.num_spans_dropped)
    tracing.recorder.record_request(a_request(1))
    tracing.shutdown(timeout=30)
    assert trace_of_file(path).one("decode").span_id.hex() == decode_id(1)
