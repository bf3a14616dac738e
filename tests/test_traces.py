"""Spans as a collector receives them, as the file holds them, as Jaeger's UI opens them."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan

from specserve_observability import names
from specserve_observability.jaeger import TraceFileError, export_jaeger, export_main
from specserve_observability.metrics import Metrics
from specserve_observability.pipeline import SpanPipeline
from specserve_observability.recorder import Recorder
from specserve_observability.records import QueuePeriod, StepRecord
from specserve_observability.server_tracer import ServerTracer
from specserve_observability.tracing import Tracing, open_tracing
from tests.otlp_receiver import an_otlp_receiver, attributes_of, spans_of
from tests.trace_records import (
    START,
    a_request,
    a_row,
    a_step,
    decode_id,
    decode_traceparent,
    server_traceparent,
    trace_id,
)

GOLDEN = Path(__file__).parent / "golden"
PHASES = ("plan", "draft", "target_forward", "verify", "commit")


class Trace:
    """Finished spans of one run, found by name or id."""

    def __init__(self, spans: Sequence[tuple[str, Span]]) -> None:
        self.services = {span.span_id.hex(): service for service, span in spans}
        self.spans = [span for _, span in spans]
        self.by_id = {(span.trace_id.hex(), span.span_id.hex()): span for span in self.spans}
        assert len(self.by_id) == len(self.spans), "a span was delivered twice"

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span

    def parent_of(self, span: Span) -> Span:
        return self.by_id[span.trace_id.hex(), span.parent_span_id.hex()]

    def links_of(self, span: Span) -> list[Span]:
        """The spans linked to; a link that leads nowhere is a KeyError."""
        return [self.by_id[link.trace_id.hex(), link.span_id.hex()] for link in span.links]


def read_trace_file(path: Path) -> list[ExportTraceServiceRequest]:
    """Parsed by protobuf's own JSON mapping, once OTLP's hex ids are the base64 it wants."""
    return [
        json_format.ParseDict(_ids_in_base64(json.loads(line)), ExportTraceServiceRequest())
        for line in path.read_text().splitlines()
    ]


def _ids_in_base64(value: object) -> object:
    if isinstance(value, list):
        return [_ids_in_base64(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: base64.b64encode(bytes.fromhex(inner)).decode()
        if key in ("traceId", "spanId", "parentSpanId")
        else _ids_in_base64(inner)
        for key, inner in value.items()
    }


def trace_of_file(path: Path) -> Trace:
    return Trace([pair for message in read_trace_file(path) for pair in spans_of(message)])


class FileTracing:
    """Tracing into a file; `finish` ends it and returns what the file holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics(drafters=["ngram"])
        self.tracing: Tracing = open_tracing(
            trace_file=path, service_version="1.2.3", metrics=self.metrics
        )

    def finish(self) -> Trace:
        self.tracing.shutdown()
        return trace_of_file(self.path)


@pytest.fixture
def to_file(tmp_path: Path) -> Iterator[FileTracing]:
    run = FileTracing(tmp_path / "traces.jsonl")
    yield run
    run.tracing.shutdown()


def record_two_requests(tracing: Tracing) -> None:
    """req-0 and req-1 share three steps, as the engine would write them: request before step."""
    assert tracing.server_tracer is not None
    spans = [
        tracing.server_tracer.start(
            method="POST", route="/x", headers={"traceparent": server_traceparent(idx)}
        )
        for idx in (0, 1)
    ]
    rows = [a_row(0, drafted=3, accepted=2), a_row(1, drafted=3, accepted=0)]
    prefill = a_step(0, [a_row(0, tokens=8, emitted=1), a_row(1, tokens=8, emitted=0)])
    tracing.recorder.record_step(prefill)
    tracing.recorder.record_step(a_step(1, rows))
    for idx, span in enumerate(spans):
        request = a_request(idx, rows=[rows[idx]], traceparent=span.traceparent)
        tracing.recorder.record_request(request)
    tracing.recorder.record_step(a_step(2, rows))
    for span in spans:
        span.end(200, {})


