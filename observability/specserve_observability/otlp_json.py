"""Spans as one line of OTLP JSON: `{"resourceSpans": [...]}`.

The proto3 JSON mapping with OTLP's two exceptions: ids are hex (not base64) and enums are ints.
64-bit ints are strings. Empty fields are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AnyValue

from .spans import Event, Origin, Span, link_flags

Json = dict[str, object]


def encode_line(spans: Iterable[Span]) -> bytes:
    """One object and a newline. Spans are grouped by origin, in order of first appearance."""
    by_origin: dict[int, list[Span]] = {}
    for span in spans:
        by_origin.setdefault(id(span.origin), []).append(span)
    groups = [_resource_spans(group[0].origin, group) for group in by_origin.values()]
    return msgspec.json.encode({"resourceSpans": groups}) + b"\n"


def _resource_spans(origin: Origin, spans: Sequence[Span]) -> Json:
    return {
        "resource": {"attributes": _attributes(origin.resource)},
        "scopeSpans": [
            {
                "scope": {"name": origin.scope, "version": origin.version},
                "spans": [_span(span) for span in spans],
            }
        ],
    }


def _span(span: Span) -> Json:
    context, parent = span.context, span.parent
    out: Json = _ids(context)
    if context.trace_state:
        out["traceState"] = context.trace_state.to_header()
    if parent is not None:
        out["parentSpanId"] = f"{parent.span_id:016x}"
    out["flags"] = span.flags
    out["name"] = span.name
    out["kind"] = span.kind
    out["startTimeUnixNano"] = str(span.start_ns)
    out["endTimeUnixNano"] = str(span.end_ns)
    if span.attributes:
        out["attributes"] = _attributes(span.attributes)
    if span.events:
        out["events"] = [_event(event) for event in span.events]
    if span.links:
        out["links"] = [{**_ids(link), "flags": link_flags(link)} for link in span.links]
    out["status"] = _status(span.error)
    return out


def _ids(context: SpanContext) -> Json:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _event(event: Event) -> Json:
    return {
        "name": event.name,
        "timeUnixNano": str(event.time_ns),
        "attributes": _attributes(event.attributes),
    }


def _status(error: str | None) -> Json:
    if error is None:
        return {}
    return {"code": 2, "message": error} if error else {"code": 2}


def _attributes(attributes: Mapping[str, AnyValue]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: AnyValue) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case Mapping():
            return {"kvlistValue": {"values": _attributes(value)}}
        case Sequence():
            return {"arrayValue": {"values": [_value(item) for item in value]}}
        case _:
            return {}
