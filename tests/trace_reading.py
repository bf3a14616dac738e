"""Traces read back: from a trace file through protobuf's own parser, and as spans by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from specserve_observability.export import ExportSettings
from specserve_observability.metrics import Metrics
from specserve_observability.tracing import Tracing, open_tracing
from tests.otlp_receiver import spans_of
from tests.trace_records import a_request, a_row, a_step, server_traceparent


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
        settings = ExportSettings(trace_file=str(path), exporter="thread")
        self.tracing: Tracing = open_tracing(
            settings, service_version="1.2.3", metrics=self.metrics
        )

    def finish(self) -> Trace:
        self.tracing.shutdown()
        return trace_of_file(self.path)


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