# ---- over a socket ---------------------------------------------------------------------------


async def test_a_collector_receives_every_name_attribute_and_link(tmp_path: Path) -> None:
    async with an_otlp_receiver() as receiver:
        tracing = open_tracing(
            otlp_endpoint=receiver.endpoint,
            service_version="1.2.3",
            resource={names.MODEL_TARGET: "demo"},
        )
        assert tracing.server_tracer is not None
        span = tracing.server_tracer.start(
            method="POST", route="/v1/completions", headers={"host": "h:80", "user-agent": "curl"}
        )
        assert span.traceparent is not None
        span.child(names.TOKENIZE, START, START + 0.001, {"specserve.prompt_tokens": 12})
        decode_context = f"{span.traceparent[:36]}{decode_id(0)}-01"
        rows = [a_row(0, drafted=3, accepted=2, traceparent=decode_context)]
        tracing.recorder.record_step(a_step(0, rows, preempted=1))
        tracing.recorder.record_request(a_request(0, rows=rows, traceparent=span.traceparent))
        span.end(200, {names.REQUEST_ID: "req-0"})
        await asyncio.to_thread(tracing.shutdown)
        received = list(receiver.spans())
        resource = attributes_of(receiver.messages[0].resource_spans[0].resource.attributes)

    trace = Trace(received)
    assert Counter((service, span.name) for service, span in received) == Counter(
        {
            ("specserve", "POST /v1/completions"): 1,
            ("specserve", "tokenize"): 1,
            ("specserve", "queue"): 1,
            ("specserve", "prefill"): 2,
            ("specserve", "decode"): 1,
            ("specserve-engine", "engine.window"): 1,
            ("specserve-engine", "engine.step"): 1,
            **{("specserve-engine", phase): 1 for phase in PHASES},
        }
    )
    assert resource["service.version"] == "1.2.3"
    assert resource["specserve.model.target"] == "demo"
    assert resource["service.instance.id"]

    server = trace.one("POST /v1/completions")
    assert server.kind == Span.SPAN_KIND_SERVER
    assert attributes_of(server.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "url.path": "/v1/completions",
        "server.address": "h",
        "server.port": 80,
        "user_agent.original": "curl",
        "specserve.request.id": "req-0",
    }
    for name in ("tokenize", "queue", "prefill", "decode"):
        assert all(trace.parent_of(child) is server for child in trace.named(name))
    window, step, decode = (trace.one(n) for n in ("engine.window", "engine.step", "decode"))
    assert trace.links_of(window) == trace.links_of(step) == [decode]
    assert trace.links_of(decode) == [window, step]


