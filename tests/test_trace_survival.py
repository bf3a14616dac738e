"""What tracing survives: odd records, a side process that does not start, odd bytes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from specserve.server import telling
from specserve.server.state import ServerSettings
from specserve_observability import exporter_process
from specserve_observability.export import ExportSettings, Where
from specserve_observability.metrics import Metrics
from specserve_observability.sampling import StepSampler
from specserve_observability.tracing import Tracing, open_tracing
from tests.http_server import a_server
from tests.otlp_receiver import attributes_of
from tests.raw_http import connect
from tests.scripted import says
from tests.test_trace_exporter import exporters
from tests.trace_reading import trace_of_file
from tests.trace_records import a_request, a_row, a_step, decode_id

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


def test_a_side_process_that_cannot_be_started_again_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_process, "RESTART_SECONDS", 0.0)
    path, metrics = tmp_path / "traces.jsonl", Metrics()
    earlier = set(exporters())
    tracing = to_file(path, metrics)
    (pid,) = set(exporters()) - earlier
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(tmp_path / "gone"))
        os.kill(pid, signal.SIGKILL)
        for idx in range(2):
            num_lost = metrics.num_spans_dropped
            tracing.recorder.record_request(a_request(idx))
            wait_until(lambda before=num_lost: metrics.num_spans_dropped > before)
    tracing.recorder.record_request(a_request(2))
    tracing.shutdown(timeout=30)
    assert trace_of_file(path).one("decode").span_id.hex() == decode_id(2)


def test_the_side_process_imports_nothing_from_the_folder_it_is_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "traces.jsonl"
    tracing = to_file(path, Metrics())
    tracing.recorder.record_request(a_request(0))
    tracing.shutdown(timeout=30)
    assert trace_of_file(path).one("decode")


def test_a_low_rate_of_steps_is_kept_and_none_is_none() -> None:
    for rate, num_kept in ((0.1, 2), (0.0, 0)):
        sampler = StepSampler(rate)
        steps = [a_step(idx, [a_row()]) for idx in range(1100)]  # of 10 ms
        assert sum(sampler.reason_to_keep(step) == "rate" for step in steps) == num_kept


def test_a_file_that_could_not_be_put_aside_is_once_it_can(tmp_path: Path) -> None:
    path, metrics = tmp_path / "traces.jsonl", Metrics()
    path.with_name("traces.jsonl.2").touch()
    path.with_name("traces.jsonl.3").mkdir()  # which no file replaces
    tracing = to_file(path, metrics, exporter="thread", trace_file_bytes=20_000)
    for idx in range(100):
        tracing.recorder.record_request(a_request(idx))
    wait_until(lambda: metrics.num_spans_dropped)
    path.with_name("traces.jsonl.3").rmdir()
    tracing.recorder.record_request(a_request(100))
    tracing.shutdown(timeout=30)
    assert trace_of_file(path).named("decode")[-1].span_id.hex() == decode_id(100)


def test_a_trace_file_that_cannot_rotate_is_refused_at_once(tmp_path: Path) -> None:
    fifo = tmp_path / "traces.jsonl"
    os.mkfifo(fifo)  # nobody reads it: to open it would wait for ever
    with pytest.raises(OSError, match="no ordinary file"):
        to_file(fifo, Metrics(), exporter="process")


async def test_spans_tell_no_id_that_was_not_sent_and_the_beginning_of_long_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "MOST_CONTENT", 3)
    path = tmp_path / "traces.jsonl"
    tracing = to_file(path, Metrics(), exporter="thread")
    settings = ServerSettings(trace_content=True)
    async with a_server(says("hello"), tracer=tracing.server_tracer, settings=settings) as server:
        reply = await server.complete(request_id="mine", max_tokens=2)
        refused = await server.complete(prompt="x" * 10_000)
    await asyncio.to_thread(tracing.shutdown, 30)
    assert (reply.headers["x-request-id"], refused.status) == ("mine", 400)
    trace = trace_of_file(path)
    spans = {
        attributes_of(one.attributes)["http.response.status_code"]: one
        for one in trace.named("POST /v1/completions")
    }
    assert "http.response.header.x-request-id" not in attributes_of(spans[200].attributes)
    told = [
        attributes_of(one.attributes).get("gen_ai.input.messages")
        for one in trace.spans
        if one.name.startswith("text_completion")
    ]
    assert [text for text in told if text] == [
        '[{"role":"user","parts":[{"type":"text","content":"say [1 characters more]"}]}]'
    ]
