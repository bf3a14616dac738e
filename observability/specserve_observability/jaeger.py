"""A trace file (OTLP JSON lines) as what Jaeger's UI opens by upload.

The UI reads `{"data": [{traceID, spans, processes}]}` from a plain file; OTLP JSON it can only
send to a backend for conversion. Parents become CHILD_OF references and links FOLLOWS_FROM, events
become logs. Times are microseconds since the epoch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

Json = dict[str, object]

_KIND_NAMES = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
_ERROR_CODE = 2


class TraceFileError(ValueError):
    """A line that is not OTLP JSON; the message names the line."""


class AnyValue(msgspec.Struct, rename="camel", omit_defaults=True):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: int | str | None = None
    double_value: float | None = None
    array_value: ArrayValue | None = None
    kvlist_value: KeyValueList | None = None

    def plain(self) -> object:
        if self.array_value is not None:
            return [value.plain() for value in self.array_value.values]
        if self.kvlist_value is not None:
            return {pair.key: pair.value.plain() for pair in self.kvlist_value.values}
        if self.int_value is not None:
            return int(self.int_value)
        for value in (self.string_value, self.bool_value, self.double_value):
            if value is not None:
                return value
        return ""


class ArrayValue(msgspec.Struct):
    values: list[AnyValue] = []


class KeyValue(msgspec.Struct):
    key: str
    value: AnyValue = msgspec.field(default_factory=AnyValue)


class KeyValueList(msgspec.Struct):
    values: list[KeyValue] = []


class OtlpEvent(msgspec.Struct, rename="camel"):
    time_unix_nano: int | str = 0
    name: str = ""
    attributes: list[KeyValue] = []


class OtlpLink(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str


class OtlpStatus(msgspec.Struct):
    code: int = 0
    message: str = ""


class OtlpSpan(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: int | str
    end_time_unix_nano: int | str
    parent_span_id: str = ""
    kind: int = 0
    attributes: list[KeyValue] = []
    events: list[OtlpEvent] = []
    links: list[OtlpLink] = []
    status: OtlpStatus = msgspec.field(default_factory=OtlpStatus)


class OtlpScope(msgspec.Struct):
    name: str = ""
    version: str = ""


class ScopeSpans(msgspec.Struct):
    spans: list[OtlpSpan] = []
    scope: OtlpScope = msgspec.field(default_factory=OtlpScope)


class OtlpResource(msgspec.Struct):
    attributes: list[KeyValue] = []


class ResourceSpans(msgspec.Struct, rename="camel"):
    scope_spans: list[ScopeSpans] = []
    resource: OtlpResource = msgspec.field(default_factory=OtlpResource)


class TraceLine(msgspec.Struct, rename="camel"):
    resource_spans: list[ResourceSpans]


class _Trace:
    """One Jaeger trace under construction: its spans, and a process per resource."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.spans: list[Json] = []
        self.processes: dict[str, Json] = {}
        self._process_ids: dict[bytes, str] = {}

    def process_id(self, resource: OtlpResource) -> str:
        key = msgspec.json.encode(resource.attributes)
        known = self._process_ids.get(key)
        if known is not None:
            return known
        process_id = f"p{len(self.processes) + 1}"
        self._process_ids[key] = process_id
        service = {pair.key: pair.value.plain() for pair in resource.attributes}.get("service.name")
        rest = [pair for pair in resource.attributes if pair.key != "service.name"]
        self.processes[process_id] = {"serviceName": str(service or "unknown"), "tags": _tags(rest)}
        return process_id

    def json(self) -> Json:
        return {"traceID": self.trace_id, "spans": self.spans, "processes": self.processes}