async def test_both_sinks_hold_the_same_spans(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    async with an_otlp_receiver() as receiver:
        tracing = open_tracing(
            otlp_endpoint=receiver.endpoint, trace_file=path, service_version="1.2.3"
        )
        record_two_requests(tracing)
        await asyncio.to_thread(tracing.shutdown)
        sent = Trace(list(receiver.spans()))
    filed = trace_of_file(path)
    assert len(filed.spans) > 20
    # The file's flags also say "sampled" (bits 0-7), which the SDK's encoder leaves out.
    for span in filed.spans:
        span.flags &= ~0xFF
        for link in span.links:
            link.flags &= ~0xFF
    assert filed.by_id == sent.by_id
    assert filed.services == sent.services


# ---- what a span says ------------------------------------------------------------------------


def test_links_between_requests_and_steps_resolve_both_ways(to_file: FileTracing) -> None:
    record_two_requests(to_file.tracing)
    trace = to_file.finish()
    steps = trace.named("engine.step")
    decodes = trace.named("decode")
    (window,) = trace.named("engine.window")
    assert len(steps) == 3
    assert {span.span_id.hex() for span in decodes} == {decode_id(0), decode_id(1)}
    for decode in decodes:
        assert trace.links_of(decode) == [window, *steps]
    for span in (window, *steps):
        assert trace.links_of(span) == decodes
        assert trace.services[span.span_id.hex()] == "specserve-engine"
    assert {trace.services[span.span_id.hex()] for span in decodes} == {"specserve"}
    assert not window.parent_span_id
    assert all(trace.parent_of(step) is window for step in steps)


def test_a_step_has_its_five_phases_end_to_end(to_file: FileTracing) -> None:
    step = a_step(0, [a_row()])
    to_file.tracing.recorder.record_step(step)
    trace = to_file.finish()
    span = trace.one("engine.step")
    phases = [trace.one(name) for name in PHASES]
    assert all(trace.parent_of(phase) is span for phase in phases)
    assert phases[0].start_time_unix_nano == span.start_time_unix_nano
    assert span.start_time_unix_nano == round(step.plan_start * 1e9)
    assert phases[-1].end_time_unix_nano == span.end_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano


def test_a_step_carries_its_batch_and_one_outcome_per_request(to_file: FileTracing) -> None:
    rows = [a_row(0, drafted=3, accepted=2), a_row(1, drafter="none", tokens=8, emitted=0)]
    to_file.tracing.recorder.record_step(a_step(7, rows, preempted=1))
    span = to_file.finish().one("engine.step")
    assert attributes_of(span.attributes) == {
        "specserve.step.index": 7,
        "specserve.step.kind": "mixed",
        "specserve.step.sample_reason": "preempted",
        "specserve.batch.requests": 2,
        "specserve.batch.tokens": 12,
        "specserve.batch.prefill_tokens": 8,
        "specserve.batch.decode_tokens": 1,
        "specserve.batch.token_budget": 512,
        "specserve.spec.draft_tokens": 3,
        "specserve.spec.accepted_tokens": 2,
        "specserve.spec.emitted_tokens": 3,
        "specserve.generated_tokens": 3,
        "specserve.requests.running": 2,
        "specserve.requests.waiting": 2,
        "specserve.kv.blocks_free": 100,
        "specserve.kv.blocks_cached": 20,
        "specserve.kv.blocks_live": 8,
        "specserve.preemptions": 1,
    }
    assert [event.name for event in span.events] == ["specserve.request_outcome"] * 2
    assert attributes_of(span.events[0].attributes) == {
        "specserve.request.id": "req-0",
        "specserve.batch.tokens": 1,
        "specserve.spec.drafter": "ngram",
        "specserve.spec.draft_tokens": 3,
        "specserve.spec.accepted_tokens": 2,
        "specserve.generated_tokens": 3,
    }
    assert span.events[0].time_unix_nano == span.end_time_unix_nano
    assert all(not link.attributes for link in span.links)


def test_a_decode_span_sums_up_its_request(to_file: FileTracing) -> None:
    rows = [a_row(0, drafted=3, accepted=2), a_row(0, drafted=1, accepted=1), a_row(0)]
    to_file.tracing.recorder.record_request(a_request(0, rows=rows))
    trace = to_file.finish()
    decode = trace.one("decode")
    said = attributes_of(decode.attributes)
    assert said == {
        "specserve.request.id": "req-0",
        "gen_ai.provider.name": "specserve",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.4),
        "specserve.decode.steps": 3,
        "specserve.preemptions": 0,
        "specserve.spec.drafters": ["ngram"],
        "specserve.spec.steps": 2,
        "specserve.spec.draft_tokens": 4,
        "specserve.spec.accepted_tokens": 3,
        "specserve.spec.emitted_tokens": 5,
        "specserve.spec.drafted_at_position": [2, 1, 1],
        "specserve.spec.accepted_at_position": [2, 1],
        "specserve.spec.acceptance_rate": 0.75,
        "specserve.spec.acceptance_length": 2.5,
        "specserve.latency.queue": pytest.approx(0.2),
        "specserve.latency.prefill": pytest.approx(0.2),
        "specserve.latency.decode": pytest.approx(0.6),
        "specserve.latency.ttft": pytest.approx(0.4),
    }
    chunks = [attributes_of(span.attributes) for span in trace.named("prefill")]
    assert [c["specserve.prefill.chunk"] for c in chunks] == [0, 1]
    assert [c["specserve.prefill.tokens"] for c in chunks] == [6, 2]
    assert [c["specserve.prefill.cached_tokens"] for c in chunks] == [4, 0]


