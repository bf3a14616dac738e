"""ReadableSpans as one line of OTLP JSON: `{"resourceSpans": [...]}`.

The proto3 JSON mapping with OTLP's two exceptions: ids are hex (not base64) and enums are ints.
64-bit ints are strings. Empty fields are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, StatusCode
from opentelemetry.util.types import AnyValue

Json = dict[str, object]

_KINDS = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
_HAS_IS_REMOTE = 0x100  # span flags: bit 8 says that bit 9 is known
_IS_REMOTE = 0x200


def encode_line(spans: Iterable[ReadableSpan]) -> bytes:
    """One object and a newline. Spans are grouped by resource, in order of first appearance."""
    by_resource: dict[int, list[ReadableSpan]] = {}
    for span in spans:
        by_resource.setdefault(id(span.resource), []).append(span)
    groups = [_resource_spans(group) for group in by_resource.values()]
    return msgspec.json.encode({"resourceSpans": groups}) + b"\n"


def _resource_spans(spans: Sequence[ReadableSpan]) -> Json:
    """All spans of one resource come from one SpanFactory, so they share its scope."""
    first = spans[0]
    return {
        "resource": _resource(first.resource),
        "scopeSpans": [
            {
                "scope": _scope(first.instrumentation_scope),
                "spans": [_span(span) for span in spans],
            }
        ],
    }


def _resource(resource: Resource) -> Json:
    return {"attributes": _attributes(resource.attributes)}


def _scope(scope: InstrumentationScope | None) -> Json:
    if scope is None:
        return {}
    return {"name": scope.name, "version": scope.version or ""}


def _span(span: ReadableSpan) -> Json:
    context = span.get_span_context()
    assert context is not None
    assert span.start_time is not None
    assert span.end_time is not None
    parent = span.parent
    out: Json = _ids(context)
    if context.trace_state:
        out["traceState"] = context.trace_state.to_header()
    if parent is not None:
        out["parentSpanId"] = f"{parent.span_id:016x}"
    out["flags"] = _flags(context, parent)
    out["name"] = span.name
    out["kind"] = _KINDS[span.kind]
    out["startTimeUnixNano"] = str(span.start_time)
    out["endTimeUnixNano"] = str(span.end_time)
    if span.attributes:
        out["attributes"] = _attributes(span.attributes)
    if span.events:
        out["events"] = [_event(event) for event in span.events]
    if span.links:
        out["links"] = [_link(link) for link in span.links]
    out["status"] = _status(span)
    return out


def _ids(context: SpanContext) -> Json:
    return {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}


def _flags(context: SpanContext, parent: SpanContext | None) -> int:
    remote = _IS_REMOTE if parent is not None and parent.is_remote else 0
    return int(context.trace_flags) | _HAS_IS_REMOTE | remote


def _event(event: Event) -> Json:
    return {
        "name": event.name,
        "timeUnixNano": str(event.timestamp),
        "attributes": _attributes(event.attributes or {}),
    }


def _link(link: Link) -> Json:
    return {**_ids(link.context), "flags": _flags(link.context, link.context)}


def _status(span: ReadableSpan) -> Json:
    status = span.status
    if status.status_code is StatusCode.UNSET:
        return {}
    out: Json = {"code": status.status_code.value}
    if status.description:
        out["message"] = status.description
    return out


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
