"""How spans arrive: over a socket, in a file, in Jaeger's UI, and what happens when they cannot."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from specserve_observability.export import ExportSettings, Where
from specserve_observability.jaeger import TraceFileError, export_jaeger, export_main
from specserve_observability.metrics import Metrics
from specserve_observability.tracing import Tracing, open_tracing
from tests.otlp_receiver import an_otlp_receiver, attributes_of
from tests.trace_reading import FileTracing, Trace, record_two_requests, trace_of_file
from tests.trace_records import a_request, a_row, a_step, decode_id

GOLDEN = Path(__file__).parent / "golden"
PHASES = ("plan", "draft", "target_forward", "verify", "commit")


@pytest.fixture
def to_file(tmp_path: Path) -> Iterator[FileTracing]:
    run = FileTracing(tmp_path / "traces.jsonl")
    yield run
    run.tracing.shutdown()


# ---- over a socket ---------------------------------------------------------------------------


def to_collector(endpoint: str, metrics: Metrics | None = None, **more: object) -> Tracing:
    settings = ExportSettings(otlp_endpoint=endpoint, exporter="thread")
    settings = msgspec.structs.replace(settings, **more)
    return open_tracing(settings, service_version="1.2.3", metrics=metrics)


async def test_both_sinks_hold_the_same_spans(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with an_otlp_receiver() as receiver:
        tracing = to_collector(receiver.endpoint, trace_file=str(path))
        record_two_requests(tracing)
        await asyncio.to_thread(tracing.shutdown)
        sent = Trace(list(receiver.spans()))
    filed = trace_of_file(path)
    assert len(filed.spans) > 20
    assert filed.by_id == sent.by_id
    assert filed.services == sent.services


# ---- when it goes wrong, and when it is off --------------------------------------------------


def span_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name in ("specserve-spans", "specserve-otlp")}


def test_without_a_sink_there_is_no_tracer_thread_or_queue() -> None:
    before = span_threads()
    tracing = open_tracing(ExportSettings(), service_version="1")
    tracing.recorder.record_step(a_step(0, [a_row()]))
    tracing.recorder.record_request(a_request(0))
    assert tracing.server_tracer is None
    assert len(tracing.recorder.steps) == len(tracing.recorder.requests) == 0
    assert span_threads() == before
    tracing.shutdown()


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_collector_that_is_down_costs_spans_and_nothing_else(
    unused_tcp_port: int, protocol: str
) -> None:
    metrics = Metrics()
    tracing = to_collector(f"http://127.0.0.1:{unused_tcp_port}", metrics, otlp_protocol=protocol)
    for idx in range(50):
        tracing.recorder.record_step(a_step(idx, [a_row()]))
    tracing.shutdown(timeout=2.0)
    _wait_until_gone("specserve-otlp")
    num_built = 50 * 6 + 1
    assert metrics.num_spans_dropped == num_built
    assert metrics.num_steps == 50


async def test_a_collector_that_never_answers_does_not_hold_up_shutdown() -> None:
    answered = asyncio.Event()

    async def swallow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answered.wait()
        writer.close()

    server = await asyncio.start_server(swallow, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    metrics = Metrics()
    tracing = to_collector(f"http://{host}:{port}", metrics, steps_per_second=math.inf)
    for idx in range(200):
        tracing.recorder.record_step(a_step(idx, [a_row()]))
    await asyncio.to_thread(tracing.shutdown, 1.0)
    assert metrics.num_steps == 200
    assert metrics.num_spans_dropped > 500  # all but the request that hangs
    answered.set()
    await asyncio.to_thread(_wait_until_gone, "specserve-otlp")
    server.close()
    await server.wait_closed()
    assert metrics.num_spans_dropped == 1201


def _wait_until_gone(thread_name: str) -> None:
    while any(thread.name == thread_name for thread in threading.enumerate()):
        time.sleep(0.01)


def test_shutting_down_twice_is_fine(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_step(a_step(0, [a_row()]))
    first = to_file.finish()
    second = to_file.finish()
    assert first.by_id == second.by_id


@pytest.mark.parametrize("exporter", ["process", "thread"])
def test_an_endpoint_that_is_no_url_is_refused_with_an_example(exporter: Where) -> None:
    with pytest.raises(ValueError, match=r"'localhost:4318'.*for example http://127.0.0.1:4318"):
        open_tracing(
            ExportSettings(otlp_endpoint="localhost:4318", exporter=exporter), service_version="1"
        )


@pytest.mark.parametrize("exporter", ["process", "thread"])
def test_a_trace_file_in_no_directory_is_an_error_at_once(tmp_path: Path, exporter: Where) -> None:
    with pytest.raises(FileNotFoundError):
        open_tracing(
            ExportSettings(trace_file=str(tmp_path / "no" / "file"), exporter=exporter),
            service_version="1",
        )


def test_a_record_that_cannot_become_a_span_does_not_stop_the_others(
    to_file: FileTracing,
) -> None:
    broken = msgspec.structs.replace(a_request(0), decode_span_id="not hex")
    to_file.tracing.recorder.record_request(broken)
    to_file.tracing.recorder.record_request(a_request(1))
    trace = to_file.finish()
    assert trace.one("decode").span_id.hex() == decode_id(1)
    assert to_file.metrics.num_spans_dropped == 1


# ---- the trace file and Jaeger ---------------------------------------------------------------


def test_a_file_cut_off_by_a_crash_is_continued_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text('{"resourceSpans":[]}\n{"resourceSp')
    run = FileTracing(path)
    run.tracing.recorder.record_step(a_step(0, [a_row()]))
    run.tracing.shutdown()
    lines = path.read_text().splitlines()
    assert lines[1] == '{"resourceSp'
    assert all("resourceSpans" in json.loads(line) for line in lines[2:])
    assert len(lines) > 2


def test_a_file_that_grows_too_large_is_put_aside_three_times_and_then_dropped(
    tmp_path: Path,
) -> None:
    path = tmp_path / "traces.jsonl"
    settings = ExportSettings(trace_file=str(path), trace_file_bytes=20_000, exporter="thread")
    tracing = open_tracing(settings, service_version="1")
    for idx in range(300):
        tracing.recorder.record_request(a_request(idx))
    tracing.shutdown()
    files = [path, *(path.with_name(f"traces.jsonl.{idx}") for idx in (1, 2, 3))]
    assert sorted(tmp_path.iterdir()) == files
    kept = [trace_of_file(file) for file in files]
    assert all(file.stat().st_size <= 20_000 or len(kept[0].spans) <= 32 for file in files)
    oldest = attributes_of(kept[3].named("decode")[0].attributes)["specserve.request.id"]
    newest = attributes_of(kept[0].named("decode")[-1].attributes)["specserve.request.id"]
    assert (oldest != "req-0", newest) == (True, "req-299")


def test_the_golden_file_becomes_the_golden_jaeger_json(tmp_path: Path) -> None:
    out = tmp_path / "jaeger.json"
    status = export_main([str(GOLDEN / "trace.jsonl"), "--format", "jaeger-json", "-o", str(out)])
    assert status == 0
    assert json.loads(out.read_text()) == json.loads((GOLDEN / "jaeger.json").read_text())


def test_a_real_trace_file_has_the_shape_jaegers_ui_reads(to_file: FileTracing) -> None:
    record_two_requests(to_file.tracing)
    trace = to_file.finish()
    with to_file.path.open() as lines:
        exported = export_jaeger(lines)
    assert exported.keys() == {"data"}
    found: dict[tuple[str, str], dict[str, object]] = {}
    for jaeger_trace in exported["data"]:
        assert jaeger_trace.keys() == {"traceID", "spans", "processes", "warnings"}
        for span in jaeger_trace["spans"]:
            assert_jaeger_span(span, jaeger_trace)
            found[span["traceID"], span["spanID"]] = span
    assert found.keys() == trace.by_id.keys()
    for key, span in found.items():
        otlp = trace.by_id[key]
        assert span["operationName"] == otlp.name
        assert span["startTime"] == otlp.start_time_unix_nano // 1000
        follows = [r for r in span["references"] if r["refType"] == "FOLLOWS_FROM"]
        assert [r["spanID"] for r in follows] == [link.span_id.hex() for link in otlp.links]
        if span["operationName"] != "POST /x":  # whose parent is the caller's span, not ours
            assert all((r["traceID"], r["spanID"]) in found for r in span["references"])


def assert_jaeger_span(span: dict[str, object], trace: dict[str, object]) -> None:
    types = {
        "traceID": str,
        "spanID": str,
        "operationName": str,
        "references": list,
        "startTime": int,
        "duration": int,
        "tags": list,
        "logs": list,
        "processID": str,
        "warnings": type(None),
    }
    assert {key: type(value) for key, value in span.items()} == types
    assert span["traceID"] == trace["traceID"]
    assert span["processID"] in trace["processes"]
    process = trace["processes"][span["processID"]]
    assert process["serviceName"] in ("specserve", "specserve-engine")
    for reference in span["references"]:
        assert reference.keys() == {"refType", "traceID", "spanID"}
        same_trace = reference["traceID"] == span["traceID"]
        assert reference["refType"] == ("CHILD_OF" if same_trace else "FOLLOWS_FROM")
    tag_types = {"string": str, "bool": bool, "int64": int, "float64": float}
    fields = [field for log in span["logs"] for field in log["fields"]]
    for tag in (*span["tags"], *process["tags"], *fields):
        assert tag.keys() == {"key", "type", "value"}
        assert type(tag["value"]) is tag_types[tag["type"]]
    assert all(log.keys() == {"timestamp", "fields"} for log in span["logs"])


@pytest.mark.parametrize(
    "damage", ["not json", '{"resourceSpans":[{"scopeSpans":3}]}', "{}", '{"resource']
)
def test_a_damaged_line_is_named_by_its_number(damage: str) -> None:
    good = (GOLDEN / "trace.jsonl").read_text().splitlines()[0]
    with pytest.raises(TraceFileError, match="line 3 "):
        export_jaeger([good, "", damage, good])


def test_the_command_reports_what_it_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("oops\n")
    assert export_main([str(damaged), "-o", str(tmp_path / "out.json")]) == 1
    assert "line 1 " in capsys.readouterr().err
    assert export_main([str(tmp_path / "absent"), "-o", str(tmp_path / "out.json")]) == 1
    assert "absent" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()