def test_every_stay_in_the_queue_is_a_span_with_its_reason(to_file: FileTracing) -> None:
    request = a_request(0)
    stays = (*request.queue, QueuePeriod(START + 0.5, START + 0.7, "preempted"))
    to_file.tracing.recorder.record_request(msgspec.structs.replace(request, queue=stays))
    spans = to_file.finish().named("queue")
    reasons = [attributes_of(span.attributes)["specserve.queue.reason"] for span in spans]
    assert reasons == ["admission", "preempted"]


def test_failures_are_marked_as_errors(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_step(a_step(0, [a_row()], error="out of memory"))
    to_file.tracing.recorder.record_request(
        a_request(0, finish_reason="error", error="out of memory")
    )
    trace = to_file.finish()
    for span in (trace.one("engine.step"), trace.one("decode")):
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert span.status.message == "out of memory"
        assert "error.type" in attributes_of(span.attributes)
    assert trace.one("queue").status.code == Status.STATUS_CODE_UNSET


def test_a_request_aborted_in_the_queue_still_has_a_decode_span(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_request(a_request(0, finish_reason="abort", started=False))
    trace = to_file.finish()
    assert Counter(span.name for span in trace.spans) == {"queue": 1, "decode": 1}
    said = attributes_of(trace.one("decode").attributes)
    assert said["gen_ai.response.finish_reasons"] == ["abort"]
    assert "gen_ai.response.time_to_first_chunk" not in said


def test_a_request_without_a_trace_of_its_own_gets_one(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_step(a_step(0, [a_row(traceparent=None)]))
    to_file.tracing.recorder.record_request(a_request(0, traceparent=None))
    trace = to_file.finish()
    root = trace.one("request")
    assert not root.parent_span_id
    assert trace.parent_of(trace.one("decode")) is root
    assert not trace.one("engine.step").links
    assert len(trace.one("engine.step").events) == 1


class KeptSpans:
    """A sink that keeps what it is offered."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        self.spans.extend(spans)

    def close(self, deadline: float) -> None:
        return


def test_a_drain_between_a_request_and_its_last_step_loses_no_link() -> None:
    recorder = Recorder(has_sink=True)
    sink = KeptSpans()
    server_tracer = ServerTracer(recorder.metrics)
    pipeline = SpanPipeline(recorder, server_tracer, [sink], resource={}, version="1")
    recorder.record_request(a_request(0))
    pipeline.drain(START)
    recorder.record_step(a_step(0, [a_row()]))
    pipeline.finish(START + 1)
    by_name = {span.name: span for span in sink.spans}
    linked = [link.context for link in by_name["decode"].links]
    assert linked == [by_name["engine.window"].context, by_name["engine.step"].context]


# ---- sampling and bounds ---------------------------------------------------------------------


def test_a_trace_its_sender_did_not_sample_leaves_nothing(to_file: FileTracing) -> None:
    unsampled = server_traceparent(0, sampled=False)
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    span = server_tracer.start(method="GET", route="/x", headers={"traceparent": unsampled})
    assert span.traceparent is not None
    assert span.traceparent.endswith("-00")
    span.end(200, {})
    row = a_row(0, traceparent=decode_traceparent(0, sampled=False))
    to_file.tracing.recorder.record_step(a_step(0, [row]))
    to_file.tracing.recorder.record_request(a_request(0, traceparent=span.traceparent))
    trace = to_file.finish()
    assert set(trace.services.values()) == {"specserve-engine"}
    assert not trace.one("engine.step").links


def steps_of_ten_seconds(*, odd: dict[int, StepRecord]) -> list[StepRecord]:
    """1,000 steps of 10 ms; `odd` replaces some by index."""
    return [odd.get(idx) or a_step(idx, [a_row()]) for idx in range(1000)]


def test_ordinary_steps_are_thinned_and_every_odd_one_is_kept(to_file: FileTracing) -> None:
    odd = {
        500: a_step(500, [a_row()], seconds=0.05),
        600: a_step(600, [a_row()], preempted=1),
        700: a_step(700, [a_row()], error="boom"),
    }
    for step in steps_of_ten_seconds(odd=odd):
        to_file.tracing.recorder.record_step(step)
    trace = to_file.finish()
    kept = [attributes_of(span.attributes) for span in trace.named("engine.step")]
    reasons = Counter(str(step["specserve.step.sample_reason"]) for step in kept)
    assert {k: reasons[k] for k in ("slow", "preempted", "error")} == {
        "slow": 1,
        "preempted": 1,
        "error": 1,
    }
    assert {500, 600, 700} <= {step["specserve.step.index"] for step in kept}
    assert 200 <= reasons["rate"] <= 100 + 20 * 10 + 1
    windows = [attributes_of(span.attributes) for span in trace.named("engine.window")]
    assert sum(int(str(w["specserve.window.steps"])) for w in windows) == 1000
    assert sum(int(str(w["specserve.window.sampled_steps"])) for w in windows) == len(kept)
    assert to_file.metrics.num_step_spans_sampled_out == 1000 - len(kept)


def test_trouble_without_end_is_bounded_too(to_file: FileTracing) -> None:
    for idx in range(1000):  # four seconds
        step = a_step(idx, [a_row()], start=START + idx * 0.004, seconds=0.003, preempted=1)
        to_file.tracing.recorder.record_step(step)
    at_most = 100 + 100 * 4 + 100 + 20 * 4  # the tail's burst and rate, the ordinary ones' too
    assert 400 <= len(to_file.finish().named("engine.step")) <= at_most + 2


@pytest.mark.parametrize(
    ("step_seconds", "steps_per_window"), [(0.01, [256, 256, 88]), (0.1, [50] * 12)]
)
def test_a_window_ends_after_256_steps_or_5_seconds(
    to_file: FileTracing, step_seconds: float, steps_per_window: list[int]
) -> None:
    for idx in range(600):
        start = START + idx * step_seconds
        to_file.tracing.recorder.record_step(a_step(idx, [a_row()], start=start, seconds=0.001))
    windows = [attributes_of(span.attributes) for span in to_file.finish().named("engine.window")]
    assert [w["specserve.window.steps"] for w in windows] == steps_per_window
    assert [w["specserve.window.index"] for w in windows] == list(range(len(windows)))


def test_more_requests_than_the_sdk_allows_links_are_all_linked(to_file: FileTracing) -> None:
    rows = [a_row(idx) for idx in range(300)]
    to_file.tracing.recorder.record_step(a_step(0, rows))
    for idx in range(300):
        to_file.tracing.recorder.record_request(a_request(idx))
    trace = to_file.finish()
    step = trace.one("engine.step")
    assert len(trace.links_of(step)) == 300
    assert len(step.events) == 300


def test_a_long_request_links_to_a_bounded_number_of_steps(to_file: FileTracing) -> None:
    for idx in range(100):
        to_file.tracing.recorder.record_step(a_step(idx, [a_row()]))
    to_file.tracing.recorder.record_request(a_request(0))
    trace = to_file.finish()
    assert len(trace.named("engine.step")) == 100
    linked = Counter(span.name for span in trace.links_of(trace.one("decode")))
    assert linked == {"engine.window": 1, "engine.step": 64}
    assert attributes_of(trace.one("decode").attributes)["specserve.decode.links_dropped"] == 36


# ---- the server's spans ----------------------------------------------------------------------


def test_a_server_span_continues_the_callers_trace(to_file: FileTracing) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    headers = {"traceparent": server_traceparent(3), "tracestate": "vendor=1"}
    span = server_tracer.start(method="POST", route="/v1/completions", headers=headers)
    span.end(200, {})
    sent = to_file.finish().one("POST /v1/completions")
    assert sent.trace_id.hex() == trace_id(3)
    assert sent.parent_span_id.hex() == server_traceparent(3).split("-")[2]
    assert sent.trace_state == "vendor=1"
    assert span.traceparent == f"00-{trace_id(3)}-{sent.span_id.hex()}-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
    ],
)
def test_a_header_that_is_no_traceparent_begins_a_new_trace(
    to_file: FileTracing, header: str
) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    span = server_tracer.start(method="POST", route="/x", headers={"traceparent": header})
    span.end(200, {})
    sent = to_file.finish().one("POST /x")
    assert not sent.parent_span_id
    assert span.traceparent == f"00-{sent.trace_id.hex()}-{sent.span_id.hex()}-01"


@pytest.mark.parametrize(
    ("status", "is_error"), [(200, False), (429, False), (499, False), (500, True)]
)
def test_only_a_servers_own_failure_is_an_error(
    to_file: FileTracing, status: int, is_error: bool
) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    server_tracer.start(method="GET", route="/x", headers={"host": "[::1"}).end(status, {})
    span = to_file.finish().one("GET /x")
    assert (span.status.code == Status.STATUS_CODE_ERROR) == is_error
    assert ("error.type" in attributes_of(span.attributes)) == is_error


def test_ending_a_server_span_twice_sends_it_once(to_file: FileTracing) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    span = server_tracer.start(method="GET", route="/x", headers={})
    span.end(200, {})
    span.end(500, {})
    assert (
        attributes_of(to_file.finish().one("GET /x").attributes)["http.response.status_code"] == 200
    )


# ---- when it goes wrong, and when it is off --------------------------------------------------


def span_threads() -> set[str]:
    return {t.name for t in threading.enumerate()} & {"specserve-spans", "specserve-otlp"}


def test_without_a_sink_there_is_no_tracer_thread_or_queue() -> None:
    tracing = open_tracing(service_version="1")
    tracing.recorder.record_step(a_step(0, [a_row()]))
    tracing.recorder.record_request(a_request(0))
    assert tracing.server_tracer is None
    assert len(tracing.recorder.steps) == len(tracing.recorder.requests) == 0
    assert not span_threads()
    tracing.shutdown()


def test_a_collector_that_is_down_costs_spans_and_nothing_else(unused_tcp_port: int) -> None:
    metrics = Metrics()
    tracing = open_tracing(
        otlp_endpoint=f"http://127.0.0.1:{unused_tcp_port}", service_version="1", metrics=metrics
    )
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
    tracing = open_tracing(
        otlp_endpoint=f"http://{host}:{port}", service_version="1", metrics=metrics
    )
    for idx in range(100):
        tracing.recorder.record_step(a_step(idx, [a_row()]))
    await asyncio.to_thread(tracing.shutdown, 1.0)
    assert metrics.num_steps == 100
    assert metrics.num_spans_dropped > 500  # all but the batch that hangs
    answered.set()
    await asyncio.to_thread(_wait_until_gone, "specserve-otlp")
    server.close()
    await server.wait_closed()
    assert metrics.num_spans_dropped == 601


def _wait_until_gone(thread_name: str) -> None:
    while thread_name in span_threads():
        time.sleep(0.01)


def test_shutting_down_twice_is_fine(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_step(a_step(0, [a_row()]))
    first = to_file.finish()
    second = to_file.finish()
    assert first.by_id == second.by_id


def test_an_endpoint_that_is_no_url_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match=r"'localhost:4318'.*for example http://127.0.0.1:4318"):
        open_tracing(otlp_endpoint="localhost:4318", service_version="1")


def test_a_trace_file_in_no_directory_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_tracing(trace_file=tmp_path / "no" / "file", service_version="1")


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
        assert jaeger_trace.keys() == {"traceID", "spans", "processes"}
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