def export_jaeger(lines: Iterable[str | bytes]) -> Json:
    """Jaeger UI JSON of every span in the lines, traces in order of first appearance.

    Blank lines are skipped. Raises TraceFileError, naming the line, for anything else that is not
    an OTLP trace object.
    """
    traces: dict[str, _Trace] = {}
    decoder = msgspec.json.Decoder(TraceLine)
    for line_num, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            for group in decoder.decode(line).resource_spans:
                _add_group(traces, group)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TraceFileError(
                f"line {line_num} is not OTLP JSON ({error}): "
                "remove the line, or export the file of a run that ended cleanly"
            ) from error
    return {"data": [trace.json() for trace in traces.values()]}


def export_main(argv: Sequence[str]) -> int:
    """`specserve trace export FILE --format jaeger-json -o OUT`, without its first two words.

    Returns the process's exit status: 0, or 1 where a file cannot be read, written or understood.
    """
    parser = argparse.ArgumentParser(
        prog="specserve trace export",
        description="Turn a --trace-file into what Jaeger's UI opens by upload.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written by --trace-file")
    parser.add_argument("--format", choices=["jaeger-json"], default="jaeger-json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        with args.file.open("rb") as lines:
            exported = export_jaeger(lines)
        args.output.write_bytes(msgspec.json.encode(exported))
    except (TraceFileError, OSError) as error:
        print(f"specserve trace export: {args.file}: {error}", file=sys.stderr)
        return 1
    return 0


def _add_group(traces: dict[str, _Trace], group: ResourceSpans) -> None:
    for scope_spans in group.scope_spans:
        for span in scope_spans.spans:
            trace = traces.get(span.trace_id)
            if trace is None:
                trace = traces[span.trace_id] = _Trace(span.trace_id)
            trace.spans.append(
                _jaeger_span(span, scope_spans.scope, trace.process_id(group.resource))
            )


def _jaeger_span(span: OtlpSpan, scope: OtlpScope, process_id: str) -> Json:
    start = int(span.start_time_unix_nano)
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": _references(span),
        "startTime": start // 1000,
        "duration": (int(span.end_time_unix_nano) - start) // 1000,
        "tags": _tags(span.attributes) + _derived_tags(span, scope),
        "logs": [_log(event) for event in span.events],
        "processID": process_id,
        "warnings": None,
    }


def _references(span: OtlpSpan) -> list[Json]:
    """The parent first: a viewer takes the first reference inside the trace for the parent."""
    references: list[Json] = []
    if span.parent_span_id:
        references.append(_reference("CHILD_OF", span.trace_id, span.parent_span_id))
    references += [_reference("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links]
    return references


def _reference(ref_type: str, trace_id: str, span_id: str) -> Json:
    return {"refType": ref_type, "traceID": trace_id, "spanID": span_id}


def _derived_tags(span: OtlpSpan, scope: OtlpScope) -> list[Json]:
    tags: list[Json] = []
    if span.kind in _KIND_NAMES:
        tags.append(_tag("span.kind", _KIND_NAMES[span.kind]))
    if span.status.code == _ERROR_CODE:
        tags.append(_tag("error", True))
        tags.append(_tag("otel.status_code", "ERROR"))
        if span.status.message:
            tags.append(_tag("otel.status_description", span.status.message))
    if scope.name:
        tags.append(_tag("otel.scope.name", scope.name))
    if scope.version:
        tags.append(_tag("otel.scope.version", scope.version))
    return tags


def _log(event: OtlpEvent) -> Json:
    fields = [_tag("event", event.name), *_tags(event.attributes)]
    return {"timestamp": int(event.time_unix_nano) // 1000, "fields": fields}


def _tags(pairs: Sequence[KeyValue]) -> list[Json]:
    return [_tag(pair.key, pair.value.plain()) for pair in pairs]


def _tag(key: str, value: object) -> Json:
    """Arrays and maps become JSON text, as Jaeger's own translation does."""
    match value:
        case bool():
            return {"key": key, "type": "bool", "value": value}
        case int():
            return {"key": key, "type": "int64", "value": value}
        case float():
            return {"key": key, "type": "float64", "value": value}
        case str():
            return {"key": key, "type": "string", "value": value}
        case _:
            return {"key": key, "type": "string", "value": msgspec.json.encode(value).decode()}
